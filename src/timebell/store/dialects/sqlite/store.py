"""SQLite: one file, one engine, every transaction whole in one dedicated thread."""

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
from itertools import islice
from typing import Any, TextIO
from urllib.parse import quote

import orjson
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool

from timebell.errors import StoreError, StoreInUse, StoreUnreachable
from timebell.store import transaction
from timebell.store.dialects.base import Finish, Operation, P, R, join_callers
from timebell.store.dialects.handler_transactions import lend, lend_here, whole
from timebell.store.dialects.sqlite.async_driver import Shared, shared_engine
from timebell.store.dialects.sqlite.macros import SqliteWords
from timebell.store.statement import Statement
from timebell.store.transaction import NOTHING, Dialect, Row, SqlTransaction, Steps

_OPTIONS = {"timeout": 10, "check_same_thread": False, "cached_statements": 512}  # of 128 the hot ones are half
UNSEEN = Steps("operation")  # of all transactions while nobody looks at their steps
CACHE, LENT_CACHE = 16_384, 8_192  # KiB of pages that a connection keeps: the store's own; one that is lent
PAGES = 8_000  # of the log (32 MB) after which they go to the file, while whoever comes waits: seldom, and each once
LOADED = 2_500  # rows of a statement: with the longest payloads they are less than SQLite takes, 1 GB
FEW = 8  # rows from which on JSON costs less than to bind each value, or to step from row to row


WORDS = SqliteWords()


@functools.lru_cache(maxsize=256)
def _listed(routes: tuple[str, ...]) -> str:
    """As JSON; a node asks for the same ones with each look and claim."""
    return orjson.dumps(routes).decode()


class SqliteTransaction(SqlTransaction):
    """Hot statements go straight to the driver, in the same transaction."""

    def __init__(self, connection: Connection, dialect: Dialect, steps: Steps, driver: sqlite3.Connection) -> None:
        self.connection = connection  # not by way of super(): there are several of them to each job
        self.dialect = dialect
        self.steps = steps
        self.wants_notify = ""
        self.driver = driver

    def fetch(self, statement: Statement, rows: Sequence[Mapping[str, Any]] = (), **params: Any) -> list[Row]:
        """As in Transaction."""
        if transaction.probe is not None:  # here at least: it is asked ten times a job
            self.steps()
        left: list[Row]
        if statement.columns and not params and 0 < (count := len(rows)) <= FEW:
            values: list[Any] = []
            for row in rows:
                values += map(row.get, statement.columns)
            text = statement.by_count.get((self.dialect.name, count)) or statement.listed(self.dialect, count)
            cursor = self.driver.execute(text, values)
        else:
            varying = self._bind(statement, rows, params) if statement.columns else None
            if "exact" in params:
                for name in ("exact", "prefixes"):
                    params[name] = _listed(tuple(params[name]))
            if statement.many and statement.in_two is not None:
                left = self._in_two(*statement.in_two, varying, params)
                statement.many = len(left) > FEW
                return left
            cursor = self.driver.execute(self._text(statement, varying), params)
        names = statement.returned
        if names is None:
            names = statement.returned = [column[0] for column in cursor.description or ()]
        left = [dict(zip(names, row, strict=False)) for row in cursor]
        statement.many = len(left) > FEW
        return left

    def _bind(self, statement: Statement, rows: Sequence[Mapping[str, Any]], params: dict[str, Any]) -> tuple[str, ...]:
        """Add a batch to the parameters: what all rows have in common once, the rest as JSON, as each value that is
        read from that costs; the columns in which they differ."""
        count, varying, differing = len(rows), [], []
        for name in statement.columns:
            values = [row.get(name) for row in rows]
            if count and values.count(values[0]) == count:
                params[f"same_{name}"] = values[0]
            else:
                varying.append(name)
                differing.append(values)
        listed = differing[0] if len(varying) == 1 else list(zip(*differing, strict=True)) or [0] * count
        params["rows"] = orjson.dumps(listed).decode()
        return tuple(varying)

    def _text(self, statement: Statement, varying: tuple[str, ...] | None) -> str:
        if varying is None:
            return statement.by_name.get(self.dialect.name) or statement.named(self.dialect)
        text = statement.by_varying.get(varying)
        return text or statement.spread(WORDS.rows_of(statement.columns, varying), WORDS, varying)

    def _in_two(
        self, read: Statement, write: Statement, varying: tuple[str, ...] | None, params: dict[str, Any]
    ) -> list[Row]:
        """Between rows the driver lets go of the interpreter, which a busy event loop then keeps for milliseconds."""
        driver, whole = self.driver, not self.driver.in_transaction
        if whole:
            driver.execute("BEGIN IMMEDIATE")
        try:
            found, params["ids"] = driver.execute(self._text(read, varying), params).fetchone()
            left: list[Row] = orjson.loads(found)
            if left:
                driver.execute(self._text(write, varying), params)
            if whole:
                driver.execute("COMMIT")
        except BaseException:
            if whole and driver.in_transaction:
                driver.execute("ROLLBACK")
            raise
        return left

    def load(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        fixed: Mapping[str, Any] = NOTHING,
    ) -> None:  # fmt: skip
        """As in Transaction, of what JSON can say. In statements of many rows, beside which other threads run: for each
        statement they would have to wait for their turn anew."""
        self.steps()
        given = [*("?" * len(fixed)), *(f"json_extract(value, '$[{at}]')" for at in range(len(columns)))]
        names = ", ".join((*fixed, *columns))
        text = f"INSERT INTO {table} ({names}) SELECT {', '.join(given)} FROM json_each(?)"  # noqa: S608
        rows = iter(records)
        while some := list(islice(rows, LOADED)):
            self.driver.execute(text, (*fixed.values(), orjson.dumps(some).decode()))


def _existing(url: str) -> str:
    """The same file, which opening it must not make."""
    path = make_url(url).database or ":memory:"
    made = URL.create("sqlite", database=f"file:{quote(os.path.abspath(path))}", query={"mode": "rw", "uri": "true"})
    return made.render_as_string()


def engine_for(
    url: str, *, durable: bool = True, begin: str | None = "BEGIN IMMEDIATE", cache: int = LENT_CACHE
) -> Engine:  # fmt: skip
    """An engine whose transactions take the write lock at once, so that none fails half-way for want of it.

    With `begin=None` its user begins and ends them on the driver's connection.
    """
    synchronous = f"synchronous = {'FULL' if durable else 'OFF'}"
    engine = create_engine(url, poolclass=NullPool, connect_args=_OPTIONS)

    @event.listens_for(engine, "connect")
    def _connected(driver: Any, _: Any) -> None:
        driver.isolation_level = None
        wal = ("journal_mode = WAL", f"wal_autocheckpoint = {PAGES}")
        for pragma in (*wal, synchronous, "foreign_keys = ON", f"cache_size = -{cache}"):
            driver.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if begin is not None:
            connection.exec_driver_sql(begin)

    return engine


class SqliteStore:
    """One SQLite file. `wall` is read for the database's clock: this machine's own."""

    many_nodes = False

    def __init__(
        self, url: str, wall: Callable[[], datetime], *, durable: bool = True, read_only: bool = False
    ) -> None:
        self.url = url
        self._durable = durable
        self._read_only = read_only
        self.dialect = WORDS
        self._wall = wall
        self._path = make_url(url).database or ":memory:"
        self._thread: ThreadPoolExecutor | None = None
        self._connection: Connection | None = None
        self._driver: sqlite3.Connection | None = None
        self._lock: TextIO | None = None
        self._aside: ThreadPoolExecutor | None = None  # not the store's own thread, which waits for the lock meanwhile
        self._begun: SqliteTransaction | None = None  # all that `begin` begins, one after another
        self._open: Begun | None = None  # the one of now
        self._lent: AsyncEngine | None = None
        self._lent_to_threads: Engine | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """As in Store."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="timebell-sqlite")
        if self._aside is None:
            self._aside = ThreadPoolExecutor(1, thread_name_prefix="timebell-aside")
        await self._in_thread(self._connect)

    def _connect(self) -> None:
        if self._connection is not None:
            return
        folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isdir(folder):
            raise StoreUnreachable(
                f"Cannot open {self._path}: there is no folder {folder}.", fix="Make it, or name another file."
            )
        url = _existing(self.url) if self._read_only else self.url
        self._connection = engine_for(url, durable=self._durable, begin=None, cache=CACHE).connect()
        self._driver = self._connection.connection.driver_connection
        if self._read_only and self._driver is not None:
            self._driver.execute("PRAGMA query_only = ON")

    async def close(self) -> None:
        """As in Store."""
        await self.unlock_engine()
        if self._thread is not None:
            try:
                await self._in_thread(self._disconnect)
            except RuntimeError:  # at the interpreter's end threads take no more work
                self._disconnect()
            self._thread.shutdown()
            self._thread = None
        if self._aside is not None:
            self._open, begun, self._begun = None, self._begun, None
            if begun is not None:
                try:
                    await self._beside(begun.connection.close)
                except RuntimeError:
                    begun.connection.close()
            self._aside.shutdown(wait=False)
            self._aside = self._lent = None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._driver = None

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        return await self._in_thread(self._transact, operation, args, kwargs)

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store: each statement is a transaction of its own."""
        return await self._in_thread(self._autocommit, operation, args, kwargs)

    def _autocommit(self, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        tx = self._transaction(operation)
        answer = operation(tx, *args, **kwargs)
        if transaction.probe is not None:
            tx.steps.at("done")
        if tx.wants_notify:
            self._committed(tx)
        return answer

    def _transaction(self, operation: Callable[..., Any] | None = None) -> SqliteTransaction:
        assert self._connection is not None
        assert self._driver is not None
        probed = transaction.probe is not None
        steps = Steps(getattr(operation, "__name__", "operation")) if probed else UNSEEN
        return SqliteTransaction(self._connection, self.dialect, steps, self._driver)

    def _transact(self, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        tx = self._transaction(operation)
        driver = tx.driver
        driver.execute("BEGIN IMMEDIATE")  # said to the driver: SQLAlchemy's own way costs more than the statements
        try:
            answer = operation(tx, *args, **kwargs)
            if transaction.probe is not None:
                tx.steps.at("commit")
            driver.execute("COMMIT")
        except BaseException:
            if driver.in_transaction:
                driver.execute("ROLLBACK")
            raise
        if transaction.probe is not None:
            tx.steps.at("done")
        if tx.wants_notify:
            self._committed(tx)
        return answer

    def _committed(self, tx: SqliteTransaction) -> None:
        """Called after a commit that others want to know of; SQLite has no one to tell."""

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        if isinstance(connection, Begun):
            return await self._beside(self._in_begun, connection, operation, args, kwargs)
        return (await join_callers(connection, self.dialect, _begun(operation), args, kwargs))[0]

    @contextlib.asynccontextmanager
    async def lend(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        """As in Store. One at a time, as only one of them could write."""
        if self._lent is None:
            self._lent = self._lender()
        async with self._turn, self._lent.connect() as connection, lend(connection, self.join, finish):
            yield connection

    def _lender(self) -> AsyncEngine:
        own = engine_for(self.url, durable=self._durable, begin=None)
        return AsyncEngine(shared_engine(lambda: Shared(own.raw_connection(), self._beside), is_async=True))

    @contextlib.contextmanager
    def lend_to_thread(self, finish: Finish) -> Iterator[Connection]:
        """As in Store."""
        if self._lent_to_threads is None:
            self._lent_to_threads = engine_for(self.url, durable=self._durable)
        with self._lent_to_threads.connect() as connection, lend_here(connection, self.dialect, finish):
            yield connection

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """As in Store. One at a time, as only one of them could write; all on one connection, as a new one has to read
        what tables there are."""
        try:
            async with self._turn:
                begun = self._open = Begun()
                try:
                    yield begun
                    await whole(self._beside(self._commit, begun))
                except BaseException:
                    with contextlib.suppress(sqlite3.Error, StoreError):
                        await whole(self._beside(self._roll_back, begun))
                    raise
                finally:
                    self._open = None
        except (DBAPIError, sqlite3.Error) as failed:
            raise translate(failed, self._path) from failed

    def _in_begun(
        self, begun: Begun, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> R:
        self._check_open(begun)
        if self._begun is None:
            connection = engine_for(self.url, durable=self._durable, begin=None).connect()
            driver: Any = connection.connection.driver_connection
            self._begun = SqliteTransaction(connection, self.dialect, UNSEEN, driver)
        tx = self._begun
        if transaction.probe is not None:
            tx.steps = Steps(getattr(operation, "__name__", "operation"))
        if not begun.writes:
            tx.driver.execute("BEGIN IMMEDIATE")
            begun.writes = True
        return operation(tx, *args, **kwargs)

    def _commit(self, begun: Begun) -> None:
        self._check_open(begun)
        if self._begun is None or not begun.writes:
            return
        steps = Steps("begin")
        steps.at("commit")
        self._begun.driver.execute("COMMIT")
        steps.at("done")

    def _roll_back(self, begun: Begun) -> None:
        if begun is self._open and self._begun is not None and self._begun.driver.in_transaction:
            self._begun.driver.execute("ROLLBACK")

    def _check_open(self, begun: Begun) -> None:
        if begun is not self._open:
            raise StoreError("The store was closed, or the transaction is over.", code="STORE_NOT_OPEN")

    def passes(self, failed: BaseException) -> bool:
        """As in Store: writers wait for each other."""
        return False

    async def reading(self) -> datetime:
        """As in Store."""
        return self._wall()

    async def lock_engine(self) -> None:
        """As in Store. The lock goes with the process, however it ends."""
        self._turn = asyncio.Lock()  # of this engine's event loop
        if self._path == ":memory:" or self._lock is not None:
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
                fix="Stop that one, or set TIMEBELL_DATABASE_URL to a PostgreSQL database to run several nodes.",
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} ({os.path.basename(sys.argv[0]) or 'python'})")
        lock.flush()
        self._lock = lock

    async def unlock_engine(self) -> None:
        """As in Store."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def listen(self, poke: Callable[[str], None]) -> bool:
        """As in Store: SQLite has no way to tell."""
        return False

    async def _beside(self, call: Callable[..., R], *args: Any) -> R:
        if self._aside is None:
            raise StoreError("This store is not open.", code="STORE_NOT_OPEN")
        return await asyncio.get_running_loop().run_in_executor(self._aside, call, *args)

    async def _in_thread(self, call: Callable[..., R], *args: Any) -> R:
        if self._thread is None:
            raise StoreError("This store is not open.", code="STORE_NOT_OPEN")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, call, *args)
        except (OperationalError, DatabaseError, sqlite3.Error) as failed:
            raise translate(failed, self._path) from failed


class Begun:
    """A transaction of `begin`, for `join`: it `writes` from the first operation on."""

    writes = False


def _begun(operation: Callable[..., R]) -> Callable[..., R]:
    """`operation` in a transaction for certain: by itself the driver begins none for WITH .. INSERT."""

    @functools.wraps(operation)
    def begun(tx: SqlTransaction, *args: Any, **kwargs: Any) -> R:
        driver: Any = tx.connection.connection.driver_connection
        if not driver.in_transaction:
            tx.connection.exec_driver_sql("BEGIN IMMEDIATE")

        def run(own: Any) -> R:
            if not isinstance(own, sqlite3.Connection):
                return operation(tx, *args, **kwargs)
            inner = SqliteTransaction(tx.connection, tx.dialect, tx.steps, own)
            answer = operation(inner, *args, **kwargs)
            tx.wants_notify = inner.wants_notify
            return answer

        return driver.whole(run) if isinstance(driver, Shared) else run(driver)

    return begun


def translate(failed: Exception, path: str) -> Exception:
    """A driver's error in our words; programming errors stay what they are."""
    cause = getattr(failed, "orig", None) or failed
    if isinstance(cause, sqlite3.IntegrityError | sqlite3.ProgrammingError):
        return failed
    if "no such table" in str(cause):
        from timebell.store.open import outdated

        return outdated(path, None)
    return StoreUnreachable(f"SQLite cannot use {path}: {cause}.", fix="Check the file, its folder and the disk.")
