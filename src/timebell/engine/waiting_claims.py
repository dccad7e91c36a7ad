"""Claims of remote workers that wait for due jobs.

One task serves all claims that wait on this node. It scans the lanes once for the workers that handle the same jobs,
claims for them in the order of their requests, and sleeps until the next job is due or a commit wakes it. It runs only
while a claim waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.alarm import Alarm
from timebell.engine.lane_claims import LaneClaims
from timebell.engine.node import Node
from timebell.errors import StoreError
from timebell.model.job import Attempt
from timebell.model.routes import Routes
from timebell.store.cluster import workers
from timebell.store.cluster.workers import RemoteWorker
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import remote_claims
from timebell.store.jobs.claim import QueueLane
from timebell.store.jobs.remote_claims import RemoteClaim
from timebell.store.tenancy import monthly_quota, tenant_limits
from timebell.store.transaction import JOBS

log = logging.getLogger("timebell.remote")

# Pause when due jobs could not be claimed; doubled up to the maximum.
MIN_CONFLICT_PAUSE_SECONDS, MAX_CONFLICT_PAUSE_SECONDS = 0.0005, 0.25


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A claim of up to `limit` jobs. `lease` and `wait` are in seconds."""

    worker: RemoteWorker
    claim_id: str | None
    limit: int
    lease: float
    wait: float


@dataclass(slots=True, eq=False)
class WaitingClaim:
    """A claim that waits for due jobs until `until`."""

    request: ClaimRequest
    until: datetime
    answer: asyncio.Future[RemoteClaim] = field(default_factory=asyncio.Future)


def lease_end(node: Node, attempt: Attempt, renewed_at: datetime, lease: float) -> datetime:
    """Return the end of a lease that was taken or renewed at an instant: at most the end of the attempt's timeout."""
    timeout = timedelta(seconds=node.timeout_for(attempt))
    return min(renewed_at + timedelta(seconds=lease), attempt.started_at + timeout)


class WaitingClaims:
    """The claims that wait on this node.

    `standalone`: no engine runs in this process, so this class refreshes the state that a heartbeat would refresh.
    """

    def __init__(self, node: Node, lane_claims: LaneClaims, *, standalone: bool) -> None:
        self.node, self.lane_claims, self.standalone = node, lane_claims, standalone
        self._waiting: list[WaitingClaim] = []
        self._task: asyncio.Task[None] | None = None
        self._alarm = Alarm(node.clock)
        self._conflict_pause = MIN_CONFLICT_PAUSE_SECONDS
        self._maintained_at: float | None = None

    async def wait(
        self, request: ClaimRequest, disconnected: Callable[[], Coroutine[Any, Any, None]] | None
    ) -> RemoteClaim:
        """Wait until jobs were claimed for a worker, its time is up, or `disconnected` returns. Raises StoreError."""
        waiting = WaitingClaim(request, self.node.clock.now() + timedelta(seconds=request.wait))
        self._waiting.append(waiting)
        self._wake()
        watcher = None if disconnected is None else asyncio.create_task(disconnected())
        ends: set[asyncio.Future[Any]] = {waiting.answer} if watcher is None else {waiting.answer, watcher}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return waiting.answer.result() if waiting.answer.done() else RemoteClaim([])
        finally:
            if watcher is not None:
                watcher.cancel()
            with suppress(ValueError):
                self._waiting.remove(waiting)

    def stop(self) -> None:
        """Answer all waiting claims, because this process stops."""
        for waiting in self._waiting:
            _answer(waiting, RemoteClaim([]))
        self._waiting.clear()
        self._alarm.wake()

    async def close(self) -> None:
        """Stop, and release all resources. A claim in progress is not interrupted: its jobs would run nowhere."""
        self.stop()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._alarm.close()

    def _wake(self) -> None:
        """Start the task that serves waiting claims, or wake it."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), name="timebell-remote-workers")
        self._alarm.wake()

    async def _serve(self) -> None:
        """Serve the waiting claims until none is left."""
        node = self.node
        with node.store.subscribers.subscribed(self._on_commit):
            while self._waiting:
                try:
                    next_at = await self._step()
                except StoreError as error:  # the workers retry, possibly on a node that reaches the database
                    self._fail(error)
                    return
                except Exception as error:
                    log.exception("could not serve the claims of remote workers")
                    self._fail(error)
                    return
                if self._waiting:
                    await self._alarm.wait(next_at)

    def _on_commit(self, subjects: frozenset[str]) -> None:
        if JOBS in subjects:
            self._alarm.wake_threadsafe()

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        self._waiting.clear()

    async def _step(self) -> datetime:
        """Claim for the waiting workers, answer the claims that have waited long enough; return when to continue."""
        node = self.node
        await self._maintain()
        if node.limited_tenants:
            await node.store.run(tenant_limits.release_held, node.clock.now())
        pause = node.options.heartbeat if node.receives_notifications else node.options.poll
        next_at = [node.clock.now() + timedelta(seconds=pause)]
        for waiting in _group(self._waiting):
            next_at.append(await self._serve_group(waiting))
        now = node.clock.now()
        for each in self._waiting:
            if each.until <= now or node.stopping:
                _answer(each, RemoteClaim([]))
        self._waiting = [each for each in self._waiting if not each.answer.done()]
        return min([*next_at, *(each.until for each in self._waiting)])

    async def _serve_group(self, waiting: list[WaitingClaim]) -> datetime:
        """Claim for workers that handle the same jobs, first come first served; return when to continue."""
        node, worker = self.node, waiting[0].request.worker
        now = node.clock.now()
        lanes = await node.store.run_autocommit(job_claim.list_lanes, worker.routes, now)
        if worker.queues is not None:
            lanes = [lane for lane in lanes if lane.queue in worker.queues]
        due, later = self.lane_claims.split_due(lanes, node.clock.now())
        claimed = 0
        for lane in due:
            while waiting := [each for each in waiting if not each.answer.done()]:
                count = await self._claim(waiting[0], lane)
                claimed += count
                if not count:
                    break
        if claimed:
            self._conflict_pause = MIN_CONFLICT_PAUSE_SECONDS
            return now  # more may be due
        if due:
            later.append(node.clock.now() + timedelta(seconds=self._conflict_pause))
            self._conflict_pause = min(self._conflict_pause * 2, MAX_CONFLICT_PAUSE_SECONDS)
        if node.limited_tenants:  # held jobs may start when their tenant's rate allows
            later.append(now + timedelta(seconds=1))
        return min(later, default=now + timedelta(seconds=node.options.heartbeat))

    async def _claim(self, waiting: WaitingClaim, lane: QueueLane) -> int:
        """Claim jobs of one lane for a waiting claim, and answer it; return the number of jobs it took."""
        node, request = self.node, waiting.request
        worker = request.worker
        claim = await self.lane_claims.choose(lane, worker.routes, worker.id, request.limit, recheck_queue=False)
        claimed = await node.store.run(
            remote_claims.claim_for_worker, worker.id, request.claim_id,
            lambda attempt: lease_end(node, attempt, attempt.started_at, request.lease),
            claim.operation, claim.args, claim.kwargs,
        )  # fmt: skip
        if claimed.attempts or claimed.is_repeated:
            _answer(waiting, claimed)
        return len(claimed.attempts) + claimed.returned

    async def _maintain(self) -> None:
        """Once per heartbeat interval, record that the waiting workers are alive, and refresh the state for claims."""
        node, now = self.node, self.node.clock.monotonic()
        if self._maintained_at is not None and now - self._maintained_at < node.options.heartbeat:
            return
        self._maintained_at = now
        ids = sorted({each.request.worker.id for each in self._waiting})
        draining = await node.store.run(workers.touch, ids, node.clock.now())
        for each in self._waiting:
            if each.request.worker.id in draining:
                _answer(each, RemoteClaim([]))
        if self.standalone:
            node.receives_notifications = await node.store.listen()
            node.limited_tenants = await node.store.run(tenant_limits.list_limited_tenants)
            node.metered_tenants = await node.store.run(monthly_quota.list_metered_tenants)


def _group(waiting: Iterable[WaitingClaim]) -> list[list[WaitingClaim]]:
    """Group claims of workers that handle the same jobs, so that one scan serves them all."""
    groups: dict[tuple[Routes, tuple[str, ...] | None], list[WaitingClaim]] = {}
    for each in waiting:
        groups.setdefault((each.request.worker.routes, each.request.worker.queues), []).append(each)
    return list(groups.values())


def _answer(waiting: WaitingClaim, claimed: RemoteClaim) -> None:
    if not waiting.answer.done():
        waiting.answer.set_result(claimed)
