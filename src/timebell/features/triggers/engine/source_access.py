"""Bounded access of a node to sources: limits of concurrent reads, and a circuit breaker for each source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from timebell.clock import Clock
from timebell.errors import SourceFailed
from timebell.features.triggers.model.trigger import SOURCE_BUDGET_SPENT, SOURCE_UNAUTHORIZED, Source
from timebell.features.triggers.sources.base import InvalidSourceQuery, InvalidSourceValue

R = TypeVar("R")

READ_TIMEOUT_SECONDS = 5.0
MAX_READS_PER_NODE = 512
MAX_READS_PER_TENANT = 256
MAX_READS_PER_SOURCE = 4
UNPAUSED_FAILURES = (SOURCE_UNAUTHORIZED, "ORPHANED", SOURCE_BUDGET_SPENT)
"""Codes of failures that pause no reads, because a user or a budget decides when the source works again."""
FIRST_PAUSE_SECONDS = 5.0
MAX_PAUSE_SECONDS = 60.0
"""Short, because due jobs wait for a query until their source is tried again."""


class CircuitBreaker:
    """Refuses calls for a while after each failure, twice as long after each consecutive one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self.reason = ""

    def remaining_seconds(self) -> float:
        """Return the seconds for which calls are refused."""
        return max(0.0, self._open_until - self._clock.monotonic())

    def record_failure(self, reason: str) -> None:
        """Open the breaker. Concurrent calls that fail while it is open count once."""
        if self.remaining_seconds() == 0:
            pause = min(FIRST_PAUSE_SECONDS * 2**self._failures, MAX_PAUSE_SECONDS)
            self._open_until = self._clock.monotonic() + pause
            self._failures = min(self._failures + 1, 10)
            self.reason = reason

    def record_success(self) -> None:
        """Close the breaker."""
        self._failures, self._open_until = 0, 0.0


class ReadLimits:
    """Limits of concurrent reads of a node: in total and per tenant."""

    def __init__(self) -> None:
        self._node = asyncio.Semaphore(MAX_READS_PER_NODE)
        self._tenants: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def slot(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for a free slot of the tenant, then of the node, and hold both."""
        semaphore, users = self._tenants.get(tenant_id, (asyncio.Semaphore(MAX_READS_PER_TENANT), 0))
        self._tenants[tenant_id] = semaphore, users + 1
        try:
            async with semaphore, self._node:
                yield
        finally:
            users = self._tenants[tenant_id][1] - 1
            if users:
                self._tenants[tenant_id] = semaphore, users
            else:
                del self._tenants[tenant_id]


class SourceAccess:
    """Access of a node to one source. A call that fails or takes too long opens its circuit breaker."""

    def __init__(self, source: Source, clock: Clock, limits: ReadLimits) -> None:
        self.source = source
        self._clock = clock
        self._limits = limits
        self._breaker = CircuitBreaker(clock)
        self._semaphore = asyncio.Semaphore(MAX_READS_PER_SOURCE)

    async def call(self, read: Callable[[], Awaitable[R]]) -> R:
        """Read the source. Raises SourceFailed, without a read if the source failed recently."""
        async with self._semaphore:
            self._refuse_while_paused()
            try:
                async with self._limits.slot(self.source.tenant_id), asyncio.timeout(READ_TIMEOUT_SECONDS):
                    result = await read()
            except TimeoutError:
                problem = f"No answer within {READ_TIMEOUT_SECONDS:g} s."
                self._breaker.record_failure(problem)
                raise SourceFailed(problem) from None
            except SourceFailed as error:
                answers = isinstance(error, (InvalidSourceQuery, InvalidSourceValue))  # other reads may succeed
                if error.code not in UNPAUSED_FAILURES and not answers:
                    self._breaker.record_failure(error.message)
                raise
            self._breaker.record_success()
            return result

    def _refuse_while_paused(self) -> None:
        if (seconds := self._breaker.remaining_seconds()) > 0:
            raise SourceFailed(f"Not read for another {seconds:.0f} s after a failure: {self._breaker.reason}")
