"""The completion of an attempt inside a transaction of its handler's: what the handler writes there exists if and
only if this attempt completed the job.

The fence is looked at where the job ends, in the transaction. So it does not matter how the attempt was lost, or
when: a node that died left nothing, one that was frozen or timed out writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from types import TracebackType
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.engine.node import Held, Node
from timebell.errors import Conflict, TimebellError
from timebell.model.job import Attempt, Ending, JobState
from timebell.store.dialects.base import Finish
from timebell.store.jobs import serial
from timebell.store.jobs.outcome_notices import end_told
from timebell.store.transaction import Transaction

log = logging.getLogger("timebell.runner")


class Within:
    """Of one attempt. `ending` makes the completed ending of an attempt and a result."""

    def __init__(self, node: Node, held: Held, ending: Callable[[Attempt, Any], Ending]) -> None:
        self.node = node
        self.held = held
        self.completed: Ending | None = None
        """What was committed."""
        self.lost = False
        """Whether the attempt turned out to be no longer this node's."""
        self._ending = ending

    def transaction(self, result: Callable[[], Any]) -> Block:
        """As in Completion."""
        return Block(self, result)

    @asynccontextmanager
    async def awaited(self, result: Callable[[], Any]) -> AsyncIterator[AsyncConnection]:
        """The block of an async handler."""
        task = self.held.task
        if task is None or asyncio.get_running_loop() is not task.get_loop():
            raise TimebellError(
                "event.transaction() was awaited on another event loop than the engine's.", code="OTHER_EVENT_LOOP",
                fix="Make the handler async, or write: with event.transaction() as connection.",
            )  # fmt: skip
        with self._completing(result) as finish:
            async with self.node.store.lend(finish) as connection:
                yield connection

    @contextmanager
    def blocking(self, result: Callable[[], Any]) -> Iterator[Connection]:
        """The block of a handler that is a plain function."""
        _check_thread()
        with self._completing(result) as finish, self.node.store.lend_to_thread(finish) as connection:
            yield connection

    @contextmanager
    def joined(self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]) -> Iterator[None]:
        """As in Completion."""
        _check_thread()
        with self._completing(result) as finish, atomic:
            yield
            _at_once(self.node.store.join(connection, finish))

    @contextmanager
    def _completing(self, result: Callable[[], Any]) -> Iterator[Finish]:
        """What ends the job in the transaction; when the block is over well, it was committed."""
        if self.completed is not None:
            raise self._over("It was completed by this attempt already")
        ended: list[tuple[Ending, serial.Ended]] = []

        def complete(tx: Transaction) -> None:
            self.held.completing = True
            ending = self._ending(self.held.attempt, result())
            ended.append((ending, end_told(tx, [ending]) if ending.watched else serial.complete(tx, ending)))
            if ending.id not in ended[-1][1].ids:
                self.lost = True
                raise self._over("It was taken over, or has timed out")

        try:
            yield complete
        except BaseException:
            self.held.completing = False
            raise
        self.completed, after = ended[-1]
        if after.let_go:
            self.node.working.poke_threadsafe()
        if after.put_off:
            self.node.planning.poke_threadsafe()

    def _over(self, why: str) -> Conflict:
        attempt = self.held.attempt
        return Conflict(
            f"Attempt {attempt.number} at job {attempt.id} cannot complete it. {why}; nothing of this transaction was"
            " written.",
            code="ATTEMPT_OVER", fix="Let the error end the handler.", existing=attempt.id,
        )  # fmt: skip

    def report(self, ending: Ending | None) -> None:
        """Say what became of an attempt that was over before its handler was: nothing more is written of it."""
        attempt, counters = self.held.attempt, self.node.counters
        if self.completed is None:
            counters.fenced += 1
            log.warning("attempt %d at job %s was lost; its transaction was rolled back", attempt.number, attempt.id)
            return
        counters.ended += 1
        if ending is None or ending.state is not JobState.COMPLETED:
            what = None if ending is None else ending.error or ending.reason or ending.state
            log.error(
                "job %s is completed: its transaction was committed. Then its handler failed: %s", attempt.id, what
            )
        elif ending.result not in (None, self.completed.result):
            log.warning(
                "what the handler of job %s returned is not kept, as it was completed before: set event.result inside"
                " the transaction", attempt.id,
            )  # fmt: skip


def _check_thread() -> None:
    if asyncio._get_running_loop() is not None:
        raise TimebellError(
            "with event.transaction() blocks, and this thread runs an event loop, which would stand still.",
            code="BLOCKING_IN_LOOP", fix="Write: async with event.transaction() as connection.",
        )  # fmt: skip


def _at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nobody: on a blocking connection `join` does not."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError("it waits")


class Block:
    """`async with` or `with`: once."""

    def __init__(self, within: Within, result: Callable[[], Any]) -> None:
        self._within = within
        self._result = result
        self._awaited: AbstractAsyncContextManager[AsyncConnection] | None = None
        self._blocking: AbstractContextManager[Connection] | None = None

    async def __aenter__(self) -> AsyncConnection:
        self._awaited = self._within.awaited(self._result)
        return await self._awaited.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._awaited is not None
        return await self._awaited.__aexit__(kind, raised, trace)

    def __enter__(self) -> Connection:
        self._blocking = self._within.blocking(self._result)
        return self._blocking.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._blocking is not None
        return self._blocking.__exit__(kind, raised, trace)
