"""A world on virtual time: one database, one clock, one or several nodes, and what befalls them.

Planner, worker and store are the real ones. With the same seed, handlers and calls the database holds the same
bytes at the end, ids included.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import orjson
from sqlalchemy import Connection

from timebell import ids
from timebell.app import Timebell
from timebell.engine.service import Service
from timebell.errors import StoreError
from timebell.model.job import JobState
from timebell.model.schedule import Schedule
from timebell.sim.database import Database, Link
from timebell.sim.faults import Befell, Fault, point
from timebell.sim.frozen import Frozen, here
from timebell.sim.idle_skip import Heart, RestingClock
from timebell.sim.loop import VirtualLoop
from timebell.sim.run_log import Run, in_order, jobs_since, mark
from timebell.store.schedules import schedules as store_schedules
from timebell.store.schema import finished, jobs, revisions, schedules

log = logging.getLogger("timebell.sim")

T = TypeVar("T")
START = datetime(2027, 1, 1, tzinfo=UTC)
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
CENTURY = 100 * 365 * 86_400.0
RESTART = 1.0  # seconds after which a node that could not start tries again


class _Life:
    """A node from its start to its end, however it comes."""

    def __init__(self, name: str, app: Timebell, link: Link, heart: Heart) -> None:
        self.name, self.app, self.link, self.heart = name, app, link, heart
        self.over = asyncio.Event()
        self.tried = asyncio.Event()
        self.service: Service | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Without waiting for what runs."""
        if self.service is not None:
            self.service.node.options = dataclasses.replace(self.service.node.options, drain=0.0)
        self.over.set()


class World:
    """Use it in a `with` block. `start` is the aware instant at which time begins; `nodes` says how many engines
    share the database; `options` are fields of `engine.context.Options`, the defaults those of production.

    Coroutines run by `run`; what they await of this world lets time pass. Nodes start when time first passes.
    """

    def __init__(self, *, start: datetime = START, seed: int = 0, nodes: int = 1, **options: Any) -> None:
        self._runner = asyncio.Runner(loop_factory=VirtualLoop)
        self._loop = self._runner.get_loop()
        assert isinstance(self._loop, VirtualLoop)
        self._loop.before_jump = self._before_jump
        self.clock = RestingClock(start, self._loop)
        self.database = Database(self.clock.now, many_nodes=nodes > 1)
        self._client = Link(self.database, "the client", self._client_wrote)
        self._nodes = nodes
        self._options = {"retention": CENTURY} | options
        self._lives: list[_Life] = []
        self._all: list[_Life] = []
        self._births: list[asyncio.Task[None]] = []
        self._starts: dict[str, asyncio.TimerHandle] = {}
        self._faults: list[Fault] = []
        self._frozen = Frozen(self._loop)
        self.befell: list[Befell] = []
        """What befell the nodes so far, in order."""
        self.restless = False
        """Whether hearts beat also while nothing can happen: for a test that harmed rows, which heal as they beat."""
        self._begun = False
        self._goal: tuple[float, asyncio.Future[None]] | None = None
        self._told: set[tuple[str, int, JobState]] = set()
        self._told_at = BEGINNING
        self._stack = ExitStack()
        self._seed = seed
        self.app: Timebell | None = None

    def __enter__(self) -> World:
        self._stack.enter_context(ids.seeded(_entropy(self._seed)))
        self.run(self.database.open())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._end())
        finally:
            self._stack.close()
            self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this world, to its end."""
        return self._runner.run(coroutine)

    @property
    def now(self) -> datetime:
        """The present instant, aware UTC."""
        return self.clock.now()

    @property
    def begun(self) -> bool:
        """Whether time has passed."""
        return self._begun

    def use(self, app: Timebell) -> Timebell:
        """Make this the program that the nodes run; its own verbs act on this world too, until the end."""
        if self._begun:
            raise RuntimeError("Nodes run another app already: choose one before time passes.")
        self._stack.enter_context(app._elsewhere(self._client, self.clock, self._runner.get_loop()))
        self.app = app
        return app

    def new_app(self, **options: Any) -> Timebell:
        """A new, empty app in this world; in UTC unless `timezone` says otherwise."""
        return self.use(Timebell("sqlite:///:memory:", **{"timezone": "UTC"} | options))

    async def advance(self, **spans: float) -> None:
        """Let time pass (a timedelta's arguments); everything due until then happens."""
        await self.until(self.now + timedelta(**spans))

    async def until(self, instant: datetime) -> None:
        """Let time pass until an aware instant; everything due until then happens, also what is due right then."""
        if instant < self.now:
            raise ValueError(f"Time does not go back: it is {self.now.isoformat()}, not yet {instant.isoformat()}.")
        await self.start()
        goal = asyncio.get_running_loop().create_future()
        self._goal = self.clock.deadline(instant), goal
        try:
            await goal
        finally:
            self._goal = None

    async def start(self, *, nodes: int | None = None, **options: Any) -> None:
        """Start the nodes, if they never were; again those whose app has got handlers since."""
        if self.app is None:
            self.new_app()
        assert self.app is not None
        if self._begun and (nodes is not None or options):
            raise RuntimeError("The nodes run already: say how many and how before time passes.")
        if not self._begun:
            self._begun = True
            self._options |= options
            self.database.many_nodes = (nodes or self._nodes) > 1
            await asyncio.gather(*(self._bear(f"node-{number + 1}") for number in range(nodes or self._nodes)))
        for life in list(self._lives):
            if len(life.app.handlers) != len(self.app.handlers):
                await self._stop(life)
                await self._bear(life.name)

    def crash(self, name: str | None = None, *, at: str | None = None, down: float = 1.0) -> None:
        """Crash a node, or all: no drain, no last word to the database. It starts again `down` seconds later.

        With `at`, a point such as `fire.commit` (see `sim.database.POINTS`), the first node that gets there
        crashes right there. Handlers that run get no further than their next await; one that is a plain function
        runs to its end in its thread.
        """
        if at is not None:
            self._expect(Fault(name, point(at), down))
            return
        for life in [life for life in self._lives if name in (None, life.name)]:
            self._kill(life, down)
        for waiting in [waiting for waiting in self._starts if name in (None, waiting)]:
            self._start_later(waiting, down)

    def disconnect(self, name: str | None = None, *, at: str) -> None:
        """Break the connection of a node once, at a point as of `crash`: the first that gets there is told that the
        database did not answer, and goes on. At `.done` what it asked for is done all the same. Of the name "client"
        it is that of the app's own verbs, at any operation's point."""
        if name == "client":
            self._client.fault = at, self._disconnect_client
        else:
            self._expect(Fault(name, point(at)))

    def cut(self, name: str, seconds: float) -> None:
        """Keep a node from the database; it runs on. One that crashes meanwhile is mended by that."""
        for life in self._named(name):
            life.link.cut = True
            self._note(name, "cut")
            self._loop.call_later(seconds, self._mend, life)

    def freeze(self, name: str | None, seconds: float, *, at: str | None = None) -> None:
        """Let a node stand still, its handlers too, while time passes. What is due there by then happens after it.

        With `at`, a point as of `crash`, the first node that gets there does so; of no name, any.
        """
        if at is not None:
            self._expect(Fault(name, point(at), frozen=seconds))
            return
        for life in self._named(name):
            self._freeze(life, seconds)

    def deafen(self, seconds: float) -> None:
        """Let nodes hear nothing of what others write; they find out by looking."""
        self._set_deaf(True)
        self._loop.call_later(seconds, self._set_deaf, False)

    async def join(self, name: str) -> None:
        """Start one node more. Only in a world that was started with several."""
        if not self.database.many_nodes:
            raise RuntimeError("This world was made for one node: say nodes=2 or more when it is made.")
        await self._bear(name)

    async def leave(self, name: str) -> None:
        """Let a node drain, for which time may pass, and end."""
        for life in self._named(name):
            await self._stop(life)

    @property
    def nodes(self) -> list[str]:
        """The names of those that run."""
        return [life.name for life in self._lives]

    @property
    def expected(self) -> list[str]:
        """The names of those that are down and start again by themselves."""
        return list(self._starts)

    @property
    def services(self) -> list[Service]:
        """The engines that run."""
        return [life.service for life in self._lives if life.service is not None]

    def heal(self) -> None:
        """End all that befalls the nodes: what was to come does not, and those that are down start now."""
        self._faults.clear()
        self._client.fault = None
        for life in self._lives:
            self._mend(life)
            self._thaw(life)
            self._aim(life)
        for name in self.expected:
            self._start_later(name, 0.0)
        self._set_away(False)
        self._set_deaf(False)

    @staticmethod
    def here() -> str | None:
        """The name of the node that runs this code: for handlers."""
        life = here.get()
        return None if life is None else str(life.name)

    def outage(self, start: datetime, end: datetime, *, of: str = "nodes") -> None:
        """From `start` to `end` (aware instants to come) every node is down, or with of="database" the database."""
        if not self.now <= start < end:
            raise ValueError(f"An outage lies ahead: from {start.isoformat()} to {end.isoformat()} does not.")
        if of == "database":
            self.at(start, lambda: self._set_away(True))
            self.at(end, lambda: self._set_away(False))
        elif of == "nodes":
            self.at(start, lambda: self.crash(down=(end - start).total_seconds()))
        else:
            raise ValueError(f"An outage is of nodes or of the database, not of {of!r}.")

    def at(self, instant: datetime, call: Callable[[], None]) -> None:
        """Call something at an aware instant to come, before what is due then."""
        self._loop.call_at(self.clock.deadline(instant), call)

    @contextlib.contextmanager
    def connect(self) -> Iterator[Connection]:
        """The simulated database, for tables of one's own: a SQLAlchemy connection in a transaction that the end of
        the block commits. For use while no time passes."""
        with self.database.connect() as connection, connection.begin():
            yield connection

    def runs(self) -> list[Run]:
        """What fired, ended or was skipped, or is due and waits, and was not told before; in order."""
        fresh = [job for job in self.database.look(jobs_since, self._told_at, self.now) if mark(job) not in self._told]
        self._told_at = self.now
        self._told = {mark(job) for job in self.database.look(jobs_since, self.now, self.now)}
        return in_order(fresh)

    def history(self) -> list[Run]:
        """As `runs`, since the beginning."""
        return in_order(self.database.look(jobs_since, BEGINNING, self.now))

    def schedules(self) -> list[Schedule]:
        """Every schedule, soonest first."""
        return self.database.look(store_schedules.upcoming, 1_000_000)

    def ledger(self) -> bytes:
        """Every row of schedules, their revisions, and jobs live and finished: a line of JSON each."""
        driver = self.database._transaction().driver
        lines = []
        for table in (schedules, revisions, jobs, finished):
            rows = driver.execute(f"SELECT * FROM {table.name} ORDER BY 1, 2")  # noqa: S608 - our own table names
            names = [column[0] for column in rows.description]
            lines += [orjson.dumps([table.name, dict(zip(names, row, strict=True))]) for row in rows]
        return b"\n".join(lines)

    async def _bear(self, name: str) -> None:
        """Start a node, or see it fail to."""
        assert self.app is not None
        self._starts.pop(name, None)
        link = Link(self.database, name)
        heart = Heart(self.clock)
        life = _Life(name, self.app._twin(link, self.clock, heart), link, heart)
        self._lives.append(life)
        self._all.append(life)
        self._aim(life)
        life.task = asyncio.create_task(self._live(life), name=name)
        trying = asyncio.create_task(life.tried.wait())
        await asyncio.wait({life.task, trying}, return_when=asyncio.FIRST_COMPLETED)
        trying.cancel()
        if life.task.done():
            life.task.result()

    async def _live(self, life: _Life) -> None:
        here.set(life)
        while not life.over.is_set():
            try:
                async with life.app.running(name=life.name, **self._options) as service:
                    life.service = service
                    life.tried.set()
                    await life.over.wait()
            except StoreError as failed:  # whoever looks after the process starts it again
                log.warning("%s did not start: %s", life.name, failed)
                life.tried.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(life.over.wait(), RESTART)

    def _disconnect_client(self) -> bool:
        self._note("client", "disconnect")
        return True

    def _freeze(self, life: _Life, seconds: float) -> None:
        self._frozen.freeze(life)
        self._note(life.name, "freeze")
        self._loop.call_later(seconds, self._thaw, life)

    def _named(self, name: str | None) -> list[_Life]:
        return [life for life in self._lives if life.name == name]

    def _note(self, name: str | None, what: str) -> None:
        self.befell.append(Befell(self.now, name, what))

    def _mend(self, life: _Life) -> None:
        if life in self._lives:
            life.link.cut = False
            self._note(life.name, "mend")

    def _thaw(self, life: _Life) -> None:
        if life in self._frozen:
            self._frozen.thaw(life)
            life.heart.poke()  # it is late: what it held may be another's by now
            self._note(life.name, "thaw")

    def _kill(self, life: _Life, down: float) -> None:
        self._note(life.name, "crash")
        self._lives.remove(life)
        life.link.cut = True
        life.end()
        if life.service is not None:
            for held in life.service.node.held.values():
                held.stop("drain")
        self._thaw(life)
        self._start_later(life.name, down)

    def _start_later(self, name: str, down: float) -> None:
        if name in self._starts:
            self._starts[name].cancel()

        def start() -> None:
            self._births.append(self._loop.create_task(self._bear(name)))

        self._starts[name] = self._loop.call_later(down, start)

    def _expect(self, fault: Fault) -> None:
        self._faults.append(fault)
        for life in self._lives:
            self._aim(life)

    def _aim(self, life: _Life) -> None:
        """Let the first fault that is meant for it wait for this node."""
        life.link.fault = None
        for fault in self._faults:
            if fault.name in (None, life.name):
                life.link.fault = fault.at, functools.partial(self._strike, fault, life)
                return

    def _strike(self, fault: Fault, life: _Life) -> bool:
        """Whether what the node does there is broken off."""
        self._faults.remove(fault)
        if fault.down is not None:
            self._kill(life, fault.down)
        elif fault.frozen is not None:
            self._freeze(life, fault.frozen)
        else:
            self._note(life.name, "disconnect")
        for other in self._lives:
            self._aim(other)
        return fault.frozen is None

    async def _stop(self, life: _Life) -> None:
        life.over.set()
        if life.task is not None:
            await life.task
        if life in self._lives:  # or it has crashed as it drained
            self._lives.remove(life)

    async def _end(self) -> None:
        for handle in self._starts.values():
            handle.cancel()
        for life in self._all:
            self._frozen.thaw(life)
            life.end()
        self.database.away = False
        await asyncio.gather(*(life.task for life in self._all if life.task is not None), *self._births)
        for life in self._all:
            if life.app.handlers.threads is not None:
                life.app.handlers.threads.shutdown()
        await self.database.close()

    def _set_away(self, away: bool) -> None:
        self.database.away = away
        self._note(None, "away" if away else "back")

    def _set_deaf(self, deaf: bool) -> None:
        self.database.deaf = deaf

    def _client_wrote(self) -> None:
        """As any other's, its writes are not heard while the nodes are deaf."""
        if not self.database.deaf:
            self._poke()

    def _poke(self) -> None:
        """Planners and workers look at once, as after a write by their own process, or a heartbeat."""
        for life in self._lives:
            if life.service is not None:
                life.service.node.planning.poke()
                life.service.node.working.poke()

    def _before_jump(self, at: float | None) -> float | None:
        """Where time goes from here: to the next timer, heartbeat, or the end of what was asked for."""
        now = self._loop.time()
        goal = self._goal if self._goal is not None and not self._goal[1].done() else None
        if goal is not None and (at is None or at > goal[0]):
            at = max(goal[0], now)
        else:
            goal = None
        if at is None:
            return None
        beat = math.inf
        for life in self._lives:
            if life.heart.due < beat and life not in self._frozen:
                beat = life.heart.due
        beat += self.clock.rested
        if at > beat:
            if (calm := self._calm_until()) is not None:
                if at > calm:  # what nobody waits for yet, a heartbeat would have told them by then
                    at, goal = calm, None
                    self._poke()
                self.clock.rested += at - now
            else:
                at, goal = max(beat, now), None
                for life in self._lives:
                    if life not in self._frozen and life.heart.due + self.clock.rested <= at:
                        life.heart.poke()
        if goal is not None:
            goal[1].set_result(None)
        return at

    def _calm_until(self) -> float | None:
        """Until when hearts may rest, in the loop's seconds; None: they beat."""
        if self.database.away or self.database.deaf or self.restless:
            return None
        held = 0
        for life in self._lives:
            if life.service is None or life.service.node.stopping or life.service.failing:
                return None
            if life.link.cut or life in self._frozen:
                return None
            held += sum(one.drop != "lost" for one in life.service.node.held.values())
        until = self.database.calm_until(held)
        return None if until is None else self.clock.deadline(until)


def _entropy(seed: int) -> Callable[[int], bytes]:
    """Bytes that look random and are the same for the same seed."""
    blocks = itertools.count()
    return lambda size: hashlib.shake_256(f"{seed}.{next(blocks)}".encode()).digest(size)
