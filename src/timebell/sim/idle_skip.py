"""What makes idle time cost nothing: while nothing can happen, the machines of a simulation sleep.

Between two events nodes only renew leases for one another. So, when all is calm until the next timer, the wall
goes on but every monotonic clock stands still, as on a machine that is suspended: no lease ages and no heart
beats. At all other times hearts beat as they do in production.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from timebell.alarm import Alarm
from timebell.clock import ClockStep, VirtualClock
from timebell.sim.loop import VirtualLoop


class RestingClock(VirtualClock):
    """One clock for the database and all nodes. `monotonic` leaves out the rests; `deadline` and timers speak the
    event loop's seconds, which do not."""

    def __init__(self, start: datetime, loop: VirtualLoop) -> None:
        super().__init__(start)
        self._virtual = self._loop = loop
        self.rested = 0.0
        self._read, self._from, self._now = math.nan, self._zero, self._zero

    def now(self) -> datetime:
        """As in Clock."""
        time = self._virtual.seconds  # it stands still while anything happens
        if time != self._read or self._from is not self._zero:
            self._read, self._from, self._now = time, self._zero, self._zero + timedelta(seconds=time)
        return self._now

    def monotonic(self) -> float:
        """As in Clock."""
        return self._virtual.seconds - self.rested

    def discipline(self, reading: datetime, sent: float, received: float) -> ClockStep | None:
        """As in Clock: it is the database's own, so there is nothing to learn."""
        return None

    def begin(self, instant: datetime) -> None:
        """Make this aware instant the present, before anything has read the clock."""
        self._zero = self._anchor = instant.astimezone(UTC) - timedelta(seconds=self._virtual.seconds)


class Heart(Alarm):
    """The alarm of a node's heartbeats. It sets no timer: the simulation looks at `due` before time jumps."""

    due = math.inf
    """The clock's monotonic seconds of the next beat."""

    def __init__(self, clock: RestingClock) -> None:
        super().__init__(clock)
        self._resting_clock = clock

    async def wait(self, until: datetime | None) -> bool:
        """As in Alarm, but for the one who rings it."""
        clock = self._resting_clock
        self.due = math.inf if until is None else clock.monotonic() + (until - clock.now()).total_seconds()
        try:
            return await super().wait(None)
        finally:
            self.due = math.inf
