"""What an audit reads: schedules with their revisions, and rows by schedule and time. Nothing is written or locked.

Each statement sees the database as it was at one instant, so that a job on its way from one table to the other is seen
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import select

from timebell.model.audit_findings import History, Recorded, Revised, ZoneMove
from timebell.recurrence import Recurrence
from timebell.store.schedules.recurrence_column import recurrence_of
from timebell.store.schema import revisions, schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Row, Transaction

FIRST = "00000000-0000-0000-0000-000000000000"

# Of schedules that are gone the revisions are left; of what nobody knows, rows: a step an id, not a row.
IDS = Statement(
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
HISTORIES = Statement(
    """
    WITH $rows SELECT d.id, s.name, s.enabled, s.fault, s.next_fire_at, COALESCE(s.tenant_id, r.tenant_id) AS tenant_id,
        r.revision, r.effective_at, r.recurrence
    FROM d LEFT JOIN timebell_schedules s ON s.id = d.id
    LEFT JOIN timebell_schedule_revisions r ON r.schedule_id = d.id ORDER BY d.id, r.revision
    """,
    id="id",
)
MOVES = Statement(
    "SELECT timezone, offset_before, offset_after, since, recorded_at FROM timebell_zone_changes"
    " WHERE since IS NOT NULL AND offset_before <> offset_after"
)
HALTED = Statement("SELECT name FROM timebell_queues WHERE name = '*' AND paused")

_READ = (
    "{0}.schedule_id, {0}.id, {0}.kind, {0}.scheduled_at, {0}.run_at, {0}.state, {0}.attempt, {0}.revision,"
    " {0}.created_at, {0}.started_at, {0}.tenant_id"
)
_IN_WINDOW = "x.schedule_id = d.id AND x.scheduled_at >= d.low AND x.scheduled_at < d.high"
# CROSS JOIN, as of a plain one SQLite may make a walk through all jobs.
ROWS = Statement(
    f"""
    WITH $rows SELECT {_READ.format("x")}, CAST(NULL AS VARCHAR) AS reason, 1 AS skipped_count,
        x.scheduled_at AS skipped_to FROM d CROSS JOIN timebell_jobs x WHERE {_IN_WINDOW}
    UNION ALL
    SELECT {_READ.format("x")}, x.reason, x.skipped_count, COALESCE(x.skipped_to, x.scheduled_at) AS skipped_to
        FROM d CROSS JOIN timebell_finished x WHERE {_IN_WINDOW}
    """,  # noqa: S608 - constants only
    id="id",
    low="instant",
    high="instant",
)
# Range rows do not overlap: only the last planned one before an instant can reach beyond it.
REACHING = Statement(
    f"""
    WITH $rows SELECT {_READ.format("x")}, x.reason, x.skipped_count, x.skipped_to
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
    """The rows of a schedule to read: those scheduled in [low, high)."""

    id: str
    low: datetime
    high: datetime
    first: bool


class Found(NamedTuple):
    """The rows of a window, in order, and the range row that reaches into it, if it is the first."""

    rows: list[Recorded]
    before: Recorded | None


def ids(tx: Transaction, after: str | None, most: int) -> list[str]:
    """Every schedule that is or was, by id from `after` on."""
    return [str(row["id"]) for row in tx.fetch(IDS, after=after or FIRST, most=most)]


def histories(tx: Transaction, wanted: Sequence[str], tenant_id: str | None) -> list[History]:
    """Those of these schedules that belong to a tenant (None: to any)."""
    by_id: dict[str, list[Row]] = {}
    for row in tx.fetch(HISTORIES, [{"id": id_} for id_ in wanted]):
        by_id.setdefault(str(row["id"]), []).append(row)
    return [
        _history(tx, id_, rows)
        for id_, rows in by_id.items()
        if tenant_id is None or rows[0]["tenant_id"] in (None, tenant_id)
    ]


def _history(tx: Transaction, id_: str, rows: Sequence[Row]) -> History:
    one, from_db = rows[0], tx.dialect.from_db
    texts = {row["revision"]: row["recurrence"] for row in rows if row["revision"] is not None}

    def recurrence(number: int) -> Recurrence:
        return recurrence_of(texts[number])

    return History(
        id=id_, name=one["name"] or f"deleted schedule {id_}", exists=one["name"] is not None,
        enabled=bool(one["enabled"]), fault=one["fault"], next_fire_at=from_db(one["next_fire_at"]),
        revisions=[Revised(row["revision"], from_db(row["effective_at"])) for row in rows if row["revision"] in texts],
        recurrence=recurrence,
    )  # fmt: skip


def recorded(tx: Transaction, windows: Sequence[Window], tenant_id: str | None) -> dict[str, Found]:
    """The rows of each window, by schedule; at most one window of each."""
    to_db = tx.dialect.to_db
    spans: list[dict[str, Any]] = [{"id": one.id, "low": to_db(one.low), "high": to_db(one.high)} for one in windows]
    found: dict[str, Found] = {one.id: Found([], None) for one in windows}
    for row in tx.fetch(ROWS, spans):
        if tenant_id is None or row["tenant_id"] == tenant_id:
            found[str(row["schedule_id"])].rows.append(_recorded(tx, row))
    for one in found.values():
        one.rows.sort(key=lambda row: (row.scheduled_at, row.id))
    reaching = [{"id": one.id, "low": to_db(one.low)} for one in windows if one.first]
    for row in tx.fetch(REACHING, reaching) if reaching else ():
        id_ = str(row["schedule_id"])
        found[id_] = found[id_]._replace(before=_recorded(tx, row))
    return found


def moves(tx: Transaction) -> list[ZoneMove]:
    """What new zone data moved."""
    from_db = tx.dialect.from_db
    return [
        ZoneMove(
            row["timezone"], from_db(row["since"]), from_db(row["recorded_at"]),
            timedelta(seconds=abs(row["offset_after"] - row["offset_before"])),
        )
        for row in tx.fetch(MOVES)
    ]  # fmt: skip


def halted(tx: Transaction) -> bool:
    """Whether all firing is stopped."""
    return bool(tx.fetch(HALTED))


def _recorded(tx: Transaction, row: Row) -> Recorded:
    from_db = tx.dialect.from_db
    return Recorded(
        str(row["id"]), row["kind"], from_db(row["scheduled_at"]), from_db(row["run_at"]), row["state"],
        row["attempt"], row["revision"], from_db(row["created_at"]), from_db(row["started_at"]), row["reason"],
        row["skipped_count"], from_db(row["skipped_to"]),
    )  # fmt: skip


def named(tx: Transaction, name: str, id_: str | None, tenant_id: str | None) -> list[str]:
    """The schedules of this name or id; by id also one that was deleted."""
    table = schedules if id_ is None else revisions
    column = table.c.id if id_ is None else table.c.schedule_id
    query = select(column).distinct().where(table.c.name == name if id_ is None else column == id_)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    return [str(found) for found in tx.execute(query.order_by(column)).scalars()]
