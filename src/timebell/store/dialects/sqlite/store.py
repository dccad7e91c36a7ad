"""The SQLite store: one file, one engine, every transaction as a whole in one dedicated thread."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from timebell.errors import StoreError, StoreInUse, StoreUnreachable
from timebell.store import transaction
from timebell.store.dialects.base import Finish, Operation, P, R, join_caller_connection
from timebell.store.dialects.handler_transactions import (
    handler_transaction,
    handler_transaction_in_thread,
    run_to_completion,
)
from timebell.store.dialects.sqlite.async_driver import AdaptedConnection, adapted_engine
from timebell.store.dialects.sqlite.dialect import SqliteDialect
from timebell.store.recent_writes import RecentWrites, Written
from timebell.store.sql import SQL
from timebell.store.subscribers import Subscribers
from timebell.store.transaction import NO_SUBJECTS, NO_VALUES, Dialect, Row, SqlTransaction, Steps
from timebell.store.version import schema_outdated

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

_CONNECT_OPTIONS = {
    "timeout": 10,
    "check_same_thread": False,
    "cached_statements": 512,
}  # the hot statements alone are half of the default of 128
UNOBSERVED_STEPS = Steps("operation")  # shared by all transactions while no probe is set
# Page caches in KiB: of the store's own connection, and of each connection for handlers and requests.
STORE_CACHE_KIB, OTHER_CACHE_KIB = 16_384, 8_192
# WAL size (32 MB) that triggers a checkpoint, for which writers wait. With rare checkpoints a page that changes often
# is written to the file only once.
WAL_CHECKPOINT_PAGES = 8_000
MAX_INSERT_ROWS = 256  # per statement; with the widest table far below SQLite's limit of 32,766 parameters


DIALECT = SqliteDialect()


class SqliteTransaction(SqlTransaction):
    """A transaction that executes hot statements directly on the driver connection."""

    def __init__(self, connection: Connection, dialect: Dialect, steps: Steps, driver: sqlite3.Connection) -> None:
        self.connection = connection  # without super().__init__(), for speed: there are several transactions per job
        self.dialect = dialect
        self.steps = steps
        self.subjects = NO_SUBJECTS
        self.driver = driver

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        if transaction.probe is not None:  # inlined, because this runs ten times per job
            self.steps()
        cursor = self.driver.execute(statement.text, params)
        names = statement.returned_columns
        if names is None:
            names = statement.returned_columns = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=False)) for row in cursor]

    def record(self, kind: str, rows: Written) -> None:
        """Do nothing: a file has no standby that could lack what was committed."""

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        driver = self.driver
        if driver.in_transaction:
            yield
            return
        driver.execute("BEGIN IMMEDIATE")
        try:
            yield
            driver.execute("COMMIT")
        except BaseException:
            if driver.in_transaction:
                driver.execute("ROLLBACK")
            raise

    def bulk_insert(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        constants: Mapping[str, Any] = NO_VALUES,
    ) -> None:  # fmt: skip
        self._insert_values(table, columns, records, constants)

    def bulk_upsert(
        self, table: Table, columns: Sequence[str], records: Sequence[tuple[Any, ...]], *,
        replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        update = self.dialect.on_conflict(table, replace=replace, add=add, key=key)
        self._insert_values(table.name, columns, records, NO_VALUES, update)

    def _insert_values(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]], constants: Mapping[str, Any],
        suffix: str = "",
    ) -> None:  # fmt: skip
        """Insert records by statements of 2^n rows each, so that few different ones are prepared.

        Many rows per statement, because each statement has to get the GIL back from other threads. Values are bound,
        because it takes SQLite longer to extract them from JSON than to insert them.
        """
        self.steps()
        names, remaining = (*constants, *columns), iter(records)
        while batch := list(islice(remaining, MAX_INSERT_ROWS)):
            while batch:
                size = 1 << (len(batch).bit_length() - 1)
                statement = f"{_insert_statement(table, names, len(constants), size)} {suffix}"
                self.driver.execute(statement, tuple(chain(constants.values(), *batch[:size])))
                del batch[:size]


@functools.lru_cache(maxsize=512)
def _insert_statement(table: str, columns: tuple[str, ...], constants: int, rows: int) -> str:
    """Return an INSERT of rows whose first columns have the same values in all rows."""
    row = ", ".join([*(f"?{number}" for number in range(1, constants + 1)), *["?"] * (len(columns) - constants)])
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([f'({row})'] * rows)}"  # noqa: S608


def _existing_file_url(url: str) -> str:
    """Return a URL for the same file that does not create it."""
    path = make_url(url).database or ":memory:"
    file_url = URL.create(
        "sqlite", database=f"file:{quote(os.path.abspath(path))}", query={"mode": "rw", "uri": "true"}
    )
    return file_url.render_as_string()


def engine_for(
    url: str, *, durable: bool = True, begin: str | None = "BEGIN IMMEDIATE", cache_kib: int = OTHER_CACHE_KIB
) -> Engine:  # fmt: skip
    """Create an engine whose transactions take the write lock at their start, so that none fails half-way.

    `begin` is the SQL that begins a transaction. With `begin=None` the caller controls transactions on the driver
    connection. With `durable=False` commits do not wait for the disk.
    """
    synchronous = f"synchronous = {'FULL' if durable else 'OFF'}"
    engine = create_engine(url, poolclass=NullPool, connect_args=_CONNECT_OPTIONS)

    @event.listens_for(engine, "connect")
    def _configure_connection(driver: Any, _: Any) -> None:
        driver.isolation_level = None
        wal = ("journal_mode = WAL", f"wal_autocheckpoint = {WAL_CHECKPOINT_PAGES}")
        for pragma in (*wal, synchronous, "foreign_keys = ON", f"cache_size = -{cache_kib}"):
            driver.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if begin is not None:
            connection.exec_driver_sql(begin)

    return engine


class SqliteStore:
    """A SQLite file. `wall_clock`, this machine's clock, serves as the clock of the database."""

    multi_node = False

    def __init__(
        self, url: str, wall_clock: Callable[[], datetime], *, durable: bool = True, read_only: bool = False,
        subscribers: Subscribers | None = None,
    ) -> None:  # fmt: skip
        self.url = url
        self.subscribers = subscribers or Subscribers()
        self.recent_writes = RecentWrites(lambda: 0.0)  # stays empty; see SqliteTransaction.record
        self._durable = durable
        self._read_only = read_only
        self.dialect = DIALECT
        self._wall_clock = wall_clock
        self._path = make_url(url).database or ":memory:"
        self._thread: ThreadPoolExecutor | None = None
        self._connection: Connection | None = None
        self._driver: sqlite3.Connection | None = None
        self._engine_lock: TextIO | None = None
        # For transactions of handlers and requests. They need another thread than the store's own, which waits for the
        # write lock while they hold it.
        self._side_thread: ThreadPoolExecutor | None = None
        self._request_transaction: SqliteTransaction | None = None  # reused by all transactions of `begin`
        self._open_request: RequestTransaction | None = None  # the current transaction of `begin`
        self._handler_engine: AsyncEngine | None = None
        self._thread_engine: Engine | None = None
        self._write_lock = asyncio.Lock()

    async def open(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="timebell-sqlite")
        if self._side_thread is None:
            self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="timebell-sqlite-side")
        await self._in_thread(self._connect)

    def _connect(self) -> None:
        if self._connection is not None:
            return
        folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isdir(folder):
            raise StoreUnreachable(
                f"Cannot open {self._path}: there is no folder {folder}.", fix="Create it, or specify another file."
            )
        url = _existing_file_url(self.url) if self._read_only else self.url
        self._connection = engine_for(url, durable=self._durable, begin=None, cache_kib=STORE_CACHE_KIB).connect()
        self._driver = self._connection.connection.driver_connection
        if self._read_only and self._driver is not None:
            self._driver.execute("PRAGMA query_only = ON")

    async def close(self) -> None:
        await self.unlock_engine()
        if self._thread is not None:
            try:
                await self._in_thread(self._disconnect)
            except RuntimeError:  # at interpreter shutdown executors accept no work
                self._disconnect()
            self._thread.shutdown()
            self._thread = None
        if self._side_thread is not None:
            self._open_request, request_transaction, self._request_transaction = None, self._request_transaction, None
            if request_transaction is not None:
                try:
                    await self._in_side_thread(request_transaction.connection.close)
                except RuntimeError:
                    request_transaction.connection.close()
            self._side_thread.shutdown(wait=False)
            self._side_thread = self._handler_engine = None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._driver = None

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._in_thread(self._transact, operation, args, kwargs)

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation with each statement as a transaction of its own."""
        return await self._in_thread(self._autocommit, operation, args, kwargs)

    def _autocommit(self, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        tx = self._transaction(operation)
        result = operation(tx, *args, **kwargs)
        if transaction.probe is not None:
            tx.steps.at("done")
        if tx.subjects:
            self._publish(tx.subjects)
        return result

    def _transaction(self, operation: Callable[..., Any] | None = None) -> SqliteTransaction:
        if self._connection is None or self._driver is None:  # closed while the operation was queued
            raise StoreError("This store is not open.", code="STORE_NOT_OPEN")
        probed = transaction.probe is not None
        steps = Steps(getattr(operation, "__name__", "operation")) if probed else UNOBSERVED_STEPS
        return SqliteTransaction(self._connection, self.dialect, steps, self._driver)

    def _transact(self, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        tx = self._transaction(operation)
        driver = tx.driver
        driver.execute("BEGIN IMMEDIATE")  # on the driver: through SQLAlchemy it would cost more than the statements
        try:
            result = operation(tx, *args, **kwargs)
            if transaction.probe is not None:
                tx.steps.at("commit")
            driver.execute("COMMIT")
        except BaseException:
            if driver.in_transaction:
                driver.execute("ROLLBACK")
            raise
        if transaction.probe is not None:
            tx.steps.at("done")
        if tx.subjects:
            self._publish(tx.subjects)
        return result

    def _publish(self, subjects: frozenset[str], _: object = ()) -> None:
        """Publish the subjects of a committed transaction; there are no other nodes, and nothing is remembered."""
        self.subscribers.publish(subjects)

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(connection, RequestTransaction):
            return await self._in_side_thread(self._run_in_request, connection, operation, args, kwargs)
        return (await join_caller_connection(connection, self.dialect, _begin_if_needed(operation), args, kwargs))[0]

    @contextlib.asynccontextmanager
    async def handler_transaction(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        """Open a transaction for a handler. One at a time, because SQLite allows one writer."""
        if self._handler_engine is None:
            self._handler_engine = self._create_handler_engine()
        async with (
            self._write_lock,
            self._handler_engine.connect() as connection,
            handler_transaction(connection, self.join, finish, self._publish),
        ):
            yield connection

    def _create_handler_engine(self) -> AsyncEngine:
        from sqlalchemy.ext.asyncio import AsyncEngine  # it loads the ORM

        engine = engine_for(self.url, durable=self._durable, begin=None)
        return AsyncEngine(
            adapted_engine(lambda: AdaptedConnection(engine.raw_connection(), self._in_side_thread), is_async=True)
        )

    @contextlib.contextmanager
    def handler_transaction_in_thread(self, finish: Finish) -> Iterator[Connection]:
        if self._thread_engine is None:
            self._thread_engine = engine_for(self.url, durable=self._durable)
        with (
            self._thread_engine.connect() as connection,
            handler_transaction_in_thread(connection, self.dialect, finish, self._publish),
        ):
            yield connection

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """Open a transaction for several operations.

        One at a time, because SQLite allows one writer. All use the same connection, because a new one would have to
        read the schema first.
        """
        try:
            async with self._write_lock:
                request = self._open_request = RequestTransaction()
                try:
                    yield request
                    await run_to_completion(self._in_side_thread(self._commit, request))
                except BaseException:
                    with contextlib.suppress(sqlite3.Error, StoreError):
                        await run_to_completion(self._in_side_thread(self._roll_back, request))
                    raise
                finally:
                    self._open_request = None
        except (DBAPIError, sqlite3.Error) as error:
            raise translate_error(error, self._path) from error

    def _run_in_request(
        self, request: RequestTransaction, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> R:
        self._check_open(request)
        if self._request_transaction is None:
            connection = engine_for(self.url, durable=self._durable, begin=None).connect()
            driver: Any = connection.connection.driver_connection
            self._request_transaction = SqliteTransaction(connection, self.dialect, UNOBSERVED_STEPS, driver)
        tx = self._request_transaction
        if transaction.probe is not None:
            tx.steps = Steps(getattr(operation, "__name__", "operation"))
        if not request.has_begun:
            tx.subjects = NO_SUBJECTS
            tx.driver.execute("BEGIN IMMEDIATE")
            request.has_begun = True
        return operation(tx, *args, **kwargs)

    def _commit(self, request: RequestTransaction) -> None:
        self._check_open(request)
        if self._request_transaction is None or not request.has_begun:
            return
        steps = Steps("begin")
        steps.at("commit")
        self._request_transaction.driver.execute("COMMIT")
        steps.at("done")
        self._publish(self._request_transaction.subjects)

    def _roll_back(self, request: RequestTransaction) -> None:
        if (
            request is self._open_request
            and self._request_transaction is not None
            and self._request_transaction.driver.in_transaction
        ):
            self._request_transaction.driver.execute("ROLLBACK")

    def _check_open(self, request: RequestTransaction) -> None:
        if request is not self._open_request:
            raise StoreError("The store was closed, or the transaction has ended.", code="STORE_NOT_OPEN")

    def is_transient(self, error: BaseException) -> bool:
        """Return False: writers wait for each other, so there are no conflicts."""
        return False

    async def read_clock(self) -> datetime:
        return self._wall_clock()

    async def lock_engine(self) -> None:
        """Lock the engine file. The lock is released when the process ends, whatever the reason."""
        self._write_lock = asyncio.Lock()  # bound to the event loop of this engine
        if self._path == ":memory:" or self._engine_lock is not None:
            return
        lock = open(f"{self._path}-engine", "a+")  # noqa: ASYNC230, SIM115 - held for life; no wait on a local file
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise StoreInUse(
                f"{self._path} is already run by {holder}; a SQLite file has one engine at a time.",
                fix="Stop that process, or set TIMEBELL_DATABASE_URL to a PostgreSQL database to run several nodes.",
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} ({os.path.basename(sys.argv[0]) or 'python'})")
        lock.flush()
        self._engine_lock = lock

    async def unlock_engine(self) -> None:
        if self._engine_lock is not None:
            self._engine_lock.close()
            self._engine_lock = None

    async def listen(self) -> bool:
        """Return False: SQLite has no notifications."""
        return False

    async def _in_side_thread(self, function: Callable[..., R], *args: Any) -> R:
        if self._side_thread is None:
            raise StoreError("This store is not open.", code="STORE_NOT_OPEN")
        return await asyncio.get_running_loop().run_in_executor(self._side_thread, function, *args)

    async def _in_thread(self, function: Callable[..., R], *args: Any) -> R:
        if self._thread is None:
            raise StoreError("This store is not open.", code="STORE_NOT_OPEN")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *args)
        except (OperationalError, DatabaseError, sqlite3.Error) as error:
            raise translate_error(error, self._path) from error


class RequestTransaction:
    """A handle for a transaction of `begin`, to pass to `join`. It begins with the first operation."""

    has_begun = False


def _begin_if_needed(operation: Callable[..., R]) -> Callable[..., R]:
    """Wrap an operation to begin a transaction if none is open.

    The driver begins one implicitly for INSERT, UPDATE and DELETE, but not for WITH .. INSERT.
    """

    @functools.wraps(operation)
    def run_in_transaction(tx: SqlTransaction, *args: Any, **kwargs: Any) -> R:
        driver: Any = tx.connection.connection.driver_connection
        if not driver.in_transaction:
            tx.connection.exec_driver_sql("BEGIN IMMEDIATE")

        def run(driver_connection: Any) -> R:
            if not isinstance(driver_connection, sqlite3.Connection):
                return operation(tx, *args, **kwargs)
            inner = SqliteTransaction(tx.connection, tx.dialect, tx.steps, driver_connection)
            result = operation(inner, *args, **kwargs)
            tx.subjects = inner.subjects
            return result

        return driver.run_with_driver(run) if isinstance(driver, AdaptedConnection) else run(driver)

    return run_in_transaction


def translate_error(error: Exception, path: str) -> Exception:
    """Convert a driver error to a Timebell error; return programming errors unchanged."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.IntegrityError | sqlite3.ProgrammingError):
        return error
    if "no such table" in str(cause):
        return schema_outdated(path, None)
    return StoreUnreachable(f"SQLite cannot use {path}: {cause}.", fix="Check the file, its folder and the disk.")
