"""An event loop whose time jumps to the next timer as soon as there is nothing else to do.

Everything that asks the loop for time works on it unchanged: `asyncio.sleep`, `timeout`, `wait_for`,
`call_at`, `timebell.clock.VirtualClock`. While a call runs in a thread, time stands still.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

ROUNDS = 16  # rounds of the loop, all with something to do, between two looks at sockets and threads

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Events = list[tuple[selectors.SelectorKey, int]]


def run_virtual(main: Coroutine[Any, Any, _T], start_time: float = 0.0) -> _T:
    """Run `main` to its end on a fresh `VirtualLoop` whose time begins at `start_time` seconds, as
    `asyncio.run` would, and return its result. RuntimeError when everything waits and no timer is set."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_time)) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, with real threads.

    The order of things is the same in every run: a timer is called at exactly its time, and the results of
    calls in threads are handed over when nothing else is ready, in the order in which the calls were made.
    (What such calls do to one another is up to the executor: give those that share state one with a single
    thread. A call that speaks to the loop while it runs, such as `run_coroutine_threadsafe`, is heard when it
    does so. A cancelled call runs all the same: whether its thread had begun it would be chance.)

    Sockets and subprocesses are real too, but the loop cannot know that an answer is on its way: wrap such a
    wait in `busy()`. Executors must be of threads.
    """

    patience = 60.0
    """Real seconds to wait for a thread or a socket before RuntimeError: it may itself be waiting for virtual
    time."""

    # Private to asyncio's BaseEventLoop, unchanged since Python 3.4. Nothing public tells the next timer.
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _default_executor: ThreadPoolExecutor

    def __init__(self, start_time: float = 0.0) -> None:
        self._calls: list[_Call] = []
        self._holds = 0
        self.seconds = start_time
        """What `time` says, for those who ask often."""
        self.before_jump: Callable[[float | None], float | None] | None = None
        """Asked before each jump of time: given the next timer's time (None: there is none), it answers where
        to jump, no further than that, and may make something ready there."""
        super().__init__(_Selector(self._idle))
        self.set_default_executor(ThreadPoolExecutor(thread_name_prefix="virtual"))
        self._jump(start_time)

    def time(self) -> float:
        """Virtual seconds."""
        return self.seconds

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Hold virtual time while inside: something outside of the loop is at work and will wake it."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        call = _Call(self.create_future())

        def run() -> _T:
            _thread.call = call
            return func(*args)

        def wake(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody waits for the result
                self.call_soon_threadsafe(lambda: None)

        call.result = (executor or self._default_executor).submit(run)
        self._calls.append(call)
        call.result.add_done_callback(wake)
        return call.waiter

    def await_in_thread(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Called in a thread: await something on the loop. Virtual time passes meanwhile, if that takes some."""
        call: _Call | None = getattr(_thread, "call", None)

        async def waiting() -> _T:
            if call is not None:
                call.waits = True
            try:
                return await coroutine
            finally:
                if call is not None:
                    call.waits = False

        return asyncio.run_coroutine_threadsafe(waiting(), self).result()

    def call_soon_threadsafe(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        # A thread that speaks to the loop may wait for it to make younger calls, so those must not wait for
        # this one.
        if (call := getattr(_thread, "call", None)) is not None:
            call.speaks = True
        return super().call_soon_threadsafe(callback, *args, context=context)

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        with self.busy():  # its timeout must not run out on virtual time
            await super().shutdown_default_executor(*args, **kwargs)

    def _idle(self, poll: Callable[[float], _Events], forever: bool) -> _Events:
        """Nothing is ready: hear the outside, or hand over a result, or wait for one, or let time jump."""
        if events := poll(0):
            return events
        if self._calls and (call := self._first_to_hand_over()):
            self._calls.remove(call)
            call.hand_over()
            return []
        if self._holds or (self._calls and not all(call.waits for call in self._calls)):
            if events := poll(self.patience):
                return events
            raise RuntimeError(f"virtual time: a thread or socket has been at work for {self.patience:g} real seconds")
        at = None if forever else self._scheduled[0].when()
        if self.before_jump is not None:
            at = self.before_jump(at)
        if at is None:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
            raise RuntimeError(f"virtual time: everything waits and no timer is set (tasks: {waiting or 'none'})")
        self._jump(at)
        return []

    def _first_to_hand_over(self) -> _Call | None:
        for call in self._calls:
            if call.result.done():
                return call
            if not call.speaks:
                break
        return None

    def _jump(self, time: float) -> None:
        self.seconds = time
        # asyncio calls timers early by up to its resolution, and never if adding that to the time changes
        # nothing.
        self._clock_resolution = math.ulp(time)


class _Call:
    """A call in a thread, and who waits for it."""

    result: Future[Any]

    def __init__(self, waiter: asyncio.Future[Any]) -> None:
        self.waiter = waiter
        self.speaks = False
        self.waits = False

    def hand_over(self) -> None:
        if self.waiter.done():
            return
        if self.result.cancelled():
            self.waiter.cancel()
        elif error := self.result.exception():
            self.waiter.set_exception(error)
        else:
            self.waiter.set_result(self.result.result())


_thread = threading.local()


class _Selector(selectors.DefaultSelector):
    """The real selector; when asked to wait, it asks `idle` what to do instead."""

    def __init__(self, idle: Callable[[Callable[[float], _Events], bool], _Events]) -> None:
        super().__init__()
        self._idle = idle
        self._rounds = 0

    def select(self, timeout: float | None = None) -> _Events:
        if timeout is not None and timeout <= 0:
            # What is ready goes first. To hear the outside costs, so it is not done each time.
            self._rounds += 1
            return super().select(0) if self._rounds % ROUNDS == 0 else []
        return self._idle(super().select, timeout is None)
