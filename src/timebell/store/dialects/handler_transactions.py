"""Transactions for handlers: the completion of the job is written in the same transaction as the handler's changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection

from timebell.errors import TimebellError
from timebell.store.dialects.base import PENDING_CHANGES, Finish, PendingChanges, Publish, join
from timebell.store.transaction import Dialect, Steps, Transaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

R = TypeVar("R")
JoinFunction = Callable[[Any, Finish], Coroutine[Any, Any, None]]


@asynccontextmanager
async def handler_transaction(
    connection: AsyncConnection, join_connection: JoinFunction, finish: Finish, publish: Publish
) -> AsyncIterator[AsyncConnection]:
    """Begin a transaction on a connection; at the end run `finish` in it, commit, and publish its changes.

    An error in the block or in `finish` rolls it back. `join_connection` runs `finish` on the connection.
    """
    transaction = await connection.begin()
    connection.info[PENDING_CHANGES] = PendingChanges()
    try:
        yield connection
        await run_to_completion(_finish_and_commit(connection, transaction, join_connection, finish, publish))
    except BaseException:
        if transaction.is_active:
            with suppress(Exception):  # the connection is broken; the server rolls back itself
                await transaction.rollback()
        raise


def no_finish(tx: Transaction) -> None:
    """Do nothing: the `finish` of a transaction without a completion."""


async def _finish_and_commit(
    connection: AsyncConnection, transaction: AsyncTransaction, join_connection: JoinFunction, finish: Finish,
    publish: Publish,
) -> None:  # fmt: skip
    _check_active(transaction.is_active)
    steps = Steps(finish.__name__)
    await join_connection(connection, finish)
    changes = connection.info.pop(PENDING_CHANGES, PendingChanges())
    steps.at("commit")
    await transaction.commit()
    steps.at("done")
    publish(changes.subjects, changes.written)


async def run_to_completion(coroutine: Coroutine[Any, Any, R]) -> R:
    """Await a coroutine to its end even if this task is cancelled, because the outcome of a commit must be known."""
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the cancellation replaces it
        raise


@contextmanager
def handler_transaction_in_thread(
    connection: Connection, dialect: Dialect, finish: Finish, publish: Publish,
    notify: Callable[[Transaction, frozenset[str]], None] | None = None,
) -> Iterator[Connection]:  # fmt: skip
    """Begin a transaction like `handler_transaction`, in the calling thread.

    `notify` notifies other nodes in the transaction of what `finish` changed.
    """
    transaction = connection.begin()
    connection.info[PENDING_CHANGES] = PendingChanges()
    try:
        yield connection
        _check_active(transaction.is_active)
        steps = Steps(finish.__name__)
        _, notified = join(connection, dialect, finish, (), {})
        if notified and notify is not None:
            join(connection, dialect, notify, (notified,), {})
        changes = connection.info.pop(PENDING_CHANGES, PendingChanges())
        steps.at("commit")
        transaction.commit()
        steps.at("done")
        publish(changes.subjects, changes.written)
    except BaseException:
        if transaction.is_active:
            with suppress(Exception):
                transaction.rollback()
        raise


def _check_active(active: bool) -> None:
    if not active:
        raise TimebellError(
            "The transaction was ended inside its block, so the job cannot be completed in it.",
            code="TRANSACTION_ENDED", fix="Do not call commit(). To roll back, raise an exception.",
        )  # fmt: skip
