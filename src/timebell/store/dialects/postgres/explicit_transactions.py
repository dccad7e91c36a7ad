"""Transactions of several operations on PostgreSQL, controlled through asyncpg.

Through SQLAlchemy each of their statements would cost several times as much.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.store.dialects.handler_transactions import run_to_completion
from timebell.store.recent_writes import Written
from timebell.store.transaction import NO_SUBJECTS, SqlTransaction, Steps


class ExplicitTransactions:
    """The open transactions by connection, with the subjects to publish when each one is committed."""

    def __init__(self, new_transaction: Callable[[Connection, Steps], SqlTransaction]) -> None:
        self._new_transaction = new_transaction
        self._subjects: dict[AsyncConnection, frozenset[str]] = {}
        self._written: dict[AsyncConnection, list[tuple[str, Written]]] = {}

    def is_open_on(self, connection: Any) -> bool:
        """Return whether one of the transactions is open on this connection."""
        return isinstance(connection, AsyncConnection) and connection in self._subjects

    async def join(
        self,
        connection: AsyncConnection,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an operation in the open transaction of a connection."""

        def run_operation(inner: Connection) -> tuple[Any, SqlTransaction]:
            tx = self._new_transaction(inner, Steps(getattr(operation, "__name__", "operation")))
            return operation(tx, *args, **kwargs), tx

        result, tx = await connection.run_sync(run_operation)
        self._subjects[connection] |= tx.subjects
        self._written[connection] += tx.written
        return result

    @contextlib.asynccontextmanager
    async def open_on(
        self, connection: AsyncConnection, publish: Callable[[frozenset[str], Sequence[tuple[str, Written]]], None]
    ) -> AsyncIterator[None]:
        """Open a transaction on a connection in autocommit mode; commit it at the end, or roll back on an error.

        After the commit `publish` is called with the subjects of its operations, and what they wrote.
        """
        assert connection.sync_connection is not None
        driver: Any = connection.sync_connection.connection.driver_connection
        transaction = driver.transaction(isolation="read_committed")
        self._subjects[connection], self._written[connection] = NO_SUBJECTS, []
        steps = Steps("begin")
        try:
            await transaction.start()
            yield
            steps.at("commit")
            await run_to_completion(transaction.commit())
            steps.at("done")
            subjects, written = self._subjects[connection], self._written[connection]
        except BaseException:
            try:
                await run_to_completion(transaction.rollback())
            except BaseException:  # its state is unknown, so it must not return to the pool
                with contextlib.suppress(Exception):
                    await connection.invalidate()
            raise
        finally:
            self._subjects.pop(connection, None)
            self._written.pop(connection, None)
        publish(subjects, written)
