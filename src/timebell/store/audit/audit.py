"""Queries of an audit: schedules with their revisions, and rows by schedule and time. Nothing is written or locked.

Rows of both job tables are read in a single statement, which sees one snapshot, so that a job moving between the
tables is read exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import select

from timebell.model.audit_findings import RecordedJob, RevisionStart, ScheduleHistory, ZoneShift
from timebell.recurrence import Recurrence
from timebell.store.schedules.recurrence_column import recurrence_from_json
from timebell.store.schema import revisions, schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Row, Transaction

LOWEST_ID = "00000000-0000-0000-0000-000000000000"

# Deleted schedules still have revisions; schedules without revisions may still have finished rows. The recursion is a
# loose index scan over the latter: one step per schedule id instead of one per row.
SELECT_SCHEDULE_IDS = Statement(
    """
    WITH RECURSIVE strays(id, n) AS (
        SELECT * FROM (SELECT schedule_id, 1 FROM timebell_finished WHERE schedule_id > :after
                       ORDER BY schedule_id LIMIT 1) AS first
        UNION ALL
        SELECT (SELECT f.schedule_id FROM timebell_finished f WHERE f.schedule_id > s.id
                ORDER BY f.schedule_id LIMIT 1), s.n + 1
        FROM strays s WHERE s.id IS NOT NULL AND s.n < :most
    )
    SELECT id FROM (
        SELECT id FROM strays WHERE id IS NOT NULL
        UNION SELECT * FROM (SELECT schedule_id FROM timebell_schedule_revisions WHERE schedule_id > :after
                             GROUP BY schedule_id ORDER BY schedule_id LIMIT :most) AS r
        UNION SELECT * FROM (SELECT id FROM timebell_schedules WHERE id > :after ORDER BY id LIMIT :most) AS s
    ) AS every ORDER BY id LIMIT :most
    """
)
SELECT_HISTORIES = Statement(
    """
    WITH $rows SELECT d.id, s.name, s.enabled, s.error, s.next_fire_at, COALESCE(s.tenant_id, r.tenant_id) AS tenant_id,
        r.revision, r.effective_at, r.recurrence
    FROM d LEFT JOIN timebell_schedules s ON s.id = d.id
    LEFT JOIN timebell_schedule_revisions r ON r.schedule_id = d.id ORDER BY d.id, r.revision
    """,
    id="id",
)
SELECT_ZONE_MOVES = Statement(
    "SELECT timezone, offset_before, offset_after, since, recorded_at FROM timebell_zone_changes"
    " WHERE since IS NOT NULL AND offset_before <> offset_after"
)
SELECT_FIRING_STOPPED = Statement("SELECT name FROM timebell_queues WHERE name = '*' AND paused")

_RECORD_COLUMNS = (
    "{0}.schedule_id, {0}.id, {0}.kind, {0}.scheduled_at, {0}.run_at, {0}.state, {0}.attempt, {0}.revision,"
    " {0}.created_at, {0}.started_at, {0}.tenant_id"
)
_IN_WINDOW = "x.schedule_id = d.id AND x.scheduled_at >= d.low AND x.scheduled_at < d.high"
# CROSS JOIN fixes the join order on SQLite; with a plain JOIN it may scan all jobs.
SELECT_ROWS = Statement(
    f"""
    WITH $rows SELECT {_RECORD_COLUMNS.format("x")}, CAST(NULL AS VARCHAR) AS reason, 1 AS skipped_count,
        x.scheduled_at AS skipped_to FROM d CROSS JOIN timebell_jobs x WHERE {_IN_WINDOW}
    UNION ALL
    SELECT {_RECORD_COLUMNS.format("x")}, x.reason, x.skipped_count,
        COALESCE(x.skipped_to, x.scheduled_at) AS skipped_to
        FROM d CROSS JOIN timebell_finished x WHERE {_IN_WINDOW}
    """,  # noqa: S608 - constants only
    id="id",
    low="instant",
    high="instant",
)
# Range rows do not overlap: only the last planned one before the window can reach into it.
SELECT_REACHING_RANGES = Statement(
    f"""
    WITH $rows SELECT {_RECORD_COLUMNS.format("x")}, x.reason, x.skipped_count, x.skipped_to
    FROM d CROSS JOIN timebell_finished x WHERE x.id = (
        SELECT f.id FROM timebell_finished f WHERE f.schedule_id = d.id AND f.scheduled_at < d.low
        AND f.kind = 'planned' AND (f.reason IS NULL OR f.reason <> 'override')
        ORDER BY f.schedule_id DESC, f.scheduled_at DESC LIMIT 1)
    AND x.skipped_to >= d.low
    """,  # noqa: S608 - constants only
    id="id",
    low="instant",
)


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
    return [str(row["id"]) for row in tx.fetch(SELECT_SCHEDULE_IDS, after=after or LOWEST_ID, most=limit)]


def find_histories(tx: Transaction, schedule_ids: Sequence[str], tenant_id: str | None) -> list[ScheduleHistory]:
    """Return the histories of those schedules that belong to a tenant, or to any tenant if None."""
    by_id: dict[str, list[Row]] = {}
    for row in tx.fetch(SELECT_HISTORIES, [{"id": id_} for id_ in schedule_ids]):
        by_id.setdefault(str(row["id"]), []).append(row)
    return [
        _history_from_rows(tx, id_, rows)
        for id_, rows in by_id.items()
        if tenant_id is None or rows[0]["tenant_id"] in (None, tenant_id)
    ]


def _history_from_rows(tx: Transaction, id_: str, rows: Sequence[Row]) -> ScheduleHistory:
    first, from_db = rows[0], tx.dialect.from_db
    recurrences_json = {row["revision"]: row["recurrence"] for row in rows if row["revision"] is not None}

    def load_recurrence(number: int) -> Recurrence:
        return recurrence_from_json(recurrences_json[number])

    return ScheduleHistory(
        id=id_, name=first["name"] or f"deleted schedule {id_}", exists=first["name"] is not None,
        enabled=bool(first["enabled"]), error=first["error"], next_fire_at=from_db(first["next_fire_at"]),
        revisions=[
            RevisionStart(row["revision"], from_db(row["effective_at"]))
            for row in rows
            if row["revision"] in recurrences_json
        ],
        load_recurrence=load_recurrence,
    )  # fmt: skip


def read_windows(tx: Transaction, windows: Sequence[Window], tenant_id: str | None) -> dict[str, WindowRows]:
    """Return the rows of each window by schedule id; `windows` has at most one window per schedule."""
    to_db = tx.dialect.to_db
    spans: list[dict[str, Any]] = [
        {"id": window.id, "low": to_db(window.low), "high": to_db(window.high)} for window in windows
    ]
    result: dict[str, WindowRows] = {window.id: WindowRows([], None) for window in windows}
    for row in tx.fetch(SELECT_ROWS, spans):
        if tenant_id is None or row["tenant_id"] == tenant_id:
            result[str(row["schedule_id"])].rows.append(_record_from_row(tx, row))
    for window_rows in result.values():
        window_rows.rows.sort(key=lambda row: (row.scheduled_at, row.id))
    first_windows = [{"id": window.id, "low": to_db(window.low)} for window in windows if window.first]
    for row in tx.fetch(SELECT_REACHING_RANGES, first_windows) if first_windows else ():
        id_ = str(row["schedule_id"])
        result[id_] = result[id_]._replace(before=_record_from_row(tx, row))
    return result


def list_zone_moves(tx: Transaction) -> list[ZoneShift]:
    """Return the local-time ranges that tzdata releases moved."""
    from_db = tx.dialect.from_db
    return [
        ZoneShift(
            row["timezone"], from_db(row["since"]), from_db(row["recorded_at"]),
            timedelta(seconds=abs(row["offset_after"] - row["offset_before"])),
        )
        for row in tx.fetch(SELECT_ZONE_MOVES)
    ]  # fmt: skip


def is_firing_stopped(tx: Transaction) -> bool:
    """Return whether all firing is stopped."""
    return bool(tx.fetch(SELECT_FIRING_STOPPED))


def _record_from_row(tx: Transaction, row: Row) -> RecordedJob:
    from_db = tx.dialect.from_db
    return RecordedJob(
        str(row["id"]), row["kind"], from_db(row["scheduled_at"]), from_db(row["run_at"]), row["state"],
        row["attempt"], row["revision"], from_db(row["created_at"]), from_db(row["started_at"]), row["reason"],
        row["skipped_count"], from_db(row["skipped_to"]),
    )  # fmt: skip


def find_schedule_ids(tx: Transaction, name: str, id_: str | None, tenant_id: str | None) -> list[str]:
    """Return the ids of schedules with this name, or with this id, which may be deleted."""
    table = schedules if id_ is None else revisions
    column = table.c.id if id_ is None else table.c.schedule_id
    query = select(column).distinct().where(table.c.name == name if id_ is None else column == id_)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    return [str(value) for value in tx.execute(query.order_by(column)).scalars()]
