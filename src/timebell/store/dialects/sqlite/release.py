"""Release the jobs that waited for a completed one: the next of a schedule, or of a group.

SQLite has one writer at a time, so nothing is locked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from timebell.store.dialects.batches import encode
from timebell.store.dialects.operations import Executor
from timebell.store.dialects.sqlite.values import Values
from timebell.store.sql import SQL, Row

# A schedule has no next instant only if it has ended, or if it has a fixed delay and a live job.
READ_SCHEDULES = SQL("""
SELECT s.id, CASE WHEN s.next_fire_at IS NULL THEN s.recurrence END AS fixed_delay,
    EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = s.id AND j.hold = 'overlap') AS may_have_waiting
FROM timebell_schedules s WHERE s.id IN (SELECT value FROM json_each(:ids))
""")

RELEASE_NEXT = SQL("""
UPDATE timebell_jobs SET hold = NULL
WHERE id IN (
    SELECT (SELECT j.id FROM timebell_jobs j WHERE j.schedule_id = d.value AND j.hold = 'overlap'
            ORDER BY j.scheduled_at, j.id LIMIT 1)
    FROM json_each(:schedules) AS d
    WHERE NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = d.value AND j.serial
                        AND (j.hold IS NULL OR j.hold NOT IN ('overlap', 'backlog')))
)
RETURNING id
""")

# The index timebell_jobs_group yields the held jobs of a group in the order of priority and run_at.
RELEASE_NEXT_OF_GROUPS = SQL("""
WITH d AS MATERIALIZED (
    SELECT json_extract(value, '$[0]') AS queue, json_extract(value, '$[1]') AS tenant_id,
        json_extract(value, '$[2]') AS group_name
    FROM json_each(:groups)
)
UPDATE timebell_jobs SET hold = NULL
WHERE id IN (
    SELECT (SELECT j.id FROM timebell_jobs j WHERE j.hold = 'group' AND j.queue = d.queue
                AND j.tenant_id = d.tenant_id AND j.group_name = d.group_name
            ORDER BY j.priority, j.run_at LIMIT 1)
    FROM d
)
RETURNING id
""")

# Not while the schedule has another live job, whose completion will get here, too. Jobs of the backlog do not count.
ADVANCE_FIXED_DELAYS = SQL("""
WITH d AS MATERIALIZED (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.next_fire_at') AS next_fire_at
    FROM json_each(:rows)
)
UPDATE timebell_schedules AS s SET next_fire_at = d.next_fire_at
FROM d
WHERE s.id = d.id AND s.id IN (SELECT id FROM d)
    AND NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.serial
                        AND (j.hold IS NULL OR j.hold <> 'backlog'))
RETURNING id
""")


class ReleaseOperations(Values):
    """The operations of this module."""

    def lock_schedules(self, tx: Executor, ids: Collection[str], *, skip_locked: bool) -> list[Row]:
        return tx.run_sql(READ_SCHEDULES, ids=encode(list(ids)))

    def release_next(self, tx: Executor, schedules: Sequence[str]) -> int:
        return len(tx.run_sql(RELEASE_NEXT, schedules=encode(schedules)))

    def release_next_of_groups(self, tx: Executor, groups: Collection[tuple[str, str, str]]) -> int:
        return len(tx.run_sql(RELEASE_NEXT_OF_GROUPS, groups=encode(list(groups))))

    def advance_fixed_delays(self, tx: Executor, next_instants: Mapping[str, datetime]) -> bool:
        rows = [{"id": id_, "next_fire_at": self.to_db(at)} for id_, at in next_instants.items()]
        return bool(tx.run_sql(ADVANCE_FIXED_DELAYS, rows=encode(rows)))
