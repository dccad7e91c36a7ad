"""Scan lanes and claim jobs.

A claim locks with SKIP LOCKED, so concurrent claims take different jobs. It finds the rows that it has locked by ctid,
which needs no second index look-up, and `= ANY(ARRAY(...))` evaluates the subquery once: with IN (...) the planner may
join the whole table.

Never early: a job must be due by the clock of the node (`:now`) and by that of the server, because one may be ahead.
The routes of the node are `:exact` names, `:prefixes` of names, or `:everything` that does not begin with `@`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from timebell.model.routes import Routes
from timebell.store.dialects.batches import encode
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.postgres.values import Values
from timebell.store.sql import SQL, Row

# `lane` is a loose index scan of timebell_jobs_claim: one look-up finds the first job after lane `l`, whatever the
# number of jobs in between. With `:positions` it is empty, and only the given lanes are scanned, each from `since` on.
# That skips the index entries of claimed jobs, which PostgreSQL has to pass until a vacuum removes them.
# `due`: routes are checked only for due jobs. Finding a future job of one's own routes could mean walking millions of
# others, while waking up once for the job of another node costs only one scan.
# With `:only_tenant` its jobs are found in timebell_jobs_shared, whatever the number of jobs of other tenants. Jobs
# that are not shared are all of the tenant `default`.
# `busy`: two counts, because each state has its own partial index.
# `crowded`: the first and the last tenant of the lane in timebell_jobs_shared differ.
SCAN_LANES = SQL("""
WITH RECURSIVE lane (queue, priority, since) AS (
    (SELECT queue, priority, run_at FROM timebell_jobs
     WHERE state = 'pending' AND hold IS NULL AND CAST(:positions AS text) IS NULL
     ORDER BY queue, priority, run_at LIMIT 1)
    UNION ALL
    SELECT following.* FROM lane l CROSS JOIN LATERAL (
        SELECT queue, priority, run_at FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND (queue, priority) > (l.queue, l.priority)
        ORDER BY queue, priority, run_at LIMIT 1) AS following
), scanned (queue, priority, since) AS (
    SELECT * FROM lane
    UNION ALL
    SELECT * FROM json_to_recordset(CAST(CAST(:positions AS text) AS json))
        AS given (queue text, priority int, since timestamptz)
)
SELECT l.queue, l.priority, q.concurrency, q.concurrency_per_group, q.rate, q.per, q.starts,
    q.paused OR a.paused AS paused,
    COALESCE(
        (SELECT j.run_at FROM timebell_jobs j
         WHERE j.state = 'pending' AND j.hold IS NULL AND j.queue = l.queue AND j.priority = l.priority
            AND j.run_at >= l.since AND j.run_at <= :now
            AND (j.route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND j.route NOT LIKE '@%')
                OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(j.route, length(p)) = p))
            AND COALESCE(CAST(:only_tenant AS text), 'default') = 'default'
            AND (CAST(:only_tenant AS text) IS NULL OR j.tenant_id = 'default')
         ORDER BY j.run_at LIMIT 1),
        (SELECT j.run_at FROM timebell_jobs j
         WHERE j.state = 'pending' AND j.hold IS NULL AND j.shared AND j.queue = l.queue AND j.priority = l.priority
            AND j.tenant_id = CAST(:only_tenant AS text) AND j.run_at <= :now
            AND (j.route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND j.route NOT LIKE '@%')
                OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(j.route, length(p)) = p))
         ORDER BY j.run_at LIMIT 1)) AS due,
    (SELECT j.run_at FROM timebell_jobs j
     WHERE j.state = 'pending' AND j.hold IS NULL AND j.queue = l.queue AND j.priority = l.priority AND j.run_at > :now
     ORDER BY j.run_at LIMIT 1) AS later,
    CASE WHEN q.concurrency IS NOT NULL THEN
        (SELECT count(*) FROM timebell_jobs j WHERE j.state = 'running' AND j.queue = l.queue)
        + (SELECT count(*) FROM timebell_jobs j WHERE j.state = 'dispatched' AND j.queue = l.queue) END AS busy,
    EXISTS (SELECT 1 FROM timebell_jobs j
            WHERE j.state = 'pending' AND j.hold IS NULL AND j.queue = l.queue AND j.priority = l.priority
                AND j.run_at >= l.since AND j.run_at <= :late)
        AND (SELECT j.tenant_id FROM timebell_jobs j
             WHERE j.state = 'pending' AND j.hold IS NULL AND j.shared
                AND j.queue = l.queue AND j.priority = l.priority
             ORDER BY j.tenant_id LIMIT 1)
            <> (SELECT j.tenant_id FROM timebell_jobs j
                WHERE j.state = 'pending' AND j.hold IS NULL AND j.shared
                    AND j.queue = l.queue AND j.priority = l.priority
                ORDER BY j.tenant_id DESC LIMIT 1) AS crowded
FROM scanned l
LEFT JOIN timebell_queues q ON q.name = l.queue
LEFT JOIN timebell_queues a ON a.name = '*'
""")

LIST_UPCOMING = SQL("""
SELECT run_at,
    route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')
        OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p) AS is_handled
FROM timebell_jobs
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at > :now AND run_at <= :until
ORDER BY run_at LIMIT :limit
""")

# The index timebell_jobs_claim yields the jobs of the lane in the order of run_at. `:since` skips its dead entries.
# Running jobs are in none of the indexes for listing jobs, so the update adds no entries to those.
CLAIM = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
        AND run_at >= :since AND run_at <= :now AND (:virtual_time OR run_at <= statement_timestamp())
        AND (route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')
            OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p))
        AND (CAST(:only_tenant AS text) IS NULL OR tenant_id = CAST(:only_tenant AS text))
        AND NOT (:recheck_queue AND EXISTS (
            SELECT 1 FROM timebell_queues q WHERE q.name IN (:queue, '*') AND (q.paused
                OR (q.name = :queue AND COALESCE(q.concurrency, q.concurrency_per_group, q.rate) IS NOT NULL))))
    ORDER BY run_at LIMIT :limit
    FOR UPDATE SKIP LOCKED
))
RETURNING id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
""")

# A LATERAL join, so that the LIMIT applies to each tenant. The index timebell_jobs_shared yields the jobs of a tenant
# in the order of run_at.
CLAIM_FAIR_SHARES = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE ctid = ANY(ARRAY(
    SELECT s.row_id FROM unnest(CAST(:tenants AS text[])) AS d (tenant)
    CROSS JOIN LATERAL (
        SELECT ctid AS row_id FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND shared AND tenant_id = d.tenant
            AND queue = :queue AND priority = :priority
            AND run_at <= :now AND (:virtual_time OR run_at <= statement_timestamp())
            AND (route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')
                OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p))
        ORDER BY run_at LIMIT :share
        FOR UPDATE SKIP LOCKED) AS s
))
RETURNING id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
""")

# A loose index scan of timebell_jobs_shared: a few look-ups per tenant, whatever the number of jobs. UNION ends the
# recursion when a tenant repeats.
ROTATE_TENANTS = SQL("""
WITH RECURSIVE circle (id) AS (
    SELECT COALESCE(
        (SELECT tenant_id FROM timebell_jobs
         WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
            AND tenant_id > :after ORDER BY tenant_id LIMIT 1),
        (SELECT tenant_id FROM timebell_jobs
         WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
         ORDER BY tenant_id LIMIT 1))
    UNION
    SELECT COALESCE(
        (SELECT tenant_id FROM timebell_jobs
         WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
            AND tenant_id > circle.id ORDER BY tenant_id LIMIT 1),
        (SELECT tenant_id FROM timebell_jobs
         WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
         ORDER BY tenant_id LIMIT 1))
    FROM circle WHERE circle.id IS NOT NULL
)
SELECT id,
    (SELECT 1 FROM timebell_jobs
     WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
        AND tenant_id = seen.id AND run_at <= :now AND (:virtual_time OR run_at <= statement_timestamp())
     ORDER BY run_at LIMIT 1) AS due
FROM (SELECT id FROM circle WHERE id IS NOT NULL LIMIT :limit) AS seen
""")

LOCK_DUE = SQL("""
SELECT id, tenant_id, group_name FROM timebell_jobs
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at <= :now AND (:virtual_time OR run_at <= statement_timestamp())
    AND (route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')
        OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p))
    AND (CAST(:only_tenant AS text) IS NULL OR tenant_id = CAST(:only_tenant AS text))
ORDER BY run_at LIMIT :limit
FOR UPDATE SKIP LOCKED
""")

LOCK_DUE_SHARES = SQL("""
SELECT s.* FROM unnest(CAST(:tenants AS text[])) AS d (tenant)
CROSS JOIN LATERAL (
    SELECT id, tenant_id, group_name FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND shared AND tenant_id = d.tenant
        AND queue = :queue AND priority = :priority
        AND run_at <= :now AND (:virtual_time OR run_at <= statement_timestamp())
        AND (route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')
            OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p))
    ORDER BY run_at LIMIT :share
    FOR UPDATE SKIP LOCKED) AS s
""")

START_LOCKED = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE id = ANY(CAST(:ids AS uuid[]))
RETURNING id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
""")

# A held job leaves timebell_jobs_claim, so later scans do not read it again.
HOLD_FOR_GROUP = SQL("UPDATE timebell_jobs SET hold = 'group' WHERE id = ANY(CAST(:ids AS uuid[]))")


class ClaimOperations(Values):
    """The operations of this module."""

    def scan_lanes(
        self, tx: Executor, routes: Routes, now: datetime, late: datetime, positions: Mapping[Lane, datetime] | None
    ) -> list[Row]:
        given = None if positions is None else encode([
            {"queue": queue, "priority": priority, "since": since} for (queue, priority), since in positions.items()
        ])  # fmt: skip
        return tx.run_sql(SCAN_LANES, now=now, late=late, positions=given, **routes.sql_params())

    def list_upcoming(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, until: datetime, limit: int
    ) -> list[Row]:
        queue, priority = lane
        return tx.run_sql(
            LIST_UPCOMING, queue=queue, priority=priority, now=now, until=until, limit=limit, **routes.sql_params()
        )

    def claim(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, since: datetime, limit: int, *,
        recheck_queue: bool,
    ) -> list[Row]:  # fmt: skip
        return tx.run_sql(
            CLAIM, queue=lane[0], priority=lane[1], node=node, now=now, since=since, limit=limit,
            recheck_queue=recheck_queue, virtual_time=self.virtual_time, **routes.sql_params(),
        )  # fmt: skip

    def claim_fair_shares(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        return tx.run_sql(
            CLAIM_FAIR_SHARES, queue=lane[0], priority=lane[1], node=node, now=now, tenants=list(tenants), share=share,
            virtual_time=self.virtual_time, **routes.sql_params(),
        )  # fmt: skip

    def rotate_tenants(self, tx: Executor, lane: Lane, after: str, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(
            ROTATE_TENANTS, queue=lane[0], priority=lane[1], after=after, now=now, limit=limit,
            virtual_time=self.virtual_time,
        )  # fmt: skip

    def lock_due(self, tx: Executor, lane: Lane, routes: Routes, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(
            LOCK_DUE, queue=lane[0], priority=lane[1], now=now, limit=limit, virtual_time=self.virtual_time,
            **routes.sql_params(),
        )  # fmt: skip

    def lock_due_shares(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        return tx.run_sql(
            LOCK_DUE_SHARES, queue=lane[0], priority=lane[1], now=now, tenants=list(tenants), share=share,
            virtual_time=self.virtual_time, **routes.sql_params(),
        )  # fmt: skip

    def start_locked(self, tx: Executor, ids: Sequence[str], node: str, now: datetime) -> list[Row]:
        return tx.run_sql(START_LOCKED, ids=list(ids), node=node, now=now)

    def hold_for_group(self, tx: Executor, ids: Sequence[str]) -> None:
        tx.run_sql(HOLD_FOR_GROUP, ids=list(ids))
