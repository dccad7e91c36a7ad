"""Notice within seconds that a database server has gone silent.

A host that loses power or its network answers nothing and closes nothing, so its clients would wait for their timeouts.
Therefore a statement that waits for long makes the store ask the server on another connection what it is doing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

log = logging.getLogger("timebell.store")

CHECK_INTERVAL_SECONDS = 0.5
SUSPECT_AFTER_SECONDS = 1.0  # wait for an answer after which the server is asked about it
PROBE_TIMEOUT_SECONDS = 3.0  # until the server counts as silent

C = TypeVar("C", bound=Hashable)


class Pulse(Generic[C]):
    """Observes the connections that wait for a server.

    `probe` asks the server about those that have waited for long, and returns why they are lost, or None if the server
    works on them. It gets a function that returns those that have not been answered until now. It may raise OSError if
    the server cannot be reached. `abandon` is called with the reason.
    """

    def __init__(
        self, probe: Callable[[Callable[[], Collection[C]]], Awaitable[str | None]], abandon: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._probe, self._abandon = probe, abandon
        self._waiting: dict[C, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check operations from now on, until none waits: an idle store costs nothing."""
        if self._timer is None:
            self._timer = loop.call_later(CHECK_INTERVAL_SECONDS, self._check, loop)

    def begin(self, connection: C) -> None:
        """Note that this connection waits for an answer from now on. Thread-safe, as is `end`."""
        self._waiting[connection] = time.monotonic()

    def end(self, connection: C) -> None:
        """Note that this connection does not wait any more."""
        self._waiting.pop(connection, None)

    @contextmanager
    def waiting(self, connection: C) -> Iterator[None]:
        """Observe this connection while the block runs, in any thread."""
        self.begin(connection)
        try:
            yield
        finally:
            self.end(connection)

    def reset(self) -> None:
        """Forget all operations and stop, at the end of the event loop or of the store."""
        for pending in (self._timer, self._task):
            if pending is not None:
                pending.cancel()
        self._timer = self._task = None
        self._waiting.clear()

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._waiting:
            return
        self._timer = loop.call_later(CHECK_INTERVAL_SECONDS, self._check, loop)
        suspected_before = time.monotonic() - SUSPECT_AFTER_SECONDS
        waiting = self._waiting.copy()
        suspects = {connection: since for connection, since in waiting.items() if since <= suspected_before}
        if suspects and (self._task is None or self._task.done()):
            self._task = loop.create_task(self._judge(suspects))

    async def _judge(self, suspects: dict[C, float]) -> None:
        # Some may be answered meanwhile: this process may have been frozen, or its event loop busy.
        def unanswered() -> list[C]:
            return [connection for connection, since in suspects.items() if self._waiting.get(connection) == since]

        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                reason = await self._probe(unanswered)
        except TimeoutError:
            reason = f"it has not answered for {SUSPECT_AFTER_SECONDS + PROBE_TIMEOUT_SECONDS:g} s"
        except OSError as error:
            reason = str(error) or type(error).__name__
        if reason is not None and unanswered():
            log.warning("dropped all connections to the database: %s", reason)
            self._abandon(reason)
