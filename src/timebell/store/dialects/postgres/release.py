"""Release the jobs that waited for a completed one: the next of a schedule, or of a group.

`= ANY(ARRAY(...))` forces look-ups by id: with IN (...) the planner may join the whole table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from timebell.store.dialects.batches import encode
from timebell.store.dialects.operations import Executor
from timebell.store.dialects.postgres.values import Values
from timebell.store.sql import SQL, Row

# In the order of the ids, so that two transactions cannot deadlock. A schedule has no next instant only if it has
# ended, or if it has a fixed delay and a live job. `may_have_waiting` is always true: the planner may hold a job
# between the snapshot of this statement and the acquisition of the lock.
LOCK_SCHEDULES = SQL("""
SELECT id, CASE WHEN next_fire_at IS NULL THEN recurrence END AS fixed_delay, true AS may_have_waiting
FROM timebell_schedules WHERE id = ANY(CAST(:ids AS uuid[]))
ORDER BY id
FOR UPDATE
""")

LOCK_SCHEDULES_UNLOCKED = SQL("""
SELECT id, CASE WHEN next_fire_at IS NULL THEN recurrence END AS fixed_delay, true AS may_have_waiting
FROM timebell_schedules WHERE id = ANY(CAST(:ids AS uuid[]))
ORDER BY id
FOR UPDATE SKIP LOCKED
""")

# The schedules are locked, so no other transaction releases or adds one of their jobs.
RELEASE_NEXT = SQL("""
UPDATE timebell_jobs SET hold = NULL
WHERE id = ANY(ARRAY(
    SELECT (SELECT j.id FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.hold = 'overlap'
            ORDER BY j.scheduled_at, j.id LIMIT 1)
    FROM unnest(CAST(:schedules AS uuid[])) AS d (id)
    WHERE NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.serial
                        AND (j.hold IS NULL OR j.hold NOT IN ('overlap', 'backlog')))
))
RETURNING id
""")

# The index timebell_jobs_group yields the held jobs of a group in the order of priority and run_at. A job that another
# transaction releases is skipped.
RELEASE_NEXT_OF_GROUPS = SQL("""
UPDATE timebell_jobs SET hold = NULL
WHERE id = ANY(ARRAY(
    SELECT (SELECT j.id FROM timebell_jobs j WHERE j.hold = 'group' AND j.queue = d.queue
                AND j.tenant_id = d.tenant_id AND j.group_name = d.group_name
            ORDER BY j.priority, j.run_at LIMIT 1
            FOR UPDATE SKIP LOCKED)
    FROM unnest(CAST(:queues AS text[]), CAST(:tenants AS text[]), CAST(:names AS text[]))
        AS d (queue, tenant_id, group_name)
))
RETURNING id
""")

# Not while the schedule has another live job, whose completion will get here, too. Jobs of the backlog do not count.
ADVANCE_FIXED_DELAYS = SQL("""
UPDATE timebell_schedules AS s SET next_fire_at = d.next_fire_at
FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (id uuid, next_fire_at timestamptz)
WHERE s.id = d.id AND s.id = ANY(CAST(:ids AS uuid[]))
    AND NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.serial
                        AND (j.hold IS NULL OR j.hold <> 'backlog'))
RETURNING s.id
""")


class ReleaseOperations(Values):
    """The operations of this module."""

    def lock_schedules(self, tx: Executor, ids: Collection[str], *, skip_locked: bool) -> list[Row]:
        return tx.run_sql(LOCK_SCHEDULES_UNLOCKED if skip_locked else LOCK_SCHEDULES, ids=list(ids))

    def release_next(self, tx: Executor, schedules: Sequence[str]) -> int:
        return len(tx.run_sql(RELEASE_NEXT, schedules=list(schedules)))

    def release_next_of_groups(self, tx: Executor, groups: Collection[tuple[str, str, str]]) -> int:
        queues, tenants, names = map(list, zip(*groups, strict=True))
        return len(tx.run_sql(RELEASE_NEXT_OF_GROUPS, queues=queues, tenants=tenants, names=names))

    def advance_fixed_delays(self, tx: Executor, next_instants: Mapping[str, datetime]) -> bool:
        rows = encode([{"id": id_, "next_fire_at": at} for id_, at in next_instants.items()])
        return bool(tx.run_sql(ADVANCE_FIXED_DELAYS, rows=rows, ids=list(next_instants)))
