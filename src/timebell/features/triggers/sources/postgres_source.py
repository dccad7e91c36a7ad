"""Read-only access to PostgreSQL sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import asyncpg
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from timebell.features.triggers.sources.base import InvalidSourceQuery
from timebell.store.dialects.postgres import connections, text_dates
from timebell.store.dialects.postgres.server import PostgresServer

SESSION_SETTINGS = {**connections.SESSION_SETTINGS, **text_dates.SESSION_SETTINGS}
PROBE_TIMEOUT_SECONDS = 2.0
SESSION_ENDED = (
    asyncpg.AdminShutdownError, asyncpg.CrashShutdownError, asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,
)  # fmt: skip
R = TypeVar("R")


class PostgresDatabase:
    """A PostgreSQL database, read through a small pool."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: AsyncEngine | None = None
        self._configured: WeakSet[Any] = WeakSet()

    async def fetch(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[dict[str, Any]]:
        """Return the rows of a query with `:name` parameters, or only the first one."""
        compiled = text(query).compile(dialect=self._open_engine().dialect)
        arguments = [parameters[name] for name in compiled.positiontup or ()]

        async def read(driver: Any) -> list[dict[str, Any]]:
            if first:
                row = await driver.fetchrow(compiled.string, *arguments)
                return [] if row is None else [dict(row)]
            return [dict(row) for row in await driver.fetch(compiled.string, *arguments)]

        return await self._read(read)

    async def list_columns(self, query: str) -> list[str]:
        """Return the columns of a query without parameters."""

        async def read(driver: Any) -> list[str]:
            return [column.name for column in (await driver.prepare(query)).get_attributes()]

        return await self._read(read)

    async def _read(self, read: Callable[[Any], Awaitable[R]]) -> R:
        """Read with a connection of the pool, and once more with a new pool if the server had ended the session.

        The driver notices this only when it has read the server's last message and the end of the stream.
        """
        try:
            async with self._connect() as driver:
                return await read(driver)
        except SESSION_ENDED:
            await self.close()
            async with self._connect() as driver:
                return await read(driver)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        """Hold a connection of the driver.

        The pool does not see errors of the driver, so connections that the server closed, or that were interrupted
        during a query, are discarded here.
        """
        async with self._open_engine().connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            if driver.is_closed():
                await connection.invalidate()
                driver = (await connection.get_raw_connection()).driver_connection
            try:
                if driver not in self._configured:
                    await text_dates.read_dates_as_text(driver)
                    self._configured.add(driver)
                yield driver
            except SESSION_ENDED:
                await connection.invalidate()
                raise
            except asyncpg.PostgresError:
                raise
            except asyncpg.UnsupportedClientFeatureError as error:  # a range of times, because times are read as text
                raise InvalidSourceQuery(
                    f"A column cannot be read: {error}",
                    fix='Use a query with the ends of the range: SELECT id, lower(at) AS start, upper(at) AS "end"',
                ) from error
            except BaseException:
                await connection.invalidate()
                raise

    def _open_engine(self) -> AsyncEngine:
        if self._engine is None:
            self._engine = connections.engine_for(
                PostgresServer(self._url), pool_size=2, read_only=True, settings=SESSION_SETTINGS
            )
        return self._engine

    async def close(self) -> None:
        """Close all connections."""
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None


class Listener:
    """A connection that receives notifications of changed keys. It is replaced when it does not answer."""

    def __init__(self, url: str, channel: str) -> None:
        self._url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._channel = channel
        self._connection: asyncpg.Connection[Any] | None = None

    async def ensure_listening(self, on_change: Callable[[str | None], None]) -> bool:
        """Check the connection, or open one; return whether it is a new one."""
        if self._connection is not None:
            try:
                await self._connection.execute("SELECT 1", timeout=PROBE_TIMEOUT_SECONDS)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self.close()
            else:
                return False
        connection = await asyncpg.connect(self._url, timeout=5)
        try:
            await connection.add_listener(self._channel, lambda *args: on_change(str(args[-1])))
        except BaseException:  # the connection is open, but does not listen
            connection.terminate()
            raise
        connection.add_termination_listener(lambda _: on_change(None))
        self._connection = connection
        return True

    def close(self) -> None:
        """Close the connection without waiting for the server."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None


READ_ERRORS = (
    *(OSError, TimeoutError, asyncio.IncompleteReadError),
    *(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError),
)
"""Errors of the server or the connection; other errors are those of a value."""
