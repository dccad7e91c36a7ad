"""Dead letters: jobs that failed for good. They stay in `finished` until they are replayed or forgotten.

A discarded one is a dead letter no longer: its reason says so, and it stays in the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, and_, delete, func, insert, or_, select, text, update

from timebell.errors import Conflict, InvalidInput
from timebell.model.job import Hold, Job, JobState
from timebell.model.operation import Operation, Step
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.model.routes import COMPLETES, route
from timebell.store.schema import finished, jobs, schedules
from timebell.store.sql import ledger
from timebell.store.sql.jobs import take_turns
from timebell.store.transaction import Transaction
from timebell.store.types import from_micros, to_micros

DISCARDED = "discarded"
DEAD = text("state = 'failed' AND (reason IS NULL OR reason <> 'discarded')")  # as its index says it
_LIVE = [column.name for column in jobs.columns if column.name in finished.columns]


def replay(tx: Transaction, tenant_id: str | None, job_id: str, now: datetime, *, sent: bool = False) -> bool | None:
    """Make a failed job pending again, under its id and with a fresh budget of tries; None for an unknown id.

    With `sent`, one that was sent to a target outside Python, completed ones as well. False when it is not such a one.
    One of a schedule waits for its turn. Raises Conflict (KEY_IN_USE).
    """
    mine = (
        finished.c.id == job_id
        if tenant_id is None
        else (finished.c.id == job_id) & (finished.c.tenant_id == tenant_id)
    )
    row = tx.execute(select(finished).where(mine).with_for_update()).first()
    if row is None:
        return None if ledger.find(tx, tenant_id, job_id) is None else False
    outside = decode(row.target) not in (None, COMPLETES)
    over = (JobState.FAILED, JobState.COMPLETED) if sent and outside else () if sent else (JobState.FAILED,)
    if row.state not in over:
        return False
    same = (jobs.c.tenant_id == row.tenant_id) & (jobs.c.key == row.key)
    if row.key is not None and (holder := tx.execute(select(jobs.c.id).where(same)).scalar()):
        raise Conflict(
            f"The key {row.key!r} belongs to job {holder} by now.", code="KEY_IN_USE", existing=holder,
            fix="Wait for that job to finish, or cancel it.",
        )  # fmt: skip
    hold = None
    if row.serial:
        tx.execute(select(schedules.c.id).where(schedules.c.id == row.schedule_id).with_for_update())
        others = select(func.count()).select_from(jobs).where(jobs.c.schedule_id == row.schedule_id)
        others = others.where(jobs.c.hold.is_(None) | (jobs.c.hold != Hold.RECOVER.value))  # nobody waits for those
        hold = Hold.OVERLAP.value if tx.execute(others).scalar_one() else None
    tx.execute(delete(finished).where(mine))
    tx.execute(insert(jobs).values(**_fresh(row, hold, now)))
    if hold is not None:
        take_turns(tx, [row.schedule_id])
    tx.notify()
    return True


def _fresh(row: Row[Any], hold: str | None, now: datetime) -> dict[str, Any]:
    """The live row of a failed job that is tried again."""
    return {name: getattr(row, name) for name in _LIVE} | {
        "state": JobState.PENDING.value, "run_at": now, "tries": 0, "node_id": None, "started_at": None,
        "expires_at": None, "hold": hold, "shared": True, "charged": True, "replays": row.replays + 1,
        "route": route(row.topic, decode(row.target)),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which dead letters; None: any. `start` and `end` are the instants of failure, [start, end)."""

    topic: str | None = None
    schedule_id: str | None = None
    error_code: str | None = None
    start: datetime | None = None
    end: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """What is set; instants as microseconds since 1970."""
        said = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: to_micros(value) if isinstance(value, datetime) else value
            for name, value in said.items()
            if value is not None
        }

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Which:
        """The inverse of `to_json`."""
        given: dict[str, Any] = {
            name: from_micros(value) if isinstance(value, int) else value for name, value in said.items()
        }
        return cls(**given)

    def where(self, tenant_id: str) -> ColumnElement[bool]:
        """As a condition."""
        columns = finished.c
        equal = {columns.topic: self.topic, columns.schedule_id: self.schedule_id, columns.error_code: self.error_code}
        found: list[Any] = [columns.tenant_id == tenant_id, DEAD]
        found += [column == value for column, value in equal.items() if value is not None]
        if self.start is not None:
            found.append(columns.finished_at >= self.start)
        if self.end is not None:
            found.append(columns.finished_at < self.end)
        return and_(*found)


def count(tx: Transaction, tenant_id: str, which: Which) -> int:
    """How many there are."""
    return int(tx.execute(select(func.count()).select_from(finished).where(which.where(tenant_id))).scalar_one())


def page(tx: Transaction, tenant_id: str, which: Which, limit: int, cursor: str | None) -> Page[Job]:
    """Dead letters, those that failed last first. Raises InvalidInput (INVALID_CURSOR)."""
    query = select(finished).where(which.where(tenant_id))
    if cursor is not None:
        at, id_ = _place(cursor)
        earlier = and_(finished.c.finished_at == at, finished.c.id < id_)
        query = query.where(finished.c.finished_at <= at, or_(finished.c.finished_at < at, earlier))
    query = query.order_by(finished.c.finished_at.desc(), finished.c.id.desc()).limit(limit + 1)
    rows = tx.execute(query).all()
    return Page([ledger.read(row) for row in rows[:limit]], _cursor(rows[limit - 1]) if len(rows) > limit else None)


@dataclass(frozen=True, slots=True)
class Group:
    """Dead letters that share a topic or an error code: how many, and which failed last."""

    value: str | None
    count: int
    latest: Job


def groups(tx: Transaction, tenant_id: str, which: Which, by: str, most: int) -> list[Group]:
    """Dead letters by `topic` or `error_code`, the largest group first."""
    column, where = finished.c[by], which.where(tenant_id)
    counted = select(column, func.count().label("many")).where(where).group_by(column)
    found = []
    rows: Any = tx.execute(counted.order_by(func.count().desc(), column).limit(most)).all()
    for value, many in rows:
        same = column.is_(None) if value is None else column == value
        newest = select(finished).where(where, same).order_by(finished.c.finished_at.desc(), finished.c.id.desc())
        found.append(Group(value, many, ledger.read(tx.execute(newest.limit(1)).one())))
    return found


def replay_some(tx: Transaction, operation: Operation, most: int, now: datetime) -> Step:
    """Replay the next dead letters of an operation, oldest first; those that failed after it began are not its."""
    rows = _next(tx, operation, most)
    plain = [row for row in rows if row.key is None and not row.serial]
    if plain:
        tx.execute(delete(finished).where(finished.c.id.in_([row.id for row in plain]), DEAD))
        tx.execute(insert(jobs), [_fresh(row, None, now) for row in plain])
        tx.notify()
    done, errors = len(plain), []
    for row in rows:
        if row.key is None and not row.serial:
            continue
        try:
            replay(tx, operation.tenant_id, row.id, now)
            done += 1
        except Conflict as taken:
            errors.append({"jobId": row.id, "code": taken.code, "detail": taken.message})
    return Step(done, len(errors), 0, _cursor(rows[-1]) if len(rows) == most else None, tuple(errors))


def discard_some(tx: Transaction, operation: Operation, most: int, now: datetime) -> Step:
    """Discard the next dead letters of an operation."""
    rows = _next(tx, operation, most)
    if rows:
        tx.execute(update(finished).where(finished.c.id.in_([row.id for row in rows]), DEAD).values(reason=DISCARDED))
    return Step(len(rows), 0, 0, _cursor(rows[-1]) if len(rows) == most else None)


def _next(tx: Transaction, operation: Operation, most: int) -> list[Row[Any]]:
    which = Which.of_json(operation.spec["which"])
    query = select(finished).where(which.where(operation.tenant_id), finished.c.finished_at <= operation.created_at)
    if operation.cursor is not None:
        at, id_ = _place(operation.cursor)
        later = and_(finished.c.finished_at == at, finished.c.id > id_)
        query = query.where(finished.c.finished_at >= at, or_(finished.c.finished_at > at, later))
    query = query.order_by(finished.c.finished_at, finished.c.id).limit(most).with_for_update()
    return list(tx.execute(query).all())


def _cursor(row: Row[Any]) -> str:
    return f"{to_micros(row.finished_at)}.{row.id}"


def _place(cursor: str) -> tuple[datetime, str]:
    """The inverse. Raises InvalidInput (INVALID_CURSOR)."""
    micros, _, id_ = cursor.partition(".")
    try:
        return from_micros(int(micros)), str(UUID(id_))
    except (ValueError, OverflowError) as bad:
        raise InvalidInput(
            f"cursor {cursor!r:.60} is not one of ours.", code="INVALID_CURSOR", fix="Use next_cursor as it came."
        ) from bad
