"""Find due jobs in all queue lanes, also when a full scan is slow.

To reach the pending jobs, PostgreSQL walks over the index entries of all jobs claimed since the last vacuum: up to a
minute's worth, or hours' worth while a session holds an older snapshot. So after a slow full scan, the next scans start
at the position where the previous one found a job. A full scan in the background finds the jobs that these partial
scans miss: jobs released from a hold, jobs inserted with an earlier due time, and lanes that were empty.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from timebell.engine.node import Node
from timebell.model.routes import Routes
from timebell.store.jobs import claim

SLOW_SCAN_SECONDS = 0.005  # above this duration, full scans run in the background
# Pause after a background scan, as a multiple of its duration (a 10 % duty cycle), and the maximum in seconds.
SCAN_PAUSE_FACTOR, MAX_SCAN_PAUSE_SECONDS = 9, 1.0


class QueueScanner:
    """Scans the lanes for one node: partial or full scans for its worker, and full scans in the background (`step`)."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._scan_starts: dict[Routes, claim.ScanPositions] = {}
        self._full_scan_is_slow = False
        self._pending_routes: set[Routes] = set()
        """Routes that had a partial scan and need a full one."""
        self._paused_until = 0.0

    async def scan(self, routes: Routes, now: datetime) -> list[claim.QueueLane]:
        """Return the lanes with pending jobs, as `claim.list_lanes` does.

        While full scans are slow, this is a partial scan. If the background scan finds an earlier job, it wakes the
        worker.
        """
        positions = self._scan_starts.get(routes)
        if positions is None or not self._full_scan_is_slow:
            result = await self._full_scan(routes, now)
            self._scan_starts[routes] = result.positions
            return result.lanes
        if routes not in self._pending_routes:
            self._pending_routes.add(routes)
            self.node.wakeups.scanner.wake()
        scanned_from = dict(positions)
        result = await self.node.store.run_autocommit(claim.scan_lanes, routes, now, scanned_from)
        for lane, position in result.positions.items():
            if positions[lane] == scanned_from[lane]:  # otherwise a full scan has set an earlier position meanwhile
                positions[lane] = position
        return result.lanes

    async def step(self) -> datetime | None:
        """Run a full scan for each requested route set. Returns when to continue (None: on the next wake-up)."""
        node = self.node
        if not self._pending_routes:
            return None
        if remaining := max(timedelta(), timedelta(seconds=self._paused_until - node.clock.monotonic())):
            return node.clock.now() + remaining
        started_at = node.clock.monotonic()
        requested, self._pending_routes = self._pending_routes, set()
        try:
            for routes in requested:
                positions = self._scan_starts[routes]
                known_positions = dict(positions)
                result = await self._full_scan(routes, node.clock.now())
                earlier = {
                    lane: position
                    for lane, position in result.positions.items()
                    if lane not in known_positions or position < known_positions[lane]
                }
                if earlier:
                    positions |= earlier
                    node.wakeups.worker.wake()
        except BaseException:
            self._pending_routes |= requested
            raise
        ended_at = node.clock.monotonic()
        self._paused_until = ended_at + min(SCAN_PAUSE_FACTOR * (ended_at - started_at), MAX_SCAN_PAUSE_SECONDS)
        return None

    async def _full_scan(self, routes: Routes, now: datetime) -> claim.ScanResult:
        started_at = self.node.clock.monotonic()
        result = await self.node.store.run_autocommit(claim.scan_lanes, routes, now)
        self._full_scan_is_slow = self.node.clock.monotonic() - started_at > SLOW_SCAN_SECONDS
        return result
