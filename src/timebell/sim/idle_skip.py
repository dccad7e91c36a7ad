"""Skip idle time in simulations, so that it costs nothing.

Between two events, nodes only renew leases. If nothing can happen until the next timer, the wall clock advances while
every monotonic clock stands still, as on a suspended machine: no lease ages and no heartbeat runs. At all other times
heartbeats run as in production.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from timebell.alarm import Alarm
from timebell.clock import ClockStep, VirtualClock
from timebell.sim.loop import VirtualLoop


class IdleSkippingClock(VirtualClock):
    """The clock of the database and all nodes.

    `monotonic` excludes skipped idle time; `deadline` and timers use the event loop's time, which includes it.
    """

    def __init__(self, start: datetime, loop: VirtualLoop) -> None:
        super().__init__(start)
        self._virtual_loop = self._loop = loop
        self.skipped_seconds = 0.0
        self._cached_time, self._cached_zero, self._cached_now = math.nan, self._zero, self._zero

    def now(self) -> datetime:
        time = self._virtual_loop.virtual_time  # constant between two jumps, so the result can be cached
        if time != self._cached_time or self._cached_zero is not self._zero:
            self._cached_time, self._cached_zero, self._cached_now = (
                time,
                self._zero,
                self._zero + timedelta(seconds=time),
            )
        return self._cached_now

    def monotonic(self) -> float:
        return self._virtual_loop.virtual_time - self.skipped_seconds

    def discipline(self, reading: datetime, sent: float, received: float) -> ClockStep | None:
        """Return None: this is the database's own clock, so there is no offset to correct."""
        return None

    def start_at(self, instant: datetime) -> None:
        """Set the current instant (aware), before anything has read the clock."""
        self._zero = self._anchor = instant.astimezone(UTC) - timedelta(seconds=self._virtual_loop.virtual_time)


class HeartbeatAlarm(Alarm):
    """The alarm of a node's heartbeats. It sets no timer: the simulation checks `due` before each jump of time."""

    due = math.inf
    """Monotonic time of the next heartbeat."""

    def __init__(self, clock: IdleSkippingClock) -> None:
        super().__init__(clock)
        self._skipping_clock = clock

    async def wait(self, until: datetime | None) -> bool:
        """Set `due` and wait until the simulation calls `wake`."""
        clock = self._skipping_clock
        self.due = math.inf if until is None else clock.monotonic() + (until - clock.now()).total_seconds()
        try:
            return await super().wait(None)
        finally:
            self.due = math.inf
