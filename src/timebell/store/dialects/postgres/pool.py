"""Connections that stay checked out of the pool of SQLAlchemy while they are idle."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from timebell.store.dialects.postgres.connections import close_connections, connect_alive, discard_closed, driver_of


class ConnectionPool:
    """The connections of an engine; the one that was used last is the first to be used again.

    A checkout of SQLAlchemy's pool costs as much as a short statement. So connections return to it only if an operation
    waits for one, and its size still limits their number. Used by one event loop at a time.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._idle: list[Connection] = []
        self._waiting = 0

    def take_idle(self) -> Connection | None:
        """Return an idle connection; None if `check_out` has to be used."""
        if not self._idle or driver_of(self._idle[-1]).is_closed():
            return None
        return self._idle.pop()

    def check_out(self) -> Connection:
        """Return a connection that the server has not closed. Call it in a greenlet. Raises PoolTimeout."""
        while self._idle:
            if (connection := discard_closed(self._idle.pop())) is not None:
                return connection
        self._waiting += 1
        try:
            return connect_alive(self.engine.sync_engine)
        finally:
            self._waiting -= 1

    def put_back(self, connection: Connection) -> bool:
        """Keep a connection for the next operation; return False if the caller must close it, in a greenlet.

        It must close it if it was invalidated, if its pool was replaced meanwhile, or if an operation waits for it.
        """
        if connection.invalidated or connection.closed or self._waiting or driver_of(connection).is_closed():
            return False
        if connection.info["pool"] is not self.engine.sync_engine.pool:
            return False
        self._idle.append(connection)
        return True

    def replace(self) -> Coroutine[Any, Any, None]:
        """Replace the pool; return a coroutine that closes its idle connections."""
        idle, self._idle = self._idle, []
        pool = self.engine.sync_engine.pool
        self.engine.sync_engine.dispose(close=False)
        return close_connections(idle, pool)

    def abandon(self) -> None:
        """Discard the connections of an event loop that has ended; they cannot be closed gracefully without it."""
        while self._idle:
            with suppress(Exception):
                self._idle.pop().detach()
        self.engine.sync_engine.dispose(close=False)
