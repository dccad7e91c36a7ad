"""Wait until an instant or a wake-up call. All engine loops wait for time through this module."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime

from timebell.clock import Clock, Timer


class Alarm:
    """Wakes one waiter at an instant, less than a millisecond late and never early, or earlier by `wake`.

    Can be created and woken before there is an event loop; the first wait binds it to the running one. Must be closed:
    it may own a file descriptor.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: Timer | None = None
        self._until: datetime | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._wake_pending = self._last_wait_woken = False

    @property
    def was_woken(self) -> bool:
        """True if `wake` ended the last wait, or was called since."""
        return self._last_wait_woken or self._wake_pending

    async def wait(self, until: datetime | None) -> bool:
        """Wait until `wake` is called or the aware instant `until` is reached (None: until `wake` is called).

        Returns True if woken, now or since the last wait; False once `clock.now() >= until`, even if the clock was
        corrected in the meantime. Returns immediately, without yielding, if there is nothing to wait for. Raises
        RuntimeError if another task is waiting.
        """
        if self._waiter is not None:
            raise RuntimeError("Another task is already waiting on this alarm.")
        loop, timer = asyncio.get_running_loop(), self._timer
        if timer is None or self._loop is not loop:
            timer = self._bind(loop)
        if self._wake_pending:
            self._wake_pending = False
            self._last_wait_woken = True
            return True
        self._last_wait_woken = False
        if until is not None and self._clock.now() >= until:
            return False
        self._until = until
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        unwatch = None if until is None else self._clock.watch(self._check_deadline)
        try:
            if until is not None:
                timer.arm(self._clock.deadline(until))
            self._last_wait_woken = await waiter
            return self._last_wait_woken
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._wake_pending = True  # woken and cancelled simultaneously: keep the wake-up for the next waiter
            raise
        finally:
            if unwatch is not None:
                unwatch()
                timer.disarm()
            self._waiter = None

    def wake(self) -> None:
        """Wake the waiter; without one, the next wait returns immediately. Event loop thread only.

        Several calls without a waiter count as one.
        """
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)
        elif waiter is None or waiter.cancelled() or not waiter.result():
            # Otherwise an earlier call has woken a waiter that has not run yet, and that covers this call as well.
            self._wake_pending = True

    def wake_threadsafe(self) -> None:
        """Call `wake` from any thread: in the thread of the event loop immediately, from others soon.

        Does nothing if the event loop is closed.
        """
        if self._loop is None:
            self._wake_pending = True
        # Check again: a first wait that missed the flag has bound the loop by now.
        if (loop := self._loop) is not None:
            if loop is asyncio._get_running_loop():
                self.wake()
                return
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.wake)

    def close(self) -> None:
        """Release the timer and wake the waiter, if any. Idempotent; a later wait binds to the then running loop."""
        if self._timer is not None:
            self._timer.close()
            self._timer = self._loop = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> Timer:
        self.close()
        self._loop, self._timer = loop, self._clock.timer(self._check_deadline)
        return self._timer

    def _check_deadline(self) -> None:
        if self._until is None or self._waiter is None or self._waiter.done() or self._timer is None:
            return
        if self._clock.now() >= self._until:
            self._waiter.set_result(False)
        else:
            self._timer.arm(self._clock.deadline(self._until))
