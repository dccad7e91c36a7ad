"""An event loop whose time jumps to the next timer whenever nothing else is ready.

Code that uses the loop's time works unchanged: `asyncio.sleep`, `timeout`, `wait_for`, `call_at`,
`timebell.clock.VirtualClock`. While a call runs in a thread, time stands still.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

ROUNDS_PER_POLL = 16  # busy iterations of the loop between two polls of sockets and threads

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Events = list[tuple[selectors.SelectorKey, int]]


def run_virtual(main: Coroutine[Any, Any, _T], start_time: float = 0.0) -> _T:
    """Run `main` on a new `VirtualLoop` whose time starts at `start_time` seconds, and return its result.

    Like `asyncio.run`. Raises RuntimeError if all tasks wait and no timer is set.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_time)) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, with real threads.

    The order of events is the same in every run: a timer is called at exactly its time, and results of calls in threads
    are delivered when nothing else is ready, in the order in which the calls were submitted. (Interactions between
    such calls depend on the executor: use a single-threaded one for calls that share state. When a running call
    contacts the loop, for example by `run_coroutine_threadsafe`, the loop reacts immediately. A cancelled call runs
    anyway, since whether its thread had started would be random.)

    Sockets and subprocesses are real as well, but the loop cannot know that a response is on its way: wrap such a wait
    in `hold_time()`. Executors must use threads.
    """

    thread_timeout_seconds = 60.0
    """Real seconds to wait for a thread or a socket before RuntimeError: it may be waiting for virtual time."""

    socket_grace_seconds = 0.0
    """Real seconds to wait for open sockets before each jump in time: a response may be on its way."""

    # Private to asyncio's BaseEventLoop, unchanged since Python 3.4. There is no public access to the next timer.
    _scheduled: list[asyncio.TimerHandle]
    # The same, since Python 3.4: the thread that runs the loop.
    _thread_id: int | None
    _clock_resolution: float
    _default_executor: ThreadPoolExecutor

    def __init__(self, start_time: float = 0.0) -> None:
        self._calls: list[_Call] = []
        self._holds = 0
        self.virtual_time = start_time
        """The value of `time()`, for frequent access."""
        self.before_jump: Callable[[float | None], float | None] | None = None
        """Called before each jump with the time of the next timer (None: no timer); returns the time to jump to, which
        must not be later. It may schedule callbacks at that time."""
        self.thread_context: Callable[[], AbstractContextManager[None]] = nullcontext
        """Called in the thread of the loop before each call in a thread, which then runs in the returned context."""
        self._sockets = _Selector(self._idle)
        super().__init__(self._sockets)
        self.set_default_executor(ThreadPoolExecutor(thread_name_prefix="virtual"))
        self._jump(start_time)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.virtual_time

    def runs_in_this_thread(self) -> bool:
        """Return whether the calling thread runs this loop, also while the loop is hidden from asyncio."""
        return self._thread_id == threading.get_ident()

    @contextmanager
    def hold_time(self) -> Iterator[None]:
        """Stop virtual time inside the block: something outside of the loop is working and will wake it."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        call = _Call(self.create_future())

        context = self.thread_context()

        def run() -> _T:
            _thread.call = call
            with context:
                return func(*args)

        def wake(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so the result is not needed
                self.call_soon_threadsafe(lambda: None)

        call.result = (executor or self._default_executor).submit(run)
        self._calls.append(call)
        call.result.add_done_callback(wake)
        return call.waiter

    def await_in_thread(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop from a thread and return its result; virtual time may pass meanwhile."""
        call: _Call | None = getattr(_thread, "call", None)

        async def waiting() -> _T:
            if call is not None:
                call.waits_for_loop = True
            try:
                return await coroutine
            finally:
                if call is not None:
                    call.waits_for_loop = False

        return asyncio.run_coroutine_threadsafe(waiting(), self).result()

    def call_soon_threadsafe(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        # A thread that contacts the loop may wait for calls submitted later, so their results must not wait for
        # the result of this one.
        if (call := getattr(_thread, "call", None)) is not None:
            call.contacts_loop = True
        return super().call_soon_threadsafe(callback, *args, context=context)

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        with self.hold_time():  # its timeout must not expire on virtual time
            await super().shutdown_default_executor(*args, **kwargs)

    def _idle(self, poll: Callable[[float], _Events], forever: bool) -> _Events:
        """Poll sockets and threads, deliver or await a thread's result, or jump in time, because nothing is ready."""
        if events := poll(0):
            return events
        if self._calls and (call := self._next_finished_call()):
            self._calls.remove(call)
            call.deliver_result()
            return []
        if self._holds or (self._calls and not all(call.waits_for_loop for call in self._calls)):
            if events := poll(self.thread_timeout_seconds):
                return events
            raise RuntimeError(
                f"virtual time: a thread or socket has been busy for {self.thread_timeout_seconds:g} real seconds"
            )
        has_sockets = len(self._sockets.get_map()) > 1  # one is the loop's own
        if self.socket_grace_seconds and has_sockets and (events := poll(self.socket_grace_seconds)):
            return events
        at = None if forever else self._scheduled[0].when()
        if self.before_jump is not None:
            at = self.before_jump(at)
        if at is None:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
            raise RuntimeError(f"virtual time: all tasks wait and no timer is set (tasks: {waiting or 'none'})")
        self._jump(at)
        return []

    def _next_finished_call(self) -> _Call | None:
        for call in self._calls:
            if call.result.done():
                return call
            if not call.contacts_loop:
                break
        return None

    def _jump(self, time: float) -> None:
        self.virtual_time = time
        # asyncio calls timers early by up to its resolution; it never calls them if adding the resolution to the time
        # does not change the time.
        self._clock_resolution = math.ulp(time)


class _Call:
    """A call in a thread, with the future of its caller."""

    result: Future[Any]

    def __init__(self, waiter: asyncio.Future[Any]) -> None:
        self.waiter = waiter
        self.contacts_loop = False
        self.waits_for_loop = False

    def deliver_result(self) -> None:
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
    """The real selector, except that it calls `idle` instead of blocking."""

    def __init__(self, idle: Callable[[Callable[[float], _Events], bool], _Events]) -> None:
        super().__init__()
        self._idle = idle
        self._rounds = 0

    def select(self, timeout: float | None = None) -> _Events:
        if timeout is not None and timeout <= 0:
            # Ready callbacks run first. Polling is expensive, so it is not done in every iteration.
            self._rounds += 1
            return super().select(0) if self._rounds % ROUNDS_PER_POLL == 0 else []
        return self._idle(super().select, timeout is None)
