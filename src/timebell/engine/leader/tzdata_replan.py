"""The leader's chore when new zone data comes: what an earlier release of it gave is computed again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from timebell.engine.node import Node
from timebell.model.tzdata_change import Change
from timebell.recurrence import installed
from timebell.store.schedules import tzdata_replan

log = logging.getLogger("timebell.zones")

AGAIN = 3600.0  # seconds; processes that run no engine write schedules too, with the zone data they have
AGAIN_APART = 60.0  # while nodes have different zone data
STRETCH = 1.0  # seconds, so that nothing else that the leader does is late for long
BATCH = 500


class ZoneData:
    """The chore. `as_leader` runs an operation if this node still leads, and answers None if it does not."""

    def __init__(self, node: Node, as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._as_leader = as_leader
        self._versions: set[str] = set()
        self._looked: float | None = None
        self._after: str | None = None

    def begin(self) -> None:
        """Look at everything from the start."""
        self._looked, self._after = None, None

    def heard(self, versions: set[str]) -> None:
        """Know which releases the live nodes have; with different ones, say so."""
        if versions == self._versions:
            return
        self._versions = versions
        self.begin()
        if self.mixed:
            log.warning("nodes have different zone data (%s): give all of them the newest", ", ".join(sorted(versions)))

    @property
    def mixed(self) -> bool:
        """Whether live nodes have different releases."""
        return len(self._versions) > 1

    async def step(self) -> None:
        """Go on where the last step ended, for a while; at the end rest until it is time to look again."""
        now = self.node.clock.monotonic()
        if self._looked is not None and now - self._looked < (AGAIN_APART if self.mixed else AGAIN):
            return
        before = await self.node.store.run(tzdata_replan.recorded, installed().version)
        if await self._place(now + STRETCH):
            self._looked = now
        self.node.working.poke()  # what was moved may be due
        self.node.planning.poke()
        await self._report(before)

    async def _place(self, until: float) -> bool:
        """Whether all is done."""
        clock, release = self.node.clock, installed()
        while True:
            self._after = await self._as_leader(
                tzdata_replan.place_schedules, release, self._after, clock.now(), BATCH
            )  # fmt: skip
            if self._after is None:
                break
            if clock.monotonic() >= until:
                return False
        while await self._as_leader(tzdata_replan.place_jobs, release, clock.now(), BATCH):
            if clock.monotonic() >= until:
                return False
        return True

    async def _report(self, before: list[Change]) -> None:
        """Say what moved since `before`."""
        version = installed().version
        after = await self.node.store.run(tzdata_replan.recorded, version)
        looked = sum(one.looked_at for one in after) - sum(one.looked_at for one in before)
        if looked:
            log.info("zone data %s: %d schedules and jobs looked at", version, looked)
        for change in after:
            if change.moves and change not in before:
                log.warning("zone data %s: %s", version, change.sentence("moved"))
