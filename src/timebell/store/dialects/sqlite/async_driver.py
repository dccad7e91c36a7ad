"""SQLite's driver under an engine that may await: an AsyncConnection without a driver that is async."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

R = TypeVar("R")


class Shared:
    """A connection of the driver's, for an engine that may await: what takes time is run by `call`."""

    def __init__(self, connection: Any, call: Callable[..., Awaitable[Any]] | None = None, *, keep: bool = False):
        self._connection = connection
        self._call = call
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def run(self, call: Callable[..., R], *args: Any) -> R:
        """Here, or where `call` does it."""
        return call(*args) if self._call is None else await_only(self._call(call, *args))

    def whole(self, call: Callable[[Any], R]) -> R:
        """`call` with the driver's own connection, in one visit to where `run` would go for each statement."""

        def there() -> R:
            visited, self._call = self._call, None
            try:
                return call(getattr(self._connection, "driver_connection", self._connection))
            finally:
                self._call = visited

        return self.run(there)

    def cursor(self) -> Any:
        """As in DB-API."""
        return SharedCursor(self, self._connection.cursor())

    def commit(self) -> None:
        """As in DB-API."""
        self.run(self._connection.commit)

    def rollback(self) -> None:
        """As in DB-API."""
        self.run(self._connection.rollback)

    def close(self) -> None:
        """As in DB-API, unless someone else goes on using it."""
        if not self._keep:
            self._connection.close()


class SharedCursor:
    """A cursor of a Shared."""

    def __init__(self, shared: Shared, cursor: Any) -> None:
        self._shared = shared
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, *args: Any) -> None:
        """As in DB-API."""
        self._shared.run(self._cursor.execute, *args)

    def executemany(self, *args: Any) -> None:
        """As in DB-API."""
        self._shared.run(self._cursor.executemany, *args)

    async def _async_soft_close(self) -> None:
        """As SQLAlchemy wants it of those who await: nothing, as rows are had without."""


def shared_engine(connect: Callable[[], Shared], *, is_async: bool) -> Engine:
    """An engine on what `connect` gives; an async one is for AsyncEngine."""
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    engine.dialect.is_async = is_async

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
