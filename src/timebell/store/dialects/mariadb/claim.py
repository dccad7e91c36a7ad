"""Scan lanes and claim jobs.

MariaDB has no UPDATE .. RETURNING, so a claim is two statements in one transaction: the first locks the jobs with
SKIP LOCKED and returns them as they will be, the second starts them. Concurrent claims take different jobs.

Never early: a job must be due by the clock of the node (`:now`) and by that of the server, because one may be ahead.
`:exact` lists the routes of the node with a space around each, `:prefixes` is a regular expression or NULL, and
`:everything` means all routes that do not begin with `@`.

Partial indexes of the other databases have the columns of their condition in front here: see `ddl.py`. FORCE INDEX:
without fresh statistics MariaDB would choose a shorter index, and read and sort a whole lane for each look-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from timebell.model.routes import Routes
from timebell.store.dialects.batches import encode
from timebell.store.dialects.mariadb.values import Values, route_params
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.sql import SQL, Row

# The first lane after another one: a range of timebell_jobs_claim. MariaDB uses ranges only for constants, so lanes are
# found and scanned one by one; in a recursive query each look-up would read all jobs of a lane.
NEXT_LANE = SQL("""
SELECT queue, priority, run_at AS since FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
WHERE state = 'pending' AND hold IS NULL
    AND (queue > :queue OR (queue = :queue AND priority > :priority))
ORDER BY queue, priority, run_at LIMIT 1
""")

# `due`: routes are checked only for due jobs. Finding a future job of one's own routes could mean walking millions of
# others, while waking up once for the job of another node costs only one scan.
# With `:only_tenant` its jobs are found in timebell_jobs_shared, whatever the number of jobs of other tenants. Jobs
# that are not shared are all of the tenant `default`.
# `busy`: two counts, because each state is a range of another index.
# `crowded`: the first and the last tenant of the lane in timebell_jobs_shared differ.
SCAN_LANE = SQL("""
SELECT :queue AS queue, :priority AS priority, q.concurrency, q.concurrency_per_group, q.rate, q.per, q.starts,
    q.paused OR a.paused AS paused,
    COALESCE(
        (SELECT run_at FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
         WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
            AND run_at >= :since AND run_at <= :now
            AND (INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
                OR route REGEXP :prefixes)
            AND COALESCE(:only_tenant, 'default') = 'default' AND (:only_tenant IS NULL OR tenant_id = 'default')
         ORDER BY run_at LIMIT 1),
        (SELECT run_at FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
         WHERE state = 'pending' AND hold IS NULL AND shared = true AND tenant_id = :only_tenant
            AND queue = :queue AND priority = :priority AND run_at <= :now
            AND (INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
                OR route REGEXP :prefixes)
         ORDER BY run_at LIMIT 1)) AS due,
    (SELECT run_at FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
     WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority AND run_at > :now
     ORDER BY run_at LIMIT 1) AS later,
    CASE WHEN q.concurrency IS NOT NULL THEN
        (SELECT count(*) FROM timebell_jobs FORCE INDEX (timebell_jobs_running)
         WHERE state = 'running' AND queue = :queue)
        + (SELECT count(*) FROM timebell_jobs FORCE INDEX (timebell_jobs_dispatched)
           WHERE state = 'dispatched' AND queue = :queue) END AS busy,
    EXISTS (SELECT 1 FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
            WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
                AND run_at >= :since AND run_at <= :late)
        AND (SELECT tenant_id FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
             WHERE state = 'pending' AND hold IS NULL AND shared = true AND queue = :queue AND priority = :priority
             ORDER BY tenant_id LIMIT 1)
            <> (SELECT tenant_id FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
                WHERE state = 'pending' AND hold IS NULL AND shared = true AND queue = :queue AND priority = :priority
                ORDER BY tenant_id DESC LIMIT 1) AS crowded
FROM (SELECT 1) AS lane
LEFT JOIN timebell_queues q ON q.name = :queue
LEFT JOIN timebell_queues a ON a.name = '*'
""")

LIST_UPCOMING = SQL("""
SELECT run_at,
    INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
        OR COALESCE(route REGEXP :prefixes, false) AS is_handled
FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at > :now AND run_at <= :until
ORDER BY run_at LIMIT :limit
""")

# The index yields the jobs of the lane in the order of run_at.
LOCK_CLAIMABLE = SQL("""
SELECT id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt + 1 AS attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at >= :since AND run_at <= :now
    AND (:virtual_time OR run_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))
    AND (INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
        OR route REGEXP :prefixes)
    AND (:only_tenant IS NULL OR tenant_id = :only_tenant)
    AND NOT (:recheck_queue AND EXISTS (
        SELECT 1 FROM timebell_queues q WHERE q.name IN (:queue, '*') AND (q.paused
            OR (q.name = :queue AND COALESCE(q.concurrency, q.concurrency_per_group, q.rate) IS NOT NULL))))
ORDER BY run_at LIMIT :limit
FOR UPDATE SKIP LOCKED
""")

# Executed once per tenant, because MariaDB has no LATERAL join. The index yields the jobs of a tenant in the order of
# run_at.
LOCK_CLAIMABLE_OF_TENANT = SQL("""
SELECT id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
    timeout, expires_at, attempt + 1 AS attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,
    manual_retries, conditions
FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
WHERE state = 'pending' AND hold IS NULL AND shared = true AND tenant_id = :tenant
    AND queue = :queue AND priority = :priority AND run_at <= :now
    AND (:virtual_time OR run_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))
    AND (INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
        OR route REGEXP :prefixes)
ORDER BY run_at LIMIT :share
FOR UPDATE SKIP LOCKED
""")

# The rows are locked. The primary key is forced also for small tables: a table scan would wait for rows that other
# transactions have locked.
START = SQL("""
UPDATE JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.state = 'running', j.attempt = j.attempt + 1, j.node_id = :node, j.started_at = :now
""")

# The first tenant after another one, and whether its first job is due: the first entry of a range of the index. MariaDB
# uses ranges only for constants, so tenants are found one by one.
NEXT_TENANT = SQL("""
SELECT tenant_id AS id,
    run_at <= :now AND (:virtual_time OR run_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)) AS due
FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
WHERE state = 'pending' AND hold IS NULL AND shared = true AND queue = :queue AND priority = :priority
    AND tenant_id > :after
ORDER BY tenant_id, run_at LIMIT 1
""")

LOCK_DUE = SQL("""
SELECT id, tenant_id, group_name FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority AND run_at <= :now
    AND (:virtual_time OR run_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))
    AND (INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
        OR route REGEXP :prefixes)
    AND (:only_tenant IS NULL OR tenant_id = :only_tenant)
ORDER BY run_at LIMIT :limit
FOR UPDATE SKIP LOCKED
""")

LOCK_DUE_OF_TENANT = SQL("""
SELECT id, tenant_id, group_name FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
WHERE state = 'pending' AND hold IS NULL AND shared = true AND tenant_id = :tenant
    AND queue = :queue AND priority = :priority AND run_at <= :now
    AND (:virtual_time OR run_at <= CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))
    AND (INSTR(:exact, CONCAT(' ', route, ' ')) > 0 OR (:everything AND route NOT LIKE '@%')
        OR route REGEXP :prefixes)
ORDER BY run_at LIMIT :share
FOR UPDATE SKIP LOCKED
""")

READ_LOCKED = SQL("""
SELECT j.id, j.tenant_id, j.topic, j.schedule_id, j.scheduled_at, j.kind, j.timezone, j.payload, j.metadata, j.target,
    j.queue, j.retry, j.timeout, j.expires_at, j.attempt + 1 AS attempt, j.attempts_used, j.serial, j.errors,
    j.revision, j.run_at, j.group_name, j.priority, j.manual_retries, j.conditions
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
""")

# A held job is not among the entries of timebell_jobs_claim with hold NULL, so later scans do not read it again.
HOLD_FOR_GROUP = SQL("""
UPDATE JSON_TABLE(:ids, '$[*]' COLUMNS (id CHAR(36) PATH '$')) AS d
STRAIGHT_JOIN timebell_jobs AS j FORCE INDEX (PRIMARY) ON j.id = d.id
SET j.hold = 'group'
""")


BEFORE_FIRST_LANE: Lane = ("", 0)


class ClaimOperations(Values):
    """The operations of this module."""

    def scan_lanes(
        self, tx: Executor, routes: Routes, now: datetime, late: datetime, positions: Mapping[Lane, datetime] | None
    ) -> list[Row]:
        instants = {"now": self.to_db(now), "late": self.to_db(late)}
        if positions is None:
            starts = self._find_lanes(tx)
        else:
            starts = {lane: self.to_db(since) for lane, since in positions.items()}
        rows: list[Row] = []
        for (queue, priority), since in starts.items():
            rows += tx.run_sql(
                SCAN_LANE, queue=queue, priority=priority, since=since, **instants, **route_params(routes)
            )
        return rows

    def _find_lanes(self, tx: Executor) -> dict[Lane, int]:
        """Return the instants of the first jobs by lane."""
        starts: dict[Lane, int] = {}
        lane = BEFORE_FIRST_LANE
        while found := tx.run_sql(NEXT_LANE, queue=lane[0], priority=lane[1]):
            lane = found[0]["queue"], found[0]["priority"]
            starts[lane] = found[0]["since"]
        return starts

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
        claimed = tx.run_sql(
            LOCK_CLAIMABLE, queue=lane[0], priority=lane[1], now=self.to_db(now), since=self.to_db(since), limit=limit,
            recheck_queue=recheck_queue, virtual_time=self.virtual_time, **route_params(routes),
        )  # fmt: skip
        return self._start(tx, claimed, node, now)

    def claim_fair_shares(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        claimed: list[Row] = []
        for tenant in tenants:
            claimed += tx.run_sql(
                LOCK_CLAIMABLE_OF_TENANT, queue=lane[0], priority=lane[1], now=self.to_db(now), tenant=tenant,
                share=share, virtual_time=self.virtual_time, **route_params(routes),
            )  # fmt: skip
        return self._start(tx, claimed, node, now)

    def _start(self, tx: Executor, locked: list[Row], node: str, now: datetime) -> list[Row]:
        if locked:
            tx.run_sql(START, ids=encode([row["id"] for row in locked]), node=node, now=self.to_db(now))
        return locked

    def rotate_tenants(self, tx: Executor, lane: Lane, after: str, now: datetime, limit: int) -> list[Row]:
        tenants: dict[str, Row] = {}
        params = {
            "queue": lane[0], "priority": lane[1], "now": self.to_db(now), "virtual_time": self.virtual_time,
        }  # fmt: skip
        has_wrapped = False
        while len(tenants) < limit:
            found = tx.run_sql(NEXT_TENANT, after=after, **params)
            if found and found[0]["id"] not in tenants:
                after = found[0]["id"]
                tenants[after] = found[0]
            elif found or has_wrapped:
                break
            else:
                after, has_wrapped = "", True
        return list(tenants.values())

    def lock_due(self, tx: Executor, lane: Lane, routes: Routes, now: datetime, limit: int) -> list[Row]:
        return tx.run_sql(
            LOCK_DUE, queue=lane[0], priority=lane[1], now=self.to_db(now), limit=limit,
            virtual_time=self.virtual_time, **route_params(routes),
        )  # fmt: skip

    def lock_due_shares(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        locked: list[Row] = []
        for tenant in tenants:
            locked += tx.run_sql(
                LOCK_DUE_OF_TENANT, queue=lane[0], priority=lane[1], now=self.to_db(now), tenant=tenant, share=share,
                virtual_time=self.virtual_time, **route_params(routes),
            )  # fmt: skip
        return locked

    def start_locked(self, tx: Executor, ids: Sequence[str], node: str, now: datetime) -> list[Row]:
        return self._start(tx, tx.run_sql(READ_LOCKED, ids=encode(ids)), node, now)

    def hold_for_group(self, tx: Executor, ids: Sequence[str]) -> None:
        tx.run_sql(HOLD_FOR_GROUP, ids=encode(ids))
