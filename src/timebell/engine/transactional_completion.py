"""Complete an attempt inside a transaction of its handler (`event.transaction()`).

The handler's writes are committed if and only if this attempt completes the job. The fence is checked by the statement
that completes the job, in the same transaction. So it does not matter how or when the attempt was lost: a dead node
leaves nothing behind, and a frozen or timed-out attempt cannot commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from timebell.engine.node import Node
from timebell.engine.running_attempt import AttemptEvent, RunningAttempt
from timebell.errors import Conflict, TimebellError
from timebell.model.job import Attempt, Completion
from timebell.store.dialects.base import Finish
from timebell.store.jobs import serial
from timebell.store.jobs.outcome_notices import complete_with_notices
from timebell.store.transaction import NO_SUBJECTS, Transaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


class TransactionalCompletion:
    """The transactional completion of one attempt. `make_completion` builds it from the attempt and a result."""

    def __init__(
        self, node: Node, running_attempt: RunningAttempt, make_completion: Callable[[Attempt, Any], Completion]
    ) -> None:
        self.node = node
        self.running_attempt = running_attempt
        self.completed: Completion | None = None
        """The committed completion."""
        self._make_completion = make_completion
        self._subjects = NO_SUBJECTS

    def transaction(self, result: Callable[[], Any]) -> TransactionBlock:
        """Return the context manager behind `event.transaction()`; `result` is called when the block ends."""
        return TransactionBlock(self, result)

    @asynccontextmanager
    async def async_transaction(self, result: Callable[[], Any]) -> AsyncIterator[AsyncConnection]:
        """Run the transaction of an async handler. Raises TimebellError (OTHER_EVENT_LOOP)."""
        task = self.running_attempt.task
        if task is None or asyncio.get_running_loop() is not task.get_loop():
            raise TimebellError(
                "event.transaction() was awaited on an event loop other than the engine's.", code="OTHER_EVENT_LOOP",
                fix="Make the handler async, or write: with event.transaction() as connection.",
            )  # fmt: skip
        with self._completing(result) as finish:
            async with self.node.store.handler_transaction(finish) as connection:
                yield connection

    @contextmanager
    def sync_transaction(self, result: Callable[[], Any]) -> Iterator[Connection]:
        """Run the transaction of a sync handler. Raises TimebellError (BLOCKING_IN_LOOP) on an event loop's thread."""
        _reject_event_loop_thread()
        with self._completing(result) as finish, self.node.store.handler_transaction_in_thread(finish) as connection:
            yield connection

    @contextmanager
    def join_transaction(
        self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Complete the job on the caller's `connection`, inside its own `atomic` block."""
        _reject_event_loop_thread()
        with self._completing(result) as finish, atomic:
            yield
            _run_without_waiting(self.node.store.join(connection, finish))
        # The store could not observe the commit.
        self.node.store.subscribers.publish(self._subjects)

    @contextmanager
    def _completing(self, result: Callable[[], Any]) -> Iterator[Finish]:
        """Yield the function that completes the job in the transaction. A normal exit means it was committed.

        Raises Conflict (ATTEMPT_ENDED) if the attempt cannot complete the job.
        """
        if self.completed is not None:
            raise self._attempt_over("This attempt has completed it already")
        completions: list[Completion] = []

        # The simulation crashes nodes at operations by their function name; its registry contains `complete_one`.
        def complete_one(tx: Transaction) -> None:
            self.running_attempt.transition(AttemptEvent.COMMIT)
            completion = self._make_completion(self.running_attempt.attempt, result())
            completions.append(completion)
            written = (
                complete_with_notices(tx, [completion]) if completion.watched else serial.complete_one(tx, completion)
            )
            self._subjects = tx.subjects
            if completion.id not in written:
                raise self._attempt_over("The attempt was taken over or timed out")

        try:
            yield complete_one
        except BaseException:
            self.running_attempt.transition(AttemptEvent.ROLL_BACK)
            raise
        self.completed = completions[-1]
        self.running_attempt.transition(AttemptEvent.COMPLETE)

    def _attempt_over(self, reason: str) -> Conflict:
        attempt = self.running_attempt.attempt
        return Conflict(
            f"Attempt {attempt.number} cannot complete job {attempt.id}. {reason}; this transaction was rolled back.",
            code="ATTEMPT_ENDED", fix="Let the error propagate out of the handler.", existing=attempt.id,
        )  # fmt: skip


def _reject_event_loop_thread() -> None:
    if asyncio._get_running_loop() is not None:
        raise TimebellError(
            "with event.transaction() would block the event loop of this thread.",
            code="BLOCKING_IN_LOOP", fix="Write: async with event.transaction() as connection.",
        )  # fmt: skip


def _run_without_waiting(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends; `join` does not on a blocking connection."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("the coroutine suspended")


class TransactionBlock:
    """The object returned by `event.transaction()`, for one `async with` or `with`."""

    def __init__(self, completion: TransactionalCompletion, result: Callable[[], Any]) -> None:
        self._completion = completion
        self._result = result
        self._async_context: AbstractAsyncContextManager[AsyncConnection] | None = None
        self._sync_context: AbstractContextManager[Connection] | None = None

    async def __aenter__(self) -> AsyncConnection:
        self._async_context = self._completion.async_transaction(self._result)
        return await self._async_context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._async_context is not None
        return await self._async_context.__aexit__(kind, exc, trace)

    def __enter__(self) -> Connection:
        self._sync_context = self._completion.sync_transaction(self._result)
        return self._sync_context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._sync_context is not None
        return self._sync_context.__exit__(kind, exc, trace)
