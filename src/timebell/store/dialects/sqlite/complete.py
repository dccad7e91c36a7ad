"""Complete, retry and dispatch attempts, and renew their leases.

Fence: the attempt number and the state must match. Otherwise the attempt has ended, perhaps reclaimed, and the row is
left alone. SQLite has one writer at a time, so no row is locked, and `skip_locked` has no effect.

CROSS JOIN makes SQLite read the batch first and look up its rows by id. MATERIALIZED: otherwise it would generate the
text of each row of the batch again for every value that is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import orjson

from timebell.model.job import Completion, JobState
from timebell.store.dialects.batches import attempt_rows, completion_rows, dispatch_rows, encode, fence_rows
from timebell.store.dialects.operations import Executor
from timebell.store.dialects.sqlite.claim import FEW_ROWS
from timebell.store.dialects.sqlite.values import Values
from timebell.store.sql import SQL, Row
from timebell.store.types import to_micros

# Copies the rows from the live to the finished table; a second statement then removes them.
# If a cancel was requested while the attempt ran, only a success is kept; any other outcome becomes `cancelled`.
COPY_COMPLETED = SQL("""
WITH batch AS MATERIALIZED (
    SELECT value FROM json_each(:rows)
), d AS (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.was') AS was, json_extract(value, '$.state') AS state,
        json_extract(value, '$.at') AS at, json_extract(value, '$.counts') AS counts,
        json_extract(value, '$.reason') AS reason, json_extract(value, '$.error') AS error,
        json_extract(value, '$.code') AS code, json_extract(value, '$.result') AS result,
        json_extract(value, '$.errors') AS errors, json_extract(value, '$.cancel') AS cancel,
        json_extract(value, '$.replaced_by') AS replaced_by
    FROM batch
)
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, attempt, node_id, created_at, started_at, replaces,
    local_time, tzdata, group_name, manual_retries, conditions, state, errors, attempts_used, finished_at, reason,
    error, error_code, result, cancel, replaced_by
)
SELECT j.id, j.tenant_id, j.topic, j.schedule_id, j.revision, j.kind, j.scheduled_at, j.run_at, j.timezone, j.payload,
    j.metadata, j.owner_id, j.key, j.target, j.queue, j.priority, j.retry, j.timeout, j.expires_at, j.serial, j.attempt,
    j.node_id, j.created_at, j.started_at, j.replaces, j.local_time, j.tzdata, j.group_name, j.manual_retries,
    j.conditions, CASE WHEN j.cancel_requested AND d.state <> 'completed' THEN 'cancelled' ELSE d.state END,
    d.errors, j.attempts_used + d.counts, d.at, d.reason, d.error, d.code, d.result,
    CASE WHEN j.cancel_requested THEN 'in_flight' ELSE d.cancel END, d.replaced_by
FROM d CROSS JOIN timebell_jobs j ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
""")

# The rows that COPY_COMPLETED copies, as one row; see FEW_ROWS.
READ_COMPLETED = SQL("""
WITH batch AS MATERIALIZED (
    SELECT value FROM json_each(:rows)
), d AS (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.was') AS was
    FROM batch
)
SELECT json_group_array(json_object(
        'id', j.id, 'schedule_id', j.schedule_id, 'started_at', j.started_at, 'serial', j.serial, 'queue', j.queue,
        'tenant_id', j.tenant_id, 'group_name', j.group_name)) AS jobs, json_group_array(j.id) AS ids
FROM d CROSS JOIN timebell_jobs j ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
""")

# For a few rows, after COPY_COMPLETED. It repeats the fence, so that it deletes the rows that were copied.
DELETE_COMPLETED_RETURNING = SQL("""
WITH d AS MATERIALIZED (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.was') AS was
    FROM json_each(:rows)
)
DELETE FROM timebell_jobs AS j
WHERE j.id IN (SELECT id FROM d)
    AND EXISTS (SELECT 1 FROM d WHERE d.id = j.id AND d.attempt = j.attempt AND d.was = j.state)
RETURNING id, schedule_id, started_at, serial, queue, tenant_id, group_name
""")

DELETE_COMPLETED = SQL("DELETE FROM timebell_jobs WHERE id IN (SELECT value FROM json_each(:ids))")

# A job whose cancel was requested is not retried.
RETRY = SQL("""
WITH batch AS MATERIALIZED (
    SELECT value FROM json_each(:rows)
), d AS (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.was') AS was, json_extract(value, '$.counts') AS counts,
        json_extract(value, '$.errors') AS errors, json_extract(value, '$.run_at') AS run_at
    FROM batch
)
UPDATE timebell_jobs AS j
SET state = 'pending', run_at = d.run_at, errors = d.errors, attempts_used = j.attempts_used + d.counts, node_id = NULL
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND NOT j.cancel_requested
    AND j.id IN (SELECT id FROM d)
RETURNING id, queue, tenant_id, group_name
""")

# The heartbeat of a dispatched job is the deadline for its report, in microseconds since 1970.
DISPATCH = SQL("""
WITH batch AS MATERIALIZED (
    SELECT value FROM json_each(:rows)
), d AS (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.was') AS was, json_extract(value, '$.until') AS until,
        json_extract(value, '$.errors') AS errors
    FROM batch
)
UPDATE timebell_jobs AS j SET state = 'dispatched', heartbeat = d.until, errors = COALESCE(d.errors, j.errors)
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = d.was AND j.id IN (SELECT id FROM d)
RETURNING id
""")

RENEW_LEASES = SQL("""
WITH d AS MATERIALIZED (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt FROM json_each(:rows)
)
UPDATE timebell_jobs AS j SET heartbeat = j.heartbeat + 1
FROM d
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = 'running' AND j.id IN (SELECT id FROM d)
RETURNING id
""")

# Reads the oldest rows in the order of timebell_finished_at.
PRUNE_FINISHED = SQL("""
DELETE FROM timebell_finished
WHERE id IN (
    SELECT id FROM timebell_finished WHERE finished_at < :before ORDER BY finished_at LIMIT :limit)
""")

FIND_UNCHANGED = SQL("""
WITH d AS MATERIALIZED (
    SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.attempt') AS attempt,
        json_extract(value, '$.was') AS was
    FROM json_each(:rows)
)
SELECT j.id, j.cancel_requested
FROM d CROSS JOIN timebell_jobs j ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
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
        if len(completions) <= FEW_ROWS:
            tx.run_sql(COPY_COMPLETED, rows=rows)
            return tx.run_sql(DELETE_COMPLETED_RETURNING, rows=rows)
        (found,) = tx.run_sql(READ_COMPLETED, rows=rows)
        completed: list[Row] = orjson.loads(found["jobs"])
        if completed:
            tx.run_sql(COPY_COMPLETED, rows=rows)
            tx.run_sql(DELETE_COMPLETED, ids=found["ids"])
        return completed

    def retry(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        return tx.run_sql(RETRY, rows=encode(completion_rows(completions, self.to_db)))

    def dispatch(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> set[str]:
        return {row["id"] for row in tx.run_sql(DISPATCH, rows=encode(dispatch_rows(completions)))}

    def renew_leases(self, tx: Executor, attempts: Sequence[tuple[str, int]], *, skip_locked: bool) -> set[str]:
        return {row["id"] for row in tx.run_sql(RENEW_LEASES, rows=encode(attempt_rows(attempts)))}

    def prune_finished(self, tx: Executor, before: datetime, limit: int) -> int:
        return tx.execute(PRUNE_FINISHED.clause, {"before": self.to_db(before), "limit": limit}).rowcount

    def find_unchanged(self, tx: Executor, attempts: Sequence[tuple[str, int, JobState]]) -> list[Row]:
        return tx.run_sql(FIND_UNCHANGED, rows=encode(fence_rows(attempts)))

    def list_running(self, tx: Executor) -> list[Row]:
        return tx.run_sql(LIST_RUNNING)

    def list_overdue_dispatched(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(LIST_OVERDUE_DISPATCHED, until=to_micros(now), limit=limit)
