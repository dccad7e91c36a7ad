"""PostgreSQL: many nodes, row locks that are skipped, LISTEN/NOTIFY as a hint.

Every connection is in autocommit, and a transaction is opened only where an operation needs one: for the hot
single-statement operations the round trips of BEGIN and COMMIT would cost more than the statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from operator import add
from typing import Any

import asyncpg
import orjson
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, Pool, QueuePool
from sqlalchemy.util import await_only, greenlet_spawn

from timebell.errors import StoreError, StoreUnreachable, TimebellError
from timebell.store.dialects.base import Finish, Operation, P, R, join_callers
from timebell.store.dialects.handler_transactions import lend, lend_here
from timebell.store.dialects.postgres import pooler
from timebell.store.dialects.postgres.explicit_transactions import Begun, stale
from timebell.store.dialects.postgres.macros import PostgresWords
from timebell.store.statement import Statement
from timebell.store.transaction import NOTHING, Row, SqlTransaction, Steps, Transaction

CHANNEL = "timebell"
LENT = 5  # connections kept for transactions of handlers, and as many more when they are in use
LENT_PATIENCE = 3600.0  # seconds; the attempt's own timeout comes first
ASKED = 5  # connections for the transactions of requests, and as many more: they never take those of the engine
ASKED_PATIENCE = 5.0  # seconds until a request is told that there is none
KEPT = 4  # connections that hot operations keep to themselves, and as many more
ANSWER = 30.0  # seconds to wait for that of a statement
LONG = 86_400.0  # and of one of a migration, which may make an index of many rows
NOTIFY_EVERY = 0.05  # seconds; NOTIFY takes a lock over all commits, so never one per job
# Serialisation failure, deadlock, lock not available; and a unique key that another wrote between our look and our
# insert: the operation, run again, sees it.
_TRANSIENT = {"40001", "40P01", "55P03", "23505"}
_GONE = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, asyncpg.InternalClientError)


class PostgresTransaction(SqlTransaction):
    """Hot statements go straight to asyncpg, in the same transaction."""

    def _driver(self) -> asyncpg.Connection[Any]:
        return self.connection.connection.driver_connection

    def fetch(self, statement: Statement, rows: Sequence[Mapping[str, Any]] = (), **params: Any) -> list[Row]:
        """As in Transaction."""
        self.steps()
        if statement.columns:
            params["rows"] = orjson.dumps(rows).decode()
        text, names = statement.numbered(self.dialect)
        return await_only(self._driver().fetch(text, *[params[name] for name in names]))

    def load(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        fixed: Mapping[str, Any] = NOTHING,
    ) -> None:  # fmt: skip
        """As in Transaction, by COPY."""
        self.steps()
        rows = map(add, records, repeat(tuple(fixed.values())))
        copied = self._driver().copy_records_to_table(table, columns=[*columns, *fixed], records=rows)
        await_only(copied)


class PostgresStore:
    """A PostgreSQL database (13 or newer)."""

    many_nodes = True

    def __init__(self, url: str, *, server_clock: bool = True, pool_size: int = 6, read_only: bool = False) -> None:
        self.url = url
        self.dialect = PostgresWords(server_clock=server_clock)
        self._engine: AsyncEngine = engine_for(url, pool_size=pool_size, read_only=read_only)
        self._hot: AsyncEngine = engine_for(url, pool_size=KEPT, read_only=read_only, settings=HOT)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: list[AsyncConnection] = []
        # Apart from those of the engine, which would go short of connections while handlers take their time.
        self._lent: AsyncEngine | None = None
        self._asked: AsyncEngine | None = None
        self._begun = Begun(lambda connection, steps: PostgresTransaction(connection, self.dialect, steps))
        self._lent_to_threads: Engine | None = None
        self._lending = threading.Lock()
        self._listener: asyncpg.Connection[Any] | None = None
        self._notifying: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._untold = ""

    async def open(self) -> None:
        """As in Store."""
        await self.reading()

    async def close(self) -> None:
        """As in Store."""
        if self._notifying is not None:
            await asyncio.wait([self._notifying])
        if self._listener is not None:
            with contextlib.suppress(*_GONE):
                await self._listener.close(timeout=1)
            self._listener = None
        self._dispose(self._engine, self._hot, *filter(None, (self._lent, self._asked)))
        if self._ending:
            await asyncio.wait(self._ending)
        if self._lent_to_threads is not None:
            self._lent_to_threads.dispose()
        self._loop = self._lent = self._asked = self._lent_to_threads = None

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        answer: R = await self._connected(self._transact, operation, args, kwargs)
        return answer

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        answer: R = await self._connected(self._autocommit, operation, args, kwargs, keep=True)
        return answer

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store. The NOTIFY is part of the caller's transaction, so it comes with the commit or not at all; of
        one of ours it comes after it."""
        if self._begun.has(connection):
            return await self._begun.join(connection, operation, args, kwargs)  # type: ignore[no-any-return]
        answer, wants_notify = await join_callers(connection, self.dialect, operation, args, kwargs)
        if wants_notify:
            await join_callers(connection, self.dialect, _notify, (wants_notify,), {})
        return answer

    @contextlib.asynccontextmanager
    async def lend(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        """As in Store."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._settle_on(loop)
        if self._lent is None:
            engine = engine_for(self.url, pool_size=LENT, patience=LENT_PATIENCE)
            self._lent = engine.execution_options(isolation_level="READ COMMITTED")
        try:
            connection = await self._lent.connect()
        except (*_GONE, DBAPIError) as failed:
            raise unreachable(self.url, failed) from failed
        try:
            async with lend(connection, self.join, finish):
                yield connection
        finally:
            await connection.close()

    @contextlib.contextmanager
    def lend_to_thread(self, finish: Finish) -> Iterator[Connection]:
        """As in Store."""
        with self._lending:
            if self._lent_to_threads is None:
                self._lent_to_threads = _engine_for_threads(self.url)
        try:
            connection = self._lent_to_threads.connect()
        except DBAPIError as failed:
            raise unreachable(self.url, failed) from failed
        with connection, lend_here(connection, self.dialect, finish, _notify):
            yield connection

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """As in Store."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._settle_on(loop)
        if self._asked is None:
            self._asked = engine_for(self.url, pool_size=ASKED, patience=ASKED_PATIENCE)
        try:
            async with self._asked.connect() as connection, self._begun.on(connection, self._tell):
                yield connection
        except NoneFree as busy:
            raise unreachable(self.url, busy) from busy
        except (*_GONE, DBAPIError, asyncpg.PostgresError) as failed:
            if stale(failed) or _lost(failed):
                self._dispose(self._asked)
            if _lost(failed):
                raise unreachable(self.url, failed) from failed
            raise

    def passes(self, failed: BaseException) -> bool:
        """As in Store."""
        return stale(failed) or getattr(getattr(failed, "orig", None) or failed, "sqlstate", None) in _TRANSIENT

    async def reading(self) -> datetime:
        """As in Store."""
        found: datetime = await self.hot(_reading)
        return found

    async def lock_engine(self) -> None:
        """As in Store: any number of nodes."""

    async def unlock_engine(self) -> None:
        """As in Store."""

    async def listen(self, poke: Callable[[str], None]) -> bool:
        """As in Store. Call it again now and then: it connects anew when the connection was lost."""
        if pooler.pooled(plain(self.url)):
            return False
        if self._listener is None or self._listener.is_closed():
            try:
                listener = await asyncpg.connect(plain(self.url), timeout=5, command_timeout=10)
                try:
                    await listener.add_listener(CHANNEL, lambda *heard: poke(str(heard[-1])))
                except BaseException:  # else it would pass for one that listens
                    listener.terminate()
                    raise
            except (*_GONE, asyncpg.PostgresError):
                return False
            self._listener = listener
        return True

    def _transact(
        self, connection: Connection, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[R, str]:
        tx = PostgresTransaction(connection, self.dialect, Steps(operation.__name__))
        driver = tx._driver()
        transaction = driver.transaction()
        await_only(transaction.start())
        try:
            answer = operation(tx, *args, **kwargs)
            tx.steps.at("commit")
        except BaseException:
            if not driver.is_closed():  # asked of the driver: SQLAlchemy lets go of one whose statement was cut off
                with contextlib.suppress(*_GONE, asyncpg.PostgresError):
                    await_only(transaction.rollback())
            raise
        await_only(transaction.commit())
        tx.steps.at("done")
        return answer, tx.wants_notify

    def _autocommit(
        self, connection: Connection, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[R, str]:
        tx = PostgresTransaction(connection, self.dialect, Steps(operation.__name__))
        answer = operation(tx, *args, **kwargs)
        tx.steps.at("done")
        return answer, tx.wants_notify

    async def _connected(
        self,
        way: Callable[..., tuple[R, str]],
        operation: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        keep: bool = False,
    ) -> Any:
        """Run `way` on a connection; a transient conflict is tried again, a lost server is reported."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._settle_on(loop)
        for last in (False, False, True):
            try:
                async with self._connection(keep) as connection:
                    answer, wants_notify = await self._on(connection, way, operation, args, kwargs)
                break
            except NoneFree as busy:
                raise unreachable(self.url, busy) from busy
            except (*_GONE, DBAPIError, asyncpg.PostgresError) as failed:
                cause = getattr(failed, "orig", None) or failed
                state = getattr(cause, "sqlstate", None)
                if state in _TRANSIENT and not last:
                    continue
                if stale(failed) and not last:
                    self._dispose(self._engine, self._hot)
                    continue
                if _lost(failed):
                    self._dispose(self._engine, self._hot)
                    raise unreachable(self.url, failed) from failed
                if state in ("42P01", "42703"):
                    from timebell.store.open import outdated

                    raise outdated(self.url, None) from failed
                raise
        if wants_notify:
            self._tell(wants_notify)
        return answer

    def _tell(self, wants_notify: str) -> None:
        self._untold = max(self._untold, wants_notify)  # of schedules means of jobs too
        if self._notifying is None or self._notifying.done():
            self._notifying = asyncio.get_running_loop().create_task(self._notify())

    def _settle_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connections belong to an event loop: a later one gets its own. Raises StoreError while the first one runs."""
        if self._loop is not None and self._loop.is_running():
            raise StoreError(
                "This app is in use on another event loop, to which its connections belong.", code="OTHER_EVENT_LOOP",
                fix="From other threads use app.sync, or make another Timebell.",
            )  # fmt: skip
        if self._loop is not None:  # it is over, so that they cannot be closed in good order any more
            while self._kept:
                with contextlib.suppress(Exception):
                    self._kept.pop().sync_connection.detach()  # type: ignore[union-attr]
            for engine in (self._engine, self._hot, self._lent, self._asked):
                if engine is not None:
                    engine.sync_engine.dispose(close=False)
            self._lent = self._asked = self._listener = self._notifying = None
        self._loop = loop

    def _dispose(self, *engines: AsyncEngine) -> None:
        """Let go of every connection of theirs that nobody uses now; new ones are made at once."""
        for engine in engines:
            kept, pool = [], engine.sync_engine.pool
            if engine is self._hot:
                kept, self._kept = self._kept, []
            engine.sync_engine.dispose(close=False)
            ending = asyncio.get_running_loop().create_task(_end(kept, pool))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    @contextlib.asynccontextmanager
    async def _connection(self, keep: bool) -> AsyncIterator[AsyncConnection]:
        """One of the pool's; or of the few that hot operations keep, as a visit to the pool costs more than they do."""
        engine = self._hot if keep else self._engine
        pool = engine.pool
        connection = self._kept.pop() if keep and self._kept else await engine.connect()
        try:
            yield connection
        finally:
            gone = connection.invalidated or connection.closed or engine.pool is not pool
            if keep and len(self._kept) < KEPT and not gone:
                self._kept.append(connection)
            else:
                await connection.close()

    async def _on(self, connection: AsyncConnection, way: Any, *args: Any) -> Any:
        try:
            return await connection.run_sync(way, *args)
        except (*_GONE, asyncpg.PostgresError, asyncio.CancelledError):
            # Its state is unknown: it must not go back to the pool.
            with contextlib.suppress(Exception):
                await connection.invalidate()
            raise

    async def _notify(self) -> None:
        """One NOTIFY for all that asked in the last moment. A hint: if it fails, the others look within 5 s."""
        while told := self._untold:
            self._untold = ""
            with contextlib.suppress(StoreUnreachable):
                await self.hot(_notify, told)
            await asyncio.sleep(NOTIFY_EVERY)


NOTIFY = Statement(f"SELECT pg_notify('{CHANNEL}', CAST(:told AS text))")
READING = Statement("SELECT clock_timestamp() AS at")


def _notify(tx: Transaction, told: str) -> None:
    tx.fetch(NOTIFY, told=told)


def _reading(tx: Transaction) -> Any:
    return tx.fetch(READING)[0]["at"]


# `jit` compiles what is guessed to be dear before it runs, each time: 20 ms for a look that takes one.
SETTINGS = {
    "application_name": "timebell", "idle_in_transaction_session_timeout": "10000", "jit": "off", "timezone": "UTC",
}  # fmt: skip
# What is hot looks a few rows up by an index. Left to itself the server plans each claim beside a backlog, which takes
# three times as long as the claim; so each connection plans it once, and not by statistics, as they may come later.
HOT = SETTINGS | {
    "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_sort": "off", "enable_mergejoin": "off",
}  # fmt: skip


def engine_for(
    url: str, *, pool_size: int = 5, patience: float = 30.0, answer: float = ANSWER, read_only: bool = False,
    settings: Mapping[str, str] = SETTINGS,
) -> AsyncEngine:  # fmt: skip
    """An asyncpg engine in autocommit; a transaction left open by a frozen client is ended by the server.

    `patience` is how many seconds to wait for a connection while all are in use, `answer` for that of a statement.
    """
    asked = {**settings, **({"default_transaction_read_only": "on"} if read_only else {})}
    engine = create_async_engine(
        _address(url),
        isolation_level="AUTOCOMMIT",
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=patience,
        pool_use_lifo=True,  # plans are a connection's own, and warm on the one that was just used
        connect_args={"server_settings": asked, "timeout": 5, "command_timeout": answer},
    )
    pooler.heed(engine, plain(url))
    _end_strays(engine)
    return engine


async def _end(kept: Iterable[AsyncConnection], pool: Pool) -> None:
    """End connections, in good order where the other side is heard within 2 s."""
    assert isinstance(pool, QueuePool)
    strays = [connection.close() for connection in kept]
    idle = [greenlet_spawn(lambda: pool.connect().invalidate()) for _ in range(pool.checkedin())]
    await asyncio.gather(*strays, *idle, return_exceptions=True)


def _end_strays(engine: AsyncEngine) -> None:
    """Have a connection end when it comes back to a pool that was let go of meanwhile, where nobody would end it."""

    @event.listens_for(engine.sync_engine, "connect")
    def made(_: Any, record: ConnectionPoolEntry) -> None:
        record.info["pool"] = engine.sync_engine.pool

    @event.listens_for(engine.sync_engine, "checkin")
    def returned(_: Any, record: ConnectionPoolEntry) -> None:
        if record.info.get("pool") is not engine.sync_engine.pool:
            record.invalidate()


def _engine_for_threads(url: str) -> Engine:
    """Another, of psycopg, for code that blocks. Raises TimebellError (PSYCOPG_MISSING)."""
    options: dict[str, Any] = {"options": " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())}
    if pooler.pooled(plain(url)):
        options = {"application_name": SETTINGS["application_name"], "prepare_threshold": None}
    try:
        return create_engine(
            make_url(plain(url)).set(drivername="postgresql+psycopg"),
            pool_size=LENT,
            max_overflow=LENT,
            pool_timeout=LENT_PATIENCE,
            connect_args={"connect_timeout": 5, **options},
        )
    except ImportError as missing:
        raise TimebellError(
            "A plain function has no driver for a transaction on PostgreSQL: psycopg is not installed.",
            code="PSYCOPG_MISSING", fix="pip install psycopg[binary], or make the handler async.",
        ) from missing  # fmt: skip


def listening(url: str) -> list[tuple[str, int]]:
    """(host, port) of the servers that the URL names."""
    address = _address(url)
    _, found = address.get_dialect()().create_connect_args(address)
    hosts, ports = (
        given if isinstance(given, list) else [given]
        for given in (found.get("host", "localhost"), found.get("port", 5432))
    )
    return [(host, port or 5432) for host, port in zip(hosts, ports, strict=True) if not host.startswith("/")]


def _address(url: str) -> URL:
    return make_url(plain(url)).set(drivername="postgresql+asyncpg")


def plain(url: str) -> str:
    """The address as libpq writes it."""
    scheme, _, rest = url.partition("://")
    return f"postgresql://{rest}" if scheme.startswith("postgres") else url


def _lost(failed: BaseException) -> bool:
    """Whether the server went away, as opposed to having refused a statement."""
    cause = getattr(failed, "orig", None) or failed
    cause = getattr(cause, "__cause__", None) or cause
    state = getattr(cause, "sqlstate", None) or ""
    return (
        isinstance(failed, _GONE)  # a timeout's own cause is a cancellation
        or isinstance(cause, _GONE)
        or state.startswith(("08", "57P", "53", "25P03"))  # the last: this node stood still in a transaction
        or bool(getattr(failed, "connection_invalidated", False))
    )


def unreachable(url: str, failed: BaseException) -> StoreUnreachable:
    """The error for a database that does not answer; no password in it."""
    shown = make_url(plain(url)).render_as_string(hide_password=True)
    cause = str(getattr(failed, "orig", None) or failed) or type(failed).__name__
    return StoreUnreachable(
        f"The database {shown} does not answer: {cause}.",
        fix="Check that it runs, and TIMEBELL_DATABASE_URL.",
    )
