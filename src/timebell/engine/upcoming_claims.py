"""Cache of the next due jobs seen by a lane scan, so that they are claimed at their due time without another scan.

A scan takes about as long as the claim after it. Changes in between wake the worker, which then scans again; and a
cached claim takes no job of a queue that was paused or limited meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import itemgetter

from timebell.model.routes import Routes
from timebell.store.dialects.base import Store
from timebell.store.jobs import claim

LOOKAHEAD = timedelta(seconds=0.25)
"""How far ahead the due times of individual jobs are loaded."""
MAX_JOBS_PER_LANE = 50  # due times loaded per lane
MAX_LANES = 4  # lanes whose due times are loaded


class UpcomingClaims:
    """Due times and their lanes, one entry per job, as of the last scan."""

    def __init__(self) -> None:
        self._upcoming: list[tuple[datetime, claim.QueueLane]] = []
        self._routes = Routes()
        self._valid_until: datetime | None = None

    def clear(self) -> None:
        """Discard the cache after a mismatch."""
        self._upcoming.clear()

    def pop_due(self, routes: Routes, now: datetime) -> list[claim.QueueLane]:
        """Remove and return the lanes of due entries, once per job; empty if a scan is needed."""
        if routes != self._routes or (self._valid_until is not None and self._valid_until <= now):
            self.clear()
        count = 0
        for due_at, _ in self._upcoming:
            if due_at > now:
                break
            count += 1
        due_lanes, self._upcoming = [lane for _, lane in self._upcoming[:count]], self._upcoming[count:]
        return due_lanes

    def covers(self, lanes: Sequence[claim.QueueLane]) -> bool:
        """True if each of these lanes has an upcoming entry."""
        cached_lane_ids = {id(lane) for _, lane in self._upcoming}
        return all(id(lane) in cached_lane_ids for lane in lanes)

    @property
    def next_at(self) -> datetime | None:
        """When to claim or scan next; None if nothing is cached."""
        first_due = self._upcoming[0][0] if self._upcoming else None
        return min(filter(None, (first_due, self._valid_until)), default=None)

    async def refresh(
        self,
        store: Store,
        lanes: Sequence[claim.QueueLane],
        routes: Routes,
        now: datetime,
        valid_until: datetime | None,
    ) -> None:
        """Cache the upcoming jobs of lanes scanned at `now` that have nothing left to start now.

        The cache is valid until `valid_until` (None: until cleared), or earlier if a lane's next start is uncertain.
        """
        upcoming: list[tuple[datetime, claim.QueueLane]] = []
        loaded_lanes = 0
        for lane in lanes:
            next_start = lane.earliest_start if lane.has_limits else lane.next_future_due
            if next_start is None:
                continue
            if lane.has_limits or lane.needs_fair_sharing:  # the first job may start then or not, so scan
                valid_until = next_start if valid_until is None else min(next_start, valid_until)
            elif loaded_lanes < MAX_LANES and next_start <= now + LOOKAHEAD:
                loaded_lanes += 1
                due_times, known_until = await store.run_autocommit(
                    claim.list_upcoming, lane, routes, MAX_JOBS_PER_LANE, now, now + LOOKAHEAD
                )
                upcoming += [(due_at, lane) for due_at in due_times]
                if not due_times:
                    valid_until = known_until if valid_until is None else min(known_until, valid_until)
            else:
                upcoming.append((next_start, lane))
        upcoming.sort(key=itemgetter(0))
        self._upcoming, self._routes, self._valid_until = upcoming, routes, valid_until
