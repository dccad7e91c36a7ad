"""Connections of MariaDB's driver, which blocks, lent to who awaits: what each says is said in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

from timebell.store.dialects.handler_transactions import whole
from timebell.store.dialects.sqlite.async_driver import Shared

R = TypeVar("R")


class Lender:
    """The connections of an engine, `most` of them, for one event loop. Who finds none free asks for one `tries` times,
    each as long as the engine waits: so nobody is left who still waits when it is closed."""

    def __init__(self, name: str, own: Engine, most: int, tries: int) -> None:
        self.own = own
        self._tries = tries
        # A thread for each connection. Who waits for one does so in others: else nobody could give one back.
        self._threads = ThreadPoolExecutor(most, thread_name_prefix=f"timebell-{name}")
        self._waiting = ThreadPoolExecutor(most, thread_name_prefix=f"timebell-{name}-waiting")
        lending = create_engine(own.url, creator=self._taken, poolclass=NullPool)
        lending.dialect.is_async = True
        # The first connection is used to look at the server, and others wait for that. A listener that comes now says
        # how: as coroutines do. Else the second would stop the event loop, and with it the first, for ever.
        event.listen(lending, "connect", lambda *_: None)
        self._engine = AsyncEngine(lending)

    async def connect(self) -> AsyncConnection:
        """One of them, to be closed. Raises what the engine does when there is none."""
        return await self._engine.connect()

    def close(self) -> None:
        """Let go of all that nobody has."""
        self._threads.shutdown(wait=False)
        self._waiting.shutdown(wait=False)
        self.own.dispose()

    def _taken(self) -> Lent:
        loop = asyncio.get_running_loop()
        for left in reversed(range(self._tries)):
            try:
                return Lent(await_only(loop.run_in_executor(self._waiting, self.own.raw_connection)), self._call)
            except NoneFree:
                if not left:
                    raise
        raise AssertionError

    async def _call(self, function: Callable[..., R], *args: Any) -> R:
        """Also for who is cancelled it is waited for: the connection takes one statement at a time."""

        async def there() -> R:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

        return await whole(there())


class Lent(Shared):
    """One that is given back in a thread, too: before that it rolls back once more."""

    def close(self) -> None:
        """As in DB-API."""
        self.run(self._connection.close)
