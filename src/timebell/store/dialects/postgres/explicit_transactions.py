"""Transactions of several operations on PostgreSQL, controlled through asyncpg.

Through SQLAlchemy each of their statements would cost several times as much.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import asyncpg
from asyncpg.transaction import Transaction
from sqlalchemy import Connection
from sqlalchemy.util import greenlet_spawn

from timebell.store.dialects.base import Publish
from timebell.store.dialects.handler_transactions import run_to_completion
from timebell.store.dialects.postgres.connections import driver_of
from timebell.store.dialects.postgres.transaction import PostgresTransaction
from timebell.store.recent_writes import Written
from timebell.store.transaction import NO_SUBJECTS, READ_ONLY_OPERATIONS, WHOLE_TRANSACTIONS, Dialect, Steps


class ExplicitTransaction:
    """A transaction on a connection in autocommit mode, committed at the end of its block, or rolled back on an error.

    It begins with the first operation that needs a transaction. After the commit `publish` is called with the subjects
    of its operations, and what they wrote.
    """

    def __init__(self, connection: Connection, dialect: Dialect, publish: Publish) -> None:
        self.driver: asyncpg.Connection[Any] = driver_of(connection)
        self.subjects = NO_SUBJECTS
        self.written: list[tuple[str, Written]] = []
        self.begun: Transaction | None = None
        self._connection, self._dialect, self._publish = connection, dialect, publish

    async def join(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation in this transaction."""
        is_whole = self.begun is None and operation in WHOLE_TRANSACTIONS
        if self.begun is None and not is_whole and operation not in READ_ONLY_OPERATIONS:
            self.begun = self.driver.transaction(isolation="read_committed")
            await self.begun.start()
        tx = PostgresTransaction(self._connection, self._dialect, Steps(getattr(operation, "__name__", "operation")))
        result = await greenlet_spawn(operation, tx, *args, **kwargs)
        if is_whole:
            tx.steps.at("done")
            self._publish(tx.subjects, tx.written)
        else:
            self.subjects |= tx.subjects
            self.written += tx.written
        return result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            await self._roll_back(error)
            return
        try:
            await self._commit()
        except BaseException as failure:
            await self._roll_back(failure)
            raise

    async def _commit(self) -> None:
        if self.begun is None:
            return
        steps = Steps("begin")
        steps.at("commit")
        await run_to_completion(self.begun.commit())
        steps.at("done")
        self._publish(self.subjects, self.written)

    async def _roll_back(self, error: BaseException) -> None:
        """Roll back after an error. If the state of the connection is then unknown, close it."""
        is_known = not isinstance(error, asyncio.CancelledError | TimeoutError)
        if self.begun is not None:
            try:
                await run_to_completion(self.begun.rollback())
                is_known = True
            except BaseException:
                is_known = False
        if not is_known:  # it must not return to the pool
            with contextlib.suppress(Exception):
                await greenlet_spawn(self._connection.invalidate)
