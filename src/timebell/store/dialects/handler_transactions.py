"""A transaction lent to a handler: what ends its job is written at the end of it, and committed with the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from timebell.errors import TimebellError
from timebell.store.dialects.base import Finish, join
from timebell.store.transaction import Dialect, Steps, Transaction

R = TypeVar("R")
Join = Callable[[Any, Finish], Coroutine[Any, Any, None]]


@asynccontextmanager
async def lend(connection: AsyncConnection, joining: Join, finish: Finish) -> AsyncIterator[AsyncConnection]:
    """The connection in a transaction, which `finish` ends; an error in the block or in `finish` rolls it back."""
    transaction = await connection.begin()
    try:
        yield connection
        await whole(_end(connection, transaction, joining, finish))
    except BaseException:
        if transaction.is_active:
            with suppress(Exception):  # a connection that broke; the server rolls back by itself
                await transaction.rollback()
        raise


def nothing_more(tx: Transaction) -> None:
    """The `finish` of a transaction that has said everything."""


async def _end(connection: AsyncConnection, transaction: AsyncTransaction, joining: Join, finish: Finish) -> None:
    _check(transaction.is_active)
    steps = Steps(finish.__name__)
    await joining(connection, finish)
    steps.at("commit")
    await transaction.commit()
    steps.at("done")


async def whole(work: Coroutine[Any, Any, R]) -> R:
    """Await it to its end, also when cancelled meanwhile: what a commit came to must be known."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # of which nobody else hears any more
        raise


@contextmanager
def lend_here(
    connection: Connection, dialect: Dialect, finish: Finish, tell: Callable[[Transaction, str], None] | None = None
) -> Iterator[Connection]:
    """As `lend`, in the thread that calls; `tell` makes other nodes look again, if `finish` wants it."""
    transaction = connection.begin()
    try:
        yield connection
        _check(transaction.is_active)
        steps = Steps(finish.__name__)
        _, wants_notify = join(connection, dialect, finish, (), {})
        if wants_notify and tell is not None:
            join(connection, dialect, tell, (wants_notify,), {})
        steps.at("commit")
        transaction.commit()
        steps.at("done")
    except BaseException:
        if transaction.is_active:
            with suppress(Exception):
                transaction.rollback()
        raise


def _check(active: bool) -> None:
    if not active:
        raise TimebellError(
            "The transaction of the block was ended inside it, so the job cannot be completed in it.",
            code="TRANSACTION_ENDED", fix="Leave commit() out; to roll back, raise.",
        )  # fmt: skip
