"""Waiting until an instant or a poke: the one way to wait for time to pass."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime

from timebell.clock import Clock


class Alarm:
    """Wakes one waiter at an instant, less than a millisecond late and never early, or sooner when poked.

    Made inside a running event loop (RuntimeError otherwise), to which it belongs. Close it: it may hold a
    descriptor.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer = clock.timer(self._look)
        self._until: datetime | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._poked = False
        self._closed = False

    async def wait(self, until: datetime | None) -> bool:
        """Wait for a poke, at most until the aware instant `until` (None: for a poke only).

        True when poked, now or since the last wait; False when the instant came, that is `clock.now() >=
        until`, also if the clock was corrected meanwhile. Returns at once, without yielding, when there is
        nothing to wait for. RuntimeError when someone waits already, or after `close`.
        """
        if self._closed:
            raise RuntimeError("The alarm is closed.")
        if self._waiter is not None:
            raise RuntimeError("Someone waits on this alarm already, and it has room for one.")
        if self._poked:
            self._poked = False
            return True
        if until is not None and self._clock.now() >= until:
            return False
        self._until = until
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiter = waiter
        unwatch = self._clock.watch(self._look)
        try:
            self._look()
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._poked = True  # the poke and the cancellation met: the next waiter gets the poke
            raise
        finally:
            unwatch()
            self._timer.disarm()
            self._waiter = None

    def poke(self) -> None:
        """Wake the waiter, or the next one at once: a poke nobody waited for is remembered, any number of
        them once. From the event loop's thread only."""
        if self._waiter is None or self._waiter.done():
            self._poked = True
        else:
            self._waiter.set_result(True)

    def poke_threadsafe(self) -> None:
        """Like `poke`, from any thread. Does nothing when the event loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.poke)

    def close(self) -> None:
        """Give back the timer. Someone who still waits is poked. May be called again."""
        self._closed = True
        self._timer.close()
        self.poke()

    def _look(self) -> None:
        if self._until is None or self._waiter is None or self._waiter.done() or self._closed:
            return
        if self._clock.now() >= self._until:
            self._waiter.set_result(False)
        else:
            self._timer.arm(self._clock.deadline(self._until))
