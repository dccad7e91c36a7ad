"""Scan lanes and claim jobs.

SQLite has one writer at a time, so nothing is locked. The routes of the node are `:exact` names, `:prefixes` of names,
or `:everything` that does not begin with `@`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import orjson

from timebell.model.routes import Routes
from timebell.store.dialects.batches import encode
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.sqlite.values import Values, route_params
from timebell.store.sql import SQL, Row

FEW_ROWS = 8
"""For more rows, one JSON text is cheaper than stepping from row to row.

The driver releases the GIL after every row, and may wait milliseconds to get it back from a busy event loop.
"""

# `lane` is a loose index scan of timebell_jobs_claim: a few look-ups per lane, whatever the number of jobs in between.
# The lane after lane `l` is the next priority of the same queue, else the first lane of the next queue: two look-ups
# instead of one row comparison, of which SQLite would use the index only for the first column. With `:positions` it is
# empty, and only the given lanes are scanned, each from `since` on.
# `due`: routes are checked only for due jobs. Finding a future job of one's own routes could mean walking millions of
# others, while waking up once for the job of another node costs only one scan.
# With `:only_tenant` its jobs are found in timebell_jobs_shared, whatever the number of jobs of other tenants. Jobs
# that are not shared are all of the tenant `default`.
# `busy`: two counts, because each state has its own partial index.
# `crowded`: the first and the last tenant of the lane in timebell_jobs_shared differ.
SCAN_LANES = SQL("""
WITH RECURSIVE lane (queue, priority, since) AS (
    SELECT * FROM (SELECT queue, priority, run_at FROM timebell_jobs
                   WHERE state = 'pending' AND hold IS NULL AND :positions IS NULL
                   ORDER BY queue, priority, run_at LIMIT 1) AS first
    UNION ALL
    SELECT
        COALESCE(
            (SELECT queue FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                AND queue = l.queue AND priority > l.priority ORDER BY priority, run_at LIMIT 1),
            (SELECT queue FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                AND queue > l.queue ORDER BY queue, priority, run_at LIMIT 1)),
        COALESCE(
            (SELECT priority FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                AND queue = l.queue AND priority > l.priority ORDER BY priority, run_at LIMIT 1),
            (SELECT priority FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                AND queue > l.queue ORDER BY queue, priority, run_at LIMIT 1)),
        COALESCE(
            (SELECT run_at FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                AND queue = l.queue AND priority > l.priority ORDER BY priority, run_at LIMIT 1),
            (SELECT run_at FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                AND queue > l.queue ORDER BY queue, priority, run_at LIMIT 1))
    FROM lane l WHERE l.queue IS NOT NULL
), scanned (queue, priority, since) AS (
    SELECT * FROM lane WHERE queue IS NOT NULL
    UNION ALL
    SELECT json_extract(value, '$.queue'), json_extract(value, '$.priority'), json_extract(value, '$.since')
    FROM json_each(:positions)
)
SELECT l.queue, l.priority, q.concurrency, q.concurrency_per_group, q.rate, q.per, q.starts,
    q.paused OR a.paused AS paused,
    COALESCE(
        (SELECT j.run_at FROM timebell_jobs j
         WHERE j.state = 'pending' AND j.hold IS NULL AND j.queue = l.queue AND j.priority = l.priority
            AND j.run_at >= l.since AND j.run_at <= :now
            AND ((:everything AND j.route NOT LIKE '@%') OR j.route IN (SELECT value FROM json_each(:exact))
                OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(j.route, 1, length(p.value)) = p.value))
            AND COALESCE(:only_tenant, 'default') = 'default' AND (:only_tenant IS NULL OR j.tenant_id = 'default')
         ORDER BY j.run_at LIMIT 1),
        (SELECT j.run_at FROM timebell_jobs j
         WHERE j.state = 'pending' AND j.hold IS NULL AND j.shared AND j.queue = l.queue AND j.priority = l.priority
            AND j.tenant_id = :only_tenant AND j.run_at <= :now
            AND ((:everything AND j.route NOT LIKE '@%') OR j.route IN (SELECT value FROM json_each(:exact))
                OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(j.route, 1, length(p.value)) = p.value))
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
    (:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))
        OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value) AS is_handled
FROM timebell_jobs
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at > :now AND run_at <= :until
ORDER BY run_at LIMIT :limit
""")

# The index timebell_jobs_claim yields the jobs of the lane in the order of run_at.
CLAIM = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE id IN (
    SELECT id FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
        AND run_at >= :since AND run_at <= :now
        AND ((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))
            OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))
        AND (:only_tenant IS NULL OR tenant_id = :only_tenant)
        AND NOT (:recheck_queue AND EXISTS (
            SELECT 1 FROM timebell_queues q WHERE q.name IN (:queue, '*') AND (q.paused
                OR (q.name = :queue AND COALESCE(q.concurrency, q.concurrency_per_group, q.rate) IS NOT NULL))))
    ORDER BY run_at LIMIT :limit
)
RETURNING id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
""")

# The same in two statements, of which the first returns all jobs in one row.
READ_CLAIMABLE = SQL("""
SELECT json_group_array(json_object(
        'id', id, 'tenant_id', tenant_id, 'topic', topic, 'schedule_id', schedule_id, 'scheduled_at', scheduled_at,
        'kind', kind, 'timezone', timezone, 'payload', payload, 'metadata', metadata, 'target', target, 'queue', queue,
        'retry', retry, 'timeout', timeout, 'expires_at', expires_at, 'attempt', attempt + 1,
        'attempts_used', attempts_used, 'serial', serial, 'errors', errors, 'revision', revision, 'run_at', run_at,
        'group_name', group_name, 'priority', priority, 'manual_retries', manual_retries, 'conditions', conditions
    )) AS jobs, json_group_array(id) AS ids
FROM (
    SELECT * FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
        AND run_at >= :since AND run_at <= :now
        AND ((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))
            OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))
        AND (:only_tenant IS NULL OR tenant_id = :only_tenant)
        AND NOT (:recheck_queue AND EXISTS (
            SELECT 1 FROM timebell_queues q WHERE q.name IN (:queue, '*') AND (q.paused
                OR (q.name = :queue AND COALESCE(q.concurrency, q.concurrency_per_group, q.rate) IS NOT NULL))))
    ORDER BY run_at LIMIT :limit
)
""")
START_READ = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE id IN (SELECT value FROM json_each(:ids))
""")

# The LIMIT of the inner subquery applies to each tenant. The index timebell_jobs_shared yields the jobs of a tenant in
# the order of run_at.
CLAIM_FAIR_SHARES = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE id IN (
    SELECT s.id FROM json_each(:tenants) AS d
    CROSS JOIN timebell_jobs s WHERE s.id IN (
        SELECT id FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND shared AND tenant_id = d.value
            AND queue = :queue AND priority = :priority AND run_at <= :now
            AND ((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))
                OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))
        ORDER BY run_at LIMIT :share)
)
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
        AND tenant_id = seen.id AND run_at <= :now
     ORDER BY run_at LIMIT 1) AS due
FROM (SELECT id FROM circle WHERE id IS NOT NULL LIMIT :limit) AS seen
""")

LOCK_DUE = SQL("""
SELECT id, tenant_id, group_name FROM timebell_jobs
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority AND run_at <= :now
    AND ((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))
        OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))
    AND (:only_tenant IS NULL OR tenant_id = :only_tenant)
ORDER BY run_at LIMIT :limit
""")

LOCK_DUE_SHARES = SQL("""
SELECT s.id, s.tenant_id, s.group_name FROM json_each(:tenants) AS d
CROSS JOIN timebell_jobs s WHERE s.id IN (
    SELECT id FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND shared AND tenant_id = d.value
        AND queue = :queue AND priority = :priority AND run_at <= :now
        AND ((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))
            OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))
    ORDER BY run_at LIMIT :share)
""")

START_LOCKED = SQL("""
UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now
WHERE id IN (SELECT value FROM json_each(:ids))
RETURNING id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
""")

# A held job leaves timebell_jobs_claim, so later scans do not read it again.
HOLD_FOR_GROUP = SQL("UPDATE timebell_jobs SET hold = 'group' WHERE id IN (SELECT value FROM json_each(:ids))")


class ClaimOperations(Values):
    """The operations of this module."""

    _last_claim_was_large = False
    """Whether the last claim returned many jobs, so that the next one probably will, too."""

    def scan_lanes(
        self, tx: Executor, routes: Routes, now: datetime, late: datetime, positions: Mapping[Lane, datetime] | None
    ) -> list[Row]:
        given = None if positions is None else encode([
            {"queue": queue, "priority": priority, "since": self.to_db(since)}
            for (queue, priority), since in positions.items()
        ])  # fmt: skip
        return tx.run_sql(
            SCAN_LANES, now=self.to_db(now), late=self.to_db(late), positions=given, **route_params(routes)
        )

    def list_upcoming(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, until: datetime, limit: int
    ) -> list[Row]:
        return tx.run_sql(
            LIST_UPCOMING, queue=lane[0], priority=lane[1], now=self.to_db(now), until=self.to_db(until), limit=limit,
            **route_params(routes),
        )  # fmt: skip

    def claim(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, since: datetime, limit: int, *,
        recheck_queue: bool,
    ) -> list[Row]:  # fmt: skip
        params = {
            "queue": lane[0], "priority": lane[1], "now": self.to_db(now), "since": self.to_db(since), "limit": limit,
            "recheck_queue": recheck_queue, **route_params(routes),
        }  # fmt: skip
        if self._last_claim_was_large:
            with tx.atomic():
                (found,) = tx.run_sql(READ_CLAIMABLE, **params)
                claimed: list[Row] = orjson.loads(found["jobs"])
                if claimed:
                    tx.run_sql(START_READ, ids=found["ids"], node=node, now=params["now"])
        else:
            claimed = tx.run_sql(CLAIM, node=node, **params)
        self._last_claim_was_large = len(claimed) > FEW_ROWS
        return claimed

    def claim_fair_shares(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        return tx.run_sql(
            CLAIM_FAIR_SHARES, queue=lane[0], priority=lane[1], node=node, now=self.to_db(now),
            tenants=encode(tenants), share=share, **route_params(routes),
        )  # fmt: skip

    def rotate_tenants(self, tx: Executor, lane: Lane, after: str, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(
            ROTATE_TENANTS, queue=lane[0], priority=lane[1], after=after, now=self.to_db(now), limit=limit
        )

    def lock_due(self, tx: Executor, lane: Lane, routes: Routes, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(
            LOCK_DUE, queue=lane[0], priority=lane[1], now=self.to_db(now), limit=limit, **route_params(routes)
        )

    def lock_due_shares(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        return tx.run_sql(
            LOCK_DUE_SHARES, queue=lane[0], priority=lane[1], now=self.to_db(now), tenants=encode(tenants),
            share=share, **route_params(routes),
        )  # fmt: skip

    def start_locked(self, tx: Executor, ids: Sequence[str], node: str, now: datetime) -> list[Row]:
        return tx.run_sql(START_LOCKED, ids=encode(ids), node=node, now=self.to_db(now))

    def hold_for_group(self, tx: Executor, ids: Sequence[str]) -> None:
        tx.run_sql(HOLD_FOR_GROUP, ids=encode(ids))
