"""Complete, retry and dispatch attempts, and renew their leases.

Fence: the attempt number and the state must match. Otherwise the attempt has ended, perhaps reclaimed by another node,
and the row is left alone.

MariaDB has no UPDATE .. RETURNING, and only SELECT can skip locked rows. So the first statement locks the rows whose
fence holds, and the next ones write these rows, all in one transaction.

STRAIGHT_JOIN and FORCE INDEX make MariaDB read the batch first and look up its rows by id, also in small tables: a
table scan would wait for rows that other transactions have locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from timebell.model.job import Completion, JobState
from timebell.store.dialects.batches import attempt_rows, completion_rows, dispatch_rows, encode, fence_rows
from timebell.store.dialects.mariadb.values import Values, batches
from timebell.store.dialects.operations import Executor
from timebell.store.sql import SQL, Row
from timebell.store.types import to_micros

LOCK_ATTEMPTS = SQL("""
SELECT j.id, j.queue, j.tenant_id, j.group_name, j.cancel_requested
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', attempt INT PATH '$.attempt', was VARCHAR(10) PATH '$.was')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY)
    ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
FOR UPDATE
""")

# Rows that another transaction (possibly of a frozen node) has locked are left for the next call, so that one stuck
# session cannot delay the batch.
LOCK_UNLOCKED_ATTEMPTS = SQL("""
SELECT j.id, j.queue, j.tenant_id, j.group_name, j.cancel_requested
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', attempt INT PATH '$.attempt', was VARCHAR(10) PATH '$.was')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY)
    ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
FOR UPDATE SKIP LOCKED
""")

# Copies the rows from the live to the finished table; DELETE_COMPLETED then removes them. FOR UPDATE, or two
# transactions could copy the same row.
# If a cancel was requested while the attempt ran, only a success is kept; any other outcome becomes `cancelled`.
COPY_COMPLETED = SQL("""
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    `key`, target, queue, priority, retry, timeout, expires_at, serial, attempt, node_id, created_at, started_at,
    replaces, local_time, tzdata, group_name, manual_retries, conditions, state, errors, attempts_used, finished_at,
    reason, error, error_code, result, cancel, replaced_by
)
SELECT j.id, j.tenant_id, j.topic, j.schedule_id, j.revision, j.kind, j.scheduled_at, j.run_at, j.timezone, j.payload,
    j.metadata, j.owner_id, j.`key`, j.target, j.queue, j.priority, j.retry, j.timeout, j.expires_at, j.serial,
    j.attempt, j.node_id, j.created_at, j.started_at, j.replaces, j.local_time, j.tzdata, j.group_name,
    j.manual_retries, j.conditions,
    CASE WHEN j.cancel_requested AND d.state <> 'completed' THEN 'cancelled' ELSE d.state END,
    d.errors, j.attempts_used + d.counts, d.at, d.reason, d.error, d.code, d.result,
    CASE WHEN j.cancel_requested THEN 'in_flight' ELSE d.cancel END, d.replaced_by
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', attempt INT PATH '$.attempt', was VARCHAR(10) PATH '$.was',
    state VARCHAR(10) PATH '$.state', at BIGINT PATH '$.at', counts INT PATH '$.counts',
    reason LONGTEXT PATH '$.reason', error LONGTEXT PATH '$.error', code LONGTEXT PATH '$.code',
    result LONGTEXT PATH '$.result', errors LONGTEXT PATH '$.errors', cancel LONGTEXT PATH '$.cancel',
    replaced_by CHAR(36) PATH '$.replaced_by')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY)
    ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
FOR UPDATE
RETURNING id, schedule_id, started_at, serial, queue, tenant_id, group_name
""")

DELETE_COMPLETED = SQL("""
DELETE j FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
""")

RETRY = SQL("""
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', counts INT PATH '$.counts', errors LONGTEXT PATH '$.errors',
    run_at BIGINT PATH '$.run_at')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.state = 'pending', j.run_at = d.run_at, j.errors = d.errors, j.attempts_used = j.attempts_used + d.counts,
    j.node_id = NULL
""")

# The heartbeat of a dispatched job is the deadline for its report, in microseconds since 1970.
DISPATCH = SQL("""
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', until BIGINT PATH '$.until', errors LONGTEXT PATH '$.errors')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.state = 'dispatched', j.heartbeat = d.until, j.errors = COALESCE(d.errors, j.errors)
""")

RENEW_LEASES = SQL("""
UPDATE JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.heartbeat = j.heartbeat + 1
""")

# In the order of timebell_finished_at.
PRUNE_FINISHED = SQL("""
DELETE FROM timebell_finished WHERE finished_at < :before ORDER BY finished_at LIMIT :limit
""")

FIND_UNCHANGED = SQL("""
SELECT j.id, j.cancel_requested
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', attempt INT PATH '$.attempt', was VARCHAR(10) PATH '$.was')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY)
    ON j.id = d.id AND j.attempt = d.attempt AND j.state = d.was
""")

LIST_RUNNING = SQL("""
SELECT id, attempt, heartbeat, hold FROM timebell_jobs FORCE INDEX (timebell_jobs_running) WHERE state = 'running'
UNION ALL
SELECT id, attempt, heartbeat, hold FROM timebell_jobs FORCE INDEX (timebell_jobs_held)
WHERE hold = 'stopping' AND state = 'dispatched'
""")

LIST_OVERDUE_DISPATCHED = SQL("""
SELECT id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions, started_at
FROM timebell_jobs FORCE INDEX (timebell_jobs_dispatched) WHERE state = 'dispatched' AND heartbeat <= :until
ORDER BY heartbeat LIMIT :limit
""")


class CompleteOperations(Values):
    """The operations of this module."""

    def complete(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        rows = completion_rows(completions, self.to_db)
        if skip_locked:  # INSERT .. SELECT cannot skip locked rows and would wait
            rows, _ = self._lock(tx, rows, skip_locked=True)
        completed: list[Row] = []
        for part in batches(rows):
            completed += tx.run_sql(COPY_COMPLETED, rows=part)
        if completed:
            tx.run_sql(DELETE_COMPLETED, ids=encode([row["id"] for row in completed]))
        return completed

    def retry(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        rows, locked = self._lock(tx, completion_rows(completions, self.to_db), skip_locked=skip_locked)
        retried = {row["id"]: row for row in locked if not row["cancel_requested"]}
        for part in batches([row for row in rows if row["id"] in retried]):
            tx.run_sql(RETRY, rows=part)
        return list(retried.values())

    def dispatch(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> set[str]:
        rows, locked = self._lock(tx, dispatch_rows(completions), skip_locked=skip_locked)
        for part in batches(rows):
            tx.run_sql(DISPATCH, rows=part)
        return {row["id"] for row in locked}

    def renew_leases(self, tx: Executor, attempts: Sequence[tuple[str, int]], *, skip_locked: bool) -> set[str]:
        rows = [{**row, "was": "running"} for row in attempt_rows(attempts)]
        _, locked = self._lock(tx, rows, skip_locked=skip_locked)
        ids = [row["id"] for row in locked]
        if ids:
            tx.run_sql(RENEW_LEASES, ids=encode(ids))
        return set(ids)

    def _lock(
        self, tx: Executor, rows: list[dict[str, Any]], *, skip_locked: bool
    ) -> tuple[list[dict[str, Any]], list[Row]]:
        """Lock the jobs of a batch whose fence holds; return their rows of the batch, and the locked rows."""
        fences = encode([{"id": row["id"], "attempt": row["attempt"], "was": row["was"]} for row in rows])
        locked = tx.run_sql(LOCK_UNLOCKED_ATTEMPTS if skip_locked else LOCK_ATTEMPTS, rows=fences)
        ids = {row["id"] for row in locked}
        return [row for row in rows if row["id"] in ids], locked

    def prune_finished(self, tx: Executor, before: datetime, limit: int) -> int:
        return tx.execute(PRUNE_FINISHED.clause, {"before": self.to_db(before), "limit": limit}).rowcount

    def find_unchanged(self, tx: Executor, attempts: Sequence[tuple[str, int, JobState]]) -> list[Row]:
        return tx.run_sql(FIND_UNCHANGED, rows=encode(fence_rows(attempts)))

    def list_running(self, tx: Executor) -> list[Row]:
        return tx.run_sql(LIST_RUNNING)

    def list_overdue_dispatched(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(LIST_OVERDUE_DISPATCHED, until=to_micros(now), limit=limit)
