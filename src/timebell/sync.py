"""`app.sync`: the verbs for callers that block. Each is the app's own coroutine, run on an event loop in a thread."""

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
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from timebell.app import Timebell
from timebell.client.audiences import Audiences
from timebell.client.campaigns import Campaigns
from timebell.client.connections import Connections
from timebell.client.devices import Devices
from timebell.client.schedules import Schedules
from timebell.client.secrets import Secrets
from timebell.client.targets import Targets
from timebell.client.triggers import Triggers
from timebell.clock import SystemClock
from timebell.errors import TimebellError
from timebell.store.dialects.base import callers_thread

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
PATIENCE = 10.0  # seconds that closing waits for a database that does not answer


@dataclass(slots=True)
class _Serving:
    """The event loop of a portal, the app on it, and how to end it."""

    loop: asyncio.AbstractEventLoop
    app: Timebell
    over: asyncio.Event
    thread: threading.Thread


class Portal:
    """The way from threads that block to an event loop, which starts in a thread of its own when first needed.

    On it is a twin of the app, with connections of its own: the app itself may run on another loop meanwhile. Any
    number of threads may call. After a fork the child starts anew.
    """

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._starting = threading.Lock()
        self._serving: _Serving | None = None
        _portals.add(self)

    def call(self, verb: Callable[[Timebell], Coroutine[Any, Any, R]]) -> R:
        """Run a verb of the app to its end. Raises what it raises, and BLOCKING_IN_LOOP on an event loop's thread."""
        if asyncio._get_running_loop() is not None:
            raise TimebellError(
                "app.sync blocks, and this thread runs an event loop, which would stand still.",
                code="BLOCKING_IN_LOOP", fix="Use the verb itself: await app.schedule_at(...).",
            )  # fmt: skip
        app, loop = self._app, self._app._loop
        if loop is not None and not loop.is_running():  # in a simulation time passes in this very thread
            return loop.run_until_complete(verb(app))
        if loop is None:
            serving = self._start()
            app, loop = serving.app, serving.loop
        work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        done = asyncio.run_coroutine_threadsafe(_called(verb, app, work), loop)
        done.add_done_callback(lambda _: work.put(None))
        try:
            while (task := work.get()) is not None:
                task()
        except BaseException:
            done.cancel()
            raise
        return done.result()

    def _start(self) -> _Serving:
        with self._starting:
            if self._serving is None:
                begun: Future[_Serving] = Future()
                threading.Thread(target=self._serve, args=(begun,), name="timebell-sync", daemon=True).start()
                self._serving = begun.result()
                atexit.register(self.close)
            return self._serving

    def _serve(self, begun: Future[_Serving]) -> None:
        """The thread: an event loop until `over`. At the interpreter's end nothing here needs a new thread."""
        loop = asyncio.new_event_loop()
        pool = ThreadPoolExecutor(2, thread_name_prefix="timebell-sync")
        loop.set_default_executor(pool)
        try:
            loop.run_until_complete(self._until_over(begun))
        finally:
            pool.shutdown()
            loop.close()

    async def _until_over(self, begun: Future[_Serving]) -> None:
        app, over = _beside(self._app), asyncio.Event()
        begun.set_result(_Serving(asyncio.get_running_loop(), app, over, threading.current_thread()))
        await over.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        await app.close()

    def close(self) -> None:
        """End the loop and let go of its connections; the next call starts another. Also done at exit."""
        with self._starting:
            serving, self._serving = self._serving, None
        if serving is not None:
            atexit.unregister(self.close)
            serving.loop.call_soon_threadsafe(serving.over.set)
            serving.thread.join(PATIENCE)

    def _forked(self) -> None:
        """In a child process: the thread is not there, the connections are the parent's, the lock may be taken."""
        if self._serving is not None:
            _of_parents.append(self._serving)  # kept, as to let go of them would be to end them for the parent
        self._serving, self._starting = None, threading.Lock()


_portals: weakref.WeakSet[Portal] = weakref.WeakSet()
_of_parents: list[_Serving] = []


def _after_fork() -> None:
    for portal in list(_portals):
        portal._forked()


os.register_at_fork(after_in_child=_after_fork)


def _beside(app: Timebell) -> Timebell:
    """The same app with a store of its own, for another event loop: what it makes wakes this one's engine."""
    other = copy.copy(app)
    other.kinds, other.by_name = {"handler": app.handlers}, {}
    clock = app.clock if app._virtual else SystemClock()
    other._bind(other._new_store(clock), clock, app._beating, app._working, app._planning)
    return other


async def _called(
    verb: Callable[[Timebell], Coroutine[Any, Any, R]], app: Timebell, work: SimpleQueue[Callable[[], None] | None]
) -> R:
    """Await a verb; what it does on a synchronous connection is done by the thread that brought the connection."""

    async def there(call: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()

        def task() -> None:
            try:
                answer.set_result(call())
            except Exception as failed:
                answer.set_exception(failed)

        work.put(task)
        return await asyncio.wrap_future(answer)

    callers_thread.set(there)
    return await verb(app)


class Verb(Generic[S, P, R]):
    """A coroutine method as one that blocks: same arguments, same answer."""

    def __init__(self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, verbs: _Verbs[S], _: type | None = None) -> Callable[P, R]:
        @functools.wraps(self._method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return verbs._portal.call(lambda app: self._method(verbs._of(app), *args, **kwargs))

        return call


class _Verbs(Generic[S_co]):
    def __init__(self, portal: Portal, of: Callable[[Timebell], S_co]) -> None:
        self._portal = portal
        self._of = of


class BlockingSchedules(_Verbs[Schedules]):
    """`app.sync.schedules`."""

    get = Verb(Schedules.get)
    list = Verb(Schedules.list)
    pause = Verb(Schedules.pause)
    resume = Verb(Schedules.resume)
    trigger = Verb(Schedules.trigger)
    backfill = Verb(Schedules.backfill)
    recover = Verb(Schedules.recover)
    backlogs = Verb(Schedules.backlogs)
    skip = Verb(Schedules.skip)
    move = Verb(Schedules.move)
    undo = Verb(Schedules.undo)
    history = Verb(Schedules.history)
    revert = Verb(Schedules.revert)
    delete = Verb(Schedules.delete)
    upcoming = Verb(Schedules.upcoming)


class BlockingTargets(_Verbs[Targets]):
    """`app.sync.targets`."""

    put = Verb(Targets.put)
    get = Verb(Targets.get)
    list = Verb(Targets.list)
    delete = Verb(Targets.delete)
    enable = Verb(Targets.enable)
    rotate_secret = Verb(Targets.rotate_secret)
    test = Verb(Targets.test)


class BlockingSecrets(_Verbs[Secrets]):
    """`app.sync.secrets`."""

    put = Verb(Secrets.put)
    get = Verb(Secrets.get)
    list = Verb(Secrets.list)
    delete = Verb(Secrets.delete)


class BlockingConnections(_Verbs[Connections]):
    """`app.sync.connections`."""

    put = Verb(Connections.put)
    get = Verb(Connections.get)
    list = Verb(Connections.list)
    delete = Verb(Connections.delete)


class BlockingTriggers(_Verbs[Triggers]):
    """`app.sync.triggers`."""

    put_source = Verb(Triggers.put_source)
    source = Verb(Triggers.source)
    sources = Verb(Triggers.sources)
    delete_source = Verb(Triggers.delete_source)
    put_items = Verb(Triggers.put_items)
    items = Verb(Triggers.items)
    put = Verb(Triggers.put)
    get = Verb(Triggers.get)
    list = Verb(Triggers.list)
    pause = Verb(Triggers.pause)
    resume = Verb(Triggers.resume)
    scan = Verb(Triggers.scan)
    delete = Verb(Triggers.delete)


class BlockingDevices(_Verbs[Devices]):
    """`app.sync.devices`."""

    register = Verb(Devices.register)
    register_many = Verb(Devices.register_many)
    refresh = Verb(Devices.refresh)
    get = Verb(Devices.get)
    delete = Verb(Devices.delete)
    delete_tokens = Verb(Devices.delete_tokens)
    list = Verb(Devices.list)
    count = Verb(Devices.count)


class BlockingAudiences(_Verbs[Audiences]):
    """`app.sync.audiences`."""

    put = Verb(Audiences.put)
    get = Verb(Audiences.get)
    list = Verb(Audiences.list)
    refresh = Verb(Audiences.refresh)
    delete = Verb(Audiences.delete)


class BlockingCampaigns(_Verbs[Campaigns]):
    """`app.sync.campaigns`."""

    create = Verb(Campaigns.create)
    repeat = Verb(Campaigns.repeat)
    edit = Verb(Campaigns.edit)
    get = Verb(Campaigns.get)
    list = Verb(Campaigns.list)
    start = Verb(Campaigns.start)
    pause = Verb(Campaigns.pause)
    resume = Verb(Campaigns.resume)
    stop = Verb(Campaigns.stop)
    retry = Verb(Campaigns.retry)
    test = Verb(Campaigns.test)
    preview = Verb(Campaigns.preview)
    timetable = Verb(Campaigns.timetable)
    deliveries = Verb(Campaigns.deliveries)
    left = Verb(Campaigns.left)
    chunks = Verb(Campaigns.chunks)


class Blocking(_Verbs[Timebell]):
    """`app.sync`: for scripts, Flask and Django. Thread-safe; a verb in an event loop is refused (BLOCKING_IN_LOOP)."""

    schedule_at = Verb(Timebell.schedule_at)
    schedule_many = Verb(Timebell.schedule_many)
    schedule_repeat = Verb(Timebell.schedule_repeat)
    save_calendar = Verb(Timebell.save_calendar)
    calendar = Verb(Timebell.calendar)
    cancel = Verb(Timebell.cancel)
    cancel_all = Verb(Timebell.cancel_all)
    reschedule = Verb(Timebell.reschedule)
    replay = Verb(Timebell.replay)
    resend = Verb(Timebell.resend)
    erase = Verb(Timebell.erase)
    get = Verb(Timebell.get)
    list = Verb(Timebell.list)
    pause_queue = Verb(Timebell.pause_queue)
    resume_queue = Verb(Timebell.resume_queue)
    pause_all = Verb(Timebell.pause_all)
    resume_all = Verb(Timebell.resume_all)
    heal = Verb(Timebell.heal)
    audit = Verb(Timebell.audit)
    why = Verb(Timebell.why)
    open = Verb(Timebell.open)

    def __init__(self, app: Timebell) -> None:
        super().__init__(Portal(app), lambda on_its_loop: on_its_loop)
        self.schedules = BlockingSchedules(self._portal, lambda on_its_loop: on_its_loop.schedules)
        self.targets = BlockingTargets(self._portal, lambda on_its_loop: on_its_loop.targets)
        self.triggers = BlockingTriggers(self._portal, lambda on_its_loop: on_its_loop.triggers)
        self.connections = BlockingConnections(self._portal, lambda on_its_loop: on_its_loop.connections)
        self.secrets = BlockingSecrets(self._portal, lambda on_its_loop: on_its_loop.secrets)
        self.devices = BlockingDevices(self._portal, lambda on_its_loop: on_its_loop.devices)
        self.audiences = BlockingAudiences(self._portal, lambda on_its_loop: on_its_loop.audiences)
        self.campaigns = BlockingCampaigns(self._portal, lambda on_its_loop: on_its_loop.campaigns)

    def close(self) -> None:
        """Let go of the connections; the next verb opens them again. Done at exit by itself."""
        self._portal.close()
