"""Dead letters: jobs that failed for good. They stay in `finished` until they are replayed or forgotten.

A discarded one is a dead letter no longer: its reason says so, and it stays in the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, and_, delete, func, insert, or_, select, text, update

from timebell.errors import Conflict, InvalidInput
from timebell.model.job import Hold, Job, JobState, Kind, NewJob
from timebell.model.operation import Operation, Step
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.model.routes import COMPLETES, route
from timebell.store.jobs import repository
from timebell.store.jobs.claim import insert as insert_jobs
from timebell.store.jobs.claim import take_turns
from timebell.store.schedules.actions import free_by_hand
from timebell.store.schema import finished, jobs, schedules
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
    mine = _mine(tenant_id, job_id)
    row = tx.execute(select(finished).where(mine).with_for_update()).first()
    if row is None:
        return None if repository.find(tx, tenant_id, job_id) is None else False
    outside = decode(row.target) not in (None, COMPLETES)
    over = (JobState.FAILED, JobState.COMPLETED) if sent and outside else () if sent else (JobState.FAILED,)
    if row.state not in over:
        return False
    _check_key(tx, row)
    hold = _turn(tx, row)
    tx.execute(delete(finished).where(mine))
    tx.execute(insert(jobs).values(**_fresh(row, hold, now)))
    if hold is not None:
        take_turns(tx, [row.schedule_id])
    tx.notify()
    return True


_KEPT = ("tenant_id", "topic", "timezone", "owner_id", "key", "schedule_id", "revision", "target", "queue", "priority",
         "retry", "timeout", "serial")  # fmt: skip


def edited(
    tx: Transaction, tenant_id: str | None, job_id: str, new_id: str, fit: Callable[[Job], tuple[str, str | None]],
    now: datetime,
) -> NewJob | None:  # fmt: skip
    """A new job with another payload in place of a failed one, linked both ways; None for an unknown id.

    `fit` gives its payload and metadata as JSON, knowing the failed one, which is a dead letter no longer. As after a
    replay, no condition is asked, and one of a schedule waits for its turn: as a run by hand, since its occurrence
    had a job. Raises Conflict (JOB_NOT_FAILED, KEY_IN_USE), and what `fit` raises.
    """
    mine = _mine(tenant_id, job_id)
    row = tx.execute(select(finished).where(mine).with_for_update()).first()
    if row is None or row.state != JobState.FAILED or row.replaced_by is not None:
        found = repository.find(tx, tenant_id, job_id)
        if found is None:
            return None
        after = f"job {found.replaced_by} took its place" if found.replaced_by else "only failed jobs are replayed"
        raise Conflict(
            f"Job {job_id} is {found.state}: {after}.", code="JOB_NOT_FAILED", existing=found.replaced_by or job_id,
            fix="Make a new job.",
        )  # fmt: skip
    payload, metadata = fit(repository.read(row))
    _check_key(tx, row)
    hold, at = _turn(tx, row), now
    if row.schedule_id is not None:
        _lock(tx, row)
        at = free_by_hand(tx, row.schedule_id, now)
    new = NewJob(
        **{name: getattr(row, name) for name in _KEPT}, id=new_id, scheduled_at=at, run_at=at, created_at=now,
        payload=payload, metadata=metadata, kind=Kind.ONCE if row.schedule_id is None else Kind.MANUAL,
        route=route(row.topic, decode(row.target)), group=row.group_name, hold=hold, replaces=row.id,
    )  # fmt: skip
    tx.execute(update(finished).where(mine).values(reason=DISCARDED, replaced_by=new_id))
    if new_id not in insert_jobs(tx, [new]):  # another took the key while this looked
        raise _key_in_use(row.key, None)
    if hold is not None:
        take_turns(tx, [row.schedule_id])
    tx.notify()
    return new


def _check_key(tx: Transaction, row: Row[Any]) -> None:
    """Raises Conflict (KEY_IN_USE)."""
    same = (jobs.c.tenant_id == row.tenant_id) & (jobs.c.key == row.key)
    if row.key is not None and (holder := tx.execute(select(jobs.c.id).where(same)).scalar()):
        raise _key_in_use(row.key, holder)


def _key_in_use(key: str | None, holder: str | None) -> Conflict:
    return Conflict(
        f"The key {key!r} belongs to {f'job {holder}' if holder else 'another job'} by now.", code="KEY_IN_USE",
        existing=holder, fix="Wait for that job to finish, or cancel it.",
    )  # fmt: skip


def _mine(tenant_id: str | None, job_id: str) -> ColumnElement[bool]:
    same = finished.c.id == job_id
    return same if tenant_id is None else and_(same, finished.c.tenant_id == tenant_id)


def _lock(tx: Transaction, row: Row[Any]) -> None:
    tx.execute(select(schedules.c.id).where(schedules.c.id == row.schedule_id).with_for_update())


def _turn(tx: Transaction, row: Row[Any]) -> Hold | None:
    """Whether a job of a schedule that takes turns has to wait for its own."""
    if not row.serial:
        return None
    _lock(tx, row)
    others = select(func.count()).select_from(jobs).where(jobs.c.schedule_id == row.schedule_id)
    others = others.where(jobs.c.hold.is_(None) | (jobs.c.hold != Hold.RECOVER.value))  # nobody waits for those
    return Hold.OVERLAP if tx.execute(others).scalar_one() else None


def _fresh(row: Row[Any], hold: Hold | None, now: datetime) -> dict[str, Any]:
    """The live row of a failed job that is tried again."""
    return {name: getattr(row, name) for name in _LIVE} | {
        "state": JobState.PENDING.value, "run_at": now, "tries": 0, "node_id": None, "started_at": None,
        "expires_at": None, "hold": None if hold is None else hold.value, "shared": True, "charged": True,
        "replays": row.replays + 1, "route": route(row.topic, decode(row.target)),
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
    return Page([repository.read(row) for row in rows[:limit]], _cursor(rows[limit - 1]) if len(rows) > limit else None)


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
        found.append(Group(value, many, repository.read(tx.execute(newest.limit(1)).one())))
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
