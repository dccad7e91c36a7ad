"""The life cycle of a node: start the services, supervise them, drain, deregister."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from zlib import crc32

# This loads SQLAlchemy's ORM, which features and handlers may import later. While it is loaded, statements of other
# threads fail, because SQLAlchemy inspects their values with modules that are not complete yet.
import sqlalchemy.ext.asyncio  # noqa: F401

from timebell.alarm import Alarm
from timebell.engine.code_definitions import CodeDefinitions
from timebell.engine.completer import Completer
from timebell.engine.heartbeat import Heartbeat
from timebell.engine.history_check import check_history
from timebell.engine.leader import repair
from timebell.engine.leader.leader import Leader
from timebell.engine.node import Node
from timebell.engine.planner import Planner
from timebell.engine.remote_workers import RemoteWorkers
from timebell.engine.running_attempt import AttemptEvent
from timebell.engine.worker import Worker
from timebell.errors import StoreError
from timebell.model.repair_report import RepairReport
from timebell.store.cluster import nodes
from timebell.store.jobs import claim
from timebell.store.notifications import ARRIVALS_REQUEST
from timebell.store.schedules import schedules
from timebell.targets.process_pool import ProcessPool
from timebell.targets.thread_pool import ThreadPool
from timebell.tenancy.keys import fingerprints

log = logging.getLogger("timebell.engine")

PLANNER_DRAIN_SECONDS = 2.0  # how long a drain waits for a planner step
MIN_RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS = 0.1, 1.0  # between steps of a failing service


class Service:
    """The engine of one node: heartbeat, planner, worker, completer and the leader's services."""

    def __init__(self, node: Node, version: str, tzdata: str) -> None:
        self.node = node
        self.completer = Completer(node)
        self.worker = Worker(node, self.completer)
        self.planner = Planner(node, self.worker)
        self.leader = Leader(node)
        self.remote_workers = RemoteWorkers(node)
        now = node.clock.now()
        self.code_definitions = CodeDefinitions(node)
        deployment = None if node.deployment is None else node.deployment.id
        node_record = nodes.Node(
            node.id, node.options.name, version, tzdata, self.worker.routes, 0, now, now, deployment=deployment,
            secret_keys=fingerprints(node.secret_key),
        )  # fmt: skip
        self.heartbeat = Heartbeat(node, self.completer, node_record)
        self.failing_services: dict[str, StoreError] = {}
        self.started_at = node.clock.monotonic()
        self._alarms: dict[str, Alarm] = {}
        self._history_lock = asyncio.Lock()
        self.last_step_at: dict[str, float] = {}
        """When each service last finished a step (monotonic seconds)."""
        self.step_began_at: dict[str, float] = {}
        """When each service that is in a step began it (monotonic seconds)."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all services while the block runs, then drain and deregister. Raises StoreError if startup fails.

        Raises InvalidInput (INVALID_EXECUTOR) if a worker process would not find the function of a handler.
        """
        node = self.node
        node.handlers.threads = ThreadPool(node.options.threads, node.clock.monotonic)
        node.handlers.processes = ProcessPool(node.clock.monotonic, node.handlers.process_modules())
        node.handlers.monotonic = node.clock.monotonic
        await node.store.lock_engine()
        await self.heartbeat.start()
        await self._warn_about_secret_keys()
        await self.code_definitions.step()
        with node.store.subscribers.subscribed(self._on_commit):
            tasks = [
                asyncio.create_task(self._supervise(name, step, alarm), name=f"timebell-{name}")
                for name, step, alarm in (
                    ("heartbeat", self.heartbeat.step, node.wakeups.heartbeat),
                    ("planner", self.planner.step, node.wakeups.planner),
                    ("worker", self.worker.step, node.wakeups.worker),
                    ("scanner", self.worker.scanner.step, node.wakeups.scanner),
                    ("operations", self.leader.operations.step, node.wakeups.operations),
                    ("progress", self.worker.progress_writer.step, node.wakeups.progress),
                    ("definitions", self.code_definitions.step, node.wakeups.definitions),
                    ("reconciler", self.leader.broker_reconciler.step, node.wakeups.reconciler),
                    ("audit_export", self.leader.audit_export.step, node.wakeups.audit_export),
                    *((name, each.step, each.alarm) for name, each in self.leader.feature_services.items()),
                    ("leader", self.leader.step, node.wakeups.leader),
                )
            ]
            completer_task = asyncio.create_task(self._run_completer(), name="timebell-completer")
            try:
                yield
            finally:
                await self._drain()
                for task in (*tasks, completer_task):
                    task.cancel()
                await asyncio.gather(*tasks, completer_task, return_exceptions=True)
                for feature_service in self.leader.feature_services.values():
                    await feature_service.close()
                await self.worker.runner.pre_delivery_check.close()
                await self.remote_workers.close()
                await self._deregister()
                node.handlers.threads.shutdown()
                node.handlers.processes.shutdown()
                node.wakeups.close()

    def _on_commit(self, subjects: frozenset[str]) -> None:
        """Wake the loops of this node after a commit of this process or of another one."""
        self.node.wakeups.on_commit(subjects)
        if ARRIVALS_REQUEST in subjects and self.node.arrivals is not None:
            self.node.arrivals.mark_requested()

    async def wait_until_idle(self) -> None:
        """Wait until nothing is due, nothing runs and every completion is written."""
        node = self.node
        while True:
            # Read before the query: an attempt that starts or completes meanwhile may release other jobs.
            now, started = node.clock.now(), node.counters.started
            busy = bool(node.running_attempts) or self.worker.is_starting
            lanes = await node.store.run_autocommit(claim.list_lanes, self.worker.routes, now)
            next_fire_at = await node.store.run(schedules.find_next_fire_at)
            due = any(lane.next_due is not None and lane.next_due <= now for lane in lanes)
            busy = busy or bool(node.running_attempts) or self.worker.is_starting or node.counters.started != started
            if not due and not busy and (next_fire_at is None or next_fire_at > now):
                return
            alarm = Alarm(node.clock)
            await alarm.wait(now + timedelta(seconds=0.05))
            alarm.close()

    @property
    def repair_report(self) -> RepairReport:
        """Repairs by this node since it started, and the number of rows it checked."""
        return self.node.repair_report

    async def repair_now(self) -> RepairReport:
        """Run all repairs immediately that the node otherwise spreads over time, and return the report."""
        node = self.node
        report = await self.heartbeat.check_now()
        report += await repair.repair_all(node.store.run, node.clock.now(), node.options.retention)
        report += await self.leader.broker_reconciler.reconcile()
        repair.record_repairs(node, report)
        return report

    async def _warn_about_secret_keys(self) -> None:
        own = self.heartbeat.node_record
        for other in await self.node.store.run(nodes.list_nodes):
            if not other.shares_secret_key(own):
                log.warning(
                    "node %s has another TIMEBELL_SECRET_KEY: API keys, sessions and secrets of one node are not valid "
                    "on the other", other.name,
                )  # fmt: skip

    async def _supervise(self, name: str, step: Callable[[], Awaitable[datetime | None]], alarm: Alarm) -> None:
        """Run a service forever: step, then wait for the time it returned or a wake-up; after an error, back off."""
        pause = MIN_RETRY_DELAY_SECONDS
        self._alarms[name] = alarm
        while True:
            self.step_began_at[name] = self.node.clock.monotonic()
            try:
                if self.node.store.recent_writes.is_unverified:  # first, because a step may repeat lost work
                    await self._check_history()
                next_step_at = await step()
                pause = MIN_RETRY_DELAY_SECONDS
                if name in self.failing_services:
                    del self.failing_services[name]
                    for other in self.failing_services:  # the store is reachable, so retry them now
                        self._alarms[other].wake()
                    if not self.failing_services:
                        log.warning("the store is reachable again")
            except StoreError as error:
                if not self.failing_services:
                    log.warning("%s Retrying until the store is reachable.", error)
                self.failing_services[name] = error
                next_step_at, pause = self._retry_at(pause), min(pause * 2, MAX_RETRY_DELAY_SECONDS)
            except Exception:
                log.exception("service %s crashed; restarting", name)
                next_step_at, pause = self._retry_at(pause), min(pause * 2, MAX_RETRY_DELAY_SECONDS)
            self.last_step_at[name] = self.node.clock.monotonic()
            del self.step_began_at[name]
            if next_step_at is None or next_step_at > self.node.clock.now():
                await alarm.wait(next_step_at)

    async def _check_history(self) -> None:
        node = self.node
        async with self._history_lock:
            if (rewind := await check_history(node.store, node.clock, node.options.name)) is not None:
                for kind, count in rewind.counts.items():
                    node.counters.history_rewound.add(kind, by=count)

    def _retry_at(self, delay: float) -> datetime:
        """Return now plus `delay`, scaled by 0.5 to 1.5 depending on the node id so that nodes do not retry in step."""
        spread = 0.5 + crc32(self.node.id.encode()) / 2**32
        return self.node.clock.now() + timedelta(seconds=delay * spread)

    async def _run_completer(self) -> None:
        alarm = Alarm(self.node.clock)

        async def step() -> datetime | None:
            await self.completer.wait_for_work()
            await self.completer.step()
            return self.node.clock.now()

        try:
            await self._supervise("completer", step, alarm)
        finally:
            alarm.close()

    async def _drain(self) -> None:
        """Stop planning and claiming, let attempts finish, requeue the others, write all completions."""
        node = self.node
        node.stopping = True
        node.wakeups.worker.wake()
        self.remote_workers.stop()
        started_at = node.clock.monotonic()
        # Do not interrupt a claim or an insert: its jobs would run nowhere until their leases expire. The wait for the
        # planner is bounded, because it may wait for row locks.
        alarm = Alarm(node.clock)
        while (elapsed := node.clock.monotonic() - started_at) < node.options.drain and (
            node.running_attempts
            or self.worker.claiming
            or (self.worker.reserved_slots and elapsed < PLANNER_DRAIN_SECONDS)
        ):
            await alarm.wait(node.clock.now() + timedelta(seconds=0.02))
        for running in list(node.running_attempts.values()):
            running.interrupt(AttemptEvent.DRAIN)
        if self.worker.tasks:
            await asyncio.wait(self.worker.tasks, timeout=1)
        for _ in range(100):
            if self.completer.is_empty or self.failing_services:
                break
            await alarm.wait(node.clock.now() + timedelta(seconds=0.02))
        alarm.close()

    async def _deregister(self) -> None:
        try:
            await self.node.store.run(nodes.remove_nodes, [self.node.id], self.node.clock.now())
        except StoreError as error:
            log.warning("could not deregister node: %s", error)
        await self.node.store.unlock_engine()
