"""The leader's watchdog: counts what should have fired and did not, what fired twice, and tells who must know."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

from timebell.engine.context import Node
from timebell.observe.alerts import Desk, Message
from timebell.observe.watchdog import GRACE, Problem, Unrecorded
from timebell.store.sql import doubles, gauges

log = logging.getLogger("timebell.watchdog")

EVERY = 10.0  # seconds between looks
BEFORE = timedelta(seconds=30)  # looks overlap, as instants are those of different nodes


class Watchdog:
    """Looks while this node leads. What nobody but it can see is told by `timebell watch`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._desk = Desk()
        self._unrecorded = Unrecorded()
        self._looked: float | None = None
        self._since: datetime | None = None
        self._doubles: set[tuple[str, datetime]] = set()
        self._sending: set[asyncio.Task[bool]] = set()

    async def step(self) -> None:
        """Look, if it is time."""
        node, now = self.node, self.node.clock.now()
        monotonic = node.clock.monotonic()
        if self._looked is not None and monotonic - self._looked < EVERY:
            return
        self._looked = monotonic
        seen = await node.store.hot(gauges.read, now, GRACE)
        if late := self._unrecorded.count(seen.overdue, now):
            node.counters.missed.add("unrecorded", by=late)
            names = ", ".join(one.label for one in seen.overdue[:3])
            log.error("%d occurrences are overdue: %s", late, names, extra={"event": "schedule.overdue"})
        await self._look_for_doubles(now)
        for message in self._desk.news(self._problems(seen), monotonic):
            self._tell(message)

    async def _look_for_doubles(self, now: datetime) -> None:
        since = (self._since or now) - BEFORE
        self._since = now
        twice = await self.node.store.hot(doubles.found, since)
        for schedule_id, at in twice - self._doubles:
            self.node.counters.double_fires += 1
            log.error("schedule %s fired twice for %s", schedule_id, at, extra={"event": "schedule.double_fire"})
        self._doubles |= twice

    def _problems(self, seen: gauges.Gauges) -> list[Problem]:
        found = []
        if seen.unheard:
            found.append(Problem("UNHEARD_JOBS", f"{seen.unheard} due jobs are held: no live node listens."))
        if faults := seen.schedules["fault"]:
            found.append(Problem("SCHEDULE_SET_ASIDE", f"{faults} schedules cannot be fired; the log says why."))
        if self._doubles:
            found.append(Problem("DOUBLE_FIRE", f"{len(self._doubles)} occurrences ran twice."))
        return found

    def _tell(self, message: Message) -> None:
        """Send it beside everything else: a heartbeat waits for nobody."""
        task = asyncio.create_task(self.node.channels.send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
