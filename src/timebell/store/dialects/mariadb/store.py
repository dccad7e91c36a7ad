"""MariaDB: many nodes, row locks that are skipped, nobody who tells: nodes look now and then.

Its driver blocks, so each operation runs whole in a thread of a few, with a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import repeat
from operator import add
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.errors import Refused, StoreError, StoreUnreachable
from timebell.store.dialects.base import Finish, Operation, P, R, join_callers
from timebell.store.dialects.handler_transactions import lend, lend_here, nothing_more
from timebell.store.dialects.mariadb import ddl
from timebell.store.dialects.mariadb.async_driver import Lender
from timebell.store.dialects.mariadb.rewrite import MariaWords, Said, bound, said
from timebell.store.statement import Statement
from timebell.store.transaction import NOTHING, Row, SqlTransaction, Steps
from timebell.store.types import from_micros

OLDEST = (10, 6)
"""The first with SKIP LOCKED."""
LENT = 10  # connections for transactions of async handlers, as many for those of plain functions and of requests
LENT_PATIENCE = 3600.0  # seconds until a handler is told that there is none
ASKED_PATIENCE = 5.0  # and a request
PACKET = 8_000_000  # bytes of values in one statement, or less; of the server's max_allowed_packet 16 MB are usual
TRIES = 8  # of an operation that was in another's way
PAUSE = 0.002  # seconds before the second, doubled before each further one
WAIT = 10  # seconds for a lock
ANSWER = 30  # seconds for what the server says next
LONG = 86_400  # and for that of a migration, which may make an index of many rows
_SESSION = (
    f"SET NAMES utf8mb4 COLLATE {ddl.COLLATION}",
    "SET SESSION time_zone = '+00:00',"
    " sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION',"
    f" innodb_lock_wait_timeout = {WAIT}, idle_transaction_timeout = {WAIT}, join_cache_level = 0",
)
# Deadlock, lock wait, record changed since it was read; and a unique key that another wrote between our look and our
# insert: the operation, run again, sees it.
_TRANSIENT = {1213, 1205, 1020, 1062}
_ABSENT = {1054, 1146}
_DUPLICATE = 1062
# Too many connections, no room on the disk or in a table, shutting down, killed, read-only for now; and what the driver
# says of a connection.
_LOST = {0, 1021, 1040, 1044, 1045, 1049, 1053, 1077, 1079, 1114, 1152, 1203, 1290, 1927, 4031} | set(range(2000, 2100))


class MariaTransaction(SqlTransaction):
    """Statements as MariaDB takes them."""

    def fetch(self, statement: Statement, rows: Sequence[Mapping[str, Any]] = (), **params: Any) -> list[Row]:
        """As in Transaction."""
        assert isinstance(self.dialect, MariaWords)
        what, columns = said(statement, self.dialect), tuple(statement.columns)
        found: list[Row] = []
        if what.each:
            for row in rows:
                found += self._said(what, (), (), {**params, **row})
        else:
            writes = what.write or what.read.startswith(("INSERT", "UPDATE"))
            for part in _parts(rows) if writes else (rows,):
                found += self._said(what, columns, part, params)
        return found

    def _said(
        self, what: Said, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], params: Mapping[str, Any]
    ) -> list[Row]:
        self.steps()
        if columns and not rows and not what.read.lstrip().startswith(("SELECT", "WITH")):
            return []
        result = self.connection.exec_driver_sql(*bound(what.read, columns, rows, params))
        found: list[Row] = [dict(row._mapping) for row in result] if result.returns_rows else []
        if what.ignoring:
            self._only_duplicates(result)
        if what.write and found:
            self.steps()
            ids = [row["id"] for row in found]
            self.connection.exec_driver_sql(*bound(what.write, columns, rows, {**params, "ids": ids}))
        return found

    def _only_duplicates(self, result: Any) -> None:
        """IGNORE passes over more than what is there already: what else it passed over is an error."""
        if getattr(result.context.cursor if result.context else None, "warning_count", 1) == 0:
            return
        for _, code, text in self.connection.exec_driver_sql("SHOW WARNINGS").all():
            if code != _DUPLICATE:
                raise StoreError(f"MariaDB did not write a row as it was given: {text}.", code="STORE_REFUSED")

    def load(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        fixed: Mapping[str, Any] = NOTHING,
    ) -> None:  # fmt: skip
        """As in Transaction. The driver sends as many rows at a time as one packet takes."""
        self.steps()
        names = ", ".join(f"`{column}`" for column in (*columns, *fixed))
        marks = ", ".join(["%s"] * (len(columns) + len(fixed)))
        rows = list(map(add, records, repeat(tuple(fixed.values()))))
        self.connection.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)  # noqa: S608


def _parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Rows in as few parts as packets take; none is one part."""
    start = size = 0
    for at, row in enumerate(rows):
        size += 3 * sum(len(value) for value in row.values() if isinstance(value, str))
        if size > PACKET and at > start:
            yield rows[start:at]
            start, size = at, 0
    yield rows[start:]


class MariaStore:
    """A MariaDB database (10.6 or newer)."""

    many_nodes = True

    def __init__(self, url: str, *, server_clock: bool = True, pool_size: int = 10, read_only: bool = False) -> None:
        self.url = url
        self.dialect = MariaWords(server_clock=server_clock)
        self._size, self._read_only = pool_size, read_only
        self._engine = engine_for(url, pool_size=pool_size, read_only=read_only)
        self._process = os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        # Apart from those of the engine, which would go short while handlers take their time.
        self._lent: Lender | None = None
        self._asked: Lender | None = None
        self._lent_to_threads: Engine | None = None
        self._lending = threading.Lock()

    async def open(self) -> None:
        """As in Store."""
        await self.reading()

    async def close(self) -> None:
        """As in Store."""
        self._engine.dispose()
        for lent in (self._lent, self._asked):
            if lent is not None:
                lent.close()
        if self._lent_to_threads is not None:
            self._lent_to_threads.dispose()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        self._threads = self._lent = self._asked = self._lent_to_threads = None

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        self._settle()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="timebell-mariadb")
        loop = asyncio.get_running_loop()
        for again in range(TRIES):
            try:
                return await loop.run_in_executor(self._threads, self._transact, operation, args, kwargs)
            except NoneFree as busy:
                raise unreachable(self.url, busy) from busy
            except DBAPIError as failed:
                if _code(failed) in _TRANSIENT and again < TRIES - 1:
                    await asyncio.sleep(PAUSE * 2**again)
                    continue
                if _lost(failed):
                    self._engine.dispose()
                raise translated(self.url, failed) from failed
        raise AssertionError

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store: in a transaction, as what others say in one statement is two here."""
        return await self.run(operation, *args, **kwargs)

    def _settle(self) -> None:
        """Threads and connections are of the process that made them: one that was forked from it makes its own."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        for engine in (self._engine, self._lent_to_threads, *(lent.own for lent in (self._lent, self._asked) if lent)):
            if engine is not None:
                engine.dispose(close=False)
        self._threads = self._lent = self._asked = None

    def _transact(self, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        with self._engine.connect() as connection:
            tx = MariaTransaction(connection, self.dialect, Steps(getattr(operation, "__name__", "operation")))
            try:
                answer = operation(tx, *args, **kwargs)
                tx.steps.at("commit")
                connection.commit()
            except BaseException as failed:
                if isinstance(failed, DBAPIError) and _lost(failed):
                    connection.invalidate()
                else:
                    connection.rollback()
                raise
        tx.steps.at("done")
        return answer

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        return (await join_callers(connection, self.dialect, _as_maria(operation), args, kwargs))[0]

    @contextlib.asynccontextmanager
    async def lend(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        """As in Store."""
        self._settle()
        if self._lent is None:
            self._lent = self._lender("lent", LENT_PATIENCE)
        async with self._lent_from(self._lent, finish) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """As in Store."""
        self._settle()
        if self._asked is None:
            self._asked = self._lender("asked", ASKED_PATIENCE)
        try:
            async with self._lent_from(self._asked, nothing_more) as connection:
                yield connection
        except DBAPIError as failed:
            if _lost(failed):
                raise unreachable(self.url, failed) from failed
            raise

    @contextlib.asynccontextmanager
    async def _lent_from(self, source: Lender, finish: Finish) -> AsyncIterator[AsyncConnection]:
        try:
            connection = await source.connect()
        except (NoneFree, DBAPIError) as failed:
            if _lost(failed):
                source.own.dispose()  # its other connections are as old
            raise unreachable(self.url, failed) from failed
        try:
            async with lend(connection, self.join, finish):
                yield connection
        except DBAPIError as failed:
            if _lost(failed):
                source.own.dispose()
            raise
        finally:
            await connection.close()

    def _lender(self, name: str, patience: float) -> Lender:
        own = engine_for(self.url, pool_size=LENT, patience=min(1.0, patience))
        return Lender(name, own, LENT, max(1, int(patience)))

    @contextlib.contextmanager
    def lend_to_thread(self, finish: Finish) -> Iterator[Connection]:
        """As in Store."""
        self._settle()
        with self._lending:
            if self._lent_to_threads is None:
                self._lent_to_threads = engine_for(self.url, pool_size=LENT, patience=LENT_PATIENCE)
        try:
            connection = self._lent_to_threads.connect()
        except (NoneFree, DBAPIError) as failed:
            raise unreachable(self.url, failed) from failed
        with connection, lend_here(connection, self.dialect, _as_maria(finish)):
            yield connection

    def passes(self, failed: BaseException) -> bool:
        """As in Store."""
        return _code(failed) in _TRANSIENT

    async def reading(self) -> datetime:
        """As in Store."""
        return await self.run(_reading)

    async def lock_engine(self) -> None:
        """As in Store: any number of nodes."""

    async def unlock_engine(self) -> None:
        """As in Store."""

    async def listen(self, poke: Callable[[str], None]) -> bool:
        """As in Store: MariaDB has no way to tell, so nodes look every `poll` seconds."""
        return False


READING = Statement("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) AS at")


def _reading(tx: Any) -> datetime:
    return from_micros(int(tx.fetch(READING)[0]["at"]))


def _as_maria(operation: Callable[..., R]) -> Callable[..., R]:
    """`operation` with statements as MariaDB takes them, on a connection of the caller's."""

    def run(tx: SqlTransaction, *args: Any, **kwargs: Any) -> R:
        inner = MariaTransaction(tx.connection, tx.dialect, tx.steps)
        answer = operation(inner, *args, **kwargs)
        tx.wants_notify = inner.wants_notify
        return answer

    run.__name__ = getattr(operation, "__name__", "operation")
    return run


def engine_for(
    url: str, *, pool_size: int = 5, patience: float = 30.0, answer: int | None = None, read_only: bool = False
) -> Engine:  # fmt: skip
    """An engine of PyMySQL whose sessions are as Timebell needs them. Raises Refused (EXTRA_MISSING).

    `patience` is how many seconds to wait for a connection while all are in use, `answer` for its answers.
    """
    try:
        from pymysql.constants import FIELD_TYPE
        from pymysql.converters import conversions
    except ImportError as missing:
        raise Refused(
            "A MariaDB needs the package PyMySQL, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[mysql]".',
        ) from missing  # fmt: skip

    engine = create_engine(
        _address(url),
        isolation_level="READ COMMITTED",
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=patience,
        connect_args={
            "connect_timeout": 5, "read_timeout": answer or ANSWER, "write_timeout": ANSWER,
            "conv": {**conversions, FIELD_TYPE.NEWDECIMAL: _number, FIELD_TYPE.DECIMAL: _number},
        },
    )  # fmt: skip

    @event.listens_for(engine, "connect")
    def _connected(driver: Any, _: Any) -> None:
        with driver.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            _check(cursor.fetchone()[0])
            for statement in _SESSION:
                cursor.execute(statement)
            if read_only:
                cursor.execute("SET SESSION TRANSACTION READ ONLY")
        driver.commit()

    return engine


def migrating(url: str) -> Engine:
    """An engine whose DDL is as MariaDB takes it, however long that is. Nobody waits behind one that itself waits for a
    long transaction: it gives up."""
    engine = engine_for(url, answer=LONG)

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        connection.exec_driver_sql("SET SESSION lock_wait_timeout = 1").close()

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def _said(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        return ddl.said(statement), parameters

    return engine


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _check(version: str) -> None:
    name = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    numbers = tuple(int(part) for part in version.removeprefix("5.5.5-").split("-")[0].split(".")[:2])
    if name == "MySQL" or numbers < OLDEST:
        raise Refused(
            f"The server is {name} {version}, which lacks statements that Timebell needs.", code="DATABASE_UNSUPPORTED",
            fix="Use MariaDB 10.6 or newer, PostgreSQL or SQLite.",
        )  # fmt: skip


def listening(url: str) -> list[tuple[str, int]]:
    """(host, port) of the server that the URL names."""
    address = _address(url)
    return [] if "unix_socket" in address.query else [(address.host or "localhost", address.port or 3306)]


def _address(url: str) -> URL:
    return make_url(url).set(drivername="mysql+pymysql")


def _code(failed: BaseException) -> int | None:
    """The number of MariaDB's, or of the driver's, for an error."""
    cause: Any = getattr(failed, "orig", None) or failed
    code = cause.args[0] if getattr(cause, "args", None) else None
    return code if isinstance(code, int) else None


def busy(failed: BaseException) -> bool:
    """Whether somebody had a lock for too long."""
    return _code(failed) == 1205


def _lost(failed: BaseException) -> bool:
    """Whether the server went away, as opposed to having refused a statement."""
    cause = getattr(failed, "orig", None) or failed
    return (
        isinstance(cause, OSError) or bool(getattr(failed, "connection_invalidated", False)) or _code(failed) in _LOST
    )


def translated(url: str, failed: Exception) -> Exception:
    """A driver's error in our words; programming errors stay what they are."""
    if _lost(failed):
        return unreachable(url, failed)
    if _code(failed) in _ABSENT:
        from timebell.store.open import outdated

        return outdated(url, None)
    return failed


def unreachable(url: str, failed: BaseException) -> StoreUnreachable:
    """The error for a database that does not answer; no password in it."""
    shown = make_url(url).render_as_string(hide_password=True)
    cause = str(getattr(failed, "orig", None) or failed) or type(failed).__name__
    return StoreUnreachable(
        f"The database {shown} does not answer: {cause}.", fix="Check that it runs, and TIMEBELL_DATABASE_URL."
    )
