"""Claims of due jobs from a lane, for the slots of a node or for a remote worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from timebell.engine.node import CachedRevision, Node
from timebell.errors import StoreUnreachable
from timebell.model.job import Attempt
from timebell.model.routes import Routes
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import queue_limits
from timebell.store.schedules import queries
from timebell.store.tenancy import tenant_limits
from timebell.store.tenancy.tenant_limits import AdmittedClaim

log = logging.getLogger("timebell.worker")


class ClaimOperation(NamedTuple):
    """A store operation that claims jobs; `single`: it is one statement, which needs no transaction."""

    operation: Callable[..., list[Attempt] | AdmittedClaim]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    single: bool


class LaneClaims:
    """Chooses how to claim from a lane: within the limits of queues and tenants, fairly between lanes and tenants."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._claim_count = 0
        self._last_served: dict[tuple[str, int], tuple[int, str]] = {}

    def split_due(
        self, lanes: Sequence[job_claim.QueueLane], now: datetime
    ) -> tuple[list[job_claim.QueueLane], list[datetime]]:
        """Split lanes into due ones, in claim order, and the start times of the others."""
        due: list[job_claim.QueueLane] = []
        later: list[datetime] = []
        for lane in lanes:
            if (starts_at := lane.earliest_start) is not None:
                if starts_at <= now:
                    due.append(lane)
                else:
                    later.append(starts_at)
        return self.sort(due), later

    def sort(self, due: list[job_claim.QueueLane]) -> list[job_claim.QueueLane]:
        """Sort by priority, then least recently served: lanes of one priority share the slots."""
        if len(due) > 1:
            due.sort(key=lambda lane: (lane.priority, self._last_served.get((lane.queue, lane.priority), (0, ""))[0]))
        return due

    async def choose(
        self, lane: job_claim.QueueLane, routes: Routes, claimant: str, limit: int, *, recheck_queue: bool
    ) -> ClaimOperation:
        """Return the operation that claims up to `limit` jobs of a lane for a node or a remote worker (`claimant`).

        With `recheck_queue`, it claims none if the queue was paused or limited since the scan.
        """
        node = self.node
        tenants = await self._next_tenants(lane, routes, limit)
        now = node.clock.now()
        args: tuple[Any, ...] = (lane, routes, claimant, limit, now)
        if node.limited_tenants:
            claim = queue_limits.claim_limited if lane.has_limits else queue_limits.claim_fair_shares
            within = (node.limited_tenants, now, claim, *args, tenants)
            return ClaimOperation(tenant_limits.claim_within_limits, within, {}, single=False)
        if lane.has_limits:
            return ClaimOperation(queue_limits.claim_limited, (*args, tenants), {}, single=False)
        if tenants:
            return ClaimOperation(queue_limits.claim_fair_shares, (*args, tenants), {}, single=False)
        return ClaimOperation(job_claim.claim_batch, args, {"recheck_queue": recheck_queue}, single=True)

    async def _next_tenants(self, lane: job_claim.QueueLane, routes: Routes, limit: int) -> list[str]:
        """Return the tenants that share a late lane, in serving order; empty if the lane needs no fair sharing."""
        self._claim_count += 1
        key = lane.queue, lane.priority
        tenants: list[str] = []
        last_tenant = self._last_served.get(key, (0, ""))[1]
        if routes.tenant_id is not None:
            tenants = [routes.tenant_id]
        elif lane.needs_fair_sharing:
            now = self.node.clock.now()
            tenants, last_tenant = await self.node.store.run_autocommit(
                queue_limits.next_tenants, lane, last_tenant, limit, now
            )
        if len(self._last_served) > 10_000:
            self._last_served.clear()
        self._last_served[key] = self._claim_count, last_tenant
        return tenants

    async def cache_revisions(self, attempts: Sequence[Attempt]) -> None:
        """Load the schedule revisions of these jobs that are not cached yet."""
        cache = self.node.revision_cache
        unknown: set[tuple[str, int]] = set()
        for attempt in attempts:
            if attempt.schedule_id is not None and attempt.revision is not None:
                key = attempt.schedule_id, attempt.revision
                if key not in cache:
                    unknown.add(key)
        if unknown:
            if len(cache) > 100_000:
                cache.clear()
            try:
                rows = await self.node.store.run(queries.find_revisions, unknown)
                cache.update({key: CachedRevision(*row) for key, row in rows.items()})
            except Exception as error:  # the jobs are claimed, so they run anyway, without `upcoming`
                is_unexpected = not isinstance(error, StoreUnreachable)
                log.warning("could not load the schedules of %d jobs", len(attempts), exc_info=is_unexpected)
