"""The heartbeat of a node: measure the clock offset, renew leases, recover attempts of dead nodes.

A lease is a counter on the attempt. Its owner increments it, and an observer measures by its own monotonic clock how
long the counter has not changed. So no wall clock step can end or prolong a lease.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from math import inf

from timebell.engine.completer import Completer
from timebell.engine.node import Node
from timebell.engine.running_attempt import AttemptEvent
from timebell.model import decide
from timebell.model.attempts import finalize_completion
from timebell.model.job import Attempt, Completion, Hold, JobState
from timebell.model.payload import decode
from timebell.model.repair_report import RepairReport
from timebell.store.cluster import nodes
from timebell.store.jobs import claim, complete, unhandled_topics
from timebell.store.schedules import deployments
from timebell.store.tenancy import monthly_quota, tenant_limits

log = logging.getLogger("timebell.heartbeat")

CLOCK_OFFSET_WARNING_SECONDS = 0.5  # clock offsets above this are logged
EXPIRE_BATCH_SIZE = 500  # overdue dispatched attempts per statement
LOCKED_ROW_RETRY_SECONDS = 0.5  # pause before locked rows are tried again
STOP_TIMEOUT_SECONDS = 10.0  # time for an attempt to stop under overlap `cancel_previous`, then it is fenced


class Heartbeat:
    """The heartbeat service; each `step` is one heartbeat."""

    def __init__(self, node: Node, completer: Completer, node_record: nodes.Node) -> None:
        self.node = node
        self.completer = completer
        self.node_record = node_record
        self._last_heartbeats: dict[tuple[str, int], tuple[int, float]] = {}
        self._stop_requested_at: dict[tuple[str, int], float] = {}
        self._next_lease_expiry = inf  # monotonic time of the next lease expiry of another node
        self._rows_locked = False  # whether this heartbeat skipped locked rows

    async def start(self) -> None:
        """Prepare before the first claim: measure the clock, register the node, recover orphaned attempts."""
        node = self.node
        await self._measure_clock()
        if abs(offset := node.clock.offset) > CLOCK_OFFSET_WARNING_SECONDS:
            log.warning(
                "this node's clock is %.1f s %s the database's clock, which Timebell follows: check NTP on both hosts",
                abs(offset), "behind" if offset > 0 else "ahead of",
            )  # fmt: skip
        if node.deployment is not None:
            await node.store.run(deployments.register_deployment, node.deployment, node.clock.now())
        await node.store.run(nodes.announce, self.node_record)
        await self._warn_about_newer_tzdata()
        await node.store.run(unhandled_topics.release_handled, self.node_record.routes)
        node.limited_tenants = await node.store.run(tenant_limits.list_limited_tenants)
        node.metered_tenants = await node.store.run(monthly_quota.list_metered_tenants)
        if not node.store.multi_node:  # SQLite allows one engine, so every running attempt is orphaned
            rescued = await self._recover_abandoned(list(await node.store.run(claim.list_running_attempts)))
            node.repair_report += RepairReport({"lease": rescued})

    async def _warn_about_newer_tzdata(self) -> None:
        own_version = self.node_record.tzdata
        newer = [other for other in await self.node.store.run(nodes.list_nodes) if other.tzdata > own_version]
        if newer:
            log.warning(
                "this node has zone data %s, but %s has %s: upgrade the tzdata package of this node",
                own_version, newer[0].name, newer[0].tzdata,
            )  # fmt: skip

    async def step(self) -> datetime | None:
        """Run one heartbeat; return when the next one is due."""
        node = self.node
        self._rows_locked = False
        self._stop_expired()
        await self._measure_clock()
        await self._renew_leases()
        # Early, because the following steps may wait for locks of stalled sessions.
        if terminated := await node.store.run_autocommit(nodes.terminate_stalled_sessions):
            log.warning("terminated database sessions that stalled in the middle of a statement: %s", terminated)
        self.node_record = self._next_node_record()
        if await node.store.run(nodes.announce, self.node_record) and not node.stopping:
            log.info("drain of this node was requested")
            node.stopping = True
            node.drain_requested.set()
        node.receives_notifications = await node.store.listen()
        repairs = await self._watch_leases()
        # Not in one line with the await: += would then read the report first and lose concurrent additions.
        node.repair_report += repairs
        node.limited_tenants = await node.store.run(tenant_limits.list_limited_tenants)
        node.metered_tenants = await node.store.run(monthly_quota.list_metered_tenants)
        # The leader is a separate service, so that its waits cannot delay the renewal and supervision of leases.
        node.wakeups.leader.wake()
        if node.deployment is not None and node.store.multi_node:
            node.wakeups.definitions.wake()
        node.wakeups.worker.wake()  # see Node.next_poll_at
        node.wakeups.planner.wake()
        # At least 1 ms: a shorter pause rounds to 0 us, and virtual time would never reach the expiry.
        pause = min(node.options.heartbeat, max(0.001, self._next_lease_expiry - node.clock.monotonic()))
        if self._rows_locked:
            pause = min(pause, LOCKED_ROW_RETRY_SECONDS)
        if self._stop_requested_at:
            pause = min(
                pause, max(0.0, min(self._stop_requested_at.values()) + STOP_TIMEOUT_SECONDS - node.clock.monotonic())
            )
        return node.clock.now() + timedelta(seconds=pause)

    def _next_node_record(self) -> nodes.Node:
        record, node = self.node_record, self.node
        return nodes.Node(
            record.id, record.name, record.version, record.tzdata, record.routes, record.heartbeat + 1,
            record.started_at, node.clock.now(),
            slots=node.options.slots, running=len(node.running_attempts),
            clock_ahead=round(-1000 * node.clock.offset), deployment=record.deployment,
            secret_keys=record.secret_keys,
        )  # fmt: skip

    async def _measure_clock(self) -> None:
        clock = self.node.clock
        sent_at = clock.monotonic()
        reading = await self.node.store.read_clock()
        step = clock.discipline(reading, sent_at, clock.monotonic())
        if step is not None:
            self.node.counters.clock_steps += 1
            log.warning("the database's clock stepped by %.3f s; due times follow it", step.seconds)

    def _stop_expired(self) -> None:
        """Stop attempts whose lease was not renewed in time."""
        now = self.node.clock.monotonic()
        for running in list(self.node.running_attempts.values()):
            if running.lease_until <= now:
                self._stop_lost(running.attempt.id)

    def _stop_lost(self, job_id: str) -> None:
        running = self.node.running_attempts.get(job_id)
        if running is not None and running.interrupt(AttemptEvent.LOSE_LEASE):
            log.warning("lost the lease of job %s; stopping its attempt %d", job_id, running.attempt.number)

    async def _renew_leases(self) -> None:
        node = self.node
        clock = node.clock
        renew_before = clock.monotonic() + node.options.lease - node.options.heartbeat * 0.5
        aging = [
            (running.attempt.id, running.attempt.number)
            for running in node.running_attempts.values()
            if running.lease_until < renew_before and running.needs_lease
        ]
        if not aging:
            return
        sent_at = clock.monotonic()
        renewed = await node.store.run_autocommit(complete.renew_leases, aging, skip_locked=self.completer.skip_locked)
        unrenewed = [(id_, number, JobState.RUNNING) for id_, number in aging if id_ not in renewed]
        locked = (
            await node.store.run_autocommit(complete.find_unchanged, unrenewed)
            if unrenewed and self.completer.skip_locked
            else {}
        )
        self._rows_locked = self._rows_locked or bool(locked)
        for id_, number in aging:
            running = node.running_attempts.get(id_)
            if running is None or running.attempt.number != number:  # completed meanwhile
                continue
            if id_ in renewed:
                running.lease_until = sent_at + node.options.lease
            elif id_ not in locked and not running.is_reportable:  # after a report, the delivery may end in its lease
                self._stop_lost(id_)

    async def check_now(self) -> RepairReport:
        """Check all leases and release unhandled jobs that this node handles; return the report."""
        report = await self._watch_leases()
        released = await self.node.store.run(unhandled_topics.release_handled, self.node_record.routes)
        return report + RepairReport({"unhandled": released})

    async def _watch_leases(self) -> RepairReport:
        """Recover attempts whose counter has not changed for a whole lease, and stop attempts on request."""
        node = self.node
        now = node.clock.monotonic()
        running = await node.store.run_autocommit(claim.list_running_attempts)
        # A counter is dated by the end of the read that first returned it and judged by the start of a later one:
        # time that passes during a read, in which this node may be frozen, ages no lease.
        read_at = node.clock.monotonic()
        await self._stop_requested({key: cause for key, (_, cause) in running.items() if cause is not None}, now)
        own = {(tracked.attempt.id, tracked.attempt.number) for tracked in node.running_attempts.values()}
        observed: dict[tuple[str, int], tuple[int, float]] = {}
        dead = []
        for key, (heartbeat, _) in running.items():
            if key in own:
                continue
            last = self._last_heartbeats.get(key)
            observed[key] = last if last is not None and last[0] == heartbeat else (heartbeat, read_at)
            if now - observed[key][1] >= node.options.lease:
                dead.append(key)
        self._last_heartbeats = observed
        expiries = [since + node.options.lease for _, since in observed.values()]
        self._next_lease_expiry = min((expiry for expiry in expiries if expiry > now), default=inf)
        await self._expire_dispatched()
        rescued = await self._recover_abandoned(dead)
        return RepairReport({"lease": rescued}, {"leased": len(observed) - len(dead)})

    async def _stop_requested(self, requested: dict[tuple[str, int], Hold], now: float) -> None:
        """Stop attempts of this node on request; after a timeout, complete unresponsive ones of any node.

        A plain function in a thread cannot be interrupted: it reads `event.cancelled`.
        """
        node = self.node
        self._stop_requested_at = {key: self._stop_requested_at.get(key, now) for key in requested}
        unresponsive = [key for key, since in self._stop_requested_at.items() if now - since >= STOP_TIMEOUT_SECONDS]
        for (id_, number), cause in requested.items():
            running = node.running_attempts.get(id_)
            if running is not None and running.attempt.number == number:
                running.stop_cause = cause
                if node.can_cancel(running.attempt):
                    running.interrupt(AttemptEvent.STOP)
        attempts = await node.store.run(claim.load_live_attempts, unresponsive) if unresponsive else []
        at = node.clock.now()
        await self.completer.write([
            finalize_completion(attempt, decide.complete_stopped(*key, at, requested[key]), node.id)
            for attempt, _ in attempts
            for key in [(attempt.id, attempt.number)]
        ])  # fmt: skip

    async def _expire_dispatched(self) -> None:
        """Fail dispatched attempts that external workers have not reported or renewed in time."""
        node = self.node
        now = node.clock.now()
        while True:
            overdue = await node.store.run_autocommit(claim.list_overdue_dispatched, EXPIRE_BATCH_SIZE, now)
            completed = []
            for attempt in overdue:
                retry = node.retry_policy_for(attempt, decode(attempt.retry))
                timeout = node.timeout_for(attempt)
                code, error = "TIMEOUT", f"No report arrived within the timeout of {timeout:g} s."
                is_lost = now < attempt.started_at + timedelta(seconds=timeout)  # only remote workers have such leases
                if is_lost:
                    code, error = "LEASE_LOST", "The worker that ran this attempt stopped renewing its lease."
                completion = decide.complete_after_failure(
                    attempt.id, attempt.number, attempt.attempts_used, retry, now, code, error
                )  # fmt: skip
                if is_lost and completion.state is JobState.PENDING:
                    completion.run_at = now
                completed.append((attempt, finalize_completion(attempt, completion, node.id)))
            await self._write_completions(completed)
            if len(overdue) < EXPIRE_BATCH_SIZE or self._rows_locked:
                return

    async def _recover_abandoned(self, keys: list[tuple[str, int]]) -> int:
        """Retry abandoned attempts immediately, or fail those without attempts left; return their number."""
        if not keys:
            return 0
        node = self.node
        now = node.clock.now()
        completed = []
        for attempt, node_id in await node.store.run(claim.load_live_attempts, keys):
            retry = node.retry_policy_for(attempt, decode(attempt.retry))
            completion = decide.complete_after_failure(
                attempt.id, attempt.number, attempt.attempts_used, retry, now, "LEASE_LOST",
                "The node that ran this attempt stopped renewing its lease.",
            )  # fmt: skip
            if completion.state is JobState.PENDING:
                completion.run_at = now
            completed.append((attempt, finalize_completion(attempt, completion, node_id, node.id)))
        rescued = await self._write_completions(completed)
        node.counters.rescued += rescued
        if rescued:
            log.warning("recovered %d attempts of unresponsive nodes", rescued)
        return rescued

    async def _write_completions(self, completed: list[tuple[Attempt, Completion]]) -> int:
        """Write completions of other nodes' attempts; return their number. Locked rows are found again later."""
        locked = {
            completion.id for completion in await self.completer.write([completion for _, completion in completed])
        }
        for attempt, completion in completed:
            if completion.id not in locked:
                self.node.counters.record_completion(attempt.topic, completion)
        self._rows_locked = self._rows_locked or bool(locked)
        return len(completed) - len(locked)
