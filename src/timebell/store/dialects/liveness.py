"""Notice within seconds that a database server has gone silent.

A host that loses power or its network answers nothing and closes nothing, so its clients would wait until their
statements time out. Therefore the store watches how long each connection waits, and after a second asks the server, on
another connection, whether it is still working on the statement.
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
SUSPECT_AFTER_SECONDS = 1.0  # waiting time after which the server is probed
PROBE_TIMEOUT_SECONDS = 3.0  # waiting time for a probe, after which the server counts as silent

C = TypeVar("C", bound=Hashable)


class LivenessMonitor(Generic[C]):
    """Watches the connections that wait for a response of the server.

    `probe` asks the server about the connections that have waited for long. It returns the reason if they are lost, or
    None if the server is still working on them. Its argument returns those that are still waiting. It may raise OSError
    if the server cannot be reached. `drop_connections` is called if they are lost or the server is silent.
    """

    def __init__(
        self,
        probe: Callable[[Callable[[], Collection[C]]], Awaitable[str | None]],
        drop_connections: Callable[[], None],
    ) -> None:
        self._probe, self._drop_connections = probe, drop_connections
        self._waiting: dict[C, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the periodic check, which stops when no connection waits: an idle store costs nothing."""
        if self._timer is None:
            self._timer = loop.call_later(CHECK_INTERVAL_SECONDS, self._check, loop)

    def begin(self, connection: C) -> None:
        """Record that this connection waits for a response from now on. Thread-safe, like `end`."""
        self._waiting[connection] = time.monotonic()

    def end(self, connection: C) -> None:
        """Record that this connection waits no longer."""
        self._waiting.pop(connection, None)

    @contextmanager
    def waiting(self, connection: C) -> Iterator[None]:
        """Watch this connection while the block runs, in any thread."""
        self.begin(connection)
        try:
            yield
        finally:
            self.end(connection)

    def reset(self) -> None:
        """Stop watching, because the event loop or the store ends."""
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
            self._task = loop.create_task(self._probe_suspects(suspects))

    async def _probe_suspects(self, suspects: dict[C, float]) -> None:
        # A response may have arrived meanwhile: this process may have been frozen, or its event loop busy.
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
            self._drop_connections()
