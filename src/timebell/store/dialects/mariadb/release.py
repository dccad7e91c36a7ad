"""Release the jobs that waited for a completed one: the next of a schedule, or of a group.

MariaDB has no UPDATE .. RETURNING: the first statement locks the rows to change, the second one changes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from timebell.store.dialects.batches import encode
from timebell.store.dialects.mariadb.values import Values
from timebell.store.dialects.operations import Executor
from timebell.store.sql import SQL, Row

# In the order of the ids, which JSON_TABLE keeps, so that two transactions cannot deadlock. A schedule has no next
# instant only if it has ended, or if it has a fixed delay and a live job. `may_have_waiting` is always true: the
# planner may hold a job while this statement waits for the lock.
LOCK_SCHEDULES = SQL("""
SELECT s.id, CASE WHEN s.next_fire_at IS NULL THEN s.recurrence END AS fixed_delay, true AS may_have_waiting
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_schedules AS s FORCE INDEX (PRIMARY) ON s.id = d.id
FOR UPDATE
""")

LOCK_SCHEDULES_UNLOCKED = SQL("""
SELECT s.id, CASE WHEN s.next_fire_at IS NULL THEN s.recurrence END AS fixed_delay, true AS may_have_waiting
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_schedules AS s FORCE INDEX (PRIMARY) ON s.id = d.id
FOR UPDATE SKIP LOCKED
""")

# The schedules are locked, so no other transaction releases or adds one of their jobs. The index
# timebell_jobs_occurrence begins with the schedule.
LOCK_NEXT = SQL("""
SELECT j.id
FROM (
    SELECT (SELECT w.id FROM timebell_jobs AS w FORCE INDEX (timebell_jobs_occurrence)
            WHERE w.schedule_id = d.id AND w.hold = 'overlap' ORDER BY w.scheduled_at, w.id LIMIT 1) AS id
    FROM JSON_TABLE(:schedules, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
    WHERE NOT EXISTS (SELECT 1 FROM timebell_jobs AS o FORCE INDEX (timebell_jobs_occurrence)
                      WHERE o.schedule_id = d.id AND o.serial
                        AND (o.hold IS NULL OR o.hold NOT IN ('overlap', 'backlog')))
) AS following
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = following.id
FOR UPDATE
""")

# The index timebell_jobs_group yields the held jobs of a group in the order of priority and run_at. A job that another
# transaction releases is skipped.
LOCK_NEXT_OF_GROUPS = SQL("""
SELECT j.id
FROM (
    SELECT (SELECT w.id FROM timebell_jobs AS w FORCE INDEX (timebell_jobs_group)
            WHERE w.hold = 'group' AND w.queue = d.queue AND w.tenant_id = d.tenant_id AND w.group_name = d.group_name
            ORDER BY w.priority, w.run_at LIMIT 1
            FOR UPDATE SKIP LOCKED) AS id
    FROM JSON_TABLE(:groups, '$[*]' COLUMNS (
        queue VARCHAR(100) PATH '$[0]', tenant_id VARCHAR(200) PATH '$[1]', group_name VARCHAR(200) PATH '$[2]')) AS d
) AS following
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = following.id
FOR UPDATE
""")

RELEASE = SQL("""
UPDATE JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.hold = NULL
""")

# The schedules are locked. Not while a schedule has another live job, whose completion will get here, too. Jobs of the
# backlog do not count.
FIND_WITHOUT_JOBS = SQL("""
SELECT d.id FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_schedules AS s FORCE INDEX (PRIMARY) ON s.id = d.id
WHERE NOT EXISTS (SELECT 1 FROM timebell_jobs AS j FORCE INDEX (timebell_jobs_occurrence)
                  WHERE j.schedule_id = d.id AND j.serial AND (j.hold IS NULL OR j.hold <> 'backlog'))
""")
ADVANCE_FIXED_DELAYS = SQL("""
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(36) PATH '$.id', next_fire_at BIGINT PATH '$.next_fire_at')) AS d
STRAIGHT_JOIN timebell_schedules AS s FORCE INDEX (PRIMARY) ON s.id = d.id
SET s.next_fire_at = d.next_fire_at
""")


class ReleaseOperations(Values):
    """The operations of this module."""

    def lock_schedules(self, tx: Executor, ids: Collection[str], *, skip_locked: bool) -> list[Row]:
        return tx.run_sql(LOCK_SCHEDULES_UNLOCKED if skip_locked else LOCK_SCHEDULES, ids=encode(sorted(ids)))

    def release_next(self, tx: Executor, schedules: Sequence[str]) -> int:
        return self._release(tx, tx.run_sql(LOCK_NEXT, schedules=encode(schedules)))

    def release_next_of_groups(self, tx: Executor, groups: Collection[tuple[str, str, str]]) -> int:
        return self._release(tx, tx.run_sql(LOCK_NEXT_OF_GROUPS, groups=encode(list(groups))))

    def _release(self, tx: Executor, locked: Sequence[Row]) -> int:
        if locked:
            tx.run_sql(RELEASE, ids=encode([row["id"] for row in locked]))
        return len(locked)

    def advance_fixed_delays(self, tx: Executor, next_instants: Mapping[str, datetime]) -> bool:
        found = tx.run_sql(FIND_WITHOUT_JOBS, ids=encode(list(next_instants)))
        rows = [{"id": row["id"], "next_fire_at": self.to_db(next_instants[row["id"]])} for row in found]
        if rows:
            tx.run_sql(ADVANCE_FIXED_DELAYS, rows=encode(rows))
        return bool(rows)
