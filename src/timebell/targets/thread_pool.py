"""Threads for plain handlers. Calls are handed over and their results collected in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from math import inf
from threading import Lock
from typing import Any

QUEUE_AHEAD_SECONDS = 0.025
"""Calls are accepted ahead of a free thread if they are expected to start within this time."""
MAX_QUEUED_AHEAD = 500
MAX_QUEUE_SECONDS = 1.0
"""A call that has waited longer is returned, because the calls before it take longer than expected."""
SLOWEST_CALL_DECAY = 0.98
"""Factor by which each further call reduces the influence of a slow call on the estimated duration."""


class NotStarted(Exception):
    """A call was returned because no thread became free in time."""


class ThreadPool:
    """Runs calls in at most `max_threads` threads.

    A thread that takes a call while others wait starts another thread: calls that block get a thread each, and short
    ones share a thread, which takes one after another without a hand-over. All results that arrive before the event
    loop reacts are delivered at once.
    """

    def __init__(
        self, max_threads: int, monotonic: Callable[[], float], queue_ahead: float = QUEUE_AHEAD_SECONDS
    ) -> None:
        self._max_threads = max_threads
        self._queue_ahead = queue_ahead
        self._monotonic = monotonic
        self._executor = ThreadPoolExecutor(max_threads, thread_name_prefix="timebell")
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Call] = deque()
        self._finished: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._lock = Lock()
        """Protects the next two fields, and the decision of a thread that it is not needed anymore."""
        self._threads = 0
        self._is_starting = False
        self._is_collecting = False
        self._slowest = inf
        """Estimated maximum duration of a call in seconds, from the recent calls."""
        self._timer: asyncio.TimerHandle | None = None

    def capacity(self) -> int:
        """Return the number of calls to accept: one per thread, plus those expected to wait only briefly for a thread.

        A thread that still runs an abandoned call, such as one that exceeded its timeout, accepts none.
        """
        threads = self._max_threads - sum(call.future.cancelled() for call in tuple(self._running))
        ahead = int(threads * self._queue_ahead / max(self._slowest, 1e-6))
        return threads + min(ahead, MAX_QUEUED_AHEAD)

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call a function in a thread, in a copy of the current context; return the future of its result.

        A call whose future is cancelled before its start does not start. The future raises NotStarted if no thread
        became free in time.
        """
        if hasattr(self._loop, "virtual_time"):  # such a loop has to know the calls for which its time stands still
            return self._loop.run_in_executor(self._executor, copy_context().run, function)
        call = _Call(function, copy_context(), self._loop.create_future(), self._monotonic())
        self._waiting.append(call)
        if self._timer is None:
            self._timer = self._loop.call_later(MAX_QUEUE_SECONDS, self._return_waiting)
        self._add_thread()
        return call.future

    def shutdown(self) -> None:
        """Accept no more calls, and start none of those that wait. Does not wait for running calls."""
        self._waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._timer is not None:
            self._timer.cancel()

    def _add_thread(self) -> None:
        """Start a thread if calls wait; one at a time, because it may find that others have taken all calls."""
        with self._lock:
            if self._is_starting or self._threads == self._max_threads or not self._waiting:
                return
            self._threads, self._is_starting = self._threads + 1, True
        with suppress(RuntimeError):  # shut down
            self._executor.submit(self._run_waiting)

    def _run_waiting(self) -> None:
        """Run calls in this thread until none waits."""
        with self._lock:
            self._is_starting = False
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                with self._lock:
                    if not self._waiting:
                        self._threads -= 1
                        return
                continue
            if self._waiting:
                self._add_thread()
            self._running.add(call)
            call.run(self._monotonic)
            self._running.discard(call)
            self._finished.append(call)
            if not self._is_collecting:
                self._is_collecting = True
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._deliver_results)

    def _deliver_results(self) -> None:
        self._is_collecting = False  # before the results are read: later ones cause another call
        while self._finished:
            call = self._finished.popleft()
            if not isinstance(call.error, NotStarted):
                self._slowest = max(call.seconds, self._slowest * SLOWEST_CALL_DECAY if self._slowest < inf else 0.0)
            call.deliver_result()

    def _return_waiting(self) -> None:
        """Return the calls that have waited for too long."""
        expired_at = self._monotonic() - MAX_QUEUE_SECONDS
        with suppress(IndexError):  # a thread has taken the last one
            while self._waiting and self._waiting[0].submitted_at <= expired_at:
                call = self._waiting.popleft()
                if call.submitted_at > expired_at:  # a thread has taken the one before
                    self._waiting.appendleft(call)
                    break
                self._slowest = inf
                if not call.future.done():
                    call.future.set_exception(NotStarted())
        self._timer = self._loop.call_later(MAX_QUEUE_SECONDS, self._return_waiting) if self._waiting else None


class _Call:
    """A call and its result."""

    __slots__ = ("context", "error", "function", "future", "result", "seconds", "submitted_at")

    def __init__(
        self, function: Callable[[], Any], context: Context, future: asyncio.Future[Any], submitted_at: float
    ) -> None:
        self.function, self.context, self.future, self.submitted_at = function, context, future, submitted_at
        self.result: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0

    def run(self, monotonic: Callable[[], float]) -> None:
        if self.future.cancelled():
            return
        started_at = monotonic()
        try:
            self.result = self.context.run(self.function)
        except BaseException as error:
            self.error = error
        self.seconds = monotonic() - started_at

    def deliver_result(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)
