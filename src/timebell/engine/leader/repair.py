"""Whatever is lost heals while the engine runs, not when it starts: a look each minute, and the report of all looks.

What a node keeps in memory cannot be lost for long: timers and pokes are set anew at each heartbeat, leases are
watched by every node, and what is unheard is looked at by the leader. This is about the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from timebell.engine.node import Node
from timebell.model.repair_report import Healed
from timebell.store.cluster import repair

log = logging.getLogger("timebell.healing")

EVERY = 60.0  # seconds
BATCH = 100  # schedules a transaction, so that it is a short one

Run = Callable[..., Awaitable[Any]]


class Healing:
    """The leader's chore; `as_leader` runs an operation if this node still leads, and answers None if it does not."""

    def __init__(self, node: Node, as_leader: Run) -> None:
        self.node = node
        self._as_leader = as_leader
        self._looked: float | None = None
        self._after: str | None = None

    def begin(self) -> None:
        """Look at once."""
        self._looked = None

    async def step(self) -> None:
        """A look, if it is time: at holds, schedules without a next instant, and some schedules more each time."""
        node, monotonic = self.node, self.node.clock.monotonic()
        if self._looked is not None and monotonic - self._looked < EVERY:
            return
        self._looked = monotonic
        now = node.clock.now()
        since = repair.since_of(now, node.options.retention)
        found: Healed = await self._as_leader(repair.holds) or Healed()
        found += await self._as_leader(repair.without_next, since, now, BATCH) or Healed()
        looked = await self._as_leader(repair.all_next, self._after, since, now, BATCH)
        if looked is not None:
            found, self._after = found + looked[0], looked[1]
        report(node, found)


def report(node: Node, found: Healed) -> None:
    """Add it to the node's totals; say so if anything was healed."""
    node.healed += found
    if found.healed:
        log.info("%s", found)
        node.planning.poke()
        node.working.poke()


async def look(run: Run, now: datetime, retention: float) -> Healed:
    """A whole look, at every schedule."""
    since = repair.since_of(now, retention)
    found: Healed = await run(repair.holds)
    after: str | None = None
    while True:
        some, after = await run(repair.all_next, after, since, now, BATCH)
        found += some
        if after is None:
            return found
