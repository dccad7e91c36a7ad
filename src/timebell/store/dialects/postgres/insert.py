"""Insert jobs and skipped occurrences.

Batches are JSON, cast from text, because the connection of a caller may have a codec for JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.model.job import NewJob
from timebell.store.dialects.batches import encode, job_row, job_rows, request_rows
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.postgres.values import Values
from timebell.store.sql import SQL

# The second part reads a single row, whatever the number of tenants.
FIND_TENANTS = SQL("""
SELECT id FROM timebell_tenants WHERE id = ANY(CAST(:ids AS text[]))
UNION
SELECT id FROM (SELECT id FROM timebell_tenants WHERE id <> 'default' LIMIT 1) AS another
""")

# A request id is unique per tenant forever, whatever the state of its job.
RESERVE_REQUEST_IDS = SQL("""
INSERT INTO timebell_requests (tenant_id, request_id, job_id)
SELECT d.* FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (tenant_id text, request_id text, job_id uuid)
ON CONFLICT DO NOTHING
RETURNING job_id
""")

# `d` has the columns in the order of the list. `shared`: a job created while `default` is the only tenant needs no fair
# sharing between tenants, and stays out of the index for it.
# ON CONFLICT: the unique indexes allow one live job per key, and one per occurrence.
INSERT_JOBS = SQL("""
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata, group_name,
    conditions, route, hold, state, attempt, attempts_used, shared
)
SELECT d.*, 'pending', 0, 0,
    d.tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
    id uuid, tenant_id text, topic text, schedule_id uuid, revision int, kind text, scheduled_at timestamptz,
    run_at timestamptz, timezone text, payload text, metadata text, owner_id text, key text, target text, queue text,
    priority int, retry text, timeout double precision, expires_at timestamptz, serial boolean,
    created_at timestamptz, replaces uuid, local_time text, tzdata text, group_name text, conditions text, route text,
    hold text
)
ON CONFLICT DO NOTHING
""")

INSERT_JOBS_RETURNING = SQL("""
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata, group_name,
    conditions, route, hold, state, attempt, attempts_used, shared
)
SELECT d.*, 'pending', 0, 0,
    d.tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
    id uuid, tenant_id text, topic text, schedule_id uuid, revision int, kind text, scheduled_at timestamptz,
    run_at timestamptz, timezone text, payload text, metadata text, owner_id text, key text, target text, queue text,
    priority int, retry text, timeout double precision, expires_at timestamptz, serial boolean,
    created_at timestamptz, replaces uuid, local_time text, tzdata text, group_name text, conditions text, route text,
    hold text
)
ON CONFLICT DO NOTHING
RETURNING id
""")

# RESERVE_REQUEST_IDS and INSERT_JOBS_RETURNING in one round trip.
INSERT_REQUESTED = SQL("""
WITH d AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
        id uuid, tenant_id text, topic text, schedule_id uuid, revision int, kind text, scheduled_at timestamptz,
        run_at timestamptz, timezone text, payload text, metadata text, owner_id text, key text, target text,
        queue text, priority int, retry text, timeout double precision, expires_at timestamptz, serial boolean,
        created_at timestamptz, replaces uuid, local_time text, tzdata text, group_name text, conditions text,
        route text, hold text, request_id text
    )
), reserved AS (
    INSERT INTO timebell_requests (tenant_id, request_id, job_id)
    SELECT tenant_id, request_id, id FROM d WHERE request_id IS NOT NULL
    ON CONFLICT DO NOTHING
    RETURNING job_id
), inserted AS (
    INSERT INTO timebell_jobs (
        id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
        key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
        group_name, conditions, route, hold, state, attempt, attempts_used, shared
    )
    SELECT
        id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
        key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
        group_name, conditions, route, hold, 'pending', 0, 0,
        tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
    FROM d
    WHERE request_id IS NULL OR id IN (SELECT job_id FROM reserved)
    ON CONFLICT DO NOTHING
    RETURNING id
)
SELECT job_id AS id, false AS is_inserted FROM reserved UNION ALL SELECT id, true FROM inserted
""")

# Both inserts in one round trip.
INSERT_CHANGE = SQL("""
WITH counted AS (
    INSERT INTO timebell_usage AS u (tenant_id, day, slot, payload_bytes, requests)
    VALUES (:tenant_id, :day, :slot, :payload_bytes, 0)
    ON CONFLICT (tenant_id, day, slot) DO UPDATE SET payload_bytes = u.payload_bytes + excluded.payload_bytes
)
INSERT INTO timebell_audit_log (
    id, tenant_id, at, actor, actor_kind, key_id, address, action, subject, subject_name, outcome, code, suppressed,
    before, after, request_id
)
VALUES (
    :id, :tenant_id, :at, :actor, :actor_kind, :key_id, :address, :action, :subject, :subject_name, :outcome, :code,
    :suppressed, :before, :after, :request_id
)
""")

# INSERT_REQUESTED of one job, and INSERT_CHANGE if it is inserted, in one round trip. A used request id is the only
# conflict, because the job has no key. The tenant `default` always exists.
INSERT_RECORDED = SQL("""
WITH d AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
        id uuid, tenant_id text, topic text, schedule_id uuid, revision int, kind text, scheduled_at timestamptz,
        run_at timestamptz, timezone text, payload text, metadata text, owner_id text, key text, target text,
        queue text, priority int, retry text, timeout double precision, expires_at timestamptz, serial boolean,
        created_at timestamptz, replaces uuid, local_time text, tzdata text, group_name text, conditions text,
        route text, hold text, request_id text
    )
    WHERE d.tenant_id = 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id = d.tenant_id)
), reserved AS (
    INSERT INTO timebell_requests (tenant_id, request_id, job_id)
    SELECT tenant_id, request_id, id FROM d WHERE request_id IS NOT NULL
    ON CONFLICT DO NOTHING
    RETURNING job_id
), inserted AS (
    INSERT INTO timebell_jobs (
        id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
        key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
        group_name, conditions, route, hold, state, attempt, attempts_used, shared
    )
    SELECT
        id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id,
        key, target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata,
        group_name, conditions, route, hold, 'pending', 0, 0,
        tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
    FROM d
    WHERE request_id IS NULL OR id IN (SELECT job_id FROM reserved)
    RETURNING id
), counted AS (
    INSERT INTO timebell_usage AS u (tenant_id, day, slot, payload_bytes, requests)
    SELECT CAST(:tenant_id AS text), CAST(:day AS text), CAST(:slot AS int), CAST(:payload_bytes AS bigint), 0
    FROM inserted
    ON CONFLICT (tenant_id, day, slot) DO UPDATE SET payload_bytes = u.payload_bytes + excluded.payload_bytes
), recorded AS (
    INSERT INTO timebell_audit_log (
        id, tenant_id, at, actor, actor_kind, key_id, address, action, subject, subject_name, outcome, code, suppressed,
        before, after, request_id
    )
    SELECT
        CAST(:id AS uuid), CAST(:tenant_id AS text), CAST(:at AS timestamptz), CAST(:actor AS text),
        CAST(:actor_kind AS text), CAST(:key_id AS text), CAST(:address AS text), CAST(:action AS text),
        CAST(:subject AS text), CAST(:subject_name AS text), CAST(:outcome AS text), CAST(:code AS text),
        CAST(:suppressed AS int), CAST(:before AS text), CAST(:after AS text), CAST(:request_id AS uuid)
    FROM inserted
)
SELECT id FROM inserted
""")

# Never early: the job must also be due by the server's clock, because the clock of this node may be ahead.
INSERT_RUNNING = SQL("""
INSERT INTO timebell_jobs (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, local_time, tzdata, group_name,
    conditions, route, hold, state, attempt, attempts_used, node_id, started_at, shared
)
SELECT d.*, 'running', 1, 0, CAST(:node AS uuid), CAST(:now AS timestamptz),
    d.tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default')
FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
    id uuid, tenant_id text, topic text, schedule_id uuid, revision int, kind text, scheduled_at timestamptz,
    run_at timestamptz, timezone text, payload text, metadata text, owner_id text, key text, target text, queue text,
    priority int, retry text, timeout double precision, expires_at timestamptz, serial boolean,
    created_at timestamptz, replaces uuid, local_time text, tzdata text, group_name text, conditions text, route text,
    hold text
)
WHERE d.run_at <= :now AND (:virtual_time OR d.run_at <= statement_timestamp())
ON CONFLICT DO NOTHING
RETURNING id
""")

INSERT_SKIPPED = SQL("""
INSERT INTO timebell_finished (
    id, tenant_id, topic, schedule_id, revision, kind, scheduled_at, run_at, timezone, payload, metadata, owner_id, key,
    target, queue, priority, retry, timeout, expires_at, serial, created_at, replaces, finished_at, reason,
    skipped_count, skipped_to, error, state, attempt, attempts_used
)
SELECT d.*, 'skipped', 0, 0
FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS d (
    id uuid, tenant_id text, topic text, schedule_id uuid, revision int, kind text, scheduled_at timestamptz,
    run_at timestamptz, timezone text, payload text, metadata text, owner_id text, key text, target text, queue text,
    priority int, retry text, timeout double precision, expires_at timestamptz, serial boolean,
    created_at timestamptz, replaces uuid, finished_at timestamptz, reason text, skipped_count bigint,
    skipped_to timestamptz, error text
)
""")

# `= ANY(ARRAY(...))` forces look-ups by id: with IN (...) the planner may join the whole table.
MARK_SERIAL = SQL("""
UPDATE timebell_jobs SET serial = true
WHERE id = ANY(ARRAY(
    SELECT j.id FROM unnest(CAST(:schedules AS uuid[])) AS d (id) JOIN timebell_jobs j ON j.schedule_id = d.id
    WHERE NOT j.serial AND (j.hold IS NULL OR j.hold <> 'backlog')
        AND EXISTS (SELECT 1 FROM timebell_jobs w WHERE w.schedule_id = d.id AND w.hold = 'overlap')
))
""")

# One look-up per lane in timebell_jobs_claim.
FIND_OPEN_LANES = SQL("""
SELECT d.queue, d.priority
FROM unnest(CAST(:queues AS text[]), CAST(:priorities AS int[])) AS d (queue, priority)
WHERE NOT EXISTS (
        SELECT 1 FROM timebell_queues q WHERE q.name = d.queue
            AND (q.paused OR q.concurrency IS NOT NULL OR q.concurrency_per_group IS NOT NULL OR q.rate IS NOT NULL))
    AND NOT EXISTS (
        SELECT 1 FROM timebell_jobs j WHERE j.state = 'pending' AND j.hold IS NULL
            AND j.queue = d.queue AND j.priority = d.priority AND j.run_at <= :now)
""")


class InsertOperations(Values):
    """The operations of this module."""

    def find_tenants(self, tx: Executor, ids: Collection[str]) -> set[str]:
        return {row["id"] for row in tx.run_sql(FIND_TENANTS, ids=list(ids))}

    def reserve_request_ids(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        reserved = tx.run_sql(RESERVE_REQUEST_IDS, rows=encode(request_rows(new_jobs)))
        return {str(row["job_id"]) for row in reserved}

    def insert_jobs(self, tx: Executor, new_jobs: Sequence[NewJob]) -> None:
        tx.run_sql(INSERT_JOBS, rows=encode(job_rows(new_jobs, self.to_db)))

    def insert_jobs_returning(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        inserted = tx.run_sql(INSERT_JOBS_RETURNING, rows=encode(job_rows(new_jobs, self.to_db)))
        return {str(row["id"]) for row in inserted}

    def insert_requested(self, tx: Executor, new_jobs: Sequence[NewJob]) -> tuple[set[str], set[str]]:
        rows = job_rows(new_jobs, self.to_db)
        for row, job in zip(rows, new_jobs, strict=True):
            row["request_id"] = job.request_id
        ids: dict[bool, set[str]] = {False: set(), True: set()}
        for result in tx.run_sql(INSERT_REQUESTED, rows=encode(rows)):
            ids[result["is_inserted"]].add(str(result["id"]))
        return ids[False], ids[True]

    def insert_change(self, tx: Executor, usage: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        tx.run_sql(INSERT_CHANGE, **usage, **record)

    def insert_recorded(
        self, tx: Executor, job: NewJob, usage: Mapping[str, Any], record: Mapping[str, Any]
    ) -> bool:  # fmt: skip
        row = job_row(job, self.to_db) | {"request_id": job.request_id}
        return bool(tx.run_sql(INSERT_RECORDED, rows=encode([row]), **usage, **record))

    def insert_running(self, tx: Executor, new_jobs: Sequence[NewJob], node: str, now: datetime) -> set[str]:
        rows = encode(job_rows(new_jobs, self.to_db))
        inserted = tx.run_sql(INSERT_RUNNING, rows=rows, node=node, now=now, virtual_time=self.virtual_time)
        return {str(row["id"]) for row in inserted}

    def insert_skipped(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        tx.run_sql(INSERT_SKIPPED, rows=encode(rows))

    def mark_serial(self, tx: Executor, schedules: Sequence[str]) -> None:
        tx.run_sql(MARK_SERIAL, schedules=list(schedules))

    def find_open_lanes(self, tx: Executor, lanes: Collection[Lane], now: datetime) -> set[Lane]:
        queues, priorities = map(list, zip(*lanes, strict=True))
        rows = tx.run_sql(FIND_OPEN_LANES, queues=queues, priorities=priorities, now=now)
        return {(row["queue"], row["priority"]) for row in rows}
