"""The worker: sleep until the next job is due, claim due jobs, start them, scan again.

A claimed job starts immediately: a node claims only as many jobs as it has free slots, and only topics and targets that
it handles.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from timebell.engine.completer import Completer
from timebell.engine.delivery import StartedCall
from timebell.engine.fast_path import FastPath
from timebell.engine.lane_claims import LaneClaims
from timebell.engine.node import Node
from timebell.engine.progress import ProgressWriter
from timebell.engine.queue_scanner import QueueScanner
from timebell.engine.runner import Runner
from timebell.engine.running_attempt import RunningAttempt
from timebell.engine.time_slice import TimeSlice
from timebell.engine.upcoming_claims import UpcomingClaims
from timebell.model.job import Attempt, Completion
from timebell.model.routes import Routes, named_target_route
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import start_on_insert
from timebell.store.tenancy import tenant_limits
from timebell.store.tenancy.tenant_limits import AdmittedClaim
from timebell.targets.process_pool import available_cores

log = logging.getLogger("timebell.worker")

REPEAT_CLAIM_SECONDS = 0.05  # how long to keep claiming from a backlogged lane before a new scan
# Pause when all due jobs are locked by other nodes; doubled up to the maximum.
MIN_CONFLICT_PAUSE_SECONDS, MAX_CONFLICT_PAUSE_SECONDS = 0.0005, 0.25
MAX_ATTEMPTS_WITHOUT_SLOT = 2000  # of a pool, that wait for external data before their delivery


@dataclass(slots=True)
class SlotPool:
    """Slots for one kind of attempt: on the event loop, in threads, or in processes.

    A claim takes at most `batch_size` jobs.
    """

    routes: Routes
    slots: int
    batch_size: int
    free_slots: int = field(init=False)
    """Negative if there are fewer slots than before, and all of them are occupied."""
    attempts_without_slot: int = 0
    """Attempts that gave their slot to others, because they wait for external data."""
    slot_waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    """Attempts that have received their external data and wait for a free slot again."""

    def __post_init__(self) -> None:
        self.free_slots = self.slots

    @property
    def max_claim(self) -> int:
        """Maximum jobs per claim: half of the slots, so that some jobs run while the next ones are claimed."""
        return min(-(-self.slots // 2), self.batch_size)


class ClaimResult(NamedTuple):
    """The attempts started by one claim, the number of jobs it had to return, and the lease end (monotonic seconds)."""

    attempts: Sequence[Attempt]
    returned: int = 0
    lease_until: float = 0.0


class Worker:
    """The worker service; each `step` is one scan of the store and the resulting claims."""

    def __init__(self, node: Node, completer: Completer) -> None:
        self.node = node
        self.runner = Runner(node)
        self.time_slice = TimeSlice(node.clock.monotonic, completer.wait_for_write)
        self.fast_path = FastPath(node, self.runner.deliverer, self.runner.completions, self.time_slice)
        self.completer = completer
        target_routes = Routes(
            frozenset(f"@{kind}" for kind in node.targets if kind != "handler")
            | frozenset(named_target_route(kind) for kind in node.named_targets)
        )
        self.pools = [
            SlotPool(routes, slots, node.options.batch_size)
            for routes, slots in (
                (node.handlers.routes("loop") | target_routes, node.options.slots),
                (node.handlers.routes("thread"), node.options.threads),
                (node.handlers.routes("process"), available_cores()),
            )
        ]
        self._active_pools = [pool for pool in self.pools if pool.routes]
        self.tasks: set[asyncio.Task[None]] = set()
        self.claiming = False
        self.lane_claims = LaneClaims(node)
        self.upcoming_claims = UpcomingClaims()
        self.scanner = QueueScanner(node)
        self.progress_writer = ProgressWriter(node)
        self.reserved_slots = 0
        """Slots reserved for jobs that the planner may start on insert."""
        self._backlogged = True
        self._conflict_pause = MIN_CONFLICT_PAUSE_SECONDS

    @property
    def routes(self) -> Routes:
        """All routes this node handles."""
        return self.pools[0].routes | self.pools[1].routes | self.pools[2].routes

    @property
    def is_starting(self) -> bool:
        """True if jobs may be starting that are not in `node.running_attempts` yet."""
        return self.claiming or self.reserved_slots > 0

    @contextmanager
    def reserve_slots(self) -> Iterator[start_on_insert.SlotReservation]:
        """Reserve slots for start-on-insert while the block runs.

        Reserves at most half of the free slots, because other jobs may come due meanwhile and the planner may have to
        wait for a row lock. Reserves none while due jobs wait for a slot, or when tenant limits make a claim necessary.
        """
        pool, node = self.pools[0], self.node
        unavailable = self._backlogged or self.claiming or node.limited_tenants or not pool.routes
        reserved = 0 if unavailable else pool.free_slots // 2
        pool.free_slots -= reserved
        self.reserved_slots += reserved
        try:
            yield start_on_insert.SlotReservation(node.id, pool.routes, reserved)
        finally:
            self.reserved_slots -= reserved
            self._free_slots(reserved, pool)

    async def step(self) -> datetime | None:
        """Claim due jobs up to the free slots. Returns when to scan again (None: on the next wake-up)."""
        node = self.node
        for pool, calls in zip(self.pools[1:], (node.handlers.threads, node.handlers.processes), strict=True):
            if calls is not None and pool.routes:
                self._resize(pool, calls.capacity())
        free_pools = [pool for pool in self._active_pools if pool.free_slots > 0]
        if node.stopping or not free_pools:
            self._backlogged = True
            return None
        routes = free_pools[0].routes if len(free_pools) == 1 else self.routes
        scan_needed = node.wakeups.worker.was_woken or bool(node.limited_tenants)
        if not scan_needed and (upcoming := self.upcoming_claims.pop_due(routes, node.clock.now())):
            return await self._claim_upcoming(upcoming, free_pools)
        self.upcoming_claims.clear()
        if node.limited_tenants:
            await node.store.run(tenant_limits.release_held, node.clock.now())
        scanned_at = node.clock.now()
        lanes = await self.scanner.scan(routes, scanned_at)
        now = node.clock.now()
        due, later = self.lane_claims.split_due(lanes, now)
        claimed, all_claimed = await self._claim_all(due, free_pools)
        all_claimed = all_claimed and not node.store.multi_node  # other nodes claim concurrently: scan once more
        if claimed and not all_claimed:
            return now
        rescan_at = node.next_poll_at(now)
        if due and not claimed:
            later.append(node.clock.now() + timedelta(seconds=self._conflict_pause))
            self._conflict_pause = min(self._conflict_pause * 2, MAX_CONFLICT_PAUSE_SECONDS)
            node.counters.claim_conflicts += any(pool.free_slots for pool in free_pools)
        elif not node.limited_tenants:  # nothing is left that could start now
            await self.upcoming_claims.refresh(node.store, lanes, routes, scanned_at, rescan_at)
            return self.upcoming_claims.next_at
        if node.limited_tenants:  # held jobs may start when their tenant's rate allows
            later += [
                now + timedelta(seconds=1),
                *(lane.next_future_due for lane in due if lane.next_future_due is not None),
            ]
        return min([*later, rescan_at] if rescan_at else later, default=None)

    async def _claim_upcoming(self, upcoming: list[job_claim.QueueLane], pools: list[SlotPool]) -> datetime | None:
        """Claim cached upcoming jobs, one lane entry per due job, without a scan. Returns when to continue."""
        lanes = list({id(lane): lane for lane in upcoming}.values())
        try:
            claimed, all_claimed = await self._claim_all(self.lane_claims.sort(lanes), pools, from_cache=True)
        except BaseException:
            self.upcoming_claims.clear()  # the popped entries are not cached anymore
            raise
        if claimed < len(upcoming) or not all_claimed or not self.upcoming_claims.covers(lanes):
            self.upcoming_claims.clear()
            return self.node.clock.now()
        return self.upcoming_claims.next_at

    async def _claim_all(
        self, due: list[job_claim.QueueLane], pools: list[SlotPool], *, from_cache: bool = False
    ) -> tuple[int, bool]:
        """Claim from the due lanes in order, up to the free slots.

        Returns the number of claimed jobs, and whether nothing claimable is left in these lanes.
        """
        claimed, backlogged = 0, False
        repeat_until = self.node.clock.monotonic() + REPEAT_CLAIM_SECONDS
        self.claiming = True
        try:
            for position, lane in enumerate(due, 1):
                sharing_lanes = (
                    1 if position == len(due) else 1 + sum(other.priority == lane.priority for other in due[position:])
                )
                is_only_lane = sum(other.priority == lane.priority for other in due) == 1
                for pool in pools:
                    count, has_more = await self._claim_lane(
                        lane, pool, sharing_lanes, repeat_until if is_only_lane else 0.0, from_cache=from_cache
                    )
                    claimed += count
                    backlogged = backlogged or has_more or lane.has_limits or lane.needs_fair_sharing
        finally:
            self.claiming, self._backlogged = False, backlogged
        if claimed:
            self.node.counters.claim_sizes.observe(claimed)
            self._conflict_pause = MIN_CONFLICT_PAUSE_SECONDS
        return claimed, not backlogged

    async def _claim_lane(
        self, lane: job_claim.QueueLane, pool: SlotPool, sharing_lanes: int, repeat_until: float, *, from_cache: bool
    ) -> tuple[int, bool]:
        """Claim and start jobs of one lane.

        `sharing_lanes` is the number of remaining lanes of this priority; each gets an equal part of the free slots.
        While the lane has more due jobs and `repeat_until` (monotonic seconds) is not reached, the next batch is
        claimed while the previous one starts. Returns the number of claimed jobs, and whether more may be due.
        """
        node, total = self.node, 0
        if lane.has_limits or lane.needs_fair_sharing or node.limited_tenants:
            repeat_until = 0.0
        limit = min(-(-pool.free_slots // sharing_lanes), pool.max_claim)
        result = await self._claim_batch(lane, pool, limit, recheck_queue=from_cache)
        while True:
            count = len(result.attempts) + result.returned
            total += count
            pool.free_slots -= len(result.attempts)
            if count < limit or min(count, pool.free_slots) < 1 or node.clock.monotonic() >= repeat_until:
                self._start_claimed(result, pool)
                return total, count >= limit
            limit = min(pool.free_slots, pool.max_claim)
            next_claim = asyncio.create_task(self._claim_batch(lane, pool, limit, recheck_queue=True))
            # Start the previous batch after the claim statement was sent, while the store processes it.
            asyncio.get_running_loop().call_soon(self._start_claimed, result, pool)
            result = await next_claim

    async def _claim_batch(
        self, lane: job_claim.QueueLane, pool: SlotPool, limit: int, *, recheck_queue: bool
    ) -> ClaimResult:
        """Claim up to `limit` jobs of a lane.

        With `recheck_queue`, claim none if its queue was paused or limited since the scan.
        """
        node = self.node
        if limit < 1 or node.stopping:
            return ClaimResult([])
        store, lane_claims = node.store, self.lane_claims
        claim = await lane_claims.choose(lane, pool.routes, node.id, limit, recheck_queue=recheck_queue)
        sent_at = node.clock.monotonic()
        run = store.run_autocommit if claim.single else store.run
        attempts, returned = AdmittedClaim.of(await run(claim.operation, *claim.args, **claim.kwargs))
        await lane_claims.cache_revisions(attempts)
        return ClaimResult(attempts, returned, sent_at + node.options.lease)

    def start_inserted(self, attempts: Sequence[Attempt], requested_at: float) -> None:
        """Start jobs inserted as running. Their leases count from `requested_at`, taken before the insert was sent."""
        pool = self.pools[0]
        pool.free_slots -= len(attempts)
        self._start_claimed(ClaimResult(attempts, 0, requested_at + self.node.options.lease), pool)

    def _start_claimed(self, claimed: ClaimResult, pool: SlotPool) -> None:
        """Register claimed attempts on the node and create their tasks."""
        node = self.node
        started = [
            RunningAttempt(
                attempt, claimed.lease_until, self.runner.transactional_completion, self.progress_writer.report
            )
            for attempt in claimed.attempts
        ]
        for running in started:
            node.running_attempts[running.attempt.id] = running
        self._create_tasks(started, pool)
        node.counters.started += len(started)

    def _create_tasks(self, started: Iterable[RunningAttempt], pool: SlotPool) -> None:
        """Create tasks for attempts: one each, or a shared one for adjacent attempts likely to finish in one step."""
        group: deque[RunningAttempt] = deque()
        for running in started:
            running.fast_handler = self.fast_path.handler_for(running.attempt)
            if running.fast_handler is not None and running.fast_handler.finishes_immediately:
                group.append(running)
                continue
            if group:
                self._start_task(self._run_group(group, pool))
                group = deque()
            self._start_task(self._run_alone(running, pool))
        if group:
            self._start_task(self._run_group(group, pool))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        if not task.done():  # an eager task may be
            self.tasks.add(task)

    async def _run_alone(self, running: RunningAttempt, pool: SlotPool) -> None:
        """Run an attempt that does not share its task, and submit its completion."""
        handler = running.fast_handler
        try:
            try:
                await self.time_slice.wait()
                result = None if handler is None else await self.fast_path.run_alone(running, handler)
            except BaseException:
                self._abandon(running, pool)
                raise
            if isinstance(result, Completion):
                self._free_slots(1, pool)
                self.completer.submit(result)
            else:
                await self._run(running, result, pool)
        finally:
            if (task := asyncio.current_task()) is not None:
                self.tasks.discard(task)

    async def _run_group(self, group: deque[RunningAttempt], pool: SlotPool) -> None:
        """Run attempts one after another and submit their completions; a slot is freed as soon as its work ends.

        An attempt that does not finish in its first step keeps this task; the attempts after it get other tasks. So do
        those that are left at the end of the time slice.
        """
        task, clean_context = asyncio.current_task(), copy_context()
        completions: list[Completion] = []
        try:
            try:
                await self.time_slice.wait()
            except BaseException:
                for running in group:
                    self._abandon(running, pool)
                raise
            try:
                unfinished = self.fast_path.run(group, clean_context, completions)
            except BaseException:
                self._abandon(group.popleft(), pool)
                raise
            finally:
                if completions:
                    self._free_slots(len(completions), pool)
                    self.completer.submit(*completions)
                if group:
                    clean_context.run(self._create_tasks, group, pool)
            if unfinished is not None:
                await self._run(*unfinished, pool)
        finally:
            if task is not None:
                self.tasks.discard(task)

    async def _run(self, running: RunningAttempt, call: StartedCall | None, pool: SlotPool) -> None:
        """Run one attempt, or the rest of its call, on the full path."""
        try:
            completion = await self.runner.run(running, call, lambda: self._without_slot(pool))
        except BaseException:
            self._abandon(running, pool)
            raise
        self._free_slots(1, pool)
        if completion is None:
            self.node.untrack(running.attempt.id, running.attempt.number)
        else:
            self.completer.submit(completion)

    def _abandon(self, running: RunningAttempt, pool: SlotPool) -> None:
        self.node.untrack(running.attempt.id, running.attempt.number)  # its lease expires, then it is recovered
        self._free_slots(1, pool)

    @asynccontextmanager
    async def _without_slot(self, pool: SlotPool) -> AsyncIterator[None]:
        """Give the slot of an attempt to others during the block, so that waiting for a slow source delays no one else.

        After the block, the attempt waits for a slot again. After an error in the block, the attempt only has to be
        completed, so it takes a slot immediately, even if none is free.
        """
        if pool.attempts_without_slot >= MAX_ATTEMPTS_WITHOUT_SLOT:
            yield
            return
        pool.attempts_without_slot += 1
        self._free_slots(1, pool)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            yield
            if pool.free_slots < 1:
                pool.slot_waiters.append(turn)
                await turn
        finally:
            pool.attempts_without_slot -= 1
            if not turn.done() or turn.cancelled():
                pool.free_slots -= 1

    def _resize(self, pool: SlotPool, slots: int) -> None:
        """Change the number of slots of a pool."""
        added = slots - pool.slots
        pool.slots = slots
        self._free_slots(added, pool)

    def _free_slots(self, count: int, pool: SlotPool) -> None:
        """Return slots to the pool, first to attempts that wait for one; wake the worker if the pool was exhausted."""
        pool.free_slots += count
        while pool.free_slots > 0 and pool.slot_waiters:
            turn = pool.slot_waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                pool.free_slots -= 1
        if 0 < pool.free_slots <= count:  # it was exhausted, so the last scan ignored this pool
            self.node.wakeups.worker.wake()
