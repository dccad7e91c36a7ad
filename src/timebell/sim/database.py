"""The database of a simulation: the SQLite store in memory, and the ways to it that can break."""

from __future__ import annotations

import asyncio
import sqlite3
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import cache, wraps
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from timebell.errors import StoreUnreachable
from timebell.model.routes import ANYONE
from timebell.sim.loop import VirtualLoop
from timebell.store import transaction
from timebell.store.dialects.base import Finish, Operation, P, R
from timebell.store.dialects.handler_transactions import lend_here, nothing_more
from timebell.store.dialects.sqlite.async_driver import Shared, shared_engine
from timebell.store.dialects.sqlite.store import SqliteStore, SqliteTransaction, engine_for, translate
from timebell.store.jobs import claim
from timebell.store.open import migrate
from timebell.store.schedules import schedules
from timebell.store.transaction import Dialect, Transaction
from timebell.store.types import from_micros

POINTS = {
    "fire": 7, "claim": 1, "claim_limited": 7, "claim_shares": 2, "end": 2, "end_in_turn": 6, "complete": 6, "retry": 1,
    "retry_in_group": 3,
}  # fmt: skip
"""Where a node can be made to crash or to freeze, or its connection to break: these operations, each before one of so
many statements (`fire.1`), before its commit (`fire.commit`, where there are several) and after it (`fire.done`)."""


WAIT = 10.0  # seconds to wait for the lock, as on a file


class Database(SqliteStore):
    """One SQLite database in memory, with the tables of the migrations; its clock is `wall`.

    Operations run where they are called, one after another: in memory there is nothing to wait for, and virtual
    time stands still meanwhile.
    """

    def __init__(self, wall: Callable[[], datetime], *, many_nodes: bool) -> None:
        super().__init__("sqlite:///:memory:", wall, durable=False)
        self.many_nodes = many_nodes
        self.away = False
        self.deaf = False
        """Whether nodes hear nothing of what others write."""
        self.listeners: list[Callable[[str], None]] = []
        self._loop: VirtualLoop | None = None

    async def open(self) -> None:
        """As in Store."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        if self._connection is None:
            self._connect()
            self._transaction().driver.executescript(_tables())

    def _connect(self) -> None:
        self._connection = _engine().connect()
        self._driver = self._connection.connection.driver_connection

    async def close(self) -> None:
        """As in Store."""
        self._disconnect()

    def _lender(self) -> AsyncEngine:
        async def call(function: Callable[..., R], *args: Any) -> R:
            return function(*args)

        return AsyncEngine(shared_engine(lambda: Shared(self._driver, call, keep=True), is_async=True))

    @contextmanager
    def lend_to_thread(self, finish: Finish) -> Iterator[Connection]:
        """As in Store. Its thread takes its turn with what is done on the event loop."""
        assert self._loop is not None
        self._loop.await_in_thread(self._take_turn())
        try:
            with self.connect() as connection, lend_here(connection, self.dialect, finish):
                yield connection
        finally:
            self._loop.call_soon_threadsafe(self._turn.release)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """As in Store."""
        try:
            async with self.lend(nothing_more) as connection:
                yield connection
        except (DBAPIError, sqlite3.Error) as failed:
            raise translate(failed, self._path) from failed

    def connect(self) -> Connection:
        """A connection for code that blocks, while no other one writes."""
        return shared_engine(lambda: Shared(self._driver, keep=True), is_async=False).connect()

    @property
    def locked(self) -> bool:
        """Whether a handler has a transaction open."""
        return self._turn.locked()

    async def free(self) -> None:
        """Until no handler has a transaction open, as others wait for a file; StoreUnreachable after as long."""
        while self._turn.locked():
            await self._take_turn()
            self._turn.release()

    async def _take_turn(self) -> None:
        try:
            await asyncio.wait_for(self._turn.acquire(), WAIT)
        except TimeoutError:
            raise StoreUnreachable(
                "The simulated database is locked by a handler that is in a transaction.",
                fix="Inside event.transaction(), pass connection= to the verbs, and keep it short.",
            ) from None

    def look(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation that only reads, from outside of the event loop too."""
        return operation(self._transaction(), *args, **kwargs)

    def calm_until(self, held: int) -> datetime | None:
        """Until when nobody but the nodes, which hold so many attempts, has anything to do; None: not even now.

        It is calm when every attempt is held and none was asked to stop, and nothing that is due waits for a place.
        """
        assert self._driver is not None
        running, stopping, pending, reported_by, fire_at = self._driver.execute(_LIVE).fetchone()
        if running != held or stopping:
            return None
        now, due = self._wall(), [self.dialect.from_db(fire_at) or _NEVER]
        if reported_by:
            due.append(from_micros(reported_by))
        if pending:
            lanes = claim.lanes(self._transaction(), ANYONE, now)
            due += [lane.starts_at or _NEVER for lane in lanes if lane.room != 0]
        until = min(due)
        return until if until > now else None

    def _committed(self, tx: SqliteTransaction) -> None:
        if tx.wants_notify and not self.deaf:
            for poke in self.listeners:
                poke(tx.wants_notify)

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        return self.at_once(self._transact, operation, args, kwargs)

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        return self.at_once(self._autocommit, operation, args, kwargs)

    def at_once(self, way: Any, operation: Callable[..., R], args: Any, kwargs: Any) -> R:
        """Run an operation by one of the store's ways, here and now."""
        try:
            answer: R = way(operation, args, kwargs)
        except (DBAPIError, sqlite3.Error) as failed:
            raise translate(failed, self._path) from failed
        return answer


_NEVER = datetime.max.replace(tzinfo=UTC)
_LIVE = (
    "SELECT count(*), count(hold), EXISTS (SELECT 1 FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL),"  # noqa: S608
    " (SELECT min(beat) FROM timebell_jobs WHERE state = 'dispatched'),"
    f" ({schedules.NEXT.template.template}) FROM timebell_jobs WHERE state = 'running'"
)


@types.coroutine
def _others_first() -> Generator[None]:
    yield


@cache
def _engine() -> Engine:
    """One engine for all simulations, which remembers the statements it has compiled; each connection of it is a
    database of its own."""
    return engine_for("sqlite:///:memory:", durable=False, begin=None)


@cache
def _tables() -> str:
    """What the migrations make of an empty database, as SQL: running them takes far longer."""
    engine = engine_for("sqlite:///:memory:")
    with engine.connect() as connection:
        with connection.begin():
            migrate(connection)
        driver: Any = connection.connection.driver_connection
        return "\n".join(driver.iterdump())


class Link:
    """The way of one node, or of a client, to the database. It can be cut, also at a named point."""

    def __init__(self, database: Database, name: str, after: Callable[[], None] | None = None) -> None:
        self.url = database.url
        self.many_nodes = database.many_nodes
        self.cut = False
        self.fault: tuple[str, Callable[[], bool]] | None = None
        """A point, and what is to happen there; whether that breaks the operation off."""
        self._database = database
        self._name = name
        self._after = after
        self._poke: Callable[[str], None] | None = None

    @property
    def dialect(self) -> Dialect:
        """As in Store."""
        return self._database.dialect

    async def open(self) -> None:
        """As in Store: it is."""

    async def close(self) -> None:
        """As in Store: the simulation closes it."""

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        database = self._database
        if database.many_nodes or self.cut or database.away or database._turn.locked():
            await self._reach()
        if self.fault is None:
            answer = database.at_once(database._transact, operation, args, kwargs)
        else:
            with self._aimed(operation):
                answer = database.at_once(database._transact, operation, args, kwargs)
        if self._after is not None:
            self._after()
        return answer

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        database = self._database
        if database.many_nodes or self.cut or database.away or database._turn.locked():
            await self._reach()
        if self.fault is None:
            return database.at_once(database._autocommit, operation, args, kwargs)
        with self._aimed(operation):
            return database.at_once(database._autocommit, operation, args, kwargs)

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store; the connection is one to a database of the caller's own."""
        return await self._database.join(connection, operation, *args, **kwargs)

    @asynccontextmanager
    async def lend(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        """As in Store."""
        await self._reach()
        with self._aimed(finish):
            async with self._database.lend(self._reached(finish)) as connection:
                yield connection

    @contextmanager
    def lend_to_thread(self, finish: Finish) -> Iterator[Connection]:
        """As in Store. No fault strikes here, as its thread goes on beside all others."""
        self._check()
        with self._database.lend_to_thread(self._reached(finish)) as connection:
            yield connection

    def _reached(self, finish: Finish) -> Finish:
        """`finish`, if by then the way is still there."""

        @wraps(finish)
        def reached(tx: Transaction) -> None:
            self._check()
            finish(tx)

        return reached

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """As in Store."""
        return self._database.begin()

    def passes(self, failed: BaseException) -> bool:
        """As in Store."""
        return self._database.passes(failed)

    async def reading(self) -> datetime:
        """As in Store."""
        await self._reach()
        return await self._database.reading()

    async def lock_engine(self) -> None:
        """As in Store: whoever made the simulation says how many engines there are."""

    async def unlock_engine(self) -> None:
        """As in Store."""
        if self._poke in self._database.listeners:
            self._database.listeners.remove(self._poke)

    async def listen(self, poke: Callable[[str], None]) -> bool:
        """As in Store."""
        if self._poke is None:
            self._poke = poke
            self._database.listeners.append(poke)
        return True

    async def _reach(self) -> None:
        if self._database.many_nodes:  # between any two operations of one node another may come
            await _others_first()
        if self._database.locked:
            await self._database.free()
        self._check()

    def _check(self) -> None:
        if self.cut or self._database.away:
            raise StoreUnreachable(f"{self._name} does not reach the simulated database: {self._why()}.")

    def _why(self) -> str:
        return "it is cut off" if self.cut else "the database is away"

    @contextmanager
    def _aimed(self, operation: Callable[..., Any]) -> Iterator[None]:
        """Where a fault may strike this operation, which nobody interrupts."""
        if self.fault is None or not self.fault[0].startswith(f"{operation.__name__}."):
            yield
            return
        at, strike = self.fault

        def probe(point: str) -> None:
            if point == at:
                self.fault = None
                if strike():
                    raise _Fault(point)

        before, transaction.probe = transaction.probe, probe
        try:
            yield
        except _Fault:
            raise StoreUnreachable(f"{self._name} was cut off at {at}.") from None
        finally:
            transaction.probe = before


class _Fault(Exception):
    """What keeps an operation from going on."""
