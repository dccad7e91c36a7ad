"""Fire schedules. SQLite has one writer at a time, so nothing is locked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.store.dialects.batches import encode
from timebell.store.dialects.operations import Executor
from timebell.store.dialects.sqlite.values import Values
from timebell.store.sql import SQL, Row

# The index timebell_schedules_due yields the schedules in the order of next_fire_at.
READ_DUE_SCHEDULES = SQL("""
SELECT * FROM timebell_schedules
WHERE enabled AND error IS NULL AND next_fire_at <= :now
    AND NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)
ORDER BY next_fire_at LIMIT :limit
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
FROM json_each(:schedules) AS d CROSS JOIN timebell_jobs j ON j.schedule_id = d.value
WHERE j.hold IS NULL OR j.hold <> 'backlog'
GROUP BY j.schedule_id
""")

ADVANCE_CURSORS = SQL("""
WITH batch AS MATERIALIZED (
    SELECT value FROM json_each(:rows)
), d AS (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.next_fire_at') AS next_fire_at,
        json_extract(value, '$.last_fired_at') AS last_fired_at, json_extract(value, '$.error') AS error,
        json_extract(value, '$.tzdata') AS tzdata, json_extract(value, '$.utc_offset') AS utc_offset
    FROM batch
)
UPDATE timebell_schedules AS s
SET next_fire_at = d.next_fire_at, last_fired_at = COALESCE(d.last_fired_at, s.last_fired_at), error = d.error,
    tzdata = d.tzdata, utc_offset = d.utc_offset
FROM d
WHERE s.id = d.id AND s.id IN (SELECT id FROM d)
""")


class FireOperations(Values):
    """The operations of this module."""

    def lock_due_schedules(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(READ_DUE_SCHEDULES, now=self.to_db(now), limit=limit)

    def find_next_fire_at(self, tx: Executor) -> datetime | None:
        rows = tx.run_sql(FIND_NEXT_FIRE_AT)
        return self.from_db(rows[0]["next_fire_at"]) if rows else None

    def count_live_jobs(self, tx: Executor, schedules: Sequence[str]) -> list[Row]:
        return tx.run_sql(COUNT_LIVE_JOBS, schedules=encode(schedules))

    def advance_cursors(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        tx.run_sql(ADVANCE_CURSORS, rows=encode(rows))
