"""The store interface, which runs operations in transactions, and the handling of callers' connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection

from timebell.errors import InvalidInput
from timebell.store.dialects import caller_connections
from timebell.store.recent_writes import RecentWrites, Written
from timebell.store.subscribers import Subscribers
from timebell.store.transaction import NO_SUBJECTS, Dialect, SqlTransaction, Steps, Transaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[Concatenate[Transaction, P], R]
Finish = Callable[[Transaction], None]
Publish = Callable[[frozenset[str], Sequence[tuple[str, Written]]], None]
"""Called after a commit, with the subjects that it notified, and the rows that it wrote."""


class Store(Protocol):
    """A database with Timebell's tables. Usage: `await store.run(operation, ...)`."""

    url: str
    multi_node: bool
    """True if several engines may share the database."""
    subscribers: Subscribers
    """Called after each commit that notified something, by this process or, while `listen` succeeds, by another."""
    recent_writes: RecentWrites
    """The recent commits of this process, to notice their loss."""

    @property
    def dialect(self) -> Dialect:
        """The database-specific parts of operations."""

    async def open(self) -> None:
        """Connect and check the tables.

        Raises StoreUnreachable or SchemaOutdated.
        """

    async def close(self) -> None:
        """Close all connections."""

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation in a transaction of its own. Raises StoreUnreachable.

        The operation may run several times, after transient conflicts.
        """

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation without a transaction: faster. For single statements, or if atomicity is not needed."""

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation in the transaction of a connection of the caller; see `join_caller_connection`."""

    def handler_transaction(self, finish: Finish) -> AbstractAsyncContextManager[AsyncConnection]:
        """Open a transaction for a handler. If the block succeeds, run `finish` in it and commit; else roll back."""

    def handler_transaction_in_thread(self, finish: Finish) -> AbstractContextManager[Connection]:
        """Open a transaction like `handler_transaction`, for use in the calling thread."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction for several operations, run by `join`. Commit it at the end, or roll back on an error."""

    def is_transient(self, error: BaseException) -> bool:
        """Return whether an error is a transient conflict, after which the whole transaction may be repeated."""

    async def read_clock(self) -> datetime:
        """Return the current time of the database clock."""

    async def lock_engine(self) -> None:
        """Register as an engine of this store. Raises StoreInUse if another engine runs and only one is allowed."""

    async def unlock_engine(self) -> None:
        """Release the registration of `lock_engine`."""

    async def listen(self) -> bool:
        """Publish the notifications of other processes to `subscribers`; return False if unsupported.

        Call it again periodically: it reconnects if the connection was lost.
        """


PENDING_CHANGES = "timebell_pending_changes"
"""The key in the `info` of a connection under which a transaction opened by a store collects its changes."""


@dataclass(slots=True)
class PendingChanges:
    """Changes to publish after the commit of a transaction: subjects to notify, and rows to remember."""

    subjects: frozenset[str] = NO_SUBJECTS
    written: list[tuple[str, Written]] = field(default_factory=list)


def join(
    connection: Connection,
    dialect: Dialect,
    operation: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[R, frozenset[str]]:
    """Run an operation on a SQLAlchemy connection; return its result, and the subjects that it notified.

    If a store opened the transaction, it publishes its changes after its commit. It cannot observe the commit of a
    transaction of the caller: on PostgreSQL NOTIFY, which is part of it, also reaches this process; elsewhere nodes
    poll.
    """
    name = getattr(operation, "__name__", "operation")
    tx = SqlTransaction(connection, dialect, Steps(name))
    result = operation(tx, *args, **kwargs)
    if (pending := connection.info.get(PENDING_CHANGES)) is not None:
        pending.subjects |= tx.subjects
        pending.written += tx.written
    return result, tx.subjects


caller_thread: ContextVar[Callable[[Callable[[], Any]], Awaitable[Any]] | None] = ContextVar("thread", default=None)
"""Set while a coroutine runs on behalf of a blocking thread: runs a function in that thread."""


async def join_caller_connection(
    connection: Any, dialect: Dialect, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any
) -> tuple[R, frozenset[str]]:
    """Run an operation like `join`, on any supported connection of a caller.

    Supported are Connection, Session, AsyncConnection and AsyncSession of SQLAlchemy, connections of psycopg, asyncpg,
    PyMySQL and sqlite3, and Django's. A synchronous connection is used in the thread of the caller. Raises InvalidInput
    (INVALID_CONNECTION, TRANSACTION_MISSING).
    """
    driver = caller_connections.driver_of(connection)
    django, run_in_caller_thread = caller_connections.is_django(connection), caller_thread.get()
    is_async = not django and (hasattr(connection, "run_sync") or driver in caller_connections.ASYNC_DRIVERS)
    type_name = type(connection).__name__
    if not (driver or django or is_async or isinstance(connection, Connection) or _is_session(connection)):
        raise InvalidInput(
            f"connection is a {type_name}, which is not supported.", code="INVALID_CONNECTION",
            fix="Pass a Connection or Session of SQLAlchemy, sync or async, or a connection of psycopg, asyncpg,"
            " PyMySQL, sqlite3 or Django.",
        )  # fmt: skip
    if is_async and run_in_caller_thread is not None:
        raise InvalidInput(
            f"connection is a {type_name}, which belongs to an event loop, but app.sync blocks.",
            code="INVALID_CONNECTION", fix="Pass a Connection or Session, or await app.schedule_at(...).",
        )  # fmt: skip

    def run_on(connection: Connection) -> tuple[R, frozenset[str]]:
        kind = dialect.name
        backend = "mysql" if connection.dialect.name == "mariadb" else connection.dialect.name
        if backend != kind:
            raise InvalidInput(
                f"connection is to {backend}, but the database of the app is {kind}.",
                code="INVALID_CONNECTION", fix="Pass a connection to the database of the app.",
            )  # fmt: skip
        return join(connection, dialect, operation, args, kwargs)

    def run_joined() -> tuple[R, frozenset[str]]:
        driver_connection = caller_connections.django_driver_connection(connection) if django else connection
        own_driver = caller_connections.driver_of(driver_connection)
        if own_driver is None:
            return run_on(
                driver_connection if isinstance(driver_connection, Connection) else driver_connection.connection()
            )
        caller_connections.check_transaction(own_driver, driver_connection)
        return caller_connections.run_with_sqlalchemy(own_driver, driver_connection, run_on)

    if driver in caller_connections.ASYNC_DRIVERS:
        return await caller_connections.run_in_greenlet(run_joined)
    if is_async:
        return await connection.run_sync(  # type: ignore[no-any-return]
            lambda inner: run_on(inner if isinstance(inner, Connection) else inner.connection())
        )
    return run_joined() if run_in_caller_thread is None else await run_in_caller_thread(run_joined)


def _is_session(candidate: Any) -> bool:
    return callable(getattr(candidate, "connection", None))
