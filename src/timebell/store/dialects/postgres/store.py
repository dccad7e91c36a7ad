"""The PostgreSQL store: several nodes, SKIP LOCKED, LISTEN/NOTIFY as a hint.

Every connection is in autocommit mode, and a transaction is opened only if an operation needs one: for the hot
single-statement operations the round trips of BEGIN and COMMIT would cost more than the statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import asyncpg
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import await_only, greenlet_spawn

from timebell.errors import StoreError, StoreUnreachable
from timebell.store.dialects.base import Finish, Operation, P, R, join_caller_connection
from timebell.store.dialects.handler_transactions import handler_transaction, handler_transaction_in_thread
from timebell.store.dialects.liveness import LivenessMonitor
from timebell.store.dialects.postgres import pooler
from timebell.store.dialects.postgres.connections import (
    HOT_SETTINGS,
    create_thread_engine,
    driver_of,
    engine_for,
)
from timebell.store.dialects.postgres.dialect import PostgresDialect
from timebell.store.dialects.postgres.errors import (
    CONNECTION_ERRORS,
    TRANSIENT_STATES,
    LostBeforeCommit,
    classify,
    is_stale_statement,
    unreachable,
)
from timebell.store.dialects.postgres.explicit_transactions import ExplicitTransaction
from timebell.store.dialects.postgres.own_schema import in_schema
from timebell.store.dialects.postgres.pool import ConnectionPool
from timebell.store.dialects.postgres.server import PostgresServer
from timebell.store.dialects.postgres.transaction import PostgresTransaction
from timebell.store.recent_writes import RecentWrites, Written
from timebell.store.sql import SQL
from timebell.store.subscribers import Subscribers
from timebell.store.transaction import NO_SUBJECTS, READ_ONLY_OPERATIONS, Steps, Transaction
from timebell.store.version import schema_outdated

# Sizes of separate pools, each of which may grow to twice its size, so that handlers and requests cannot use up the
# connections of the engine.
HANDLER_POOL_SIZE = 5  # for transactions of handlers
HANDLER_POOL_TIMEOUT_SECONDS = 3600.0  # wait for a connection; the timeout of the attempt is usually shorter
REQUEST_POOL_SIZE = 5  # for transactions of requests
REQUEST_POOL_TIMEOUT_SECONDS = 5.0  # until a request fails because no connection becomes free
HOT_POOL_SIZE = 4  # for hot operations
NOTIFY_INTERVAL_SECONDS = 0.05  # NOTIFY serializes all commits by a global lock, so never one per job


class PostgresStore:
    """A PostgreSQL database (13 or newer)."""

    multi_node = True

    def __init__(
        self, url: str, *, server_clock: bool = True, pool_size: int = 6, read_only: bool = False,
        subscribers: Subscribers | None = None,
    ) -> None:  # fmt: skip
        self.url = url
        self.subscribers = subscribers or Subscribers()
        self._server = PostgresServer(url, self._note_server_change, read_only=read_only)
        self.dialect = PostgresDialect(server_clock=server_clock)
        self._channel = self._server.channel_name("timebell")
        self.recent_writes = RecentWrites(time.monotonic)
        self._liveness: LivenessMonitor[Any] = LivenessMonitor(self._probe, self._server.drop_connections)
        self._pool = ConnectionPool(engine_for(self._server, pool_size=pool_size, read_only=read_only))
        self._hot_pool = ConnectionPool(
            engine_for(self._server, pool_size=HOT_POOL_SIZE, read_only=read_only, settings=HOT_SETTINGS)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        # Separate pools, so that slow handlers cannot use up the connections of the engine.
        self._handler_pool: ConnectionPool | None = None
        self._request_pool: ConnectionPool | None = None
        self._thread_engine: Engine | None = None
        self._thread_engine_lock = threading.Lock()
        self._listener: asyncpg.Connection[Any] | None = None
        self._notify_task: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._unsent_subjects = NO_SUBJECTS

    async def open(self) -> None:
        await self.read_clock()

    async def close(self) -> None:
        if self._notify_task is not None:
            await asyncio.wait([self._notify_task])
        self._liveness.reset()
        await self._send_notifications()  # if the task was cancelled, for example by the end of `app.sync`
        if self._listener is not None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                await self._listener.close(timeout=1)
            self._listener = None
        self._dispose(self._pool, self._hot_pool, *filter(None, (self._handler_pool, self._request_pool)))
        if self._closing_tasks:
            await asyncio.wait(self._closing_tasks)
        if self._thread_engine is not None:
            self._thread_engine.dispose()
        self._loop = self._handler_pool = self._request_pool = self._thread_engine = None

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        runner = self._read if operation in READ_ONLY_OPERATIONS else self._transact
        result: R = await self._run_on_pool(self._pool, runner, operation, args, kwargs)
        return result

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await self._run_on_pool(self._hot_pool, self._autocommit, operation, args, kwargs)
        return result

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation in the transaction of a connection of the caller, or in one opened by `begin`.

        In a transaction of the caller NOTIFY is part of it, so other nodes are notified only if it commits. After a
        transaction of `begin` it is sent separately.
        """
        if isinstance(connection, ExplicitTransaction):
            self._liveness.watch(asyncio.get_running_loop())
            with self._liveness.waiting(connection.driver):
                return await connection.join(operation, args, kwargs)  # type: ignore[no-any-return]
        located: Callable[..., R] = in_schema(self._server.schema, operation)
        result, subjects = await join_caller_connection(connection, self.dialect, located, args, kwargs)
        if subjects:
            await join_caller_connection(connection, self.dialect, self.notify, (subjects,), {})
        return result

    @contextlib.asynccontextmanager
    async def handler_transaction(self, finish: Finish) -> AsyncIterator[AsyncConnection]:
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._bind_to_loop(loop)
        if self._handler_pool is None:
            engine = engine_for(
                self._server, pool_size=HANDLER_POOL_SIZE, pool_timeout=HANDLER_POOL_TIMEOUT_SECONDS,
                own_search_path=False,
            )  # fmt: skip
            self._handler_pool = ConnectionPool(engine.execution_options(isolation_level="READ COMMITTED"))
        try:
            alive = await greenlet_spawn(self._handler_pool.check_out)
        except (*CONNECTION_ERRORS, DBAPIError) as error:
            raise unreachable(self.url, error) from error
        connection = AsyncConnection(self._handler_pool.engine, alive)
        try:
            async with handler_transaction(connection, self.join, finish, self._publish_here):
                yield connection
        finally:
            await connection.close()

    @contextlib.contextmanager
    def handler_transaction_in_thread(self, finish: Finish) -> Iterator[Connection]:
        with self._thread_engine_lock:
            if self._thread_engine is None:
                self._thread_engine = create_thread_engine(
                    self._server, pool_size=HANDLER_POOL_SIZE, pool_timeout=HANDLER_POOL_TIMEOUT_SECONDS,
                    is_pooled=pooler.is_pooled(self.url),
                )  # fmt: skip
        try:
            connection = self._thread_engine.connect()
        except DBAPIError as error:
            raise unreachable(self.url, error) from error
        finish = in_schema(self._server.schema, finish)
        publish = self._publish_here
        with connection, handler_transaction_in_thread(connection, self.dialect, finish, publish, self.notify):
            yield connection

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._bind_to_loop(loop)
        if (pool := self._request_pool) is None:
            pool = self._request_pool = ConnectionPool(
                engine_for(self._server, pool_size=REQUEST_POOL_SIZE, pool_timeout=REQUEST_POOL_TIMEOUT_SECONDS)
            )
        try:
            connection = pool.take_idle()
            if connection is None:
                connection = await greenlet_spawn(pool.check_out)
            try:
                self._liveness.watch(loop)
                async with ExplicitTransaction(connection, self.dialect, self._publish) as transaction:
                    yield transaction
            finally:
                if not pool.put_back(connection):
                    await greenlet_spawn(connection.close)
        except PoolTimeout as error:
            raise unreachable(self.url, error) from error
        except (*CONNECTION_ERRORS, DBAPIError, asyncpg.PostgresError) as error:
            kind = classify(error)
            if is_stale_statement(error) or (kind is not None and kind.drops_connections):
                self._dispose(pool)
            if kind is not None:
                raise unreachable(self.url, error) from error
            raise

    def is_transient(self, error: BaseException) -> bool:
        cause = error.__cause__ if isinstance(error, StoreUnreachable) else error
        return (
            is_stale_statement(error)
            or getattr(getattr(cause, "orig", None) or cause, "sqlstate", None) in TRANSIENT_STATES
        )

    async def read_clock(self) -> datetime:
        now: datetime = await self.run_autocommit(_read_clock)
        return now

    async def lock_engine(self) -> None:
        """Do nothing: any number of engines may run."""

    async def unlock_engine(self) -> None:
        """Do nothing; see `lock_engine`."""

    async def listen(self) -> bool:
        """Subscribe to notifications, or reconnect; return False behind a pooler or if the connection fails.

        Behind a pooler, only check whether the server was replaced: the connections to the pooler would not show it.
        """
        if pooler.is_pooled(self.url):
            with contextlib.suppress(*CONNECTION_ERRORS, asyncpg.PostgresError):
                (await self._server.connect(statement_cache_size=0)).terminate()
            return False
        if self._listener is None or self._listener.is_closed():
            try:
                listener = await self._server.connect(command_timeout=10)
                try:
                    await listener.add_listener(self._channel, self._on_notification)
                except BaseException:  # otherwise it would be taken for a subscribed connection
                    listener.terminate()
                    raise
            except (*CONNECTION_ERRORS, asyncpg.PostgresError):
                return False
            self._listener = listener
        return True

    def _on_notification(self, *notification: Any) -> None:
        self.subscribers.publish(frozenset(str(notification[-1]).split(",")))

    def _transact(self, connection: Connection, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any) -> R:
        tx = PostgresTransaction(connection, self.dialect, Steps(operation.__name__))
        driver = tx.driver
        transaction = driver.transaction()
        try:
            await_only(transaction.start())
            result = operation(tx, *args, **kwargs)
            tx.steps.at("commit")
        except BaseException as error:
            if driver.is_closed() and isinstance(error, Exception):
                raise LostBeforeCommit(error) from error
            if not driver.is_closed():  # SQLAlchemy's own state is not reliable after a cancelled statement
                with contextlib.suppress(*CONNECTION_ERRORS, asyncpg.PostgresError):
                    await_only(transaction.rollback())
            raise
        await_only(transaction.commit())
        tx.steps.at("done")
        self._publish(tx.subjects, tx.written)
        return result

    def _read(self, connection: Connection, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any) -> R:
        tx = PostgresTransaction(connection, self.dialect, Steps(operation.__name__))
        driver = tx.driver  # SQLAlchemy does not return a lost one
        try:
            return operation(tx, *args, **kwargs)
        except Exception as error:
            if driver.is_closed():  # there is nothing to commit, so it can be repeated
                raise LostBeforeCommit(error) from error
            raise

    def _autocommit(self, connection: Connection, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any) -> R:
        tx = PostgresTransaction(connection, self.dialect, Steps(operation.__name__))
        result = operation(tx, *args, **kwargs)
        tx.steps.at("done")
        self._publish(tx.subjects, tx.written)
        return result

    async def _run_on_pool(
        self,
        pool: ConnectionPool,
        runner: Callable[..., Any],
        operation: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an operation by `runner` on a pooled connection; repeat it up to twice.

        Repeated are transient conflicts, and operations whose connection was lost before anything could be committed.
        Raises StoreUnreachable if the connection is lost.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._bind_to_loop(loop)
        for is_last in (False, False, True):
            try:
                return await greenlet_spawn(self._run_checked_out, pool, loop, runner, operation, args, kwargs)
            except PoolTimeout as error:
                raise unreachable(self.url, error) from error
            except LostBeforeCommit as lost:
                self._dispose(self._pool, self._hot_pool)
                if is_last:
                    raise unreachable(self.url, lost.error) from lost.error
            except (*CONNECTION_ERRORS, DBAPIError, asyncpg.PostgresError) as error:
                cause = getattr(error, "orig", None) or error
                state = getattr(cause, "sqlstate", None)
                if state in TRANSIENT_STATES and not is_last:
                    continue
                if is_stale_statement(error) and not is_last:
                    self._dispose(self._pool, self._hot_pool)
                    continue
                if (kind := classify(error)) is not None:
                    if kind.drops_connections:
                        self._dispose(self._pool, self._hot_pool)
                    raise unreachable(self.url, error) from error
                if state in ("42P01", "42703"):
                    raise schema_outdated(self.url, None) from error
                raise
        raise AssertionError

    def _publish(self, subjects: frozenset[str], written: Sequence[tuple[str, Written]] = ()) -> None:
        """Publish the subjects of a committed transaction, notify other nodes, and remember what it wrote."""
        self._publish_here(subjects, written)
        if not subjects:
            return
        self._unsent_subjects |= subjects
        if self._notify_task is None or self._notify_task.done():
            self._notify_task = asyncio.get_running_loop().create_task(self._send_notifications())

    def _publish_here(self, subjects: frozenset[str], written: Sequence[tuple[str, Written]]) -> None:
        """Publish like `_publish`, for a transaction that has notified other nodes itself. Thread-safe."""
        self.recent_writes.add(written)
        self.subscribers.publish(subjects)

    def _bind_to_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the connections of a previous event loop, to which they are bound.

        Raises StoreError if that loop is still running.
        """
        if self._loop is not None and self._loop.is_running():
            raise StoreError(
                "This app is in use on another event loop, to which its connections are bound.",
                code="OTHER_EVENT_LOOP", fix="From other threads use app.sync, or create another Timebell.",
            )  # fmt: skip
        self._liveness.reset()
        if self._loop is not None:  # its loop has ended, so the connections cannot be closed gracefully
            for pool in (self._pool, self._hot_pool, self._handler_pool, self._request_pool):
                if pool is not None:
                    pool.abandon()
            self._handler_pool = self._request_pool = self._listener = self._notify_task = None
        self._loop = loop

    def _dispose(self, *pools: ConnectionPool) -> None:
        """Replace pools immediately, and close their idle connections in the background."""
        for pool in pools:
            closing = asyncio.get_running_loop().create_task(pool.replace())
            self._closing_tasks.add(closing)
            closing.add_done_callback(self._closing_tasks.discard)

    def _run_checked_out(
        self, pool: ConnectionPool, loop: asyncio.AbstractEventLoop, runner: Callable[..., R], *args: Any
    ) -> R:
        """Run an operation on a connection of a pool.

        The checkout runs in the greenlet of the operation: an AsyncConnection would need three greenlets.
        """
        connection = pool.check_out()
        try:
            self._liveness.watch(loop)
            with self._liveness.waiting(driver_of(connection)):
                return runner(connection, *args)
        except (*CONNECTION_ERRORS, LostBeforeCommit, asyncpg.PostgresError, asyncio.CancelledError):
            # Its state is unknown, so it must not return to the pool.
            with contextlib.suppress(Exception):
                connection.invalidate()
            raise
        finally:
            if not pool.put_back(connection):
                connection.close()

    async def _send_notifications(self) -> None:
        """Send one NOTIFY for all recent changes. If it fails, other nodes find them at their next heartbeat."""
        while subjects := self._unsent_subjects:
            self._unsent_subjects = NO_SUBJECTS
            try:
                await self.run_autocommit(self.notify, subjects)
            except asyncio.CancelledError:
                self._unsent_subjects |= subjects
                raise
            except StoreUnreachable:
                pass
            await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)

    def notify(self, tx: Transaction, subjects: frozenset[str]) -> None:
        """Notify the nodes of this database: an operation."""
        tx.run_sql(NOTIFY, channel=self._channel, subjects=",".join(sorted(subjects)))

    def _note_server_change(self) -> None:
        self.recent_writes.is_unverified = True

    async def _probe(self, unanswered: Callable[[], Collection[asyncpg.Connection[Any]]]) -> str | None:
        if pooler.is_pooled(self.url):  # its process ids are not those of the server
            return await self._server.probe(tuple, statement_cache_size=0)
        return await self._server.probe(unanswered)


NOTIFY = SQL("SELECT pg_notify(:channel, CAST(:subjects AS text))")
READ_CLOCK = SQL("SELECT clock_timestamp() AS at")


def _read_clock(tx: Transaction) -> Any:
    return tx.run_sql(READ_CLOCK)[0]["at"]
