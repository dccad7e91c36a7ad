"""Transactions of several operations on PostgreSQL, controlled through asyncpg.

Through SQLAlchemy each of their statements would cost several times as much.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.store.dialects.handler_transactions import run_to_completion
from timebell.store.transaction import SqlTransaction, Steps


class ExplicitTransactions:
    """The open transactions by connection, with the notification to send when each one is committed."""

    def __init__(self, new_transaction: Callable[[Connection, Steps], SqlTransaction]) -> None:
        self._new_transaction = new_transaction
        self._notifications: dict[AsyncConnection, str] = {}

    def is_open_on(self, connection: Any) -> bool:
        """Return whether one of the transactions is open on this connection."""
        return isinstance(connection, AsyncConnection) and connection in self._notifications

    async def join(
        self,
        connection: AsyncConnection,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an operation in the open transaction of a connection."""

        def run_operation(inner: Connection) -> tuple[Any, str]:
            tx = self._new_transaction(inner, Steps(getattr(operation, "__name__", "operation")))
            return operation(tx, *args, **kwargs), tx.wants_notify

        result, subject = await connection.run_sync(run_operation)
        self._notifications[connection] = max(
            self._notifications[connection], subject
        )  # "schedules" > "jobs" > "": schedules includes jobs
        return result

    @contextlib.asynccontextmanager
    async def open_on(self, connection: AsyncConnection, notify: Callable[[str], None]) -> AsyncIterator[None]:
        """Open a transaction on a connection in autocommit mode; commit it at the end, or roll back on an error.

        After the commit `notify` is called with the subject of the notification, if there is one.
        """
        assert connection.sync_connection is not None
        driver: Any = connection.sync_connection.connection.driver_connection
        transaction = driver.transaction(isolation="read_committed")
        self._notifications[connection] = ""
        steps = Steps("begin")
        try:
            await transaction.start()
            yield
            steps.at("commit")
            await run_to_completion(transaction.commit())
            steps.at("done")
            subject = self._notifications[connection]
        except BaseException:
            try:
                await run_to_completion(transaction.rollback())
            except BaseException:  # its state is unknown, so it must not return to the pool
                with contextlib.suppress(Exception):
                    await connection.invalidate()
            raise
        finally:
            self._notifications.pop(connection, None)
        if subject:
            notify(subject)


def is_stale_statement(error: BaseException) -> bool:
    """Return whether an error is due to a statement that was prepared before a migration changed the tables."""
    return "InvalidCachedStatement" in type(getattr(error, "orig", None) or error).__name__
