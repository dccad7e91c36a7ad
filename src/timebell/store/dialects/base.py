"""The store: runs operations in transactions. A dialect overrides only what truly differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection

from timebell.store.transaction import Dialect, SqlTransaction, Steps, Transaction

P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[Concatenate[Transaction, P], R]


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
        """Run an operation inside the caller's own SQLAlchemy transaction (sync or async)."""

    async def reading(self) -> datetime:
        """The database's clock, now."""

    async def lock_engine(self) -> None:
        """Become an engine of this store. Raises StoreInUse where only one may be."""

    async def unlock_engine(self) -> None:
        """Be one no longer."""

    async def listen(self, poke: Callable[[], None]) -> bool:
        """Call `poke` whenever another process says that something earlier is due; False if it cannot."""


def join(
    connection: Connection,
    dialect: Dialect,
    operation: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[R, bool]:
    """Run an operation on a SQLAlchemy connection; its answer, and whether it wants other nodes told."""
    name = getattr(operation, "__name__", "operation")
    tx = SqlTransaction(connection, dialect, Steps(name))
    return operation(tx, *args, **kwargs), tx.wants_notify


async def join_callers(
    connection: Any, dialect: Dialect, operation: Callable[..., R], args: tuple[Any, ...], kwargs: Any
) -> tuple[R, bool]:
    """`join` for whatever a caller holds: Connection, Session, AsyncConnection or AsyncSession."""
    if hasattr(connection, "run_sync"):
        return await connection.run_sync(  # type: ignore[no-any-return]
            lambda inner: join(_connection(inner), dialect, operation, args, kwargs)
        )
    return join(_connection(connection), dialect, operation, args, kwargs)


def _connection(given: Any) -> Connection:
    """The Connection behind a Session, or itself."""
    return given if isinstance(given, Connection) else given.connection()
