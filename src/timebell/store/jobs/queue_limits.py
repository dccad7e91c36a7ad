"""Claims within the limits of a queue, and with fair sharing between tenants.

The plain claim, a single statement, is in `claim`; `model/limits.py` computes how many jobs the limits allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from timebell.model.job import Attempt
from timebell.model.limits import GroupKey, admit_by_group, available_starts, record_starts, round_robin
from timebell.model.payload import decode, encode
from timebell.model.routes import Routes
from timebell.store.jobs import claim, groups
from timebell.store.jobs.claim import ATTEMPT_COLUMNS, CLAIMABLE_SHARED, DUE_IN_LANE, SET_RUNNING, QueueLane
from timebell.store.statement import Statement
from timebell.store.transaction import Row, Transaction
from timebell.store.types import to_micros

MAX_TENANTS_PER_CLAIM = 200  # tenants considered by one claim
GROUP_SCAN_SIZE = 500  # due jobs read by one scan for grouped jobs
MAX_GROUP_SCANS = 20  # scans per claim; needed if many due jobs are of full groups and have to be held first

_FROM_SHARED_LANE = f"FROM timebell_jobs WHERE {CLAIMABLE_SHARED} AND queue = :queue AND priority = :priority"
# Tenants in a circle by id, starting after `:after`; UNION ends the recursion when one repeats. A loose index scan:
# a few look-ups per tenant, whatever the number of jobs.
TENANT_ROTATION = Statement(
    f"""
    WITH RECURSIVE circle(id) AS (
        SELECT COALESCE((SELECT tenant_id {_FROM_SHARED_LANE} AND tenant_id > :after ORDER BY tenant_id LIMIT 1),
                        (SELECT tenant_id {_FROM_SHARED_LANE} ORDER BY tenant_id LIMIT 1))
        UNION
        SELECT COALESCE((SELECT tenant_id {_FROM_SHARED_LANE} AND tenant_id > circle.id ORDER BY tenant_id LIMIT 1),
                        (SELECT tenant_id {_FROM_SHARED_LANE} ORDER BY tenant_id LIMIT 1))
        FROM circle WHERE circle.id IS NOT NULL
    )
    SELECT id, (SELECT 1 {_FROM_SHARED_LANE} AND tenant_id = seen.id AND $due ORDER BY run_at LIMIT 1) AS due
    FROM (SELECT id FROM circle WHERE id IS NOT NULL LIMIT {MAX_TENANTS_PER_CLAIM}) AS seen
    """  # noqa: S608 - constants only
)


class TenantRotation(NamedTuple):
    """Tenants with due jobs in a lane, in round-robin order; the next rotation starts after the tenant `after`."""

    tenants: list[str]
    after: str


def next_tenants(tx: Transaction, lane: QueueLane, after: str, limit: int, now: datetime) -> TenantRotation:
    """Return up to `limit` tenants that are next in a lane; none if fewer than two tenants have due jobs there."""
    rotation = tx.fetch(
        TENANT_ROTATION, queue=lane.queue, priority=lane.priority, after=after, now=tx.dialect.to_db(now)
    )
    due = [row["id"] for row in rotation if row["due"]]
    if len(due) > limit:
        return TenantRotation(due[:limit], due[limit - 1])
    return TenantRotation(due if len(due) > 1 else [], rotation[-1]["id"] if rotation else "")


# The same number of jobs for each tenant.
_FROM_FAIR_SHARES = (
    f"FROM d $lateral WHERE {CLAIMABLE_SHARED} AND tenant_id = d.tenant AND queue = :queue AND priority = :priority"
    " AND $due AND $handled ORDER BY run_at LIMIT :limit $skip_locked $end_lateral"
)
CLAIM_FAIR_SHARES = Statement(
    f"WITH $rows {SET_RUNNING} WHERE id $in SELECT s.id {_FROM_FAIR_SHARES} $end_in RETURNING {ATTEMPT_COLUMNS}",
    tenant="text",
)


def claim_fair_shares(
    tx: Transaction, lane: QueueLane, routes: Routes, node: str, limit: int, now: datetime, tenants: Sequence[str]
) -> list[Attempt]:
    """Claim an equal share of jobs for each of these tenants, then fill up to `limit` with the next due jobs.

    A share is at least one job. If there are more tenants than `limit`, only the first ones get a share.
    """
    share, rows = max(1, limit // max(1, len(tenants))), [{"tenant": tenant} for tenant in tenants[:limit]]
    params = claim.lane_params(lane, routes)
    claimed = claim.start_attempts(tx, CLAIM_FAIR_SHARES, now, rows, node=node, limit=share, **params) if rows else []
    if len(claimed) < limit:
        claimed += claim.claim_batch(tx, lane, routes, node, limit - len(claimed), now)
    return claimed


LOCK_QUEUE = Statement("SELECT * FROM timebell_queues WHERE name = :queue $for_update")
COUNT_IN_FLIGHT = Statement(f"SELECT {claim.COUNT_IN_FLIGHT.format(':queue')} AS busy")
RECORD_STARTS = Statement("UPDATE timebell_queues SET starts = :starts WHERE name = :queue")


def claim_limited(
    tx: Transaction, lane: QueueLane, routes: Routes, node: str, limit: int, now: datetime, tenants: Sequence[str] = ()
) -> list[Attempt]:
    """Claim like `claim_fair_shares`, within the limits of the queue.

    The limits apply to all nodes together, so the row of the queue stays locked until the transaction ends.
    """
    queue_rows = tx.fetch(LOCK_QUEUE, queue=lane.queue)
    if not queue_rows:
        return claim_fair_shares(tx, lane, routes, node, limit, now, tenants)
    queue = queue_rows[0]
    if queue["paused"]:
        return []
    if queue["concurrency"] is not None:
        limit = min(limit, queue["concurrency"] - tx.fetch(COUNT_IN_FLIGHT, queue=lane.queue)[0]["busy"])
    starts, rate, now_micros = decode(queue["starts"]) or [], queue["rate"], to_micros(now)
    per = round((queue["per"] or 0) * 1e6)
    if rate is not None:
        limit = min(limit, available_starts(starts, rate, per, now_micros))
    if limit < 1:
        return []
    if queue["concurrency_per_group"] is None:
        claimed = claim_fair_shares(tx, lane, routes, node, limit, now, tenants)
    else:
        claimed = _claim_in_groups(tx, lane, routes, node, limit, now, tenants, queue["concurrency_per_group"])
    if rate is not None:
        # Expired jobs are skipped, not started. If they counted, a late queue could spend its whole rate on them.
        start_count = sum(attempt.expires_at is None or attempt.expires_at > now for attempt in claimed)
        if start_count:
            tx.fetch(
                RECORD_STARTS,
                queue=lane.queue,
                starts=encode(record_starts(starts, rate, per, now_micros, start_count)),
            )
    return claimed


RUNNING_GROUPS = Statement(
    f"SELECT tenant_id, group_name, count(*) AS running FROM ({groups.IN_FLIGHT_GROUPS}) AS busy"  # noqa: S608
    " GROUP BY tenant_id, group_name"
)
SCAN_DUE = Statement(
    f"SELECT id, tenant_id, group_name FROM timebell_jobs WHERE {DUE_IN_LANE} ORDER BY run_at LIMIT :limit $skip_locked"  # noqa: S608
)
SCAN_FAIR_SHARES = Statement(f"WITH $rows SELECT s.id, s.tenant_id, s.group_name {_FROM_FAIR_SHARES}", tenant="text")
START_SELECTED = Statement(
    f"WITH $rows {SET_RUNNING} WHERE id $in SELECT id FROM d $end_in RETURNING {ATTEMPT_COLUMNS}",  # noqa: S608
    id="id",
)
HOLD_FOR_GROUP = Statement(
    "WITH $rows UPDATE timebell_jobs SET hold = 'group' WHERE id $in SELECT id FROM d $end_in", id="id"
)


def _claim_in_groups(
    tx: Transaction, lane: QueueLane, routes: Routes, node: str, limit: int, now: datetime, tenants: Sequence[str],
    per_group: int,
) -> list[Attempt]:  # fmt: skip
    """Start due jobs whose groups have free capacity; hold the others until a job of their group ends.

    A held job leaves the claim index, so later scans do not read it again.
    """
    counted = tx.fetch(RUNNING_GROUPS, queue=lane.queue)
    running: Counter[GroupKey] = Counter({(row["tenant_id"], row["group_name"]): row["running"] for row in counted})
    claimed: list[Attempt] = []
    rows = [{"tenant": tenant} for tenant in tenants[:limit]]
    params = {**claim.lane_params(lane, routes), "now": tx.dialect.to_db(now)}
    for scan in range(MAX_GROUP_SCANS):
        if rows and scan == 0:
            due = tx.fetch(SCAN_FAIR_SHARES, rows, limit=max(1, GROUP_SCAN_SIZE // len(rows)), **params)
            due = [due[index] for index in round_robin([row["tenant_id"] for row in due])]
        else:
            due = tx.fetch(SCAN_DUE, limit=GROUP_SCAN_SIZE, **params)
        to_start, to_hold = admit_by_group(map(_group_of, due), running, per_group, limit - len(claimed))
        if to_hold:
            tx.fetch(HOLD_FOR_GROUP, [{"id": str(due[index]["id"])} for index in to_hold])
        if to_start:
            ids = [{"id": str(due[index]["id"])} for index in to_start]
            claimed += claim.start_attempts(tx, START_SELECTED, now, ids, node=node)
        if len(claimed) == limit or (len(due) < GROUP_SCAN_SIZE and not (rows and scan == 0)):
            break
    return claimed


def _group_of(row: Row) -> GroupKey | None:
    return None if row["group_name"] is None else (row["tenant_id"], row["group_name"])
