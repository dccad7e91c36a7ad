"""Queries of an audit: schedules with their revisions, and rows by schedule and time. Nothing is written or locked.

Rows of both job tables are read in a single statement, which sees one snapshot, so that a job moving between the
tables is read exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    BindParameter,
    Row,
    Select,
    String,
    Table,
    bindparam,
    cast,
    func,
    literal,
    null,
    or_,
    select,
    union,
    union_all,
)

from timebell.model.audit_findings import RecordedJob, RevisionStart, ScheduleHistory, ZoneShift
from timebell.model.job import Kind
from timebell.recurrence import Recurrence
from timebell.store.jobs.queues import ALL_QUEUES
from timebell.store.schedules.recurrence_column import recurrence_from_json
from timebell.store.schema import finished, jobs, queues, revisions, schedules, zone_changes
from timebell.store.transaction import Transaction
from timebell.store.types import Instant

LOWEST_ID = "00000000-0000-0000-0000-000000000000"


class Window(NamedTuple):
    """A time window [low, high) of a schedule. `first`: also read the range row that reaches into it."""

    id: str
    low: datetime
    high: datetime
    first: bool


class WindowRows(NamedTuple):
    """The rows of a window in order; `before` is the range row that reaches into it, if it is the first window."""

    rows: list[RecordedJob]
    before: RecordedJob | None


def list_schedule_ids(tx: Transaction, after: str | None, limit: int) -> list[str]:
    """Return the ids of existing and deleted schedules, in order above `after`."""
    return list(tx.execute(_select_schedule_ids(limit), {"above": after or LOWEST_ID}).scalars())


@cache
def _select_schedule_ids(limit: int) -> Select[str]:
    # Deleted schedules still have revisions; schedules without revisions may still have finished rows.
    strays = _finished_schedule_ids(limit)
    tables = (
        select(column).distinct().where(column > bindparam("above")).order_by(column).limit(limit).subquery()
        for column in (revisions.c.schedule_id, schedules.c.id)
    )
    ids = union(select(strays.c.id).where(strays.c.id.is_not(None)), *map(select, tables)).subquery()
    return select(ids.c.id).order_by(ids.c.id).limit(limit)


def _finished_schedule_ids(limit: int) -> CTE:
    """Return the schedule ids of finished rows by a loose index scan: one step per id instead of one per row."""
    column = finished.c.schedule_id
    above = column > bindparam("above")
    first = select(column.label("id"), literal(1).label("n")).where(above).order_by(column).limit(1)
    ids = select(first.subquery()).cte("strays", recursive=True)
    following = select(column).where(column > ids.c.id).order_by(column).limit(1).scalar_subquery()
    return ids.union_all(select(following, ids.c.n + 1).where(ids.c.id.is_not(None), ids.c.n < limit))


def find_histories(tx: Transaction, schedule_ids: Sequence[str], tenant_id: str | None) -> list[ScheduleHistory]:
    """Return the histories of those schedules that belong to a tenant, or to any tenant if None."""
    s, r = schedules.c, revisions.c
    existing = select(s.id, s.tenant_id, s.name, s.enabled, s.error, s.next_fire_at).where(s.id.in_(schedule_ids))
    schedule_by_id = {row.id: row for row in tx.execute(existing)}
    numbered = select(r.schedule_id, r.tenant_id, r.revision, r.effective_at, r.recurrence).order_by(r.revision)
    revisions_by_id: dict[str, list[Row[Any]]] = {id_: [] for id_ in sorted(schedule_ids)}
    for row in tx.execute(numbered.where(r.schedule_id.in_(schedule_ids))):
        revisions_by_id[row.schedule_id].append(row)
    histories = []
    for id_, revision_rows in revisions_by_id.items():
        schedule = schedule_by_id.get(id_)
        owner = schedule or next(iter(revision_rows), None)  # None: there are only finished rows
        if tenant_id is None or owner is None or owner.tenant_id == tenant_id:
            histories.append(_history_from_rows(id_, schedule, revision_rows))
    return histories


def _history_from_rows(id_: str, schedule: Row[Any] | None, revision_rows: Sequence[Row[Any]]) -> ScheduleHistory:
    recurrences_json = {row.revision: row.recurrence for row in revision_rows}

    def load_recurrence(number: int) -> Recurrence:
        return recurrence_from_json(recurrences_json[number])

    starts = [RevisionStart(row.revision, row.effective_at) for row in revision_rows]
    if schedule is None:
        return ScheduleHistory(
            id=id_, name=f"deleted schedule {id_}", exists=False, enabled=False, error=None, next_fire_at=None,
            revisions=starts, load_recurrence=load_recurrence,
        )  # fmt: skip
    return ScheduleHistory(
        id=id_, name=schedule.name, exists=True, enabled=schedule.enabled, error=schedule.error,
        next_fire_at=schedule.next_fire_at, revisions=starts, load_recurrence=load_recurrence,
    )  # fmt: skip


def _select_records(table: Table) -> Select[Any]:
    """Select the columns of `_record_from_row`. Live jobs have no reason and represent one occurrence each."""
    t = table.c
    common = select(
        t.schedule_id, t.tenant_id, t.id, t.kind, t.scheduled_at, t.run_at, t.state, t.attempt, t.revision,
        t.created_at, t.started_at,
    )  # fmt: skip
    if table is jobs:
        return common.add_columns(
            cast(null(), String).label("reason"), literal(1).label("skipped_count"), t.scheduled_at.label("skipped_to")
        )
    return common.add_columns(
        t.reason, t.skipped_count, func.coalesce(t.skipped_to, t.scheduled_at).label("skipped_to")
    )


def _select_rows(table: Table) -> Select[Any]:
    t = table.c
    return _select_records(table).where(t.schedule_id.in_(_IDS), t.scheduled_at >= _LOW, t.scheduled_at < _HIGH)


def _select_reaching_ranges() -> Select[Any]:
    """Select the range rows that reach into a window from `low`, of schedules with revisions.

    Range rows do not overlap: only the last planned one before the window can reach into it.
    """
    audited = select(revisions.c.schedule_id).where(revisions.c.schedule_id.in_(_IDS)).distinct().subquery("audited")
    f = finished.alias("f").c
    is_planned = (f.kind == Kind.PLANNED.value) & or_(f.reason.is_(None), f.reason != "override")
    last_id = (
        select(f.id)
        .where(f.schedule_id == audited.c.schedule_id, f.scheduled_at < _LOW, is_planned)
        .order_by(f.schedule_id.desc(), f.scheduled_at.desc())
        .limit(1)
        .correlate(audited)
        .scalar_subquery()
    )
    with_last = audited.join(finished, finished.c.id == last_id)
    return _select_records(finished).select_from(with_last).where(finished.c.skipped_to >= _LOW)


# Built once, because building them takes longer than executing them.
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_LOW, _HIGH = bindparam("low", type_=Instant), bindparam("high", type_=Instant)
SELECT_ROWS = union_all(_select_rows(jobs), _select_rows(finished))
SELECT_REACHING_RANGES = _select_reaching_ranges()


def read_windows(tx: Transaction, windows: Sequence[Window], tenant_id: str | None) -> dict[str, WindowRows]:
    """Return the rows of each window by schedule id; `windows` has at most one window per schedule."""
    result: dict[str, WindowRows] = {window.id: WindowRows([], None) for window in windows}
    ids_by_span: dict[tuple[datetime, datetime], list[str]] = {}  # most windows of a batch have the same span
    first_ids_by_low: dict[datetime, list[str]] = {}
    for window in windows:
        ids_by_span.setdefault((window.low, window.high), []).append(window.id)
        if window.first:
            first_ids_by_low.setdefault(window.low, []).append(window.id)
    for (low, high), ids in ids_by_span.items():
        for row in tx.execute(SELECT_ROWS, {"ids": ids, "low": low, "high": high}):
            if tenant_id is None or row.tenant_id == tenant_id:
                result[row.schedule_id].rows.append(_record_from_row(row))
    for window_rows in result.values():
        window_rows.rows.sort(key=lambda row: (row.scheduled_at, row.id))
    for low, ids in first_ids_by_low.items():
        for row in tx.execute(SELECT_REACHING_RANGES, {"ids": ids, "low": low}):
            result[row.schedule_id] = result[row.schedule_id]._replace(before=_record_from_row(row))
    return result


def list_zone_moves(tx: Transaction) -> list[ZoneShift]:
    """Return the local-time ranges that tzdata releases moved."""
    z = zone_changes.c
    return [
        ZoneShift(
            row.timezone, row.since, row.recorded_at, timedelta(seconds=abs(row.offset_after - row.offset_before))
        )
        for row in tx.execute(select(zone_changes).where(z.since.is_not(None), z.offset_before != z.offset_after))
    ]


def is_firing_stopped(tx: Transaction) -> bool:
    """Return whether all firing is stopped."""
    stopped = select(queues.c.name).where(queues.c.name == ALL_QUEUES, queues.c.paused)
    return tx.execute(stopped).first() is not None


def _record_from_row(row: Row[Any]) -> RecordedJob:
    return RecordedJob(
        row.id, row.kind, row.scheduled_at, row.run_at, row.state, row.attempt, row.revision, row.created_at,
        row.started_at, row.reason, row.skipped_count, row.skipped_to,
    )  # fmt: skip


def find_schedule_ids(tx: Transaction, name: str, id_: str | None, tenant_id: str | None) -> list[str]:
    """Return the ids of schedules with this name, or with this id, which may be deleted."""
    table = schedules if id_ is None else revisions
    column = table.c.id if id_ is None else table.c.schedule_id
    query = select(column).distinct().where(table.c.name == name if id_ is None else column == id_)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    return [str(value) for value in tx.execute(query.order_by(column)).scalars()]
