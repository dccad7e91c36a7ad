"""Fire schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.store.dialects.batches import encode
from timebell.store.dialects.operations import Executor
from timebell.store.dialects.postgres.values import Values
from timebell.store.sql import SQL, Row

# The index timebell_schedules_due yields the schedules in the order of next_fire_at. Planners skip what another one has
# locked. Never early: a schedule must be due by the clock of the node and by that of the server.
LOCK_DUE_SCHEDULES = SQL("""
SELECT * FROM timebell_schedules
WHERE enabled AND error IS NULL
    AND next_fire_at <= :now AND (:virtual_time OR next_fire_at <= statement_timestamp())
    AND NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)
ORDER BY next_fire_at LIMIT :limit
FOR UPDATE SKIP LOCKED
""")

FIND_NEXT_FIRE_AT = SQL("""
SELECT next_fire_at FROM timebell_schedules
WHERE enabled AND error IS NULL AND next_fire_at IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)
ORDER BY next_fire_at LIMIT 1
""")

# By timebell_jobs_occurrence, which begins with the schedule.
COUNT_LIVE_JOBS = SQL("""
SELECT j.schedule_id, count(*) AS live, sum(CASE WHEN j.serial THEN 0 ELSE 1 END) AS non_serial
FROM unnest(CAST(:schedules AS uuid[])) AS d (id) JOIN timebell_jobs j ON j.schedule_id = d.id
WHERE j.hold IS NULL OR j.hold <> 'backlog'
GROUP BY j.schedule_id
""")

# `= ANY(...)` repeats the join condition in a form that forces look-ups by id.
ADVANCE_CURSORS = SQL("""
UPDATE timebell_schedules AS s
SET next_fire_at = d.next_fire_at, last_fired_at = COALESCE(d.last_fired_at, s.last_fired_at), error = d.error,
    tzdata = d.tzdata, utc_offset = d.utc_offset
FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
    id uuid, next_fire_at timestamptz, last_fired_at timestamptz, error text, tzdata text, utc_offset int)
WHERE s.id = d.id AND s.id = ANY(CAST(:ids AS uuid[]))
""")


class FireOperations(Values):
    """The operations of this module."""

    def lock_due_schedules(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(LOCK_DUE_SCHEDULES, now=now, limit=limit, virtual_time=self.virtual_time)

    def find_next_fire_at(self, tx: Executor) -> datetime | None:
        rows = tx.run_sql(FIND_NEXT_FIRE_AT)
        at: datetime | None = self.from_db(rows[0]["next_fire_at"]) if rows else None
        return at

    def count_live_jobs(self, tx: Executor, schedules: Sequence[str]) -> list[Row]:
        return tx.run_sql(COUNT_LIVE_JOBS, schedules=list(schedules))

    def advance_cursors(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        tx.run_sql(ADVANCE_CURSORS, rows=encode(rows), ids=[row["id"] for row in rows])
