"""Complete, retry and dispatch attempts, and renew their leases.

Fence: the attempt number and the state must match. Otherwise the attempt has ended, perhaps reclaimed by another node,
and the row is left alone.

`j.id = ANY(ARRAY(...))` repeats the join condition in a form that forces look-ups by id: for the join alone the planner
may scan the table.

The variants with SKIP LOCKED leave rows that another transaction (possibly of a frozen node) has locked for the next
call, so that one stuck session cannot delay the batch. They find the rows that they have locked by ctid, which needs no
second index look-up; a row version that was replaced meanwhile is not found, as if it was locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from timebell.model.job import Completion, JobState
from timebell.store.dialects.batches import attempt_rows, completion_rows, dispatch_rows, encode, fence_rows
from timebell.store.dialects.operations import Executor
from timebell.store.dialects.postgres.values import Values
from timebell.store.sql import SQL, Row
from timebell.store.types import to_micros

# Moves the rows from the live to the finished table, in one statement.
# If a cancel was requested while the attempt ran, only a success is kept; any other outcome becomes `cancelled`.
COMPLETE = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (
        id uuid, attempt int, was text, state text, at timestamptz, counts int, reason text, error text, code text,
        result text, errors text, cancel text, replaced_by uuid)
), gone AS (
    DELETE FROM timebell_jobs j USING d
    WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND j.id = ANY(ARRAY(SELECT id FROM d))
    RETURNING j.id, j.tenant_id, j.topic, j.schedule_id, j.revision, j.kind, j.scheduled_at, j.run_at, j.timezone,
        j.payload, j.metadata, j.owner_id, j.key, j.target, j.queue, j.priority, j.retry, j.timeout, j.expires_at,
        j.serial, j.attempt, j.node_id, j.created_at, j.started_at, j.replaces, j.local_time, j.tzdata, j.group_name,
        j.manual_retries, j.conditions,
        CASE WHEN j.cancel_requested AND d.state <> 'completed' THEN 'cancelled' ELSE d.state END AS state,
        d.errors, j.attempts_used + d.counts AS attempts_used, d.at, d.reason, d.error, d.code, d.result,
        CASE WHEN j.cancel_requested THEN 'in_flight' ELSE d.cancel END AS cancel, d.replaced_by
)
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, attempt, node_id, created_at, started_at, replaces,
    local_time, tzdata, group_name, manual_retries, conditions, state, errors, attempts_used, finished_at, reason,
    error, error_code, result, cancel, replaced_by
)
SELECT * FROM gone
RETURNING id, schedule_id, started_at, serial, queue, tenant_id, group_name
""")

COMPLETE_UNLOCKED = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (
        id uuid, attempt int, was text, state text, at timestamptz, counts int, reason text, error text, code text,
        result text, errors text, cancel text, replaced_by uuid)
), gone AS (
    DELETE FROM timebell_jobs j USING d
    WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND j.ctid = ANY(ARRAY(
        SELECT ctid FROM timebell_jobs WHERE id = ANY(ARRAY(SELECT id FROM d)) FOR UPDATE SKIP LOCKED))
    RETURNING j.id, j.tenant_id, j.topic, j.schedule_id, j.revision, j.kind, j.scheduled_at, j.run_at, j.timezone,
        j.payload, j.metadata, j.owner_id, j.key, j.target, j.queue, j.priority, j.retry, j.timeout, j.expires_at,
        j.serial, j.attempt, j.node_id, j.created_at, j.started_at, j.replaces, j.local_time, j.tzdata, j.group_name,
        j.manual_retries, j.conditions,
        CASE WHEN j.cancel_requested AND d.state <> 'completed' THEN 'cancelled' ELSE d.state END AS state,
        d.errors, j.attempts_used + d.counts AS attempts_used, d.at, d.reason, d.error, d.code, d.result,
        CASE WHEN j.cancel_requested THEN 'in_flight' ELSE d.cancel END AS cancel, d.replaced_by
)
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, attempt, node_id, created_at, started_at, replaces,
    local_time, tzdata, group_name, manual_retries, conditions, state, errors, attempts_used, finished_at, reason,
    error, error_code, result, cancel, replaced_by
)
SELECT * FROM gone
RETURNING id, schedule_id, started_at, serial, queue, tenant_id, group_name
""")

# A job whose cancel was requested is not retried.
RETRY = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (
        id uuid, attempt int, was text, counts int, errors text, run_at timestamptz)
)
UPDATE timebell_jobs AS j
SET state = 'pending', run_at = d.run_at, errors = d.errors, attempts_used = j.attempts_used + d.counts, node_id = NULL
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND NOT j.cancel_requested
    AND j.id = ANY(ARRAY(SELECT id FROM d))
RETURNING j.id, j.queue, j.tenant_id, j.group_name
""")

RETRY_UNLOCKED = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (
        id uuid, attempt int, was text, counts int, errors text, run_at timestamptz)
)
UPDATE timebell_jobs AS j
SET state = 'pending', run_at = d.run_at, errors = d.errors, attempts_used = j.attempts_used + d.counts, node_id = NULL
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND NOT j.cancel_requested
    AND j.ctid = ANY(ARRAY(
        SELECT ctid FROM timebell_jobs WHERE id = ANY(ARRAY(SELECT id FROM d)) FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.queue, j.tenant_id, j.group_name
""")

# The heartbeat of a dispatched job is the deadline for its report, in microseconds since 1970.
DISPATCH = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (
        id uuid, attempt int, was text, until bigint, errors text)
)
UPDATE timebell_jobs AS j SET state = 'dispatched', heartbeat = d.until, errors = COALESCE(d.errors, j.errors)
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND j.id = ANY(ARRAY(SELECT id FROM d))
RETURNING j.id
""")

DISPATCH_UNLOCKED = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (
        id uuid, attempt int, was text, until bigint, errors text)
)
UPDATE timebell_jobs AS j SET state = 'dispatched', heartbeat = d.until, errors = COALESCE(d.errors, j.errors)
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND j.ctid = ANY(ARRAY(
    SELECT ctid FROM timebell_jobs WHERE id = ANY(ARRAY(SELECT id FROM d)) FOR UPDATE SKIP LOCKED))
RETURNING j.id
""")

# The counter is in no index, so the new row version adds no index entries if its page has room (HOT).
RENEW_LEASES = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (id uuid, attempt int)
)
UPDATE timebell_jobs AS j SET heartbeat = j.heartbeat + 1
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = 'running' AND j.id = ANY(ARRAY(SELECT id FROM d))
RETURNING j.id
""")

RENEW_LEASES_UNLOCKED = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (id uuid, attempt int)
)
UPDATE timebell_jobs AS j SET heartbeat = j.heartbeat + 1
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = 'running' AND j.ctid = ANY(ARRAY(
    SELECT ctid FROM timebell_jobs WHERE id = ANY(ARRAY(SELECT id FROM d)) FOR UPDATE SKIP LOCKED))
RETURNING j.id
""")

# Reads the oldest rows in the order of timebell_finished_at. The outer condition excludes newer partitions.
PRUNE_FINISHED = SQL("""
DELETE FROM timebell_finished
WHERE finished_at < :before AND id IN (
    SELECT id FROM timebell_finished WHERE finished_at < :before ORDER BY finished_at LIMIT :limit)
""")

FIND_UNCHANGED = SQL("""
WITH d AS (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r (id uuid, attempt int, was text)
)
SELECT j.id, j.cancel_requested FROM d JOIN timebell_jobs j ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
WHERE j.id = ANY(ARRAY(SELECT id FROM d))
""")

# Each part has its own partial index: timebell_jobs_running and timebell_jobs_held.
LIST_RUNNING = SQL("""
SELECT id, attempt, heartbeat, hold FROM timebell_jobs WHERE state = 'running'
UNION ALL
SELECT id, attempt, heartbeat, hold FROM timebell_jobs WHERE hold = 'stopping' AND state = 'dispatched'
""")

LIST_OVERDUE_DISPATCHED = SQL("""
SELECT id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions, started_at
FROM timebell_jobs WHERE state = 'dispatched' AND heartbeat <= :until
ORDER BY heartbeat LIMIT :limit
""")


class CompleteOperations(Values):
    """The operations of this module."""

    def complete(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        rows = encode(completion_rows(completions, self.to_db))
        return tx.run_sql(COMPLETE_UNLOCKED if skip_locked else COMPLETE, rows=rows)

    def retry(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        rows = encode(completion_rows(completions, self.to_db))
        return tx.run_sql(RETRY_UNLOCKED if skip_locked else RETRY, rows=rows)

    def dispatch(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> set[str]:
        rows = encode(dispatch_rows(completions))
        return {str(row["id"]) for row in tx.run_sql(DISPATCH_UNLOCKED if skip_locked else DISPATCH, rows=rows)}

    def renew_leases(self, tx: Executor, attempts: Sequence[tuple[str, int]], *, skip_locked: bool) -> set[str]:
        statement = RENEW_LEASES_UNLOCKED if skip_locked else RENEW_LEASES
        return {str(row["id"]) for row in tx.run_sql(statement, rows=encode(attempt_rows(attempts)))}

    def prune_finished(self, tx: Executor, before: datetime, limit: int) -> int:
        return tx.execute(PRUNE_FINISHED.clause, {"before": self.to_db(before), "limit": limit}).rowcount

    def find_unchanged(self, tx: Executor, attempts: Sequence[tuple[str, int, JobState]]) -> list[Row]:
        return tx.run_sql(FIND_UNCHANGED, rows=encode(fence_rows(attempts)))

    def list_running(self, tx: Executor) -> list[Row]:
        return tx.run_sql(LIST_RUNNING)

    def list_overdue_dispatched(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(LIST_OVERDUE_DISPATCHED, until=to_micros(now), limit=limit)
