"""Insert jobs and skipped occurrences.

MATERIALIZED: otherwise SQLite would generate the text of each row again for every value that is read from it.
SQLite needs `WHERE true` to distinguish ON CONFLICT from a join condition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.model.job import NewJob
from timebell.store.dialects.batches import encode, job_rows, request_rows
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.separate_inserts import SeparateInserts
from timebell.store.dialects.sqlite.values import Values
from timebell.store.sql import SQL

# The second part reads a single row, whatever the number of tenants.
FIND_TENANTS = SQL("""
SELECT id FROM timebell_tenants WHERE id IN (SELECT value FROM json_each(:ids))
UNION
SELECT id FROM (SELECT id FROM timebell_tenants WHERE id <> 'default' LIMIT 1) AS another
""")

# A request id is unique per tenant forever, whatever the state of its job.
RESERVE_REQUEST_IDS = SQL("""
INSERT INTO timebell_requests (tenant_id, request_id, job_id)
SELECT json_extract(value, '$.tenant_id'), json_extract(value, '$.request_id'), json_extract(value, '$.job_id')
FROM json_each(:rows)
WHERE true
ON CONFLICT DO NOTHING
RETURNING job_id
""")

# `shared`: a job created while `default` is the only tenant needs no fair sharing between tenants, and stays out of the
# index for it. ON CONFLICT: the unique indexes allow one live job per key, and one per occurrence.
INSERT_JOBS = SQL("""
WITH d AS MATERIALIZED (SELECT value FROM json_each(:rows))
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
    group_name, conditions, route, hold, state, attempt, attempts_used, shared
)
SELECT
    json_extract(value, '$.id'), json_extract(value, '$.tenant_id'), json_extract(value, '$.topic'),
    json_extract(value, '$.schedule_id'), json_extract(value, '$.revision'), json_extract(value, '$.kind'),
    json_extract(value, '$.scheduled_at'), json_extract(value, '$.run_at'), json_extract(value, '$.timezone'),
    json_extract(value, '$.payload'), json_extract(value, '$.metadata'), json_extract(value, '$.owner_id'),
    json_extract(value, '$.key'), json_extract(value, '$.target'), json_extract(value, '$.queue'),
    json_extract(value, '$.priority'), json_extract(value, '$.retry'), json_extract(value, '$.timeout'),
    json_extract(value, '$.expires_at'), json_extract(value, '$.serial'), json_extract(value, '$.created_at'),
    json_extract(value, '$.replaces'), json_extract(value, '$.local_time'), json_extract(value, '$.tzdata'),
    json_extract(value, '$.group_name'), json_extract(value, '$.conditions'), json_extract(value, '$.route'),
    json_extract(value, '$.hold'),
    'pending', 0, 0,
    json_extract(value, '$.tenant_id') <> 'default'
        OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM d
WHERE true
ON CONFLICT DO NOTHING
""")

INSERT_JOBS_RETURNING = SQL("""
WITH d AS MATERIALIZED (SELECT value FROM json_each(:rows))
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
    group_name, conditions, route, hold, state, attempt, attempts_used, shared
)
SELECT
    json_extract(value, '$.id'), json_extract(value, '$.tenant_id'), json_extract(value, '$.topic'),
    json_extract(value, '$.schedule_id'), json_extract(value, '$.revision'), json_extract(value, '$.kind'),
    json_extract(value, '$.scheduled_at'), json_extract(value, '$.run_at'), json_extract(value, '$.timezone'),
    json_extract(value, '$.payload'), json_extract(value, '$.metadata'), json_extract(value, '$.owner_id'),
    json_extract(value, '$.key'), json_extract(value, '$.target'), json_extract(value, '$.queue'),
    json_extract(value, '$.priority'), json_extract(value, '$.retry'), json_extract(value, '$.timeout'),
    json_extract(value, '$.expires_at'), json_extract(value, '$.serial'), json_extract(value, '$.created_at'),
    json_extract(value, '$.replaces'), json_extract(value, '$.local_time'), json_extract(value, '$.tzdata'),
    json_extract(value, '$.group_name'), json_extract(value, '$.conditions'), json_extract(value, '$.route'),
    json_extract(value, '$.hold'),
    'pending', 0, 0,
    json_extract(value, '$.tenant_id') <> 'default'
        OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM d
WHERE true
ON CONFLICT DO NOTHING
RETURNING id
""")

ADD_USAGE = SQL("""
INSERT INTO timebell_usage (tenant_id, day, slot, payload_bytes, requests)
VALUES (:tenant_id, :day, :slot, :payload_bytes, 0)
ON CONFLICT (tenant_id, day, slot) DO UPDATE SET payload_bytes = timebell_usage.payload_bytes + excluded.payload_bytes
""")

INSERT_RECORD = SQL("""
INSERT INTO timebell_audit_log (
    id, tenant_id, at, actor, actor_kind, key_id, address, action, subject, subject_name, outcome, code, suppressed,
    "before", "after", request_id
)
VALUES (
    :id, :tenant_id, :at, :actor, :actor_kind, :key_id, :address, :action, :subject, :subject_name, :outcome, :code,
    :suppressed, :before, :after, :request_id
)
""")

INSERT_RUNNING = SQL("""
WITH d AS MATERIALIZED (SELECT value FROM json_each(:rows))
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
    group_name, conditions, route, hold, state, attempt, attempts_used, node_id, started_at, shared
)
SELECT
    json_extract(value, '$.id'), json_extract(value, '$.tenant_id'), json_extract(value, '$.topic'),
    json_extract(value, '$.schedule_id'), json_extract(value, '$.revision'), json_extract(value, '$.kind'),
    json_extract(value, '$.scheduled_at'), json_extract(value, '$.run_at'), json_extract(value, '$.timezone'),
    json_extract(value, '$.payload'), json_extract(value, '$.metadata'), json_extract(value, '$.owner_id'),
    json_extract(value, '$.key'), json_extract(value, '$.target'), json_extract(value, '$.queue'),
    json_extract(value, '$.priority'), json_extract(value, '$.retry'), json_extract(value, '$.timeout'),
    json_extract(value, '$.expires_at'), json_extract(value, '$.serial'), json_extract(value, '$.created_at'),
    json_extract(value, '$.replaces'), json_extract(value, '$.local_time'), json_extract(value, '$.tzdata'),
    json_extract(value, '$.group_name'), json_extract(value, '$.conditions'), json_extract(value, '$.route'),
    json_extract(value, '$.hold'),
    'running', 1, 0, :node, :now,
    json_extract(value, '$.tenant_id') <> 'default'
        OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM d
WHERE json_extract(value, '$.run_at') <= :now
ON CONFLICT DO NOTHING
RETURNING id
""")

INSERT_SKIPPED = SQL("""
WITH d AS MATERIALIZED (SELECT value FROM json_each(:rows))
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, finished_at, reason,
    skipped_count, skipped_to, error, state, attempt, attempts_used
)
SELECT
    json_extract(value, '$.id'), json_extract(value, '$.tenant_id'), json_extract(value, '$.topic'),
    json_extract(value, '$.schedule_id'), json_extract(value, '$.revision'), json_extract(value, '$.kind'),
    json_extract(value, '$.scheduled_at'), json_extract(value, '$.run_at'), json_extract(value, '$.timezone'),
    json_extract(value, '$.payload'), json_extract(value, '$.metadata'), json_extract(value, '$.owner_id'),
    json_extract(value, '$.key'), json_extract(value, '$.target'), json_extract(value, '$.queue'),
    json_extract(value, '$.priority'), json_extract(value, '$.retry'), json_extract(value, '$.timeout'),
    json_extract(value, '$.expires_at'), json_extract(value, '$.serial'), json_extract(value, '$.created_at'),
    json_extract(value, '$.replaces'), json_extract(value, '$.finished_at'), json_extract(value, '$.reason'),
    json_extract(value, '$.skipped_count'), json_extract(value, '$.skipped_to'), json_extract(value, '$.error'),
    'skipped', 0, 0
FROM d
""")

MARK_SERIAL = SQL("""
UPDATE timebell_jobs SET serial = true
WHERE id IN (
    SELECT j.id FROM json_each(:schedules) AS d CROSS JOIN timebell_jobs j ON j.schedule_id = d.value
    WHERE NOT j.serial AND (j.hold IS NULL OR j.hold <> 'backlog')
        AND EXISTS (SELECT 1 FROM timebell_jobs w WHERE w.schedule_id = d.value AND w.hold = 'overlap')
)
""")

# One look-up per lane in timebell_jobs_claim.
FIND_OPEN_LANES = SQL("""
SELECT d.queue, d.priority
FROM (SELECT json_extract(value, '$[0]') AS queue, json_extract(value, '$[1]') AS priority FROM json_each(:lanes)) AS d
WHERE NOT EXISTS (
        SELECT 1 FROM timebell_queues q WHERE q.name = d.queue
            AND (q.paused OR q.concurrency IS NOT NULL OR q.concurrency_per_group IS NOT NULL OR q.rate IS NOT NULL))
    AND NOT EXISTS (
        SELECT 1 FROM timebell_jobs j WHERE j.state = 'pending' AND j.hold IS NULL
            AND j.queue = d.queue AND j.priority = d.priority AND j.run_at <= :now)
""")


class InsertOperations(SeparateInserts, Values):
    """The operations of this module."""

    add_usage, insert_record = ADD_USAGE, INSERT_RECORD

    def find_tenants(self, tx: Executor, ids: Collection[str]) -> set[str]:
        return {row["id"] for row in tx.run_sql(FIND_TENANTS, ids=encode(list(ids)))}

    def reserve_request_ids(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        reserved = tx.run_sql(RESERVE_REQUEST_IDS, rows=encode(request_rows(new_jobs)))
        return {row["job_id"] for row in reserved}

    def insert_jobs(self, tx: Executor, new_jobs: Sequence[NewJob]) -> None:
        tx.run_sql(INSERT_JOBS, rows=encode(job_rows(new_jobs, self.to_db)))

    def insert_jobs_returning(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        return {row["id"] for row in tx.run_sql(INSERT_JOBS_RETURNING, rows=encode(job_rows(new_jobs, self.to_db)))}

    def insert_running(self, tx: Executor, new_jobs: Sequence[NewJob], node: str, now: datetime) -> set[str]:
        rows = encode(job_rows(new_jobs, self.to_db))
        return {row["id"] for row in tx.run_sql(INSERT_RUNNING, rows=rows, node=node, now=self.to_db(now))}

    def insert_skipped(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        tx.run_sql(INSERT_SKIPPED, rows=encode(rows))

    def mark_serial(self, tx: Executor, schedules: Sequence[str]) -> None:
        tx.run_sql(MARK_SERIAL, schedules=encode(schedules))

    def find_open_lanes(self, tx: Executor, lanes: Collection[Lane], now: datetime) -> set[Lane]:
        rows = tx.run_sql(FIND_OPEN_LANES, lanes=encode(list(lanes)), now=self.to_db(now))
        return {(row["queue"], row["priority"]) for row in rows}
