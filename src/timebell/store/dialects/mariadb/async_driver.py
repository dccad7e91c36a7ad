"""Async access to MariaDB's blocking driver: statements run in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

from timebell.store.dialects.handler_transactions import run_to_completion
from timebell.store.dialects.sqlite.async_driver import AdaptedConnection

R = TypeVar("R")


class AsyncPool:
    """A pool of `size` connections of a sync engine, for one event loop.

    If all are in use, a checkout is tried up to `max_attempts` times, each time with the short timeout of the engine,
    instead of one long wait. So no thread is blocked for long after the pool is closed.
    """

    def __init__(self, name: str, engine: Engine, size: int, max_attempts: int) -> None:
        self.sync_engine = engine
        self._max_attempts = max_attempts
        # One thread per connection. Checkouts wait in other threads; otherwise they could occupy all threads, and no
        # connection could be returned.
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=f"timebell-{name}")
        self._checkout_threads = ThreadPoolExecutor(size, thread_name_prefix=f"timebell-{name}-waiting")
        async_engine = create_engine(
            engine.url, creator=self._check_out, poolclass=NullPool, pool_reset_on_return=None
        )  # fmt: skip
        async_engine.dialect.is_async = True
        # The first connection initializes the dialect while the others wait for it. Registering a listener now makes
        # SQLAlchemy use a lock for coroutines. With a thread lock the second connection would block the event loop, and
        # so the first one, forever.
        event.listen(async_engine, "connect", lambda *_: None)
        self._async_engine = AsyncEngine(async_engine)

    async def connect(self) -> AsyncConnection:
        """Check out a connection; the caller closes it. Raises the errors of the engine if none becomes free."""
        return await self._async_engine.connect()

    def close(self) -> None:
        """Close all idle connections, and start no more work."""
        self._threads.shutdown(wait=False)
        self._checkout_threads.shutdown(wait=False)
        self.sync_engine.dispose()

    def _check_out(self) -> PooledConnection:
        loop = asyncio.get_running_loop()
        for attempts_left in reversed(range(self._max_attempts)):
            try:
                return PooledConnection(
                    await_only(loop.run_in_executor(self._checkout_threads, self.sync_engine.raw_connection)),
                    self._run_in_thread,
                )
            except PoolTimeout:
                if not attempts_left:
                    raise
        raise AssertionError

    async def _run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function in a thread, and wait for it even if cancelled.

        A connection executes only one statement at a time, so it must not be used again before.
        """

        async def run() -> R:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

        return await run_to_completion(run())


class PooledConnection(AdaptedConnection):
    """A pooled connection. Returning it rolls back, so that runs in a thread, too."""

    def close(self) -> None:
        """Return the connection to the pool."""
        self.run(self._connection.close)
