"""What is due in which lane, also where a look at them all takes long.

PostgreSQL passes all that was claimed since it last cleaned an index, on the way to what is pending: up to a minute's
worth, and what was claimed in hours while a session keeps an older snapshot. So when a whole look has taken long, the
next ones begin where the one before found something, and a whole look goes on beside them for what they pass over: what
waited for another, what was made late, lanes that nothing was in.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from timebell.alarm import Alarm
from timebell.engine.node import Node
from timebell.model.routes import Routes
from timebell.store.jobs import claim

SLOW = 0.005  # seconds of a whole look from which on nobody waits for the next
REST, LONGEST_REST = 9, 1.0  # times as long as it took, until another begins beside, but at most so many seconds


class Looking:
    """The looks of a node at the lanes; `step` is a whole one beside those of the worker, when it was poked."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.alarm = Alarm(node.clock)
        self._since: dict[Routes, claim.Since] = {}
        self._slow = False
        self._asked: set[Routes] = set()
        """For whom a whole look is to be, after one that was not."""
        self._rests_until = 0.0

    async def lanes(self, routes: Routes, now: datetime) -> list[claim.Lane]:
        """As `jobs.lanes`; but where a whole look takes long, what only that sees pokes the worker when it is found."""
        since = self._since.get(routes)
        if since is None or not self._slow:
            found = await self._whole(routes, now)
            self._since[routes] = found.since
            return found.lanes
        if routes not in self._asked:
            self._asked.add(routes)
            self.alarm.poke()
        known = dict(since)
        found = await self.node.store.hot(claim.seen, routes, now, known)
        for lane, at in found.since.items():
            if since[lane] == known[lane]:  # else a whole look has found something before it meanwhile
                since[lane] = at
        return found.lanes

    async def step(self) -> datetime | None:
        """Look for what the worker does not see; when to do so again (None: when poked)."""
        node = self.node
        if not self._asked:
            return None
        if rest := max(timedelta(), timedelta(seconds=self._rests_until - node.clock.monotonic())):
            return node.clock.now() + rest
        began = node.clock.monotonic()
        asked, self._asked = self._asked, set()
        try:
            for routes in asked:
                since = self._since[routes]
                known = dict(since)
                found = await self._whole(routes, node.clock.now())
                before = {lane: at for lane, at in found.since.items() if lane not in known or at < known[lane]}
                if before:
                    since |= before
                    node.working.poke()
        except BaseException:
            self._asked |= asked
            raise
        ended = node.clock.monotonic()
        self._rests_until = ended + min(REST * (ended - began), LONGEST_REST)
        return None

    async def _whole(self, routes: Routes, now: datetime) -> claim.Seen:
        began = self.node.clock.monotonic()
        found = await self.node.store.hot(claim.seen, routes, now)
        self._slow = self.node.clock.monotonic() - began > SLOW
        return found
