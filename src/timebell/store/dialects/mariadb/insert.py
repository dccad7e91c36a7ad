"""Insert jobs and skipped occurrences.

Texts are LONGTEXT in JSON_TABLE: it reads a value that is too long for its type as NULL, while the INSERT rejects it.
`d` has the columns in the order of the list.

INSERT IGNORE can return the inserted rows, but takes a shared lock on existing ones: two transactions that update such
a row afterwards deadlock. So it is used only if the result is needed, else ON DUPLICATE KEY UPDATE.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.errors import StoreError
from timebell.model.job import NewJob
from timebell.store.dialects.batches import encode, job_rows, request_rows
from timebell.store.dialects.mariadb.values import Values, batches
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.separate_inserts import SeparateInserts
from timebell.store.sql import SQL

_DUPLICATE_KEY_ERROR = 1062

# The second part reads a single row, whatever the number of tenants.
FIND_TENANTS = SQL("""
SELECT t.id FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(200) PATH '$')) AS d
STRAIGHT_JOIN timebell_tenants AS t FORCE INDEX (PRIMARY) ON t.id = d.id
UNION
SELECT id FROM (SELECT id FROM timebell_tenants WHERE id <> 'default' LIMIT 1) AS another
""")

# A request id is unique per tenant forever, whatever the state of its job.
RESERVE_REQUEST_IDS = SQL("""
INSERT IGNORE INTO timebell_requests (tenant_id, request_id, job_id)
SELECT d.* FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    tenant_id LONGTEXT PATH '$.tenant_id', request_id LONGTEXT PATH '$.request_id', job_id CHAR(36) PATH '$.job_id'
)) AS d
RETURNING job_id
""")

# `shared`: a job created while `default` is the only tenant needs no fair sharing between tenants, and is not among the
# entries with shared = true of the index for it. The unique indexes allow one live job per key, and one per occurrence.
INSERT_JOBS = SQL("""
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    `key`, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
    group_name, conditions, route, hold, state, attempt, attempts_used, shared
)
SELECT d.*, 'pending', 0, 0,
    d.tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', tenant_id LONGTEXT PATH '$.tenant_id', topic LONGTEXT PATH '$.topic',
    schedule_id CHAR(36) PATH '$.schedule_id', revision INT PATH '$.revision', kind LONGTEXT PATH '$.kind',
    scheduled_at BIGINT PATH '$.scheduled_at', run_at BIGINT PATH '$.run_at', timezone LONGTEXT PATH '$.timezone',
    payload LONGTEXT PATH '$.payload', metadata LONGTEXT PATH '$.metadata', owner_id LONGTEXT PATH '$.owner_id',
    `key` LONGTEXT PATH '$.key', target LONGTEXT PATH '$.target', queue LONGTEXT PATH '$.queue',
    priority INT PATH '$.priority', retry LONGTEXT PATH '$.retry', timeout DOUBLE PATH '$.timeout',
    expires_at BIGINT PATH '$.expires_at', serial BOOLEAN PATH '$.serial', created_at BIGINT PATH '$.created_at',
    replaces CHAR(36) PATH '$.replaces', local_time LONGTEXT PATH '$.local_time', tzdata LONGTEXT PATH '$.tzdata',
    group_name LONGTEXT PATH '$.group_name', conditions LONGTEXT PATH '$.conditions', route LONGTEXT PATH '$.route',
    hold LONGTEXT PATH '$.hold'
)) AS d
ON DUPLICATE KEY UPDATE timebell_jobs.id = timebell_jobs.id
""")

INSERT_JOBS_RETURNING = SQL("""
INSERT IGNORE INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    `key`, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
    group_name, conditions, route, hold, state, attempt, attempts_used, shared
)
SELECT d.*, 'pending', 0, 0,
    d.tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', tenant_id LONGTEXT PATH '$.tenant_id', topic LONGTEXT PATH '$.topic',
    schedule_id CHAR(36) PATH '$.schedule_id', revision INT PATH '$.revision', kind LONGTEXT PATH '$.kind',
    scheduled_at BIGINT PATH '$.scheduled_at', run_at BIGINT PATH '$.run_at', timezone LONGTEXT PATH '$.timezone',
    payload LONGTEXT PATH '$.payload', metadata LONGTEXT PATH '$.metadata', owner_id LONGTEXT PATH '$.owner_id',
    `key` LONGTEXT PATH '$.key', target LONGTEXT PATH '$.target', queue LONGTEXT PATH '$.queue',
    priority INT PATH '$.priority', retry LONGTEXT PATH '$.retry', timeout DOUBLE PATH '$.timeout',
    expires_at BIGINT PATH '$.expires_at', serial BOOLEAN PATH '$.serial', created_at BIGINT PATH '$.created_at',
    replaces CHAR(36) PATH '$.replaces', local_time LONGTEXT PATH '$.local_time', tzdata LONGTEXT PATH '$.tzdata',
    group_name LONGTEXT PATH '$.group_name', conditions LONGTEXT PATH '$.conditions', route LONGTEXT PATH '$.route',
    hold LONGTEXT PATH '$.hold'
)) AS d
RETURNING id
""")

ADD_USAGE = SQL("""
INSERT INTO timebell_usage (tenant_id, day, slot, payload_bytes, requests)
VALUES (:tenant_id, :day, :slot, :payload_bytes, 0)
ON DUPLICATE KEY UPDATE payload_bytes = timebell_usage.payload_bytes + VALUES(payload_bytes)
""")

INSERT_RECORD = SQL("""
INSERT INTO timebell_audit_log (
    id, tenant_id, at, actor, actor_kind, key_id, address, action, subject, subject_name, outcome, code, suppressed,
    `before`, `after`, request_id
)
VALUES (
    :id, :tenant_id, :at, :actor, :actor_kind, :key_id, :address, :action, :subject, :subject_name, :outcome, :code,
    :suppressed, :before, :after, :request_id
)
""")

# Never early: the job must also be due by the server's clock, because the clock of this node may be ahead.
INSERT_RUNNING = SQL("""
INSERT IGNORE INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    `key`, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
    group_name, conditions, route, hold, state, attempt, attempts_used, node_id, started_at, shared
)
SELECT d.*, 'running', 1, 0, :node, :now,
    d.tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', tenant_id LONGTEXT PATH '$.tenant_id', topic LONGTEXT PATH '$.topic',
    schedule_id CHAR(36) PATH '$.schedule_id', revision INT PATH '$.revision', kind LONGTEXT PATH '$.kind',
    scheduled_at BIGINT PATH '$.scheduled_at', run_at BIGINT PATH '$.run_at', timezone LONGTEXT PATH '$.timezone',
    payload LONGTEXT PATH '$.payload', metadata LONGTEXT PATH '$.metadata', owner_id LONGTEXT PATH '$.owner_id',
    `key` LONGTEXT PATH '$.key', target LONGTEXT PATH '$.target', queue LONGTEXT PATH '$.queue',
    priority INT PATH '$.priority', retry LONGTEXT PATH '$.retry', timeout DOUBLE PATH '$.timeout',
    expires_at BIGINT PATH '$.expires_at', serial BOOLEAN PATH '$.serial', created_at BIGINT PATH '$.created_at',
    replaces CHAR(36) PATH '$.replaces', local_time LONGTEXT PATH '$.local_time', tzdata LONGTEXT PATH '$.tzdata',
    group_name LONGTEXT PATH '$.group_name', conditions LONGTEXT PATH '$.conditions', route LONGTEXT PATH '$.route',
    hold LONGTEXT PATH '$.hold'
)) AS d
WHERE d.run_at <= :now
    AND (:virtual_time OR d.run_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))
RETURNING id
""")

INSERT_SKIPPED = SQL("""
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
    `key`, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, finished_at, reason,
    skipped_count, skipped_to, error, state, attempt, attempts_used
)
SELECT d.*, 'skipped', 0, 0
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id CHAR(36) PATH '$.id', tenant_id LONGTEXT PATH '$.tenant_id', topic LONGTEXT PATH '$.topic',
    schedule_id CHAR(36) PATH '$.schedule_id', revision INT PATH '$.revision', kind LONGTEXT PATH '$.kind',
    scheduled_at BIGINT PATH '$.scheduled_at', run_at BIGINT PATH '$.run_at', timezone LONGTEXT PATH '$.timezone',
    payload LONGTEXT PATH '$.payload', metadata LONGTEXT PATH '$.metadata', owner_id LONGTEXT PATH '$.owner_id',
    `key` LONGTEXT PATH '$.key', target LONGTEXT PATH '$.target', queue LONGTEXT PATH '$.queue',
    priority INT PATH '$.priority', retry LONGTEXT PATH '$.retry', timeout DOUBLE PATH '$.timeout',
    expires_at BIGINT PATH '$.expires_at', serial BOOLEAN PATH '$.serial', created_at BIGINT PATH '$.created_at',
    replaces CHAR(36) PATH '$.replaces', finished_at BIGINT PATH '$.finished_at', reason LONGTEXT PATH '$.reason',
    skipped_count BIGINT PATH '$.skipped_count', skipped_to BIGINT PATH '$.skipped_to', error LONGTEXT PATH '$.error'
)) AS d
""")

# Two statements, because the first one locks by primary key only the rows that change.
LOCK_NOT_SERIAL = SQL("""
SELECT j.id
FROM JSON_TABLE(:schedules, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (timebell_jobs_occurrence) ON j.schedule_id = d.id
WHERE NOT j.serial AND (j.hold IS NULL OR j.hold <> 'backlog')
    AND EXISTS (SELECT 1 FROM timebell_jobs w WHERE w.schedule_id = d.id AND w.hold = 'overlap')
FOR UPDATE
""")
MARK_SERIAL = SQL("""
UPDATE JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.serial = true
""")

# One look-up per lane in timebell_jobs_claim.
FIND_OPEN_LANES = SQL("""
SELECT d.queue, d.priority
FROM JSON_TABLE(:lanes, '$[*]' COLUMNS (queue VARCHAR(100) PATH '$[0]', priority INT PATH '$[1]')) AS d
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
        return insert_ignore(tx, RESERVE_REQUEST_IDS, {"rows": encode(request_rows(new_jobs))})

    def insert_jobs(self, tx: Executor, new_jobs: Sequence[NewJob]) -> None:
        for rows in batches(job_rows(new_jobs, self.to_db)):
            tx.run_sql(INSERT_JOBS, rows=rows)

    def insert_jobs_returning(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        ids: set[str] = set()
        for rows in batches(job_rows(new_jobs, self.to_db)):
            ids |= insert_ignore(tx, INSERT_JOBS_RETURNING, {"rows": rows})
        return ids

    def insert_running(self, tx: Executor, new_jobs: Sequence[NewJob], node: str, now: datetime) -> set[str]:
        params = {"node": node, "now": self.to_db(now), "virtual_time": self.virtual_time}
        ids: set[str] = set()
        for rows in batches(job_rows(new_jobs, self.to_db)):
            ids |= insert_ignore(tx, INSERT_RUNNING, {"rows": rows, **params})
        return ids

    def insert_skipped(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        for part in batches(rows):
            tx.run_sql(INSERT_SKIPPED, rows=part)

    def mark_serial(self, tx: Executor, schedules: Sequence[str]) -> None:
        ids = [row["id"] for row in tx.run_sql(LOCK_NOT_SERIAL, schedules=encode(schedules))]
        if ids:
            tx.run_sql(MARK_SERIAL, ids=encode(ids))

    def find_open_lanes(self, tx: Executor, lanes: Collection[Lane], now: datetime) -> set[Lane]:
        rows = tx.run_sql(FIND_OPEN_LANES, lanes=encode(list(lanes)), now=self.to_db(now))
        return {(row["queue"], row["priority"]) for row in rows}


def insert_ignore(tx: Executor, statement: SQL, params: Mapping[str, Any]) -> set[str]:
    """Execute an INSERT IGNORE; return the ids of the inserted rows.

    Raises StoreError if it ignored anything other than a duplicate key.
    """
    result = tx.execute(statement.clause, params)
    ids = set(result.scalars())
    if getattr(result.context.cursor, "warning_count", 1):
        warnings: Any = tx.execute(SHOW_WARNINGS.clause)
        for _, code, message in warnings:
            if code != _DUPLICATE_KEY_ERROR:
                raise StoreError(f"MariaDB did not write a row unchanged: {message}.", code="STORE_REFUSED")
    return ids


SHOW_WARNINGS = SQL("SHOW WARNINGS")
