"""Limit how long attempts occupy the event loop before completions are written and other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

MAX_COMPLETION_DELAY_SECONDS = 0.025
"""The time from the end of a handler until its completion is being written, unless a later handler blocks for longer.

It is also the time for which attempts that start one after another occupy the event loop: then the completions so far
are handed to the database before the next attempt starts. So a crash repeats at most the jobs that ended in this time
and those in the write that was in progress, and heartbeats and other handlers wait no longer than this time. Batches of
short handlers are not affected.
"""

YIELDED_ITERATIONS = 3
"""Iterations of the event loop for other tasks between two slices: a timer that is due, or a reply that has arrived,
becomes a callback in the first and a step of a task in the second."""


class TimeSlice:
    """The time for which attempts may occupy the event loop.

    A slice begins with the first attempt that starts in an iteration of the loop. If it is over before the next
    iteration, attempts wait for `wait_for_write`; then a new slice begins.
    """

    def __init__(self, monotonic: Callable[[], float], wait_for_write: Callable[[], Awaitable[None]]) -> None:
        self._monotonic = monotonic
        self._wait_for_write = wait_for_write
        self._ends_at: float | None = None
        self._next_slice: asyncio.Event | None = None
        """Set when attempts may start again; None if none waits for that."""

    @property
    def ends_at(self) -> float:
        """The end of the current slice in monotonic seconds; begins one if necessary."""
        if self._ends_at is None:
            self._ends_at = self._monotonic() + MAX_COMPLETION_DELAY_SECONDS
            asyncio.get_running_loop().call_soon(self._end_unused)
        return self._ends_at

    async def wait(self) -> None:
        """Wait until an attempt may start."""
        while self._monotonic() >= self.ends_at:
            if self._next_slice is None:
                await self._run_others()
            else:
                await self._next_slice.wait()

    async def _run_others(self) -> None:
        """Let other tasks run and completions be written; the next attempt then begins a slice."""
        self._next_slice = asyncio.Event()
        try:
            for _ in range(YIELDED_ITERATIONS):
                await asyncio.sleep(0)  # noqa: TID251 - an iteration, not a time
            await self._wait_for_write()
        finally:
            self._next_slice.set()
            self._ends_at = self._next_slice = None

    def _end_unused(self) -> None:
        """End the slice in the next iteration of the loop if time is left: other tasks have run."""
        if self._ends_at is not None and self._monotonic() < self._ends_at:
            self._ends_at = None
