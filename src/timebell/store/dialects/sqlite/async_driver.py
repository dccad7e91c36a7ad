"""Adapt SQLite's blocking driver to SQLAlchemy's async engine, without an async driver.

The adapters implement the parts of DB-API that SQLAlchemy uses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

R = TypeVar("R")


class AdaptedConnection:
    """A driver connection for an async engine: blocking calls are run by `run_elsewhere`, for example in a thread.

    Without `run_elsewhere` they run in the calling thread. With `keep_open` closing has no effect.
    """

    def __init__(
        self, connection: Any, run_elsewhere: Callable[..., Awaitable[Any]] | None = None, *, keep_open: bool = False
    ):
        self._connection = connection
        self._run_elsewhere = run_elsewhere
        self._keep_open = keep_open

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def run(self, function: Callable[..., R], *args: Any) -> R:
        """Run a blocking function by `run_elsewhere`, if there is one."""
        return function(*args) if self._run_elsewhere is None else await_only(self._run_elsewhere(function, *args))

    def run_with_driver(self, function: Callable[[Any], R]) -> R:
        """Run a function with the driver connection, in one call of `run_elsewhere` instead of one per statement."""

        def call() -> R:
            run_elsewhere, self._run_elsewhere = self._run_elsewhere, None
            try:
                return function(getattr(self._connection, "driver_connection", self._connection))
            finally:
                self._run_elsewhere = run_elsewhere

        return self.run(call)

    def cursor(self) -> Any:
        return AdaptedCursor(self, self._connection.cursor())

    def commit(self) -> None:
        self.run(self._connection.commit)

    def rollback(self) -> None:
        self.run(self._connection.rollback)

    def close(self) -> None:
        """Close the connection unless it is shared (`keep_open`)."""
        if not self._keep_open:
            self._connection.close()


class AdaptedCursor:
    """A cursor of an AdaptedConnection."""

    def __init__(self, connection: AdaptedConnection, cursor: Any) -> None:
        self._connection = connection
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, *args: Any) -> None:
        self._connection.run(self._cursor.execute, *args)

    def executemany(self, *args: Any) -> None:
        self._connection.run(self._cursor.executemany, *args)

    async def _async_soft_close(self) -> None:
        """Do nothing. SQLAlchemy requires the method for async drivers; rows are fetched synchronously."""


def adapted_engine(connect: Callable[[], AdaptedConnection], *, is_async: bool) -> Engine:
    """Create an engine on the connections returned by `connect`. With `is_async` it is for AsyncEngine."""
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    engine.dialect.is_async = is_async

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
