"""Transactions of several operations on PostgreSQL, controlled through asyncpg.

Through SQLAlchemy each of their statements would cost several times as much.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import asyncpg
from sqlalchemy import Connection
from sqlalchemy.util import greenlet_spawn

from timebell.store.dialects.base import Publish
from timebell.store.dialects.handler_transactions import run_to_completion
from timebell.store.dialects.postgres.connections import driver_of
from timebell.store.dialects.postgres.transaction import PostgresTransaction
from timebell.store.recent_writes import Written
from timebell.store.transaction import NO_SUBJECTS, Dialect, Steps


class ExplicitTransaction:
    """An open transaction, with the subjects to publish when it is committed and the rows that it wrote."""

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self.driver: asyncpg.Connection[Any] = driver_of(connection)
        self.subjects = NO_SUBJECTS
        self.written: list[tuple[str, Written]] = []
        self._connection, self._dialect = connection, dialect

    async def join(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation in this transaction."""
        tx = PostgresTransaction(self._connection, self._dialect, Steps(getattr(operation, "__name__", "operation")))
        result = await greenlet_spawn(operation, tx, *args, **kwargs)
        self.subjects |= tx.subjects
        self.written += tx.written
        return result


@contextlib.asynccontextmanager
async def explicit_transaction(
    connection: Connection, dialect: Dialect, publish: Publish
) -> AsyncIterator[ExplicitTransaction]:
    """Open a transaction on a connection in autocommit mode; commit it at the end, or roll back on an error.

    After the commit `publish` is called with the subjects of its operations, and what they wrote.
    """
    joined = ExplicitTransaction(connection, dialect)
    transaction = joined.driver.transaction(isolation="read_committed")
    steps = Steps("begin")
    try:
        await transaction.start()
        yield joined
        steps.at("commit")
        await run_to_completion(transaction.commit())
        steps.at("done")
    except BaseException:
        try:
            await run_to_completion(transaction.rollback())
        except BaseException:  # its state is unknown, so it must not return to the pool
            with contextlib.suppress(Exception):
                await greenlet_spawn(connection.invalidate)
        raise
    publish(joined.subjects, joined.written)
