"""Shared connections, one per key: opened on first use, and reopened after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")

CONNECT_SECONDS = 5.0
DISCONNECT_SECONDS = 5.0


class ConnectionPool(Generic[K, C]):
    """A pool with one connection per key. `connect`, `is_alive` and `disconnect` handle a single connection.

    Concurrent callers share one connection attempt, which continues if one of them is cancelled. A failure is raised to
    all waiting callers; the next call tries again.
    """

    def __init__(
        self,
        connect: Callable[[K], Awaitable[C]],
        is_alive: Callable[[C], bool],
        disconnect: Callable[[C], Awaitable[object]],
    ) -> None:
        self._connect = connect
        self._is_alive = is_alive
        self._disconnect = disconnect
        self._connections: dict[K, asyncio.Task[C]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, key: K) -> C:
        """Return the connection of a key. Errors of `connect` propagate; ConnectionError after `CONNECT_SECONDS`."""
        task = self._connections.get(key)
        if task is not None and task.done() and not self._is_alive(task.result()):
            self.discard(key, task.result())
            task = None
        if task is None:
            task = self._connections[key] = asyncio.create_task(self._open(key))
            task.add_done_callback(lambda done: self._on_opened(key, done))
        return await asyncio.shield(task)

    def discard(self, key: K, connection: C) -> None:
        """Close a connection and remove it from the pool."""
        task = self._connections.get(key)
        if task is None or not task.done() or task.result() is not connection:
            return  # already replaced
        del self._connections[key]
        closing = asyncio.create_task(self._close_connection(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections."""
        tasks, self._connections = list(self._connections.values()), {}
        for task in tasks:
            if not task.cancel():
                await self._close_connection(task.result())
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    async def _open(self, key: K) -> C:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._connect(key)
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from None

    def _on_opened(self, key: K, opening: asyncio.Task[C]) -> None:
        failed = opening.cancelled() or opening.exception() is not None
        if failed and self._connections.get(key) is opening:
            del self._connections[key]

    async def _close_connection(self, connection: C) -> None:
        with suppress(Exception):  # a lost connection may fail to close
            async with asyncio.timeout(DISCONNECT_SECONDS):
                await self._disconnect(connection)
