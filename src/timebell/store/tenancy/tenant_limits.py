"""Limits on concurrent jobs and on starts per minute of a tenant, over all queues and nodes, enforced at the claim.

Jobs that exceed the limit of their tenant are requeued in the transaction of the claim, so they are never visible as
running. They wait with the hold `tenant`, outside the claim index, so that a million due jobs of one tenant do not
slow down others. The tenant rows are locked meanwhile. Tenants without such limits cost nothing extra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, func, select, text, union_all, update

from timebell.model.job import Attempt, JobState
from timebell.model.limits import available_starts, record_starts
from timebell.model.payload import decode, encode
from timebell.store.jobs.indexes import split_by_running
from timebell.store.schema import jobs, tenants
from timebell.store.tenancy.tenants import limits_from_json
from timebell.store.transaction import Transaction
from timebell.store.types import to_micros

MINUTE_MICROSECONDS = 60_000_000  # microseconds
UNLIMITED = 10**9
RELEASE_BATCH_SIZE = 1000
"""The maximum number of held jobs released at once per tenant; more than the nodes start until the next release."""
_HELD = text("hold = 'tenant'")  # literally as in the index
_LIMITED_TENANTS = select(tenants.c.id).where(tenants.c.starts.is_not(None))


class AdmittedClaim(NamedTuple):
    """The attempts a claim started, and the number of jobs it requeued."""

    attempts: list[Attempt]
    requeued: int

    @classmethod
    def of(cls, claimed: list[Attempt] | AdmittedClaim) -> AdmittedClaim:
        """Return the result of any claim in this form: without limits, all attempts are admitted."""
        return claimed if isinstance(claimed, AdmittedClaim) else cls(claimed, 0)


def list_limited_tenants(tx: Transaction) -> frozenset[str]:
    """Return the ids of tenants with a limit on concurrent jobs or starts."""
    return frozenset(tx.execute(_LIMITED_TENANTS).scalars())


def claim_within_limits(
    tx: Transaction,
    limited_tenants: Collection[str],
    now: datetime,
    claim: Callable[..., list[Attempt]],
    *claim_args: Any,
) -> AdmittedClaim:
    """Call `claim`, and requeue the attempts that the limits of their tenants do not allow now."""
    attempts = claim(tx, *claim_args)
    claimed = Counter(attempt.tenant_id for attempt in attempts if attempt.tenant_id in limited_tenants)
    if not claimed:
        return AdmittedClaim(attempts, 0)
    rows = _lock_tenants(tx, claimed)
    capacity = _free_capacity(tx, rows, now, claimed)
    admitted, rejected, started = [], [], Counter[str]()
    for attempt in attempts:
        if started[attempt.tenant_id] < capacity.get(attempt.tenant_id, UNLIMITED):
            started[attempt.tenant_id] += 1
            admitted.append(attempt)
        else:
            rejected.append(attempt.id)
    if rejected:
        requeue = update(jobs).where(jobs.c.id.in_(rejected))
        tx.execute(requeue.values(state="pending", attempt=jobs.c.attempt - 1, node_id=None, hold="tenant"))
    for row in rows:
        if started[row.id] and (rate := limits_from_json(row.limits).starts_per_minute) is not None:
            starts = record_starts(decode(row.starts), rate, MINUTE_MICROSECONDS, to_micros(now), started[row.id])
            tx.execute(update(tenants).where(tenants.c.id == row.id).values(starts=encode(starts)))
    return AdmittedClaim(admitted, len(rejected))


def release_held(tx: Transaction, now: datetime) -> int:
    """Release held jobs as far as their tenants have capacity; return the number of jobs."""
    has_held_jobs = select(jobs.c.id).where(jobs.c.hold == "tenant", jobs.c.tenant_id == tenants.c.id).exists()
    waiting = tx.execute(select(tenants.c.id).where(tenants.c.starts.is_not(None), has_held_jobs)).scalars().all()
    if not waiting:
        return 0
    capacity = _free_capacity(tx, _lock_tenants(tx, waiting), now, Counter())
    return sum(_release_first(tx, id_, min(free, RELEASE_BATCH_SIZE)) for id_, free in capacity.items() if free > 0)


def _release_first(tx: Transaction, tenant_id: str, limit: int) -> int:
    held = select(jobs.c.id).where(_HELD, jobs.c.tenant_id == tenant_id)
    first = tx.execute(held.order_by(jobs.c.priority, jobs.c.run_at).limit(limit)).scalars().all()
    return tx.execute(update(jobs).where(jobs.c.id.in_(first), _HELD).values(hold=None)).rowcount


def _lock_tenants(tx: Transaction, ids: Collection[str]) -> list[Row[Any]]:
    matches = tenants.c.id.in_(sorted(ids)) & tenants.c.starts.is_not(None)
    return list(tx.execute(select(tenants).where(matches).order_by(tenants.c.id).with_for_update()))


def _free_capacity(tx: Transaction, rows: list[Row[Any]], now: datetime, claimed: Counter[str]) -> dict[str, int]:
    """Return the number of jobs each tenant may still start. `claimed` jobs are already running and not counted."""
    not_running, running = split_by_running(
        select(jobs.c.tenant_id).where(jobs.c.tenant_id.in_([row.id for row in rows]))
    )
    dispatched = not_running.where(jobs.c.state == JobState.DISPATCHED.value)
    active = union_all(running, dispatched).subquery()
    counts = select(active.c.tenant_id, func.count().label("running")).group_by(active.c.tenant_id)
    active_counts = {row.tenant_id: row.running for row in tx.execute(counts)}
    capacity = {}
    for row in rows:
        limits, free = limits_from_json(row.limits), UNLIMITED
        if limits.jobs_at_once is not None:
            free = limits.jobs_at_once - (active_counts.get(row.id, 0) - claimed[row.id])
        if (rate := limits.starts_per_minute) is not None:
            free = min(free, available_starts(decode(row.starts), rate, MINUTE_MICROSECONDS, to_micros(now)))
        capacity[row.id] = max(0, free)
    return capacity
