"""Cancel attempts that exceed their timeouts, with one timer for all attempts of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from timebell.engine.running_attempt import RunningAttempt

TIMER_RESOLUTION_SECONDS = 0.001
"""The event loop may call a timer this much early."""


class Deadlines:
    """The deadlines of attempts in progress, in monotonic seconds.

    The timer is set for the earliest deadline known at that time. Most attempts end before their deadline, so the timer
    fires rarely; then all attempts in progress are checked. A timer for each attempt would cost more than a short
    handler.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._deadlines: dict[RunningAttempt, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def add(self, running: RunningAttempt, at: float) -> None:
        """Time out an attempt at `at`, unless it is removed before."""
        self._deadlines[running] = at
        if at < self._timer_at:
            self._set_timer(at)

    def remove(self, running: RunningAttempt) -> None:
        """Remove an attempt that has ended or timed out."""
        self._deadlines.pop(running, None)
        if not self._deadlines:
            self._cancel_timer()

    def _set_timer(self, at: float) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._monotonic()), self._expire)
        self._timer_at = at

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, inf

    def _expire(self) -> None:
        self._timer, self._timer_at = None, inf
        now = self._monotonic() + TIMER_RESOLUTION_SECONDS
        for running in [running for running, at in self._deadlines.items() if at <= now]:
            del self._deadlines[running]
            running.time_out()
        if self._deadlines:
            self._set_timer(min(self._deadlines.values()))
