"""A simulated world on virtual time: one database, one clock, one or more nodes, and injected faults.

Planner, worker and store are the real ones. With the same seed, handlers and calls, the final database is identical
byte for byte, including ids.
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
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import orjson
from sqlalchemy import Connection

from timebell import ids
from timebell.app import Timebell
from timebell.engine.running_attempt import AttemptEvent, AttemptState
from timebell.engine.service import Service
from timebell.errors import StoreError
from timebell.model.job import Job, JobState
from timebell.model.schedule import Schedule
from timebell.sim.caller_transactions import share_testcase_connections
from timebell.sim.database import CLIENT, DatabaseLink, SimulatedDatabase
from timebell.sim.faults import Fault, FaultEvent, validate_point
from timebell.sim.frozen import FrozenNodes, current_node
from timebell.sim.idle_skip import HeartbeatAlarm, IdleSkippingClock
from timebell.sim.loop import VirtualLoop
from timebell.sim.run_log import Run, jobs_since, run_fingerprint, to_runs
from timebell.store.jobs import repository
from timebell.store.schedules import queries
from timebell.store.schema import finished, jobs, revisions, schedules
from timebell.store.transaction import JOBS, SCHEDULES

log = logging.getLogger("timebell.sim")

T = TypeVar("T")
START = datetime(2027, 1, 1, tzinfo=UTC)
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CENTURY_SECONDS = 100 * 365 * 86_400.0
RESTART_DELAY_SECONDS = 1.0  # a node that could not start tries again after this time


class _NodeRun:
    """One run of a node, from its start until it stops or crashes."""

    def __init__(self, name: str, app: Timebell, link: DatabaseLink, heartbeat_alarm: HeartbeatAlarm) -> None:
        self.name, self.app, self.link, self.heartbeat_alarm = name, app, link, heartbeat_alarm
        self.stop_requested = asyncio.Event()
        self.start_attempted = asyncio.Event()
        self.service: Service | None = None
        self.task: asyncio.Task[None] | None = None

    def stop_immediately(self) -> None:
        """Stop the node without draining its running attempts."""
        if self.service is not None:
            self.service.node.options = dataclasses.replace(self.service.node.options, drain=0.0)
        self.stop_requested.set()


class World:
    """A simulated world, to be used in a `with` block.

    `start` is the aware instant at which time starts; `nodes` is the number of engines that share the database;
    `options` override fields of `engine.node.NodeOptions`, with the defaults of production. Run coroutines with `run`;
    virtual time passes while they await methods of the world. Nodes start when time passes for the first time.
    """

    def __init__(self, *, start: datetime = START, seed: int = 0, nodes: int = 1, **options: Any) -> None:
        self._runner = asyncio.Runner(loop_factory=VirtualLoop)
        loop = self._runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self._loop.before_jump = self._before_jump
        self._loop.thread_context = share_testcase_connections
        self.clock = IdleSkippingClock(start, self._loop)
        self.database = SimulatedDatabase(self.clock.now, multi_node=nodes > 1)
        self._client = DatabaseLink(self.database, CLIENT)
        self._nodes = nodes
        self._options = {"retention": CENTURY_SECONDS} | options
        self._running: list[_NodeRun] = []
        self._all_runs: list[_NodeRun] = []
        self._start_tasks: list[asyncio.Task[None]] = []
        self._pending_starts: dict[str, asyncio.TimerHandle] = {}
        self._faults: list[Fault] = []
        self._frozen_nodes = FrozenNodes(self._loop)
        self.started_at: dict[str, datetime] = {}
        """The latest instant at which each node had started."""
        self.fault_events: list[FaultEvent] = []
        """The faults that were applied so far, in order."""
        self.keep_heartbeats = False
        """Set to run heartbeats even while idle, for tests that corrupt rows: heartbeats repair them."""
        self._started = False
        self._latency: Callable[[], float] | None = None
        self._target_time: tuple[float, asyncio.Future[None]] | None = None
        self._reported: set[tuple[str, int, JobState]] = set()
        self._reported_at = UNIX_EPOCH
        self._stack = ExitStack()
        self._seed = seed
        self.app: Timebell | None = None

    def __enter__(self) -> World:
        self._stack.enter_context(ids.seeded(_seeded_entropy(self._seed)))
        self.run(self.database.open())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._shut_down())
        finally:
            self._stack.close()
            self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this world until it completes."""
        return self._runner.run(coroutine)

    @property
    def now(self) -> datetime:
        """The current instant, aware UTC."""
        return self.clock.now()

    @property
    def has_started(self) -> bool:
        """True once time has passed."""
        return self._started

    def use(self, app: Timebell) -> Timebell:
        """Set the app that the nodes run; calls of its own methods act on this world as well, until the end."""
        if self._started:
            raise RuntimeError("The nodes run another app already: call use() before time passes.")
        self._stack.enter_context(app._bound_to(self._client, self.clock, self._runner.get_loop()))
        self.app = app
        return app

    def new_app(self, **options: Any) -> Timebell:
        """Create an empty app in this world, with `timezone` UTC by default."""
        return self.use(Timebell("sqlite:///:memory:", **{"timezone": "UTC"} | options))

    async def advance(self, **spans: float) -> None:
        """Advance time by a span (the arguments of timedelta); everything due until then happens."""
        await self.until(self.now + timedelta(**spans))

    async def until(self, instant: datetime) -> None:
        """Advance time to an aware instant; everything due until then happens, including at that instant."""
        if instant < self.now:
            raise ValueError(f"Time cannot go back from {self.now.isoformat()} to {instant.isoformat()}.")
        await self.start()
        reached = asyncio.get_running_loop().create_future()
        self._target_time = self.clock.deadline(instant), reached
        try:
            await reached
        finally:
            self._target_time = None

    async def start(self, *, nodes: int | None = None, **options: Any) -> None:
        """Start the nodes if they have not started yet; restart nodes if handlers were added to the app since."""
        if self.app is None:
            self.new_app()
        assert self.app is not None
        if self._started and (nodes is not None or options):
            raise RuntimeError("The nodes run already: set their number and options before time passes.")
        if not self._started:
            self._started = True
            self._options |= options
            self.database.multi_node = (nodes or self._nodes) > 1
            await asyncio.gather(*(self._start_node(f"node-{number + 1}") for number in range(nodes or self._nodes)))
        for node in list(self._running):
            if len(node.app._handlers) != len(self.app._handlers):
                await self._stop(node)
                await self._start_node(node.name)

    def crash(self, name: str | None = None, *, at: str | None = None, down: float = 1.0) -> None:
        """Crash a node (None: all nodes) without drain or deregistration; it restarts `down` seconds later.

        With `at`, a fault point such as `complete_serial.commit` (see `sim.database.FAULT_POINTS`), the first node that
        reaches the point crashes there. Running async handlers are interrupted at their next await; synchronous ones
        run to the end in their thread.
        """
        if at is not None:
            self._add_fault(Fault(name, validate_point(at), down))
            return
        for node in [node for node in self._running if name in (None, node.name)]:
            self._kill(node, down)
        for pending in [pending for pending in self._pending_starts if name in (None, pending)]:
            self._start_later(pending, down)

    def disconnect(self, name: str | None = None, *, at: str) -> None:
        """Break the connection of a node once, at a fault point as in `crash`.

        The first node that reaches the point gets StoreUnreachable and continues to run. At `.done` the operation has
        been committed nevertheless. The name "client" is the connection of the app's own method calls; for that, a
        point of any operation is valid.
        """
        if name == "client":
            self._client.pending_fault = at, self._disconnect_client
        else:
            self._add_fault(Fault(name, validate_point(at)))

    def cut(self, name: str, seconds: float) -> None:
        """Cut a node's connection to the database for some time; the node continues to run.

        A crash of the node ends the cut, because the new run has a new connection.
        """
        for node in self._find_running(name):
            node.link.is_cut = True
            self._record_event(name, "cut")
            self._loop.call_later(seconds, self._reconnect, node)

    def freeze(self, name: str | None, seconds: float, *, at: str | None = None) -> None:
        """Freeze a node with its handlers for some time; everything that becomes due there happens afterwards.

        With `at`, a fault point as in `crash`, the named node (None: any) is frozen when it reaches the point.
        """
        if at is not None:
            self._add_fault(Fault(name, validate_point(at), frozen_seconds=seconds))
            return
        for node in self._find_running(name):
            self._freeze(node, seconds)

    def delay_requests(self, latency: Callable[[], float] | None) -> None:
        """Delay each request of a node to the database, and each reply, by the seconds that `latency` returns.

        Operations of the nodes, and of the loops within a node, then happen in other orders. None: no delay.
        """
        self._latency = latency
        for node in self._running:
            node.link.latency = latency

    def mute_notifications(self, seconds: float) -> None:
        """Suppress notifications of writes for some time; nodes then depend on polling."""
        self._set_notifications_muted(True)
        self._loop.call_later(seconds, self._set_notifications_muted, False)

    async def add_node(self, name: str) -> None:
        """Start another node. Raises RuntimeError in a world that was created for one node."""
        if not self.database.multi_node:
            raise RuntimeError("This world was created for one node: create it with nodes=2 or more.")
        await self._start_node(name)

    async def drain_node(self, name: str) -> None:
        """Drain and stop a node; time may pass meanwhile."""
        for node in self._find_running(name):
            await self._stop(node)

    @property
    def nodes(self) -> list[str]:
        """The names of the running nodes."""
        return [node.name for node in self._running]

    @property
    def restarting_nodes(self) -> list[str]:
        """The names of the nodes that are down and will restart."""
        return list(self._pending_starts)

    @property
    def services(self) -> list[Service]:
        """The services of the running nodes."""
        return [node.service for node in self._running if node.service is not None]

    def clear_faults(self) -> None:
        """End all faults: discard pending ones, restore connections, thaw nodes and restart those that are down."""
        self._faults.clear()
        self._client.pending_fault = None
        for node in self._running:
            self._reconnect(node)
            self._thaw(node)
            self._arm_fault(node)
        for name in self.restarting_nodes:
            self._start_later(name, 0.0)
        self._set_database_down(False)
        self._set_notifications_muted(False)

    @staticmethod
    def current_node_name() -> str | None:
        """Return the name of the node that runs the calling code (None outside of nodes); for handlers."""
        node = current_node.get()
        return None if node is None else str(node.name)

    def outage(self, start: datetime, end: datetime, *, of: str = "nodes") -> None:
        """Take all nodes down from `start` to `end` (future aware instants), or with of="database" the database."""
        if not self.now <= start < end:
            raise ValueError(f"An outage must be in the future; {start.isoformat()} to {end.isoformat()} is not.")
        if of == "database":
            self.at(start, lambda: self._set_database_down(True))
            self.at(end, lambda: self._set_database_down(False))
        elif of == "nodes":
            self.at(start, lambda: self.crash(down=(end - start).total_seconds()))
        else:
            raise ValueError(f"An outage must be of nodes or database, not of {of!r}.")

    def at(self, instant: datetime, call: Callable[[], None]) -> None:
        """Run a callback at a future aware instant, before anything that is due then."""
        self._loop.call_at(self.clock.deadline(instant), call)

    @contextlib.contextmanager
    def connect(self) -> Iterator[Connection]:
        """Yield a SQLAlchemy connection to the simulated database, for the program's own tables.

        It is in a transaction, which is committed at the end of the block. Time must not pass inside the block.
        """
        with self.database.connect() as connection, connection.begin():
            yield connection

    def runs(self) -> list[Run]:
        """Return the runs that fired, finished, were skipped or are due and waiting, since the last call; in order."""
        new_jobs = [
            job
            for job in self.database.run_read(jobs_since, self._reported_at, self.now)
            if run_fingerprint(job) not in self._reported
        ]
        self._reported_at = self.now
        self._reported = {run_fingerprint(job) for job in self.database.run_read(jobs_since, self.now, self.now)}
        return to_runs(new_jobs)

    def history(self) -> list[Run]:
        """Return all runs since the start, in order."""
        return to_runs(self.database.run_read(jobs_since, UNIX_EPOCH, self.now))

    def schedules(self) -> list[Schedule]:
        """Return all schedules, ordered by their next fire time."""
        return self.database.run_read(queries.list_next_to_fire, 1_000_000)

    def pending_jobs(self, topic: str) -> list[Job]:
        """Return up to 500 pending jobs of a topic, newest first."""
        pending = {JobState.PENDING}
        return self.database.run_read(repository.list_jobs, {"topic": topic}, pending, 500, None, 0).items

    @contextmanager
    def socket_grace(self, seconds: float) -> Iterator[None]:
        """Let time wait this long, in real seconds, for responses to open sockets before each jump in the block."""
        before, self._loop.socket_grace_seconds = self._loop.socket_grace_seconds, seconds
        try:
            yield
        finally:
            self._loop.socket_grace_seconds = before

    def dump_rows(self) -> bytes:
        """Return all rows of schedules, revisions, live and finished jobs, as one line of JSON each."""
        driver = self.database._transaction().driver
        lines = []
        for table in (schedules, revisions, jobs, finished):
            rows = driver.execute(f"SELECT * FROM {table.name} ORDER BY 1, 2")  # noqa: S608 - our own table names
            names = [column[0] for column in rows.description]
            lines += [orjson.dumps([table.name, dict(zip(names, row, strict=True))]) for row in rows]
        return b"\n".join(lines)

    async def _start_node(self, name: str) -> None:
        """Start a node; return once it runs or its first attempt to start has failed."""
        assert self.app is not None
        self._pending_starts.pop(name, None)
        link = DatabaseLink(self.database, name)
        link.latency = self._latency
        heartbeat_alarm = HeartbeatAlarm(self.clock)
        node = _NodeRun(name, self.app._clone_for_node(link, self.clock, heartbeat_alarm), link, heartbeat_alarm)
        self._running.append(node)
        self._all_runs.append(node)
        self._arm_fault(node)
        node.task = asyncio.create_task(self._run_node(node), name=name)
        first_attempt = asyncio.create_task(node.start_attempted.wait())
        await asyncio.wait({node.task, first_attempt}, return_when=asyncio.FIRST_COMPLETED)
        first_attempt.cancel()
        if node.task.done():
            node.task.result()

    async def _run_node(self, node: _NodeRun) -> None:
        current_node.set(node)
        while not node.stop_requested.is_set():
            try:
                async with node.app.running(name=node.name, **self._options) as service:
                    node.service = service
                    self.started_at[node.name] = self.now
                    node.start_attempted.set()
                    await node.stop_requested.wait()
            except StoreError as error:  # a process supervisor would restart it
                log.warning("could not start %s: %s", node.name, error)
                node.start_attempted.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(node.stop_requested.wait(), RESTART_DELAY_SECONDS)

    def _disconnect_client(self) -> bool:
        self._record_event("client", "disconnect")
        return True

    def _freeze(self, node: _NodeRun, seconds: float) -> None:
        self._frozen_nodes.freeze(node)
        self._record_event(node.name, "freeze")
        self._loop.call_later(seconds, self._thaw, node)

    def _find_running(self, name: str | None) -> list[_NodeRun]:
        return [node for node in self._running if node.name == name]

    def _record_event(self, name: str | None, kind: str) -> None:
        self.fault_events.append(FaultEvent(self.now, name, kind))

    def _reconnect(self, node: _NodeRun) -> None:
        if node in self._running:
            node.link.is_cut = False
            self._record_event(node.name, "mend")

    def _thaw(self, node: _NodeRun) -> None:
        if node in self._frozen_nodes:
            self._frozen_nodes.thaw(node)
            node.heartbeat_alarm.wake()  # overdue: other nodes may have reclaimed its attempts
            self._record_event(node.name, "thaw")

    def _kill(self, node: _NodeRun, down: float) -> None:
        self._record_event(node.name, "crash")
        self._running.remove(node)
        node.link.is_cut = True
        node.stop_immediately()
        if node.service is not None:
            for attempt in node.service.node.running_attempts.values():
                attempt.interrupt(AttemptEvent.DRAIN)
        self._thaw(node)
        self._start_later(node.name, down)

    def _start_later(self, name: str, down: float) -> None:
        if name in self._pending_starts:
            self._pending_starts[name].cancel()

        def start() -> None:
            self._start_tasks.append(self._loop.create_task(self._start_node(name)))

        self._pending_starts[name] = self._loop.call_later(down, start)

    def _add_fault(self, fault: Fault) -> None:
        self._faults.append(fault)
        for node in self._running:
            self._arm_fault(node)

    def _arm_fault(self, node: _NodeRun) -> None:
        """Arm the first pending fault that applies to this node."""
        node.link.pending_fault = None
        for fault in self._faults:
            if fault.name in (None, node.name):
                node.link.pending_fault = fault.point, functools.partial(self._apply_fault, fault, node)
                return

    def _apply_fault(self, fault: Fault, node: _NodeRun) -> bool:
        """Apply a fault; return whether it aborts the operation in progress."""
        self._faults.remove(fault)
        if fault.down_seconds is not None:
            self._kill(node, fault.down_seconds)
        elif fault.frozen_seconds is not None:
            self._freeze(node, fault.frozen_seconds)
        else:
            self._record_event(node.name, "disconnect")
        for other in self._running:
            self._arm_fault(other)
        return fault.frozen_seconds is None

    async def _stop(self, node: _NodeRun) -> None:
        node.stop_requested.set()
        if node.task is not None:
            await node.task
        if node in self._running:  # false if it crashed while draining
            self._running.remove(node)

    async def _shut_down(self) -> None:
        for handle in self._pending_starts.values():
            handle.cancel()
        for node in self._all_runs:
            self._frozen_nodes.thaw(node)
            node.stop_immediately()
        self.database.is_down = False
        await asyncio.gather(*(node.task for node in self._all_runs if node.task is not None), *self._start_tasks)
        for node in self._all_runs:
            for calls in (node.app._handlers.threads, node.app._handlers.processes):
                if calls is not None:
                    calls.shutdown()
        await self.database.close()

    def _set_database_down(self, is_down: bool) -> None:
        self.database.is_down = is_down
        self._record_event(None, "away" if is_down else "back")

    def _set_notifications_muted(self, is_muted: bool) -> None:
        self.database.notifications_muted = is_muted

    def _wake_nodes(self) -> None:
        """Wake planners and workers, as a heartbeat does."""
        for node in self._running:
            node.link.subscribers.publish(frozenset((JOBS, SCHEDULES)))

    def _before_jump(self, at: float | None) -> float | None:
        """Return the time to jump to: the next timer, the next heartbeat or the target of `until`, if earlier."""
        now = self._loop.time()
        target = self._target_time if self._target_time is not None and not self._target_time[1].done() else None
        if target is not None and (at is None or at > target[0]):
            at = max(target[0], now)
        else:
            target = None
        if at is None:
            return None
        heartbeat = math.inf
        for node in self._running:
            if node.heartbeat_alarm.due < heartbeat and node not in self._frozen_nodes:
                heartbeat = node.heartbeat_alarm.due
        heartbeat += self.clock.skipped_seconds
        if at > heartbeat:
            if (idle_until := self._idle_until()) is not None:
                if at > idle_until:  # work for which no timer is set yet: a heartbeat would have woken the nodes
                    at, target = idle_until, None
                    self._wake_nodes()
                self.clock.skipped_seconds += at - now
            else:
                at, target = max(heartbeat, now), None
                for node in self._running:
                    if node not in self._frozen_nodes and node.heartbeat_alarm.due + self.clock.skipped_seconds <= at:
                        node.heartbeat_alarm.wake()
        if target is not None:
            target[1].set_result(None)
        return at

    def _idle_until(self) -> float | None:
        """Return the loop's time until which heartbeats may be skipped; None if they must run."""
        if self.database.is_down or self.database.notifications_muted or self.keep_heartbeats:
            return None
        running_attempts = 0
        for node in self._running:
            if node.service is None or node.service.node.stopping or node.service.failing_services:
                return None
            if node.link.is_cut or node in self._frozen_nodes:
                return None
            running_attempts += sum(
                one.state is not AttemptState.LOST for one in node.service.node.running_attempts.values()
            )
        until = self.database.idle_until(running_attempts)
        return None if until is None else self.clock.deadline(until)


def _seeded_entropy(seed: int) -> Callable[[int], bytes]:
    """Return a function that generates pseudorandom bytes, the same sequence for the same seed."""
    blocks = itertools.count()
    return lambda size: hashlib.shake_256(f"{seed}.{next(blocks)}".encode()).digest(size)
