"""A node's life: start the services, keep each of them going, drain, leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from zlib import crc32

from timebell.alarm import Alarm
from timebell.engine.completer import Completer
from timebell.engine.heartbeat import Pulse
from timebell.engine.leader import repair
from timebell.engine.leader.leader import Leader
from timebell.engine.node import Node
from timebell.engine.planner import Planner
from timebell.engine.worker import Worker
from timebell.errors import StoreError
from timebell.model.repair_report import Healed
from timebell.store.cluster import nodes
from timebell.store.jobs import claim
from timebell.store.schedules import schedules

log = logging.getLogger("timebell.engine")

PLANNING = 2.0  # seconds that a drain waits for a pass of the planner
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0  # seconds between tries while the store does not answer


class Service:
    """The engine of one node."""

    def __init__(self, node: Node, version: str, tzdata: str) -> None:
        self.node = node
        self.completer = Completer(node)
        self.worker = Worker(node, self.completer)
        self.planner = Planner(node, self.worker)
        self.leader = Leader(node)
        now = node.clock.now()
        me = nodes.Node(node.id, node.options.name, version, tzdata, self.worker.routes, 0, now, now)
        self.pulse = Pulse(node, self.completer, self.leader, me)
        self.failing: dict[str, StoreError] = {}
        self.began = node.clock.monotonic()
        self._alarms: dict[str, Alarm] = {}
        self.turned: dict[str, float] = {}
        """When each service last ended a step (monotonic seconds)."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Plan and work while the block runs; then drain and leave. Raises StoreError if it cannot start."""
        node = self.node
        node.handlers.threads = ThreadPoolExecutor(node.options.threads, thread_name_prefix="timebell")
        node.handlers.monotonic = node.clock.monotonic
        await node.store.lock_engine()
        await self.pulse.start()
        tasks = [
            asyncio.create_task(self._keep(name, step, alarm), name=f"timebell-{name}")
            for name, step, alarm in (
                ("pulse", self.pulse.step, node.beating),
                ("planner", self.planner.step, node.planning),
                ("worker", self.worker.step, node.working),
                ("looking", self.worker.looking.step, self.worker.looking.alarm),
                ("operations", self.leader.operations.step, self.leader.operations.alarm),
                ("reconciler", self.leader.reconciling.step, self.leader.reconciling.alarm),
                ("sources", self.leader.watching.step, self.leader.watching.alarm),
                ("leader", self.leader.step, self.leader.alarm),
            )
        ]
        completing = asyncio.create_task(self._complete(), name="timebell-completer")
        try:
            yield
        finally:
            await self._drain()
            for task in (*tasks, completing):
                task.cancel()
            await asyncio.gather(*tasks, completing, return_exceptions=True)
            await self.leader.watching.close()
            await self.worker.runner.gate.close()
            await self._leave()
            node.handlers.threads.shutdown(wait=False, cancel_futures=True)
            for alarm in (
                node.beating, node.planning, node.working, self.worker.looking.alarm, self.leader.operations.alarm,
                self.leader.reconciling.alarm, self.leader.alarm,
            ):  # fmt: skip
                alarm.close()

    def operate(self) -> None:
        """There may be a new operation, or a new source."""
        self.leader.operations.alarm.poke()
        self.leader.watching.alarm.poke()

    async def idle(self) -> None:
        """Until nothing is due, nothing runs and nothing is left to write."""
        node = self.node
        while True:
            # Before the look: what is claimed or ends meanwhile may let others go.
            now, started = node.clock.now(), node.counters.started
            busy = bool(node.held) or self.worker.starting
            lanes = await node.store.hot(claim.lanes, self.worker.routes, now)
            fire_at = await node.store.run(schedules.next_fire)
            due = any(lane.next_due is not None and lane.next_due <= now for lane in lanes)
            busy = busy or bool(node.held) or self.worker.starting or node.counters.started != started
            if not due and not busy and (fire_at is None or fire_at > now):
                return
            alarm = Alarm(node.clock)
            await alarm.wait(now + timedelta(seconds=0.05))
            alarm.close()

    @property
    def healed(self) -> Healed:
        """What this node healed since it started, and what it looked at."""
        return self.node.healed

    async def heal(self) -> Healed:
        """Look at everything now, as the node does bit by bit; what that came to."""
        node = self.node
        found = await self.pulse.look()
        found += await repair.look(node.store.run, node.clock.now(), node.options.retention)
        found += await self.leader.reconciling.look()
        repair.report(node, found)
        return found

    async def _keep(self, name: str, step: Callable[[], Awaitable[datetime | None]], alarm: Alarm) -> None:
        """Run a service for ever: step, wait for the instant it names or a poke; on an error, pause and go on."""
        pause = FIRST_PAUSE
        self._alarms[name] = alarm
        while True:
            try:
                until = await step()
                pause = FIRST_PAUSE
                if name in self.failing:
                    del self.failing[name]
                    for other in self.failing:  # it need not wait any longer
                        self._alarms[other].poke()
                    if not self.failing:
                        log.warning("the store answers again")
            except StoreError as failed:
                if not self.failing:
                    log.warning("%s Going on as soon as it answers.", failed)
                self.failing[name] = failed
                until, pause = self._later(pause), min(pause * 2, LONGEST_PAUSE)
            except Exception:
                log.exception("the %s failed and goes on", name)
                until, pause = self._later(pause), min(pause * 2, LONGEST_PAUSE)
            self.turned[name] = self.node.clock.monotonic()
            if until is None or until > self.node.clock.now():
                await alarm.wait(until)

    def _later(self, pause: float) -> datetime:
        """After the pause, a little different on every node so that they do not come back together."""
        spread = 0.5 + crc32(self.node.id.encode()) / 2**32
        return self.node.clock.now() + timedelta(seconds=pause * spread)

    async def _complete(self) -> None:
        alarm = Alarm(self.node.clock)

        async def step() -> datetime | None:
            await self.completer.wait()
            await self.completer.step()
            return self.node.clock.now()

        try:
            await self._keep("completer", step, alarm)
        finally:
            alarm.close()

    async def _drain(self) -> None:
        """Stop planning and claiming, let what runs finish, give the rest back, write every ending."""
        node = self.node
        node.stopping = True
        node.working.poke()
        began = node.clock.monotonic()
        # What starts jobs must not be cut off, or they would be nobody's; but a planner may wait for locks, and long.
        alarm = Alarm(node.clock)
        while (passed := node.clock.monotonic() - began) < node.options.drain and (
            node.held or self.worker.claiming or (self.worker.lent and passed < PLANNING)
        ):
            await alarm.wait(node.clock.now() + timedelta(seconds=0.02))
        for held in list(node.held.values()):
            if held.task is not None and not held.task.done():
                held.stop("drain")
        if self.worker.tasks:
            await asyncio.wait(self.worker.tasks, timeout=1)
        for _ in range(100):
            if self.completer.empty or self.failing:
                break
            await alarm.wait(node.clock.now() + timedelta(seconds=0.02))
        alarm.close()

    async def _leave(self) -> None:
        try:
            await self.node.store.run(nodes.forget, [self.node.id], self.node.clock.now())
        except StoreError as failed:
            log.warning("left without saying so: %s", failed)
        await self.node.store.unlock_engine()
