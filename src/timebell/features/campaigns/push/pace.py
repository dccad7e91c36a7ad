"""Rate limiter for a provider with a quota: a token bucket that slows down on request and recovers. Does no I/O.

FCM limits the messages per minute of a project, and requires clients that exceed the quota to slow down ("Best
practices when sending FCM messages at scale"). Other clients may use the same quota, so staying below it locally is not
sufficient.
"""

from __future__ import annotations

QUOTA_SHARE = 0.96
"""The used share of the quota; the rest is a margin for clock differences and manually sent messages."""
BURST_SECONDS = 1.0
"""Maximum burst after a pause, in seconds of the full rate."""
RECOVERY_SECONDS = 60.0
"""Time from a standstill to the full rate."""
MIN_RATE_SHARE = 0.01


class Pace:
    """A token bucket. `per_minute` is the quota; times are seconds of one monotonic clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.full_rate = per_minute / 60 * QUOTA_SHARE
        self.rate = self.full_rate
        self.paused_until = now
        self._credit = max(1.0, self.full_rate * BURST_SECONDS)
        self._updated_at = now
        self._slowed_at = now - RECOVERY_SECONDS

    def take(self, wanted: int, now: float) -> int:
        """Return how many of `wanted` messages may be sent now, and deduct them."""
        if now < self.paused_until:
            return 0
        elapsed = max(0.0, now - self._updated_at)
        self._updated_at = now
        self.rate = min(self.full_rate, self.rate + self.full_rate * elapsed / RECOVERY_SECONDS)
        self._credit = min(max(1.0, self.rate * BURST_SECONDS), self._credit + self.rate * elapsed)
        granted = min(wanted, int(self._credit))
        self._credit -= granted
        return granted

    def seconds_until_next(self, now: float) -> float:
        """Return the seconds until at least one message may be sent."""
        return max(self.paused_until - now, (1.0 - self._credit) / self.rate, 0.0)

    def slow_down(self, now: float, pause: float) -> None:
        """Pause for `pause` seconds, then continue at half the rate.

        Calls within one second of each other halve the rate only once.
        """
        if now - self._slowed_at > 1.0:
            self.rate = max(self.full_rate * MIN_RATE_SHARE, self.rate / 2)
            self._slowed_at = now
        self._credit = min(self._credit, 1.0)
        self.paused_until = max(self.paused_until, now + pause)
        self._updated_at = max(self._updated_at, self.paused_until)
