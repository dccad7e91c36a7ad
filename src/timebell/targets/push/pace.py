"""How fast messages may go to a provider with a quota: a token bucket that slows down when told to, and recovers. Pure.

FCM gives each project so many messages a minute and wants those who exceed it to slow down by themselves ("Best
practices when sending FCM messages at scale"). Others may spend the same quota, so being below it is no proof.
"""

from __future__ import annotations

SHARE = 0.96
"""Of the quota: the rest is for clocks that differ and messages that are sent by hand."""
BURST = 1.0
"""Seconds of sending that may go at once after a rest."""
RECOVERY = 60.0
"""Seconds from a standstill to full speed."""
SLOWEST = 0.01


class Pace:
    """`per_minute` is the quota. Times are seconds of any one clock that does not go back."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.full = per_minute / 60 * SHARE
        self.rate = self.full
        self.closed_until = now
        self._credit = max(1.0, self.full * BURST)
        self._at = now
        self._slowed = now - RECOVERY

    def take(self, most: int, now: float) -> int:
        """How many of `most` may go now."""
        if now < self.closed_until:
            return 0
        passed = max(0.0, now - self._at)
        self._at = now
        self.rate = min(self.full, self.rate + self.full * passed / RECOVERY)
        self._credit = min(max(1.0, self.rate * BURST), self._credit + self.rate * passed)
        granted = min(most, int(self._credit))
        self._credit -= granted
        return granted

    def wait(self, now: float) -> float:
        """Seconds until at least one may go."""
        return max(self.closed_until - now, (1.0 - self._credit) / self.rate, 0.0)

    def exceeded(self, now: float, after: float) -> None:
        """The provider said to send less: nothing for `after` seconds, then at half the speed.

        Answers that come together say it once.
        """
        if now - self._slowed > 1.0:
            self.rate = max(self.full * SLOWEST, self.rate / 2)
            self._slowed = now
        self._credit = min(self._credit, 1.0)
        self.closed_until = max(self.closed_until, now + after)
        self._at = max(self._at, self.closed_until)
