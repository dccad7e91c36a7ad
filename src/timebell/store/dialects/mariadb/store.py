"""The MariaDB store: several nodes, SKIP LOCKED, no notifications, so nodes poll.

The driver blocks, so each operation runs as a whole in a thread of a small pool, with a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.errors import StoreUnreachable
from timebell.store.dialects.base import Finish, Operation, P, R, join_caller_connection
from timebell.store.dialects.handler_transactions import handler_transaction, handler_transaction_in_thread, no_finish
from timebell.store.dialects.liveness import PROBE_TIMEOUT_SECONDS, LivenessMonitor
from timebell.store.dialects.mariadb.async_driver import AsyncPool
from timebell.store.dialects.mariadb.connections import engine_for, observe_statements
from timebell.store.dialects.mariadb.dialect import MariaDialect
from timebell.store.dialects.mariadb.errors import (
    CLOSED_BY_SERVER_ERRORS,
    TOO_MANY_CONNECTIONS_ERRORS,
    TRANSIENT_ERRORS,
    LostBeforeCommit,
    classify,
    error_number,
    is_connection_lost,
    translate_error,
    unreachable,
)
from timebell.store.dialects.mariadb.server import IS_SYNCED, MariaServer
from timebell.store.dialects.mariadb.transaction import MariaTransaction, with_rewriting
from timebell.store.recent_writes import RecentWrites, Written
from timebell.store.sql import SQL
from timebell.store.subscribers import Subscribers
from timebell.store.transaction import Steps
from timebell.store.types import from_micros

HANDLER_POOL_SIZE = 10  # connections in each of three pools: for async handlers, for plain functions, for requests
HANDLER_POOL_TIMEOUT_SECONDS = 3600.0  # until a handler fails because no connection becomes free
REQUEST_POOL_TIMEOUT_SECONDS = 5.0  # the same for a request
MAX_CONFLICT_ATTEMPTS = 8  # of an operation that conflicts with another transaction
CONFLICT_RETRY_DELAY_SECONDS = 0.002  # before the second attempt, doubled before each further one
RETURN_INTERVAL_SECONDS = 5.0  # between attempts to use the first host of a Galera cluster again


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
        self._liveness: LivenessMonitor[Any] = LivenessMonitor(self._probe, self._server.drop_connections)
        self._engine = engine_for(self._server, pool_size=pool_size, read_only=read_only)
        observe_statements(self._engine, self._liveness)
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
        self._liveness.reset()
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
            self._liveness.reset()
            self._loop = loop
        self._liveness.watch(loop)
        if self._server.uses_fallback_host and time.monotonic() >= self._next_return_at:
            self._next_return_at = time.monotonic() + RETURN_INTERVAL_SECONDS
            loop.run_in_executor(self._threads, self._return_to_first_host)
        for attempt in range(MAX_CONFLICT_ATTEMPTS):
            try:
                return await loop.run_in_executor(self._threads, self._transact, operation, args, kwargs)
            except PoolTimeout as error:
                raise unreachable(self.url, error) from error
            except LostBeforeCommit as lost:
                self._engine.dispose()
                if attempt:
                    raise unreachable(self.url, lost.error) from lost.error
            except DBAPIError as error:
                if error_number(error) in TRANSIENT_ERRORS and attempt < MAX_CONFLICT_ATTEMPTS - 1:
                    await asyncio.sleep(CONFLICT_RETRY_DELAY_SECONDS * 2**attempt)
                    continue
                if is_connection_lost(error):
                    self._engine.dispose()
                raise translate_error(self.url, error) from error
        raise AssertionError

    def _return_to_first_host(self) -> None:
        """Return to the first ready member of a Galera cluster: all processes have to write to the same one."""
        first = MariaServer(self.url)
        engine = engine_for(first, pool_size=1, statement_timeout=PROBE_TIMEOUT_SECONDS)
        with contextlib.suppress(Exception):  # of the driver, or of SQLAlchemy: it will be tried again
            with engine.connect() as connection:
                is_synced = connection.exec_driver_sql(IS_SYNCED).scalar_one()
            if is_synced and self._server.return_to_host_of(first):
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
                with self._liveness.waiting(driver_connection):
                    connection.commit()
            except BaseException as error:
                if isinstance(error, DBAPIError) and is_connection_lost(error):
                    connection.invalidate()
                    if not is_committing and error_number(error) in CLOSED_BY_SERVER_ERRORS:
                        raise LostBeforeCommit(error) from error
                else:
                    with self._liveness.waiting(driver_connection):
                        connection.rollback()
                raise
            finally:
                self._liveness.end(driver_connection)  # of a statement that failed
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
        return (await join_caller_connection(connection, self.dialect, with_rewriting(operation), args, kwargs))[0]

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
            if classify(error) is not None:
                raise unreachable(self.url, error) from error
            raise

    @contextlib.asynccontextmanager
    async def _pooled_transaction(self, pool: AsyncPool, finish: Finish) -> AsyncIterator[AsyncConnection]:
        try:
            connection = await pool.connect()
        except (PoolTimeout, DBAPIError) as error:
            if is_connection_lost(error):
                pool.sync_engine.dispose()  # its other connections are probably lost, too
            raise unreachable(self.url, error) from error
        try:
            async with handler_transaction(connection, self.join, finish, self._publish):
                yield connection
        except DBAPIError as error:
            if is_connection_lost(error):
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
            handler_transaction_in_thread(connection, self.dialect, with_rewriting(finish), self._publish),
        ):
            yield connection

    def is_transient(self, error: BaseException) -> bool:
        cause = error.__cause__ if isinstance(error, StoreUnreachable) else error
        return cause is not None and error_number(cause) in TRANSIENT_ERRORS

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
                return self._server.probe(unanswered, probe.driver_connection)
        except Exception as error:  # of the driver, or of SQLAlchemy
            number = error_number(error)
            return None if number in TOO_MANY_CONNECTIONS_ERRORS else str(error)
        finally:
            engine.dispose()


READ_CLOCK = SQL("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) AS at")


def _read_clock(tx: Any) -> datetime:
    return from_micros(int(tx.run_sql(READ_CLOCK)[0]["at"]))
