"""The MariaDB store: several nodes, SKIP LOCKED, no notifications, so nodes poll.

The driver blocks, so each operation runs as a whole in a thread of a small pool, with a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.errors import Refused, StoreUnreachable
from timebell.store.dialects.base import Finish, Operation, P, R, join_caller_connection
from timebell.store.dialects.handler_transactions import handler_transaction, handler_transaction_in_thread, no_finish
from timebell.store.dialects.mariadb import ddl
from timebell.store.dialects.mariadb.async_driver import AsyncPool
from timebell.store.dialects.mariadb.dialect import MariaDialect
from timebell.store.dialects.mariadb.server import IS_SYNCED, MariaServer
from timebell.store.dialects.pulse import PROBE_TIMEOUT_SECONDS, Pulse
from timebell.store.recent_writes import RecentWrites, Written
from timebell.store.sql import SQL
from timebell.store.subscribers import Subscribers
from timebell.store.transaction import NO_VALUES, Row, SqlTransaction, Steps
from timebell.store.types import from_micros
from timebell.store.unavailability import MARIADB_ERRORS, UNREACHABLE, Unavailability, unavailable
from timebell.store.urls import parse_database_url
from timebell.store.version import schema_outdated

MIN_SERVER_VERSION = (10, 6)
"""The first version with SKIP LOCKED."""
HANDLER_POOL_SIZE = 10  # connections in each of three pools: for async handlers, for plain functions, for requests
HANDLER_POOL_TIMEOUT_SECONDS = 3600.0  # until a handler fails because no connection becomes free
REQUEST_POOL_TIMEOUT_SECONDS = 5.0  # the same for a request
MAX_STATEMENT_BYTES = 8_000_000  # of values in one statement; the usual max_allowed_packet of the server is 16 MB
MAX_CONFLICT_ATTEMPTS = 8  # of an operation that conflicts with another transaction
CONFLICT_RETRY_DELAY_SECONDS = 0.002  # before the second attempt, doubled before each further one
LOCK_TIMEOUT_SECONDS = 10  # wait for a row lock, and maximum idle time in a transaction
STATEMENT_TIMEOUT_SECONDS = 30  # wait for the response to a statement
MIGRATION_TIMEOUT_SECONDS = 86_400  # the same in a migration, which may create an index on many rows
RETURN_INTERVAL_SECONDS = 5.0  # between attempts to use the first host of a Galera cluster again
_SESSION_SETTINGS = (
    f"SET NAMES utf8mb4 COLLATE {ddl.COLLATION}",
    "SET SESSION time_zone = '+00:00',"
    " sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION',"
    f" innodb_lock_wait_timeout = {LOCK_TIMEOUT_SECONDS}, idle_transaction_timeout = {LOCK_TIMEOUT_SECONDS},"
    " join_cache_level = 0",
)
# Deadlock, lock wait timeout, record changed since it was read; and a duplicate key that another transaction inserted
# between our check and our insert: when the operation is repeated, the check finds it.
_TRANSIENT_ERRORS = {1213, 1205, 1020, 1062}
_MISSING_SCHEMA_ERRORS = {1054, 1146}
_DUPLICATE_KEY_ERROR = 1062
_TOO_MANY_CONNECTIONS_ERRORS = {1040, 1203}
_CLOSED_BY_SERVER_ERRORS = {2006, 2013}


class MariaTransaction(SqlTransaction):
    """A transaction that executes hot statements directly on the driver connection."""

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        self.steps()
        text, names = statement.formatted
        result = self.connection.exec_driver_sql(text, tuple([params[name] for name in names]))
        return [dict(row._mapping) for row in result] if result.returns_rows else []

    def bulk_insert(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        constants: Mapping[str, Any] = NO_VALUES,
    ) -> None:  # fmt: skip
        """Insert by executemany; the driver sends as many rows at a time as fit into one packet."""
        constant = tuple(constants.values())
        self._insert(table, (*columns, *constants), [record + constant for record in records])

    def bulk_upsert(
        self, table: Table, columns: Sequence[str], records: Sequence[tuple[Any, ...]], *,
        replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        update = self.dialect.on_conflict(table, replace=replace, add=add, key=key)
        self._insert(table.name, columns, list(records), update)

    def _insert(
        self, table: str, columns: Sequence[str], records: list[tuple[Any, ...]], suffix: str = ""
    ) -> None:  # fmt: skip
        self.steps()
        names = ", ".join(f"`{column}`" for column in columns)
        placeholders = ", ".join(["%s"] * len(columns))
        statement = f"INSERT INTO {table} ({names}) VALUES ({placeholders}) {suffix}"  # noqa: S608
        self.connection.exec_driver_sql(statement, records)


class MariaStore:
    """A MariaDB database (10.6 or newer)."""

    multi_node = True

    def __init__(
        self, url: str, *, server_clock: bool = True, pool_size: int = 10, read_only: bool = False,
        subscribers: Subscribers | None = None,
    ) -> None:  # fmt: skip
        self.url = url
        self.subscribers = subscribers or Subscribers()
        self.dialect = MariaDialect(server_clock=server_clock)
        self._pool_size, self._read_only = pool_size, read_only
        self.recent_writes = RecentWrites(time.monotonic)
        self._server = MariaServer(url, self._note_server_change)
        self._pulse: Pulse[Any] = Pulse(self._probe, lambda _: self._server.drop_connections())
        self._engine = engine_for(self._server, pool_size=pool_size, read_only=read_only)
        _observe_statements(self._engine, self._pulse)
        self._next_return_at = 0.0
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        # Separate pools, so that slow handlers cannot use up the connections of the engine.
        self._handler_pool: AsyncPool | None = None
        self._request_pool: AsyncPool | None = None
        self._thread_engine: Engine | None = None
        self._thread_engine_lock = threading.Lock()

    async def open(self) -> None:
        await self.read_clock()

    async def close(self) -> None:
        self._pulse.reset()
        self._engine.dispose()
        for pool in (self._handler_pool, self._request_pool):
            if pool is not None:
                pool.close()
        if self._thread_engine is not None:
            self._thread_engine.dispose()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        self._threads = self._handler_pool = self._request_pool = self._thread_engine = None

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._reset_after_fork()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._pool_size, thread_name_prefix="timebell-mariadb")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._pulse.reset()
            self._loop = loop
        self._pulse.watch(loop)
        if self._server.is_away and time.monotonic() >= self._next_return_at:
            self._next_return_at = time.monotonic() + RETURN_INTERVAL_SECONDS
            loop.run_in_executor(self._threads, self._return_to_first_host)
        for attempt in range(MAX_CONFLICT_ATTEMPTS):
            try:
                return await loop.run_in_executor(self._threads, self._transact, operation, args, kwargs)
            except PoolTimeout as error:
                raise unreachable(self.url, error) from error
            except _LostBeforeCommit as lost:
                self._engine.dispose()
                if attempt:
                    raise unreachable(self.url, lost.error) from lost.error
            except DBAPIError as error:
                if _error_number(error) in _TRANSIENT_ERRORS and attempt < MAX_CONFLICT_ATTEMPTS - 1:
                    await asyncio.sleep(CONFLICT_RETRY_DELAY_SECONDS * 2**attempt)
                    continue
                if _is_connection_lost(error):
                    self._engine.dispose()
                raise translate_error(self.url, error) from error
        raise AssertionError

    def _return_to_first_host(self) -> None:
        """Use the first member of a Galera cluster again that serves, as other processes do: one writer at a time."""
        first = MariaServer(self.url)
        engine = engine_for(first, pool_size=1, statement_timeout=PROBE_TIMEOUT_SECONDS)
        with contextlib.suppress(Exception):  # of the driver, or of SQLAlchemy: it will be tried again
            with engine.connect() as connection:
                is_synced = connection.exec_driver_sql(IS_SYNCED).scalar_one()
            if is_synced and self._server.follow(first):
                self._dispose_engines()
        engine.dispose()

    def _dispose_engines(self, *, close: bool = True) -> None:
        """Replace all pooled connections; those in use are closed after their operation."""
        for engine in (
            self._engine, self._thread_engine,
            *(pool.sync_engine for pool in (self._handler_pool, self._request_pool) if pool),
        ):  # fmt: skip
            if engine is not None:
                engine.dispose(close=close)

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation in a transaction, because one statement of other databases may be two on MariaDB."""
        return await self.run(operation, *args, **kwargs)

    def _reset_after_fork(self) -> None:
        """Drop threads and connections after a fork; they belong to the parent process."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._dispose_engines(close=False)
        self._threads = self._handler_pool = self._request_pool = None

    def _transact(self, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        pool = self._engine.pool
        with self._engine.connect() as connection:
            driver_connection = connection.connection.driver_connection
            tx = MariaTransaction(connection, self.dialect, Steps(getattr(operation, "__name__", "operation")))
            is_committing = False
            try:
                result = operation(tx, *args, **kwargs)
                tx.steps.at("commit")
                is_committing = True
                with self._pulse.waiting(driver_connection):
                    connection.commit()
            except BaseException as error:
                if isinstance(error, DBAPIError) and _is_connection_lost(error):
                    connection.invalidate()
                    if not is_committing and _error_number(error) in _CLOSED_BY_SERVER_ERRORS:
                        raise _LostBeforeCommit(error) from error
                else:
                    with self._pulse.waiting(driver_connection):
                        connection.rollback()
                raise
            finally:
                self._pulse.end(driver_connection)  # of a statement that failed
                if self._engine.pool is not pool:  # a replaced pool would keep it open
                    connection.invalidate()
        tx.steps.at("done")
        self._publish(tx.subjects, tx.written)
        return result

    def _publish(self, subjects: frozenset[str], written: Sequence[tuple[str, Written]]) -> None:
        """Publish the subjects of a committed transaction, and remember what it wrote. Thread-safe."""
        self.recent_writes.add(written)
        self.subscribers.publish(subjects)

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return (await join_caller_connection(connection, self.dialect, _with_rewriting(operation), args, kwargs))[0]

    @contextlib.asynccontextmanager
    async def handler_transaction(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        self._reset_after_fork()
        if self._handler_pool is None:
            self._handler_pool = self._create_pool("handler", HANDLER_POOL_TIMEOUT_SECONDS)
        async with self._pooled_transaction(self._handler_pool, finish) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self._reset_after_fork()
        if self._request_pool is None:
            self._request_pool = self._create_pool("request", REQUEST_POOL_TIMEOUT_SECONDS)
        try:
            async with self._pooled_transaction(self._request_pool, no_finish) as connection:
                yield connection
        except DBAPIError as error:
            if _classify(error) is not None:
                raise unreachable(self.url, error) from error
            raise

    @contextlib.asynccontextmanager
    async def _pooled_transaction(self, pool: AsyncPool, finish: Finish) -> AsyncIterator[AsyncConnection]:
        try:
            connection = await pool.connect()
        except (PoolTimeout, DBAPIError) as error:
            if _is_connection_lost(error):
                pool.sync_engine.dispose()  # its other connections are probably lost, too
            raise unreachable(self.url, error) from error
        try:
            async with handler_transaction(connection, self.join, finish, self._publish):
                yield connection
        except DBAPIError as error:
            if _is_connection_lost(error):
                pool.sync_engine.dispose()
            raise
        finally:
            await connection.close()

    def _create_pool(self, name: str, timeout: float) -> AsyncPool:
        engine = engine_for(self._server, pool_size=HANDLER_POOL_SIZE, pool_timeout=min(1.0, timeout))
        return AsyncPool(name, engine, HANDLER_POOL_SIZE, max(1, int(timeout)))

    @contextlib.contextmanager
    def handler_transaction_in_thread(self, finish: Finish) -> Iterator[Connection]:
        self._reset_after_fork()
        with self._thread_engine_lock:
            if self._thread_engine is None:
                self._thread_engine = engine_for(
                    self._server, pool_size=HANDLER_POOL_SIZE, pool_timeout=HANDLER_POOL_TIMEOUT_SECONDS
                )
        try:
            connection = self._thread_engine.connect()
        except (PoolTimeout, DBAPIError) as error:
            raise unreachable(self.url, error) from error
        with (
            connection,
            handler_transaction_in_thread(connection, self.dialect, _with_rewriting(finish), self._publish),
        ):
            yield connection

    def is_transient(self, error: BaseException) -> bool:
        cause = error.__cause__ if isinstance(error, StoreUnreachable) else error
        return cause is not None and _error_number(cause) in _TRANSIENT_ERRORS

    async def read_clock(self) -> datetime:
        return await self.run(_read_clock)

    async def lock_engine(self) -> None:
        """Do nothing: any number of engines may run."""

    async def unlock_engine(self) -> None:
        """Do nothing; see `lock_engine`."""

    async def listen(self) -> bool:
        """Return False: MariaDB has no notifications, so nodes poll."""
        return False

    def _note_server_change(self) -> None:
        self.recent_writes.is_unverified = True

    async def _probe(self, unanswered: Callable[[], Collection[Any]]) -> str | None:
        return await asyncio.to_thread(self._probe_in_thread, unanswered)

    def _probe_in_thread(self, unanswered: Callable[[], Collection[Any]]) -> str | None:
        engine = engine_for(self._server, pool_size=1, statement_timeout=PROBE_TIMEOUT_SECONDS)
        try:
            with contextlib.closing(engine.raw_connection()) as probe:
                return self._server.find_lost(unanswered, probe.driver_connection)
        except Exception as error:  # of the driver, or of SQLAlchemy
            number = _error_number(error)
            return None if number in _TOO_MANY_CONNECTIONS_ERRORS else str(error)
        finally:
            engine.dispose()


class _LostBeforeCommit(Exception):
    """The server closed the connection before the commit was sent, and rolled back."""

    def __init__(self, error: DBAPIError) -> None:
        super().__init__(str(error))
        self.error = error


READ_CLOCK = SQL("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) AS at")


def _read_clock(tx: Any) -> datetime:
    return from_micros(int(tx.run_sql(READ_CLOCK)[0]["at"]))


def _with_rewriting(operation: Callable[..., R]) -> Callable[..., R]:
    """Wrap an operation to rewrite its statements for MariaDB, on a connection of the caller."""

    def run(tx: SqlTransaction, *args: Any, **kwargs: Any) -> R:
        inner = MariaTransaction(tx.connection, tx.dialect, tx.steps)
        result = operation(inner, *args, **kwargs)
        tx.subjects, tx.written = inner.subjects, inner.written
        return result

    run.__name__ = getattr(operation, "__name__", "operation")
    return run


def engine_for(
    server: MariaServer, *, pool_size: int = 5, pool_timeout: float = 30.0, statement_timeout: float | None = None,
    read_only: bool = False,
) -> Engine:  # fmt: skip
    """Create a PyMySQL engine with the session settings of Timebell. Raises Refused (EXTRA_MISSING).

    `pool_timeout` is the maximum wait for a connection if all are in use, `statement_timeout` the maximum wait for the
    response to a statement, in seconds.
    """
    try:
        from pymysql.constants import FIELD_TYPE
        from pymysql.converters import conversions
        from pymysql.err import MySQLError
    except ImportError as error:
        raise Refused(
            "MariaDB requires the package PyMySQL, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[mysql]".',
        ) from error  # fmt: skip

    engine = create_engine(
        server.driver_url,
        isolation_level="READ COMMITTED",
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout,
        pool_reset_on_return=None,  # see `_roll_back`
        connect_args={
            "connect_timeout": 5, "read_timeout": statement_timeout or STATEMENT_TIMEOUT_SECONDS,
            "write_timeout": STATEMENT_TIMEOUT_SECONDS,
            "conv": {**conversions, FIELD_TYPE.NEWDECIMAL: _parse_number, FIELD_TYPE.DECIMAL: _parse_number},
        },
    )  # fmt: skip

    @event.listens_for(engine, "do_connect")
    def _connect(dialect: Any, _record: Any, _args: Any, arguments: dict[str, Any]) -> Any:
        return server.connect(dialect.loaded_dbapi, **arguments)

    @event.listens_for(engine, "connect")
    def _configure_session(driver: Any, _: Any) -> None:
        with driver.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            _check_server_version(cursor.fetchone()[0])
            for statement in _SESSION_SETTINGS:
                cursor.execute(statement)
            if read_only:
                cursor.execute("SET SESSION TRANSACTION READ ONLY")
        driver.commit()

    @event.listens_for(engine, "reset")
    def _roll_back(driver: Any, record: Any, _: Any) -> None:
        try:
            driver.rollback()
        except (OSError, MySQLError) as error:  # it is lost; SQLAlchemy would log a traceback of each
            record.invalidate(error)

    return engine


def _observe_statements(engine: Engine, pulse: Pulse[Any]) -> None:
    """Have `pulse` observe statements instead of operations, which do not wait for the server while they compute."""

    @event.listens_for(engine, "before_cursor_execute")
    def _begin(_: Connection, cursor: Any, *_arguments: Any) -> None:
        pulse.begin(cursor.connection)

    @event.listens_for(engine, "after_cursor_execute")
    def _end(_: Connection, cursor: Any, *_arguments: Any) -> None:
        pulse.end(cursor.connection)


def migration_engine(url: str) -> Engine:
    """Create an engine for migrations: it rewrites DDL for MariaDB, and allows long statements.

    A lock request that waits for a long transaction blocks all later ones on the table. So it gives up after a second.
    """
    engine = engine_for(MariaServer(url), statement_timeout=MIGRATION_TIMEOUT_SECONDS)

    @event.listens_for(engine, "begin")
    def _limit_lock_wait(connection: Connection) -> None:
        connection.exec_driver_sql("SET SESSION lock_wait_timeout = 1").close()

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def _rewrite_statement(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        return ddl.rewrite_ddl(statement), parameters

    return engine


def _parse_number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _check_server_version(version: str) -> None:
    name = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    numbers = tuple(int(part) for part in version.removeprefix("5.5.5-").split("-")[0].split(".")[:2])
    if name == "MySQL" or numbers < MIN_SERVER_VERSION:
        raise Refused(
            f"The server is {name} {version}, which is not supported by Timebell.", code="DATABASE_UNSUPPORTED",
            fix="Use MariaDB 10.6 or newer, PostgreSQL or SQLite.",
        )  # fmt: skip


def server_addresses(url: str) -> list[tuple[str, int]]:
    """Return the (host, port) of the server in a URL; [] for a Unix socket."""
    return MariaServer(url).addresses


def _error_number(error: BaseException) -> int | None:
    """Return the error number of MariaDB or of its driver."""
    cause: Any = getattr(error, "orig", None) or error
    code = cause.args[0] if getattr(cause, "args", None) else None
    return code if isinstance(code, int) else None


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether an error is a lock wait timeout."""
    return _error_number(error) == 1205


def _classify(error: BaseException) -> Unavailability | None:
    """Return why the database is unavailable; None if it rejected a statement."""
    kind = MARIADB_ERRORS.get(_error_number(error) or -1)
    if kind is not None:
        return kind
    cause = getattr(error, "orig", None) or error
    is_lost = (
        isinstance(cause, OSError) or _error_number(error) == 0 or bool(getattr(error, "connection_invalidated", False))
    )
    return UNREACHABLE if is_lost else None


def _is_connection_lost(error: BaseException) -> bool:
    kind = _classify(error)
    return kind is not None and kind.drops_connections


def translate_error(url: str, error: Exception) -> Exception:
    """Convert a driver error to a Timebell error; return programming errors unchanged."""
    if _classify(error) is not None:
        return unreachable(url, error)
    if _error_number(error) in _MISSING_SCHEMA_ERRORS:
        return schema_outdated(url, None)
    return error


def unreachable(url: str, error: BaseException) -> StoreUnreachable:
    """Create the error for a database that is unavailable. It omits the password."""
    safe_url = parse_database_url(url).render_as_string(hide_password=True)
    cause = str(getattr(error, "orig", None) or error) or type(error).__name__
    return unavailable(_classify(error) or UNREACHABLE, safe_url, cause)
