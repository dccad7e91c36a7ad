"""Claims within the limits of a queue, and with fair sharing between tenants.

The plain claim, a single statement, is in `claim`; `model/limits.py` computes how many jobs the limits allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select, update

from timebell.model.job import Attempt
from timebell.model.limits import GroupKey, admit_by_group, available_starts, record_starts, round_robin
from timebell.model.payload import decode, encode
from timebell.model.routes import Routes
from timebell.store.jobs import claim
from timebell.store.jobs.claim import QueueLane
from timebell.store.schema import queues
from timebell.store.sql import SQL
from timebell.store.transaction import Row, Transaction
from timebell.store.types import to_micros

MAX_TENANTS_PER_CLAIM = 200  # tenants considered by one claim
GROUP_SCAN_SIZE = 500  # due jobs read by one scan for grouped jobs
MAX_GROUP_SCANS = 20  # scans per claim; needed if many due jobs are of full groups and have to be held first


class TenantRotation(NamedTuple):
    """Tenants with due jobs in a lane, in round-robin order; the next rotation starts after the tenant `after`."""

    tenants: list[str]
    after: str


def next_tenants(tx: Transaction, lane: QueueLane, after: str, limit: int, now: datetime) -> TenantRotation:
    """Return up to `limit` tenants that are next in a lane; none if fewer than two tenants have due jobs there."""
    rotation = tx.dialect.rotate_tenants(tx, lane.key, after, now, MAX_TENANTS_PER_CLAIM)
    due = [row["id"] for row in rotation if row["due"]]
    if len(due) > limit:
        return TenantRotation(due[:limit], due[limit - 1])
    return TenantRotation(due if len(due) > 1 else [], rotation[-1]["id"] if rotation else "")


def claim_fair_shares(
    tx: Transaction, lane: QueueLane, routes: Routes, node: str, limit: int, now: datetime, tenants: Sequence[str]
) -> list[Attempt]:
    """Claim an equal share of jobs for each of these tenants, then fill up to `limit` with the next due jobs.

    A share is at least one job. If there are more tenants than `limit`, only the first ones get a share.
    """
    share, sharing, claimed = max(1, limit // max(1, len(tenants))), tenants[:limit], []
    if sharing:
        started = tx.dialect.claim_fair_shares(tx, lane.key, routes, node, now, sharing, share)
        claimed = claim.to_attempts(tx, started, now)
    if len(claimed) < limit and routes.tenant_id in (None, "default"):  # all jobs of other tenants are shared
        claimed += claim.claim_batch(tx, lane, routes, node, limit - len(claimed), now)
    return claimed


# Two counts, because each state has its own partial index.
COUNT_IN_FLIGHT = SQL("""
SELECT (SELECT count(*) FROM timebell_jobs WHERE state = 'running' AND queue = :queue)
    + (SELECT count(*) FROM timebell_jobs WHERE state = 'dispatched' AND queue = :queue) AS busy
""")


def claim_limited(
    tx: Transaction, lane: QueueLane, routes: Routes, node: str, limit: int, now: datetime, tenants: Sequence[str] = ()
) -> list[Attempt]:
    """Claim like `claim_fair_shares`, within the limits of the queue.

    The limits apply to all nodes together, so the row of the queue stays locked until the transaction ends.
    """
    same_queue = queues.c.name == lane.queue
    queue = tx.execute(select(queues).where(same_queue).with_for_update()).mappings().first()
    if queue is None:
        return claim_fair_shares(tx, lane, routes, node, limit, now, tenants)
    if queue["paused"]:
        return []
    if queue["concurrency"] is not None:
        limit = min(limit, queue["concurrency"] - tx.run_sql(COUNT_IN_FLIGHT, queue=lane.queue)[0]["busy"])
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
            recorded = record_starts(starts, rate, per, now_micros, start_count)
            tx.execute(update(queues).where(same_queue).values(starts=encode(recorded)))
    return claimed


# Two parts, because each state has its own partial index.
COUNT_IN_FLIGHT_BY_GROUP = SQL("""
SELECT tenant_id, group_name, count(*) AS running
FROM (
    SELECT tenant_id, group_name FROM timebell_jobs
    WHERE state = 'running' AND queue = :queue AND group_name IS NOT NULL
    UNION ALL
    SELECT tenant_id, group_name FROM timebell_jobs
    WHERE state = 'dispatched' AND queue = :queue AND group_name IS NOT NULL
) AS busy
GROUP BY tenant_id, group_name
""")


def _claim_in_groups(
    tx: Transaction, lane: QueueLane, routes: Routes, node: str, limit: int, now: datetime, tenants: Sequence[str],
    per_group: int,
) -> list[Attempt]:  # fmt: skip
    """Start due jobs whose groups have free capacity; hold the others until a job of their group ends.

    A held job leaves the claim index, so later scans do not read it again.
    """
    counted = tx.run_sql(COUNT_IN_FLIGHT_BY_GROUP, queue=lane.queue)
    running: Counter[GroupKey] = Counter({(row["tenant_id"], row["group_name"]): row["running"] for row in counted})
    claimed: list[Attempt] = []
    sharing = tenants[:limit]
    for scan in range(MAX_GROUP_SCANS):
        if sharing and scan == 0:
            share = max(1, GROUP_SCAN_SIZE // len(sharing))
            due = tx.dialect.lock_due_shares(tx, lane.key, routes, now, sharing, share)
            due = [due[index] for index in round_robin([row["tenant_id"] for row in due])]
        else:
            due = tx.dialect.lock_due(tx, lane.key, routes, now, GROUP_SCAN_SIZE)
        to_start, to_hold = admit_by_group(map(_group_of, due), running, per_group, limit - len(claimed))
        if to_hold:
            tx.dialect.hold_for_group(tx, [str(due[index]["id"]) for index in to_hold])
        if to_start:
            ids = [str(due[index]["id"]) for index in to_start]
            claimed += claim.to_attempts(tx, tx.dialect.start_locked(tx, ids, node, now), now)
        if len(claimed) == limit or (len(due) < GROUP_SCAN_SIZE and not (sharing and scan == 0)):
            break
    return claimed


def _group_of(row: Row) -> GroupKey | None:
    return None if row["group_name"] is None else (row["tenant_id"], row["group_name"])
