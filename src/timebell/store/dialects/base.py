"""The store: runs operations in transactions. A dialect overrides only what truly differs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.errors import InvalidInput
from timebell.store.dialects import caller_connections
from timebell.store.transaction import Dialect, SqlTransaction, Steps, Transaction

LAST_SUCCESS = (
    "SELECT max(f.finished_at) FROM (SELECT state, finished_at FROM timebell_finished"
    " WHERE schedule_id = s.id ORDER BY scheduled_at DESC LIMIT 20) AS f WHERE f.state = 'completed'"
)
"""Of the schedule `s`, if it is one of its last occurrences."""
P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[Concatenate[Transaction, P], R]
Finish = Callable[[Transaction], None]


class Store(Protocol):
    """A database, as the rest of Timebell sees it: `await store.run(operation, ...)`."""

    url: str
    many_nodes: bool
    """Whether several engines may share it."""

    @property
    def dialect(self) -> Dialect:
        """Its words and ways."""

    async def open(self) -> None:
        """Connect and check that the tables are those of this version.

        Raises StoreUnreachable or SchemaOutdated.
        """

    async def close(self) -> None:
        """Let go of every connection."""

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation in a transaction of its own. Raises StoreUnreachable."""

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, on the fast path: only for operations of a single statement, or that need no atomicity."""

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation inside a transaction of the caller's: on a connection that `join_callers` takes."""

    def lend(self, finish: Finish) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection in a transaction of its own. When the block ends well `finish` is run in it, and it is
        committed; any error rolls it back."""

    def lend_to_thread(self, finish: Finish) -> AbstractContextManager[Connection]:
        """As `lend`, for the thread that calls."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """A transaction of several operations, for `join`: commits when the block ends, unless it raises."""

    def passes(self, failed: BaseException) -> bool:
        """Whether it is a conflict that passes by itself: what failed may be done again from its start."""

    async def reading(self) -> datetime:
        """The database's clock, now."""

    async def lock_engine(self) -> None:
        """Become an engine of this store. Raises StoreInUse where only one may be."""

    async def unlock_engine(self) -> None:
        """Be one no longer."""

    async def listen(self, poke: Callable[[str], None]) -> bool:
        """Call `poke` with JOBS or SCHEDULES whenever another process says that something earlier is due; False if it
        cannot."""


def join(
    connection: Connection,
    dialect: Dialect,
    operation: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[R, str]:
    """Run an operation on a SQLAlchemy connection; its answer, and what it wants other nodes told of, if anything."""
    name = getattr(operation, "__name__", "operation")
    tx = SqlTransaction(connection, dialect, Steps(name))
    return operation(tx, *args, **kwargs), tx.wants_notify


callers_thread: ContextVar[Callable[[Callable[[], Any]], Awaitable[Any]] | None] = ContextVar("thread", default=None)
"""Set where a verb is awaited for a thread that blocks: how that thread is made to call something meanwhile."""


async def join_callers(
    connection: Any, dialect: Dialect, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any
) -> tuple[R, str]:
    """`join` for whatever a caller holds: Connection, Session, AsyncConnection or AsyncSession, or a connection of
    psycopg, asyncpg, PyMySQL or sqlite3 itself, or Django's.

    A synchronous one is used by the thread that brought it. Raises InvalidInput (CONNECTION_INVALID,
    TRANSACTION_MISSING).
    """
    driver = caller_connections.driver_of(connection)
    django, there = caller_connections.is_django(connection), callers_thread.get()
    is_async = not django and (hasattr(connection, "run_sync") or driver in caller_connections.ASYNC)
    named = type(connection).__name__
    if not (driver or django or is_async or isinstance(connection, Connection) or _is_session(connection)):
        raise InvalidInput(
            f"connection is a {named}.", code="CONNECTION_INVALID",
            fix="Give a Connection or Session of SQLAlchemy, sync or async, or one of psycopg, asyncpg, PyMySQL,"
            " sqlite3 or Django.",
        )  # fmt: skip
    if is_async and there is not None:
        raise InvalidInput(
            f"connection is a {named}, which belongs to an event loop, and app.sync blocks.",
            code="CONNECTION_INVALID", fix="Give a Connection or Session, or await app.schedule_at(...).",
        )  # fmt: skip

    def on(connection: Connection) -> tuple[R, str]:
        kind = dialect.name.partition(" ")[0]
        found = "mysql" if connection.dialect.name == "mariadb" else connection.dialect.name
        if found != kind:
            raise InvalidInput(
                f"connection is one to {found}, and the app's database is {kind}.",
                code="CONNECTION_INVALID", fix="Give one to the database of the app.",
            )  # fmt: skip
        return join(connection, dialect, operation, args, kwargs)

    def joined() -> tuple[R, str]:
        own = caller_connections.of_django(connection) if django else connection
        its = caller_connections.driver_of(own)
        if its is None:
            return on(own if isinstance(own, Connection) else own.connection())
        caller_connections.check_transaction(its, own)
        return caller_connections.lent(its, own, on)

    if driver in caller_connections.ASYNC:
        return await caller_connections.awaited(joined)
    if is_async:
        return await connection.run_sync(  # type: ignore[no-any-return]
            lambda inner: on(inner if isinstance(inner, Connection) else inner.connection())
        )
    return joined() if there is None else await there(joined)


def _is_session(given: Any) -> bool:
    return callable(getattr(given, "connection", None))
