"""Transactions of several operations on PostgreSQL, begun and ended by the driver: by way of SQLAlchemy each of their
statements costs several times as much."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.store.dialects.handler_transactions import whole
from timebell.store.transaction import SqlTransaction, Steps


class Begun:
    """Those that are open, by the connection that each has; and what others are told of when it is committed."""

    def __init__(self, made: Callable[[Connection, Steps], SqlTransaction]) -> None:
        self._made = made
        self._wants: dict[AsyncConnection, str] = {}

    def has(self, connection: Any) -> bool:
        """Whether one of them is on this connection."""
        return isinstance(connection, AsyncConnection) and connection in self._wants

    async def join(
        self,
        connection: AsyncConnection,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an operation in the one that is on this connection."""

        def joined(inner: Connection) -> tuple[Any, str]:
            tx = self._made(inner, Steps(getattr(operation, "__name__", "operation")))
            return operation(tx, *args, **kwargs), tx.wants_notify

        answer, told = await connection.run_sync(joined)
        self._wants[connection] = max(self._wants[connection], told)  # of schedules means of jobs too
        return answer

    @contextlib.asynccontextmanager
    async def on(self, connection: AsyncConnection, tell: Callable[[str], None]) -> AsyncIterator[None]:
        """One on this connection, which is in autocommit: it commits when the block ends, unless that raises. `tell`
        is then called with what other nodes are to be told of, if anything."""
        assert connection.sync_connection is not None
        driver: Any = connection.sync_connection.connection.driver_connection
        transaction = driver.transaction(isolation="read_committed")
        self._wants[connection] = ""
        steps = Steps("begin")
        try:
            await transaction.start()
            yield
            steps.at("commit")
            await whole(transaction.commit())
            steps.at("done")
            told = self._wants[connection]
        except BaseException:
            try:
                await whole(transaction.rollback())
            except BaseException:  # its state is unknown: it must not go back to the pool
                with contextlib.suppress(Exception):
                    await connection.invalidate()
            raise
        finally:
            self._wants.pop(connection, None)
        if told:
            tell(told)


def stale(failed: BaseException) -> bool:
    """Whether a statement was prepared before a migration changed the tables."""
    return "InvalidCachedStatement" in type(getattr(failed, "orig", None) or failed).__name__
