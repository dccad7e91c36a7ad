"""What a look at the lanes saw coming, so that it is claimed at its instant without another look.

A look, and the claim after it, would take as long as each other. What changes in between pokes the worker, which looks
anew; and a claim by foresight takes nothing of a queue that was paused or limited meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import itemgetter

from timebell.model.routes import Routes
from timebell.store.dialects.base import Store
from timebell.store.jobs import claim

NEAR = timedelta(seconds=0.25)
"""How far ahead the jobs of a lane are asked for one by one, if one is due by then."""
MOST = 50  # jobs of a lane that are asked for at once
LANES = 4  # lanes that are asked


class Foresight:
    """The instants at which something of a lane is due, each job with its own, as of the last look."""

    def __init__(self) -> None:
        self._coming: list[tuple[datetime, claim.Lane]] = []
        self._routes = Routes()
        self._until: datetime | None = None

    def forget(self) -> None:
        """Something is not as it was foreseen."""
        self._coming.clear()

    def due(self, routes: Routes, now: datetime) -> list[claim.Lane]:
        """The lanes of what is due by now, one for each job; none where it takes a look to know."""
        if routes != self._routes or (self._until is not None and self._until <= now):
            self.forget()
        count = 0
        for at, _ in self._coming:
            if at > now:
                break
            count += 1
        found, self._coming = [lane for _, lane in self._coming[:count]], self._coming[count:]
        return found

    def knows_more_of(self, lanes: Sequence[claim.Lane]) -> bool:
        """Whether it knows what comes next in each of them."""
        left = {id(lane) for _, lane in self._coming}
        return all(id(lane) in left for lane in lanes)

    @property
    def next(self) -> datetime | None:
        """When to claim, or to look, next."""
        first = self._coming[0][0] if self._coming else None
        return min(filter(None, (first, self._until)), default=None)

    async def learn(
        self, store: Store, lanes: Sequence[claim.Lane], routes: Routes, now: datetime, until: datetime | None
    ) -> None:
        """Remember what a look at `now` saw coming in lanes where nothing is left to start; it is good `until` then."""
        coming: list[tuple[datetime, claim.Lane]] = []
        asked = 0
        for lane in lanes:
            at = lane.starts_at if lane.limited else lane.later
            if at is None:
                continue
            if lane.limited or lane.crowded:  # whose first may start then or not
                until = at if until is None else min(at, until)
            elif asked < LANES and at <= now + NEAR:
                asked += 1
                instants, known = await store.hot(claim.coming, lane, routes, MOST, now, now + NEAR)
                coming += [(instant, lane) for instant in instants]
                if not instants:
                    until = known if until is None else min(known, until)
            else:
                coming.append((at, lane))
        coming.sort(key=itemgetter(0))
        self._coming, self._routes, self._until = coming, routes, until
