"""Waiting until an instant or a poke: the one way to wait for time to pass."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime

from timebell.clock import Clock, Timer


class Alarm:
    """Wakes one waiter at an instant, less than a millisecond late and never early, or sooner when poked.

    May be made and poked before there is an event loop; the first wait binds it to the running one. Close it:
    it may hold a descriptor.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: Timer | None = None
        self._until: datetime | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._poked = self._was_poked = False

    @property
    def poked(self) -> bool:
        """Whether a poke ended the last wait, or has come since."""
        return self._was_poked or self._poked

    async def wait(self, until: datetime | None) -> bool:
        """Wait for a poke, at most until the aware instant `until` (None: for a poke only).

        True when poked, now or since the last wait; False when the instant came, that is `clock.now() >=
        until`, also if the clock was corrected meanwhile. Returns at once, without yielding, when there is
        nothing to wait for. RuntimeError when someone waits already.
        """
        if self._waiter is not None:
            raise RuntimeError("Someone waits on this alarm already, and it has room for one.")
        loop, timer = asyncio.get_running_loop(), self._timer
        if timer is None or self._loop is not loop:
            timer = self._bind(loop)
        if self._poked:
            self._poked = False
            self._was_poked = True
            return True
        self._was_poked = False
        if until is not None and self._clock.now() >= until:
            return False
        self._until = until
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        unwatch = None if until is None else self._clock.watch(self._look)
        try:
            if until is not None:
                timer.arm(self._clock.deadline(until))
            self._was_poked = await waiter
            return self._was_poked
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._poked = True  # the poke and the cancellation met: the next waiter gets the poke
            raise
        finally:
            if unwatch is not None:
                unwatch()
                timer.disarm()
            self._waiter = None

    def poke(self) -> None:
        """Wake the waiter, or the next one at once: a poke nobody waited for is remembered, any number of
        them once. From the event loop's thread only."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)
        elif waiter is None or waiter.cancelled() or not waiter.result():
            self._poked = True  # else the poke before woke a waiter that has not run yet, and will see this one too

    def poke_threadsafe(self) -> None:
        """Like `poke`, from any thread. Does nothing when the event loop is closed."""
        if self._loop is None:
            self._poked = True
        # Asked again: a first wait that has not seen the poke has bound the loop by now.
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.poke)

    def close(self) -> None:
        """Give back the timer; someone who still waits is poked. May be called again, and a later wait opens
        the alarm again, on the event loop of then."""
        if self._timer is not None:
            self._timer.close()
            self._timer = self._loop = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> Timer:
        self.close()
        self._loop, self._timer = loop, self._clock.timer(self._look)
        return self._timer

    def _look(self) -> None:
        if self._until is None or self._waiter is None or self._waiter.done() or self._timer is None:
            return
        if self._clock.now() >= self._until:
            self._waiter.set_result(False)
        else:
            self._timer.arm(self._clock.deadline(self._until))
