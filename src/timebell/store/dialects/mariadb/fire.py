"""Fire schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.store.dialects.batches import encode
from timebell.store.dialects.mariadb.values import Values, batches
from timebell.store.dialects.operations import Executor
from timebell.store.sql import SQL, Row

# The index yields the enabled schedules in the order of next_fire_at. Planners skip what another one has locked. Never
# early: a schedule must be due by the clock of the node and by that of the server.
LOCK_DUE_SCHEDULES = SQL("""
SELECT * FROM timebell_schedules FORCE INDEX (timebell_schedules_due)
WHERE enabled = true AND error IS NULL AND next_fire_at <= :now
    AND (:virtual_time OR next_fire_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))
    AND NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)
ORDER BY next_fire_at LIMIT :limit
FOR UPDATE SKIP LOCKED
""")

FIND_NEXT_FIRE_AT = SQL("""
SELECT next_fire_at FROM timebell_schedules FORCE INDEX (timebell_schedules_due)
WHERE enabled = true AND error IS NULL AND next_fire_at IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)
ORDER BY next_fire_at LIMIT 1
""")

COUNT_LIVE_JOBS = SQL("""
SELECT j.schedule_id, count(*) AS live, sum(CASE WHEN j.serial THEN 0 ELSE 1 END) AS non_serial
FROM JSON_TABLE(:schedules, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (timebell_jobs_occurrence) ON j.schedule_id = d.id
WHERE j.hold IS NULL OR j.hold <> 'backlog'
GROUP BY j.schedule_id
""")

# The schedules are locked. The primary key is forced also for small tables: a table scan would wait for rows that other
# transactions have locked.
ADVANCE_CURSORS = SQL("""
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', next_fire_at BIGINT PATH '$.next_fire_at', last_fired_at BIGINT PATH '$.last_fired_at',
    error LONGTEXT PATH '$.error', tzdata LONGTEXT PATH '$.tzdata', utc_offset INT PATH '$.utc_offset')) AS d
STRAIGHT_JOIN timebell_schedules AS s FORCE INDEX (PRIMARY) ON s.id = d.id
SET s.next_fire_at = d.next_fire_at, s.last_fired_at = COALESCE(d.last_fired_at, s.last_fired_at), s.error = d.error,
    s.tzdata = d.tzdata, s.utc_offset = d.utc_offset
""")


class FireOperations(Values):
    """The operations of this module."""

    def lock_due_schedules(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(LOCK_DUE_SCHEDULES, now=self.to_db(now), limit=limit, virtual_time=self.virtual_time)

    def find_next_fire_at(self, tx: Executor) -> datetime | None:
        rows = tx.run_sql(FIND_NEXT_FIRE_AT)
        at: datetime | None = self.from_db(rows[0]["next_fire_at"]) if rows else None
        return at

    def count_live_jobs(self, tx: Executor, schedules: Sequence[str]) -> list[Row]:
        return tx.run_sql(COUNT_LIVE_JOBS, schedules=encode(schedules))

    def advance_cursors(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        for part in batches(rows):
            tx.run_sql(ADVANCE_CURSORS, rows=part)
