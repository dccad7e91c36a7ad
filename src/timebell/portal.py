"""Blocking variants of coroutine methods, which run the coroutines on an event loop in a thread."""

from __future__ import annotations

import asyncio
import atexit
import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from timebell.clock import SystemClock
from timebell.errors import TimebellError
from timebell.store.dialects.base import caller_thread

if TYPE_CHECKING:
    from timebell.app import Timebell

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
CLOSE_TIMEOUT_SECONDS = 10.0  # limits the wait for a database that does not respond


@dataclass(slots=True)
class _PortalThread:
    """The thread of a portal with its event loop, its clone of the app, and the event that stops it."""

    loop: asyncio.AbstractEventLoop
    app: Timebell
    stopped: asyncio.Event
    thread: threading.Thread


class Portal:
    """Runs coroutines for blocking threads on an event loop in a background thread, which is started on first use.

    The loop has a clone of the app with its own connections, because the app itself may run on another loop.
    Thread-safe. After a fork, the child starts its own thread.
    """

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._start_lock = threading.Lock()
        self._running: _PortalThread | None = None
        _portals.add(self)

    def call(self, method: Callable[[Timebell], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine method of the app and return its result.

        Raises its exceptions, and TimebellError (BLOCKING_IN_LOOP) in a thread that runs an event loop.
        """
        if asyncio._get_running_loop() is not None:
            raise TimebellError(
                "app.sync would block the event loop of this thread.",
                code="BLOCKING_IN_LOOP", fix="Await the method of the app itself: await app.schedule_at(...).",
            )  # fmt: skip
        app, loop = self._app, self._app._simulation_loop
        if loop is not None and not loop.is_running():  # in a simulation this thread runs the loop
            return loop.run_until_complete(method(app))
        if loop is None:
            portal_thread = self._start()
            app, loop = portal_thread.app, portal_thread.loop
        # Calls on a connection owned by this thread come back through the queue; None ends it.
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        result = asyncio.run_coroutine_threadsafe(_run_method(method, app, calls), loop)
        result.add_done_callback(lambda _: calls.put(None))
        try:
            while (call := calls.get()) is not None:
                call()
        except BaseException:
            result.cancel()
            raise
        return result.result()

    def _start(self) -> _PortalThread:
        with self._start_lock:
            if self._running is None:
                started: Future[_PortalThread] = Future()
                threading.Thread(target=self._serve, args=(started,), name="timebell-sync", daemon=True).start()
                self._running = started.result()
                atexit.register(self.close)
            return self._running

    def _serve(self, started: Future[_PortalThread]) -> None:
        """Run the event loop until it is stopped.

        The executor is created here, because no thread can be started during interpreter shutdown.
        """
        loop = asyncio.new_event_loop()
        pool = ThreadPoolExecutor(2, thread_name_prefix="timebell-sync")
        loop.set_default_executor(pool)
        try:
            loop.run_until_complete(self._run_until_stopped(started))
        finally:
            pool.shutdown()
            loop.close()

    async def _run_until_stopped(self, started: Future[_PortalThread]) -> None:
        app, stopped = _clone_for_loop(self._app), asyncio.Event()
        started.set_result(_PortalThread(asyncio.get_running_loop(), app, stopped, threading.current_thread()))
        await stopped.wait()
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remaining:
            task.cancel()
        if remaining:
            await asyncio.wait(remaining)
        await app.close()

    def close(self) -> None:
        """Stop the loop and close its connections; the next call starts another loop. Also runs at exit."""
        with self._start_lock:
            portal_thread, self._running = self._running, None
        if portal_thread is not None:
            atexit.unregister(self.close)
            portal_thread.loop.call_soon_threadsafe(portal_thread.stopped.set)
            portal_thread.thread.join(CLOSE_TIMEOUT_SECONDS)

    def _reset_after_fork(self) -> None:
        """Reset the state in a forked child: the thread does not exist there, and the lock may be held."""
        if self._running is not None:
            # Keep a reference: garbage collection would close the connections, which belong to the parent.
            _inherited_threads.append(self._running)
        self._running, self._start_lock = None, threading.Lock()


_portals: weakref.WeakSet[Portal] = weakref.WeakSet()
_inherited_threads: list[_PortalThread] = []


def _after_fork() -> None:
    for portal in list(_portals):
        portal._reset_after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _clone_for_loop(app: Timebell) -> Timebell:
    """Return a copy of the app with its own store for another event loop; its commits wake the engine of `app`."""
    other = copy.copy(app)
    other._targets_by_kind, other._named_targets_by_kind = {"handler": app._handlers}, {}
    clock = app.clock if app._virtual_time else SystemClock()
    other._bind(other._new_store(clock, app.store.subscribers), clock)
    return other


async def _run_method(
    method: Callable[[Timebell], Coroutine[Any, Any, R]], app: Timebell, calls: SimpleQueue[Callable[[], None] | None]
) -> R:
    """Await a method; its calls on a synchronous connection run in the thread that owns the connection."""

    async def run_in_caller_thread(function: Callable[[], Any]) -> Any:
        result: Future[Any] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        calls.put(call)
        return await asyncio.wrap_future(result)

    caller_thread.set(run_in_caller_thread)
    return await method(app)


class BlockingMethod(Generic[S, P, R]):
    """Descriptor that makes a coroutine method blocking, with the same arguments and result."""

    def __init__(self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, owner: BlockingNamespace[S], _: type | None = None) -> Callable[P, R]:
        @functools.wraps(self._method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return owner._portal.call(lambda app: self._method(owner._resolve(app), *args, **kwargs))

        return call


class BlockingNamespace(Generic[S_co]):
    """Base of the blocking variant of one group of methods; `resolve` returns the object with the coroutine methods."""

    def __init__(self, portal: Portal, resolve: Callable[[Timebell], S_co]) -> None:
        self._portal = portal
        self._resolve = resolve
