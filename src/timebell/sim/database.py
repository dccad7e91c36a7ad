"""The database of a simulation: the SQLite store in memory, and connections to it that can fail."""

from __future__ import annotations

import asyncio
import sqlite3
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from timebell.errors import StoreUnreachable
from timebell.features import FEATURES
from timebell.model.routes import ALL_ROUTES
from timebell.sim.caller_transactions import CallerTransactions, is_supported
from timebell.sim.frozen import current_node
from timebell.sim.loop import VirtualLoop
from timebell.store import transaction
from timebell.store.dialects.base import Finish, Operation, P, R
from timebell.store.dialects.handler_transactions import handler_transaction_in_thread, no_finish
from timebell.store.dialects.sqlite.async_driver import AdaptedConnection, adapted_engine
from timebell.store.dialects.sqlite.store import SqliteStore, engine_for, translate_error
from timebell.store.jobs import claim
from timebell.store.open import migrate
from timebell.store.recent_writes import RecentWrites
from timebell.store.subscribers import Subscribers
from timebell.store.transaction import Dialect, Transaction
from timebell.store.types import from_micros

FAULT_POINTS = {
    "fire_due_schedules": 7, "claim_batch": 1, "claim_limited": 7, "claim_fair_shares": 2, "complete_jobs": 2,
    "complete_serial": 6, "complete_one": 6, "schedule_retries": 1, "schedule_group_retries": 3,
}  # fmt: skip
"""Store operations at which a node can crash, freeze or lose its connection, with their numbers of statements.

A point is before a statement (`complete_serial.1`), before the commit of an operation with several statements
(`complete_serial.commit`) or after the operation (`complete_serial.done`).
"""

CLIENT = "the client"
"""The name of the link of the methods of the app; nodes have others."""

LOCK_TIMEOUT_SECONDS = 10.0  # the same limit as for the lock of a SQLite file


class SimulatedDatabase(SqliteStore):
    """One in-memory SQLite database with the migrated schema; `now` is its clock.

    Operations run synchronously in the calling task, one after another: there is no I/O to wait for, and virtual time
    does not advance meanwhile.
    """

    def __init__(self, now: Callable[[], datetime], *, multi_node: bool) -> None:
        super().__init__("sqlite:///:memory:", now, durable=False)
        self.multi_node = multi_node
        self.is_down = False
        self.notifications_muted = False
        """True while notifications of writes are delivered only to the node that writes."""
        self.listeners: list[Subscribers] = []
        """The subscribers of the nodes that receive notifications."""
        self.caller_transactions = CallerTransactions(self.execute_for_caller)
        self._engines: WeakSet[Engine] = WeakSet()
        self._late_writes: set[asyncio.Task[Any]] = set()
        self._loop: VirtualLoop | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        if self._connection is None:
            self._connect()
            migrated: Any = _migrated_database().connection.driver_connection
            migrated.backup(self._driver)

    def _connect(self) -> None:
        self._connection = _engine().connect()
        self._driver = self._connection.connection.driver_connection

    async def close(self) -> None:
        self._disconnect()

    def _create_handler_engine(self) -> AsyncEngine:
        async def call(function: Callable[..., R], *args: Any) -> R:
            return function(*args)

        engine = adapted_engine(lambda: AdaptedConnection(self._driver, call, keep_open=True), is_async=True)
        self._engines.add(engine)
        return AsyncEngine(engine)

    @contextmanager
    def handler_transaction_in_thread(self, finish: Finish) -> Iterator[Connection]:
        """Open a transaction for a handler in a thread; the write lock serializes it with the event loop's writes."""
        assert self._loop is not None
        self._loop.await_in_thread(self._acquire_lock())
        try:
            with (
                self.connect() as connection,
                handler_transaction_in_thread(connection, self.dialect, finish, self._publish),
            ):
                yield connection
        finally:
            self._loop.call_soon_threadsafe(self._write_lock.release)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        try:
            async with self.handler_transaction(no_finish) as connection:
                yield connection
        except (DBAPIError, sqlite3.Error) as error:
            raise translate_error(error, self._path) from error

    def connect(self) -> Connection:
        """Return a blocking connection; the caller ensures that no other one writes."""
        engine = adapted_engine(lambda: AdaptedConnection(self._driver, keep_open=True), is_async=False)
        self._engines.add(engine)
        return engine.connect()

    def is_own(self, connection: Any) -> bool:
        """Return whether a connection or session of SQLAlchemy is to this database."""
        try:
            bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
        except UnboundExecutionError:  # a session with several databases of the program
            return False
        engine = getattr(bind, "engine", bind)
        engine = getattr(engine, "sync_engine", engine)
        return isinstance(engine, Engine) and engine in self._engines

    def execute_for_caller(self, step: Callable[[Transaction], Any]) -> Any:
        """Run a step in one transaction, in any thread of the program under test."""
        loop = self._loop
        assert loop is not None
        if loop.is_running() and not loop.runs_in_this_thread():
            return loop.await_in_thread(self._execute_unlocked(step))
        if not self._write_lock.locked():
            return self.execute_now(self._transact, step, (), {})
        task = loop.create_task(self._execute_unlocked(step))
        self._late_writes.add(task)
        task.add_done_callback(self._late_writes.discard)
        return None

    async def _execute_unlocked(self, step: Callable[[Transaction], Any]) -> Any:
        await self.wait_until_unlocked()
        return self.execute_now(self._transact, step, (), {})

    @property
    def is_locked(self) -> bool:
        """True while a handler has an open transaction."""
        return self._write_lock.locked()

    async def wait_until_unlocked(self) -> None:
        """Wait until no handler has an open transaction. Raises StoreUnreachable after LOCK_TIMEOUT_SECONDS."""
        while self._write_lock.locked():
            await self._acquire_lock()
            self._write_lock.release()

    async def _acquire_lock(self) -> None:
        try:
            async with asyncio.timeout(LOCK_TIMEOUT_SECONDS):  # wait_for may lose a cancel (bpo-37658)
                await self._write_lock.acquire()
        except TimeoutError:
            raise StoreUnreachable(
                "The simulated database is locked by a handler with an open transaction.",
                fix="Inside event.transaction(), pass connection= to every call, and keep the transaction short.",
            ) from None

    def run_read(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a read-only operation; also allowed outside of the event loop."""
        self.caller_transactions.settle()
        return operation(self._transaction(), *args, **kwargs)

    def idle_until(self, running_attempts: int) -> datetime | None:
        """Return the instant until which the database has no work except heartbeats; None if there is work now.

        `running_attempts` is the number of attempts that the nodes are running. The database is idle if there are no
        others, none of them is being stopped, and no due job waits for a slot.
        """
        assert self._driver is not None
        running, stopping, pending, reported_by, fire_at = self._driver.execute(_IDLE_CHECK).fetchone()
        if running != running_attempts or stopping:
            return None
        now, due = self._wall_clock(), [self.dialect.from_db(fire_at) or _NEVER]
        if reported_by:
            due.append(from_micros(reported_by))
        if pending:
            lanes = claim.list_lanes(self._transaction(), ALL_ROUTES, now)
            due += [lane.earliest_start or _NEVER for lane in lanes if lane.free_capacity != 0]
        until = min(due)
        return until if until > now else None

    def _publish(self, subjects: frozenset[str], _: object = ()) -> None:
        """Publish to the node that wrote, and as a notification to the others."""
        node = current_node.get()
        writer = None if node is None else node.link.subscribers
        if writer is not None:
            writer.publish(subjects)
        if not self.notifications_muted:
            for subscribers in self.listeners:
                if subscribers is not writer:
                    subscribers.publish(subjects)

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.execute_now(self._transact, operation, args, kwargs)

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.execute_now(self._autocommit, operation, args, kwargs)

    def execute_now(self, executor: Any, operation: Callable[..., R], args: Any, kwargs: Any) -> R:
        """Run an operation synchronously with one of the store's executors."""
        try:
            result: R = executor(operation, args, kwargs)
        except (DBAPIError, sqlite3.Error) as error:
            raise translate_error(error, self._path) from error
        return result


_NEVER = datetime.max.replace(tzinfo=UTC)
_IDLE_CHECK = """
SELECT count(*), count(hold), EXISTS (SELECT 1 FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL),
    (SELECT min(heartbeat) FROM timebell_jobs WHERE state = 'dispatched'),
    (SELECT next_fire_at FROM timebell_schedules
     WHERE enabled AND error IS NULL AND next_fire_at IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)
     ORDER BY next_fire_at LIMIT 1)
FROM timebell_jobs WHERE state = 'running'
"""


@types.coroutine
def _yield_to_others() -> Generator[None]:
    yield


@cache
def _engine() -> Engine:
    """Return the engine shared by all simulations, which caches compiled statements.

    Each of its connections is a separate database.
    """
    return engine_for("sqlite:///:memory:", durable=False, begin=None)


@cache
def _migrated_database() -> Connection:
    """Return a connection to a migrated database to copy, because running the migrations takes far longer."""
    connection = engine_for("sqlite:///:memory:").connect()
    with connection.begin():
        migrate(connection, FEATURES)
    return connection


class DatabaseLink:
    """The connection of one node, or of the client, to the database; it can be cut, also at a fault point.

    Implements `Store`.
    """

    def __init__(self, database: SimulatedDatabase, name: str) -> None:
        self.url = database.url
        self.subscribers = Subscribers()
        self.recent_writes = RecentWrites(lambda: 0.0)  # stays empty: this database loses nothing
        self.multi_node = database.multi_node
        self.is_cut = False
        self.pending_fault: tuple[str, Callable[[], bool]] | None = None
        """A fault point and the fault to apply there, which returns whether it aborts the operation."""
        self.latency: Callable[[], float] | None = None
        """Returns the seconds that the next request or reply takes; None: no time passes."""
        self._database = database
        self._name = name

    @property
    def dialect(self) -> Dialect:
        return self._database.dialect

    async def open(self) -> None:
        """Do nothing: the simulation has opened the database."""

    async def close(self) -> None:
        """Do nothing: the simulation closes the database."""

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._execute(self._database._transact, operation, args, kwargs)

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._execute(self._database._autocommit, operation, args, kwargs)

    async def _execute(self, executor: Any, operation: Callable[..., R], args: Any, kwargs: Any) -> R:
        database, latency = self._database, self.latency
        if latency is not None:
            await asyncio.sleep(latency())  # noqa: TID251 - exact on virtual time
        database.caller_transactions.settle()
        if database.multi_node or self.is_cut or database.is_down or database._write_lock.locked():
            await self._wait_until_reachable()
        if self.pending_fault is None:
            result: R = database.execute_now(executor, operation, args, kwargs)
        else:
            with self._inject_fault(operation):
                result = database.execute_now(executor, operation, args, kwargs)
        if latency is not None:
            await asyncio.sleep(latency())  # noqa: TID251 - exact on virtual time
            self._check_reachable()  # otherwise the reply is lost
        return result

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation in the transaction of a connection to this database, or to the one of the program."""
        database = self._database
        if database.is_own(connection) or not is_supported(connection):
            return await database.join(connection, operation, *args, **kwargs)
        if self._name != CLIENT:  # the completion of a job: the last operation before the commit
            return database.execute_for_caller(lambda tx: operation(tx, *args, **kwargs))  # type: ignore[no-any-return]
        await database.wait_until_unlocked()
        return await database.caller_transactions.join(connection, operation, args, kwargs)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def handler_transaction(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        await self._wait_until_reachable()
        with self._inject_fault(finish):
            async with self._database.handler_transaction(self._checked_finish(finish)) as connection:
                yield connection

    @contextmanager
    def handler_transaction_in_thread(self, finish: Finish) -> Iterator[Connection]:
        """Open a transaction for a handler in a thread. No fault is injected, because the thread runs concurrently."""
        self._check_reachable()
        with self._database.handler_transaction_in_thread(self._checked_finish(finish)) as connection:
            yield connection

    def _checked_finish(self, finish: Finish) -> Finish:
        """Return `finish` with a check that the database is still reachable."""

        @wraps(finish)
        def checked(tx: Transaction) -> None:
            self._check_reachable()
            finish(tx)

        return checked

    def begin(self) -> AbstractAsyncContextManager[Any]:
        return self._database.begin()

    def is_transient(self, error: BaseException) -> bool:
        return self._database.is_transient(error)

    async def read_clock(self) -> datetime:
        await self._wait_until_reachable()
        return await self._database.read_clock()

    async def lock_engine(self) -> None:
        """Do nothing: the simulation itself determines the number of engines."""

    async def unlock_engine(self) -> None:
        if self.subscribers in self._database.listeners:
            self._database.listeners.remove(self.subscribers)

    async def listen(self) -> bool:
        if self.subscribers not in self._database.listeners:
            self._database.listeners.append(self.subscribers)
        return True

    async def _wait_until_reachable(self) -> None:
        if self._database.multi_node:  # operations of several nodes may interleave
            await _yield_to_others()
        if self._database.is_locked:
            await self._database.wait_until_unlocked()
        self._check_reachable()

    def _check_reachable(self) -> None:
        if self.is_cut or self._database.is_down:
            raise StoreUnreachable(f"{self._name} cannot reach the simulated database: {self._unreachable_reason()}.")

    def _unreachable_reason(self) -> str:
        return "its connection is cut" if self.is_cut else "the database is down"

    @contextmanager
    def _inject_fault(self, operation: Callable[..., Any]) -> Iterator[None]:
        """Apply the pending fault if this operation, which runs without interruption, reaches its point."""
        if self.pending_fault is None or not self.pending_fault[0].startswith(f"{operation.__name__}."):
            yield
            return
        fault_point, apply_fault = self.pending_fault

        def probe(point: str) -> None:
            if point == fault_point:
                self.pending_fault = None
                if apply_fault():
                    raise _InjectedFault(point)

        previous, transaction.probe = transaction.probe, probe
        try:
            yield
        except _InjectedFault:
            raise StoreUnreachable(f"{self._name} was disconnected at {fault_point}.") from None
        finally:
            transaction.probe = previous


class _InjectedFault(Exception):
    """Raised at a fault point to abort the operation."""
