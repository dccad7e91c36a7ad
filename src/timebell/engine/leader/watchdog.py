"""The leader's watchdog: counts what should have fired and did not, what fired twice and what an audit finds in the
rows of the last minutes, and tells who must know."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

from timebell.engine.leader.continuous_audit import Continuous
from timebell.engine.node import Node
from timebell.model.audit_findings import Difference, Finding
from timebell.observe.alerts import Desk, Message
from timebell.observe.watchdog import GRACE, NAMED, Problem, Unrecorded
from timebell.store.audit import duplicate_runs
from timebell.store.cluster import gauges, nodes

log = logging.getLogger("timebell.watchdog")

EVERY = 10.0  # seconds between looks
BEFORE = timedelta(seconds=30)  # looks overlap, as instants are those of different nodes
AUDITED_EVERY = 60.0  # seconds between rounds of the audit
AUDITED_FOR = 0.25  # seconds that a look spends on it, as a heartbeat waits; the round goes on with the next one
BACK = timedelta(hours=1)  # a new leader audits what was decided since then: perhaps nobody did
LASTS = 3600.0  # seconds for which a difference is a problem
REMEMBERED = ("DOUBLE_FIRE", "AUDIT_DIFFERENCE")  # what a leader found, and its successor need not find again


class Watchdog:
    """Looks while this node leads. What nobody but it can see is told by `timebell watch`.

    `as_leader` runs an operation if this node still leads, and answers None if it does not.
    """

    def __init__(self, node: Node, as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._as_leader = as_leader
        self._desk = Desk()
        self._inherited: dict[str, str] | None = None
        """What was open when this node began to lead; None until that is known."""
        self._began = 0.0
        self._unrecorded = Unrecorded()
        self._looked: float | None = None
        self._since: datetime | None = None
        self._doubles: set[tuple[str, datetime]] = set()
        self._sending: set[asyncio.Task[bool]] = set()
        self.audit: Continuous | None = None
        self._audited: float | None = None
        self._differences: deque[tuple[float, Difference]] = deque()

    def begin(self) -> None:
        """Audit from before this node led, and go on from what was told by then."""
        self.audit = self._audited = self._inherited = None

    async def step(self, *, comparable: bool) -> None:
        """Look, if it is time. `comparable`: rows are of the zone data that is installed here."""
        node, now = self.node, self.node.clock.now()
        monotonic = node.clock.monotonic()
        if self._looked is not None and monotonic - self._looked < EVERY:
            return
        self._looked = monotonic
        if self._inherited is None:
            self._inherited, self._began = await node.store.run(nodes.told), monotonic
            self._desk.take_over(self._inherited, monotonic)
        seen = await node.store.hot(gauges.read, now, GRACE)
        if late := self._unrecorded.count(seen.overdue, now):
            node.counters.missed.add("unrecorded", by=late)
            names = ", ".join(one.label for one in seen.overdue[:3])
            log.error("%d occurrences are overdue: %s", late, names, extra={"event": "schedule.overdue"})
        await self._look_for_doubles(now)
        if comparable:
            await self._look_back(now)
        await self._tell_news([*self._problems(seen), *self._lasting(monotonic)], monotonic)

    async def _look_for_doubles(self, now: datetime) -> None:
        since = (self._since or now) - BEFORE
        self._since = now
        twice = await self.node.store.hot(duplicate_runs.found, since)
        for schedule_id, at in twice - self._doubles:
            self.node.counters.double_fires += 1
            log.error("schedule %s fired twice for %s", schedule_id, at, extra={"event": "schedule.double_fire"})
        self._doubles |= twice

    async def _look_back(self, now: datetime) -> None:
        """Go on with the audit."""
        node, began = self.node, self.node.clock.monotonic()
        most = timedelta(seconds=min(node.options.retention, 1e9) / 2)  # by far, as rows go while it reads
        if self.audit is None:
            self.audit = Continuous(node.store.hot, now - min(BACK, most))
        while self.audit.under_way or self._audited is None or began - self._audited >= AUDITED_EVERY:
            if not self.audit.under_way:
                self._audited = began
            for found in await self.audit.step(now, now - most):
                self._found(found, began)
            if node.clock.monotonic() - began >= AUDITED_FOR:
                break
        while self._differences and began - self._differences[0][0] >= LASTS:
            self._differences.popleft()

    def _found(self, found: Difference, monotonic: float) -> None:
        counters = self.node.counters
        counters.differences.add(found.finding.value, by=found.count)
        if found.finding is Finding.MISSING:
            counters.missed.add("unrecorded", by=found.count)
        elif found.finding is Finding.DOUBLED and (found.schedule_id, found.at) not in self._doubles:
            self._doubles.add((found.schedule_id, found.at))
            counters.double_fires += 1
        self._differences.append((monotonic, found))
        log.error(
            "the audit found %s: %d of schedule %s at %s: %s", found.finding.value, found.count, found.schedule,
            found.at, found.detail, extra={"event": "audit.difference", "schedule": found.schedule},
        )  # fmt: skip

    def _problems(self, seen: gauges.Gauges) -> list[Problem]:
        found = []
        if seen.unheard:
            found.append(Problem("UNHEARD_JOBS", f"{seen.unheard} due jobs are held: no live node listens."))
        if faults := seen.schedules["fault"]:
            found.append(Problem("SCHEDULE_SET_ASIDE", f"{faults} schedules cannot be fired; the log says why."))
        if seen.disabled:
            found.append(Problem("TARGET_DISABLED", f"{seen.disabled} targets are disabled: what goes there fails."))
        if self._doubles:
            found.append(Problem("DOUBLE_FIRE", f"{len(self._doubles)} occurrences ran twice."))
        if self._differences:
            named = ", ".join(
                f"{one.schedule} at {one.at:%Y-%m-%d %H:%M:%S} UTC ({one.finding.value})"
                for _, one in list(self._differences)[:NAMED]
            )
            more = ", ..." if len(self._differences) > NAMED else ""
            found.append(Problem("AUDIT_DIFFERENCE", f"What is recorded is not what should have been: {named}{more}."))
        return found

    def _lasting(self, monotonic: float) -> list[Problem]:
        """What the leader before found and nobody sees any more, for as long as that is a problem."""
        if monotonic - self._began >= LASTS or self._inherited is None:
            return []
        found = {"DOUBLE_FIRE": self._doubles, "AUDIT_DIFFERENCE": self._differences}
        return [Problem(code, self._inherited[code]) for code in REMEMBERED
                if code in self._inherited and not found[code]]  # fmt: skip

    async def _tell_news(self, problems: list[Problem], monotonic: float) -> None:
        """Tell what is new. It is remembered first, where whoever leads next finds it: if this node leads no more,
        that one tells it."""
        news, known = self._desk.news(problems, monotonic), self._inherited
        self._inherited = None  # if this cannot be written now, it is read and told again
        if news and not await self._as_leader(nodes.tell, self._desk.open):
            return
        self._inherited = known
        for message in news:
            self._tell(message)

    def _tell(self, message: Message) -> None:
        """Send it beside everything else: a heartbeat waits for nobody."""
        task = asyncio.create_task(self.node.channels.send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
