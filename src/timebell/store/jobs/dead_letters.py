"""Dead letters: jobs that failed permanently. They stay in `finished` until they are retried or pruned.

Discarding a dead letter sets its reason to `discarded`. It stays in the history, but is not a dead letter any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, delete, func, insert, or_, select, text, update

from timebell.errors import Conflict
from timebell.model.attempts import mark_retried
from timebell.model.job import Hold, Job, JobState, Kind, NewJob
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.model.routes import COMPLETE_UNHANDLED, route_for
from timebell.store.jobs import repository
from timebell.store.jobs.claim import insert_returning_ids as insert_jobs
from timebell.store.jobs.claim import mark_serial
from timebell.store.jobs.indexes import UnindexedFilter
from timebell.store.schedules.actions import next_free_manual_instant
from timebell.store.schema import finished, jobs, schedules
from timebell.store.time_cursor import decode_time_cursor, encode_time_cursor
from timebell.store.transaction import JOBS, Transaction, read_only
from timebell.store.types import from_micros, to_micros

DISCARDED = "discarded"
IS_DEAD_LETTER = text("state = 'failed' AND (reason IS NULL OR reason <> 'discarded')")  # literally as in its index
_LIVE_COLUMNS = [column.name for column in jobs.columns if column.name in finished.columns]


def retry(
    tx: Transaction, tenant_id: str | None, job_id: str, now: datetime, actor: str | None = None, *,
    redeliver: bool = False,
) -> bool | None:  # fmt: skip
    """Make a failed job pending again, with the same id and a fresh attempt budget; return None for an unknown id.

    With `redeliver`, the job must have been sent to a target other than a Python handler, and may have completed.
    Returns False if the job does not qualify. A serial job of a schedule waits for the live jobs of the schedule.
    Raises Conflict (KEY_IN_USE).
    """
    same = _by_id(tenant_id, job_id)
    row = tx.execute(select(finished).where(same).with_for_update()).first()
    if row is None:
        return None if repository.find_job(tx, tenant_id, job_id) is None else False
    is_external = decode(row.target) not in (None, COMPLETE_UNHANDLED)
    eligible = (
        (JobState.FAILED, JobState.COMPLETED) if redeliver and is_external else () if redeliver else (JobState.FAILED,)
    )
    if row.state not in eligible:
        return False
    _check_key(tx, row)
    hold = _serial_hold(tx, row)
    tx.execute(delete(finished).where(same))
    tx.execute(insert(jobs).values(**pending_row(row, hold, now, actor)))
    if hold is not None:
        mark_serial(tx, [row.schedule_id])
    tx.notify(JOBS)
    return True


_COPIED_FIELDS = (
    "tenant_id", "topic", "timezone", "owner_id", "key", "schedule_id", "revision", "target", "queue", "priority",
    "retry", "timeout", "serial",
)  # fmt: skip


def retry_with_payload(
    tx: Transaction, tenant_id: str | None, job_id: str, new_id: str,
    build_payload: Callable[[Job], tuple[str, str | None]], now: datetime,
) -> NewJob | None:  # fmt: skip
    """Replace a failed job by a new one with another payload, linked both ways; return None for an unknown id.

    `build_payload` receives the failed job and returns the new payload and metadata as JSON. The failed job is
    discarded. As in a retry, conditions are not checked, and a serial job of a schedule waits for the live jobs of the
    schedule. It becomes a manual run, because its occurrence already had a job. Raises Conflict (JOB_NOT_FAILED,
    KEY_IN_USE), and the errors of `build_payload`.
    """
    same = _by_id(tenant_id, job_id)
    row = tx.execute(select(finished).where(same).with_for_update()).first()
    if row is None or row.state != JobState.FAILED or row.replaced_by is not None:
        job = repository.find_job(tx, tenant_id, job_id)
        if job is None:
            return None
        detail = f"job {job.replaced_by} took its place" if job.replaced_by else "only failed jobs can be retried"
        raise Conflict(
            f"Job {job_id} is {job.state}: {detail}.", code="JOB_NOT_FAILED", existing=job.replaced_by or job_id,
            fix="Create a new job.",
        )  # fmt: skip
    payload, metadata = build_payload(repository.job_from_row(row))
    _check_key(tx, row)
    hold, scheduled_at = _serial_hold(tx, row), now
    if row.schedule_id is not None:
        _lock_schedule(tx, row)
        scheduled_at = next_free_manual_instant(tx, row.schedule_id, now)
    new_job = NewJob(
        **{name: getattr(row, name) for name in _COPIED_FIELDS},
        id=new_id, scheduled_at=scheduled_at, run_at=scheduled_at, created_at=now,
        payload=payload, metadata=metadata, kind=Kind.ONCE if row.schedule_id is None else Kind.MANUAL,
        route=route_for(row.topic, decode(row.target)), group=row.group_name, hold=hold, replaces=row.id,
    )  # fmt: skip
    tx.execute(update(finished).where(same).values(reason=DISCARDED, replaced_by=new_id))
    if new_id not in insert_jobs(tx, [new_job]):  # a concurrent transaction took the key
        raise _key_in_use(row.key, None)
    if hold is not None:
        mark_serial(tx, [row.schedule_id])
    return new_job


def _check_key(tx: Transaction, row: Row[Any]) -> None:
    """Check that no live job has the key of this one. Raises Conflict (KEY_IN_USE)."""
    same_key = (jobs.c.tenant_id == row.tenant_id) & (jobs.c.key == row.key)
    if row.key is not None and (holder := tx.execute(select(jobs.c.id).where(same_key)).scalar()):
        raise _key_in_use(row.key, holder)


def _key_in_use(key: str | None, holder: str | None) -> Conflict:
    return Conflict(
        f"The key {key!r} now belongs to {f'job {holder}' if holder else 'another job'}.", code="KEY_IN_USE",
        existing=holder, fix="Wait for that job to finish, or cancel it.",
    )  # fmt: skip


def _by_id(tenant_id: str | None, job_id: str) -> ColumnElement[bool]:
    same = finished.c.id == job_id
    return same if tenant_id is None else and_(same, finished.c.tenant_id == tenant_id)


def _lock_schedule(tx: Transaction, row: Row[Any]) -> None:
    tx.execute(select(schedules.c.id).where(schedules.c.id == row.schedule_id).with_for_update())


def _serial_hold(tx: Transaction, row: Row[Any]) -> Hold | None:
    """Lock the schedule of a serial job; return the hold with which it waits for live jobs of the schedule, if any."""
    if not row.serial:
        return None
    _lock_schedule(tx, row)
    blocking = select(func.count()).select_from(jobs).where(jobs.c.schedule_id == row.schedule_id)
    blocking = blocking.where(
        jobs.c.hold.is_(None) | (jobs.c.hold != Hold.BACKLOG.value)
    )  # backlog jobs block no other jobs
    return Hold.OVERLAP if tx.execute(blocking).scalar_one() else None


def pending_row(row: Row[Any], hold: Hold | None, now: datetime, actor: str | None) -> dict[str, Any]:
    """Return the row in `jobs` of a finished job that is retried."""
    return {name: getattr(row, name) for name in _LIVE_COLUMNS} | {
        "state": JobState.PENDING.value, "run_at": now, "attempts_used": 0, "node_id": None, "started_at": None,
        "expires_at": None, "hold": None if hold is None else hold.value, "shared": True, "charged": True,
        "errors": mark_retried(row.errors, now, actor), "manual_retries": row.manual_retries + 1,
        "route": route_for(row.topic, decode(row.target)),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Selects dead letters; None matches all. They failed in [start, end)."""

    topic: str | None = None
    schedule_id: str | None = None
    error_code: str | None = None
    error_group: str | None = None
    start: datetime | None = None
    end: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the filters that are set as JSON; instants as microseconds since 1970."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: to_micros(value) if isinstance(value, datetime) else value
            for name, value in values.items()
            if value is not None
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeadLetterFilter:
        """Create a filter from the result of `to_json`."""
        values: dict[str, Any] = {
            name: from_micros(value) if isinstance(value, int) else value for name, value in data.items()
        }
        return cls(**values)

    def where(self, tenant_id: str) -> ColumnElement[bool]:
        """Return the SQL condition for the selected dead letters of a tenant."""
        columns = finished.c
        texts = {
            columns.topic: self.topic, columns.error_code: self.error_code, columns.error_group: self.error_group,
        }  # fmt: skip
        conditions: list[Any] = [columns.tenant_id == tenant_id, IS_DEAD_LETTER]
        # Only the index of dead letters: that of a topic has all its finished jobs.
        conditions += [UnindexedFilter(column) == value for column, value in texts.items() if value is not None]
        if self.schedule_id is not None:
            conditions.append(columns.schedule_id == self.schedule_id)
        if self.start is not None:
            conditions.append(columns.finished_at >= self.start)
        if self.end is not None:
            conditions.append(columns.finished_at < self.end)
        return and_(*conditions)


@read_only
def count(tx: Transaction, tenant_id: str, filters: DeadLetterFilter) -> int:
    """Return the number of selected dead letters."""
    return int(tx.execute(select(func.count()).select_from(finished).where(filters.where(tenant_id))).scalar_one())


@read_only
def list_page(tx: Transaction, tenant_id: str, filters: DeadLetterFilter, limit: int, cursor: str | None) -> Page[Job]:
    """Return a page of dead letters, latest failure first. Raises InvalidInput (INVALID_CURSOR)."""
    query = select(finished).where(filters.where(tenant_id))
    if cursor is not None:
        at, id_ = decode_time_cursor(cursor)
        earlier = and_(finished.c.finished_at == at, finished.c.id < id_)
        query = query.where(finished.c.finished_at <= at, or_(finished.c.finished_at < at, earlier))
    query = query.order_by(finished.c.finished_at.desc(), finished.c.id.desc()).limit(limit + 1)
    rows = tx.execute(query).all()
    return Page(
        [repository.job_from_row(row) for row in rows[:limit]],
        encode_time_cursor(rows[limit - 1].finished_at, rows[limit - 1].id) if len(rows) > limit else None,
    )


@dataclass(frozen=True, slots=True)
class DeadLetterGroup:
    """Dead letters with the same values of the grouped columns (`values`): their number, and the latest one."""

    values: Mapping[str, str | None]
    count: int
    latest: Job


@read_only
def list_groups(
    tx: Transaction, tenant_id: str, filters: DeadLetterFilter, columns: Sequence[str], limit: int
) -> list[DeadLetterGroup]:
    """Group dead letters by columns such as `topic` and `error_group`; return the largest groups first."""
    columns_by_name = {name: UnindexedFilter(finished.c[name]) for name in columns}
    grouped, where = list(columns_by_name.values()), filters.where(tenant_id)
    size = func.count().label("group_size")
    query = select(*(column.label(name) for name, column in columns_by_name.items()), size).where(where)
    query = query.group_by(*grouped).order_by(size.desc(), *grouped).limit(limit)
    groups = []
    for row in tx.execute(query).all():
        values = {name: getattr(row, name) for name in columns}
        in_group = [column.is_not_distinct_from(values[name]) for name, column in columns_by_name.items()]
        newest = select(finished).where(where, *in_group).order_by(finished.c.finished_at.desc(), finished.c.id.desc())
        latest = repository.job_from_row(tx.execute(newest.limit(1)).one())
        groups.append(DeadLetterGroup(values, row.group_size, latest))
    return groups
