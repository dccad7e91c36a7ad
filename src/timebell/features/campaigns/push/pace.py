"""Rate limiter for a provider with a quota: a token bucket that slows down on request and recovers. Does no I/O.

FCM limits the messages per minute of a project, and requires clients that exceed the quota to slow down ("Best
practices when sending FCM messages at scale"). Other clients may use the same quota, so staying below it locally is not
sufficient. The same guide requires clients to take at least a minute from a standstill to the full rate.
"""

from __future__ import annotations

from zlib import crc32

QUOTA_SHARE = 0.96
"""The used share of the quota; the rest is a margin for clock differences and manually sent messages."""
BURST_SECONDS = 1.0
"""Maximum burst after a pause, in seconds of the full rate."""
RECOVERY_SECONDS = 60.0
"""Time from a standstill to the full rate."""
MIN_RATE_SHARE = 0.01
START_RATE = 500.0
"""Messages per second after a standstill, from which the rate rises; slow enough for any project."""
IDLE_SECONDS = 60.0
"""Time without messages that counts as a standstill."""
MIN_BACK_OFF_SECONDS, MAX_BACK_OFF_SECONDS = 1.0, 60.0
UNKNOWN_RUN = 5
"""Consecutive unknown results that count as an outage; single ones occur at any time."""


class Pace:
    """A token bucket. `per_minute` is the quota; times are seconds of one monotonic clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._quota_rate = per_minute / 60 * QUOTA_SHARE
        self.full_rate = self._quota_rate
        self.rate = min(self.full_rate, START_RATE)
        self.paused_until = now
        self._credit = max(1.0, self.rate * BURST_SECONDS)
        self._updated_at = self._used_at = now
        self._slowed_at = now - RECOVERY_SECONDS
        self._back_off_seconds = MIN_BACK_OFF_SECONDS
        self._unknown_run = 0

    def divide_quota(self, nodes: int) -> None:
        """Use an equal part of the quota, because this number of nodes shares it."""
        self.full_rate = self._quota_rate / nodes
        self.rate = min(self.rate, self.full_rate)

    def take(self, wanted: int, now: float) -> int:
        """Return how many of `wanted` messages may be sent now, and deduct them."""
        if now < self.paused_until:
            return 0
        elapsed = max(0.0, now - self._updated_at)
        self._updated_at = now
        if now - self._used_at > IDLE_SECONDS:
            self.rate = min(self.rate, START_RATE)
            self._used_at = now
        else:
            self.rate = min(self.full_rate, self.rate + self.full_rate * elapsed / RECOVERY_SECONDS)
        self._credit = min(max(1.0, self.rate * BURST_SECONDS), self._credit + self.rate * elapsed)
        granted = min(wanted, int(self._credit))
        if granted:
            self._credit -= granted
            self._used_at = now
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

    def back_off(self, now: float) -> None:
        """Pause after consecutive responses that leave the outcome open, for twice as long each time, with jitter.

        Each such response may be a lost message, so few are sent until the provider recovers. The responses to messages
        that were in flight when the pause began do not extend it.
        """
        self._unknown_run += 1
        if self._unknown_run < UNKNOWN_RUN or now < self.paused_until:
            return
        jitter = crc32(str(now).encode()) / 2**32
        self.slow_down(now, self._back_off_seconds * (0.75 + jitter / 2))
        self._back_off_seconds = min(2 * self._back_off_seconds, MAX_BACK_OFF_SECONDS)

    def reset_back_off(self) -> None:
        """End the doubling of pauses, after an accepted message."""
        self._back_off_seconds, self._unknown_run = MIN_BACK_OFF_SECONDS, 0
