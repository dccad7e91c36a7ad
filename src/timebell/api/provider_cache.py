"""Documents of an identity provider, cached so that neither it nor its outage slows requests down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from timebell.clock import Clock
from timebell.errors import TimebellError

log = logging.getLogger("timebell.api")

MAX_AGE_SECONDS = 3600.0  # a key that the provider withdrew is accepted no longer than this
REFETCH_INTERVAL_SECONDS = 10.0  # at least, also while tokens with unknown keys arrive or the provider is down
T = TypeVar("T")


class ProviderUnavailable(TimebellError):
    """The identity provider does not answer, or its response violates OpenID Connect.

    `reason` names internal addresses: it is for the log and `timebell doctor`, and never part of a response.
    """

    code = "IDENTITY_PROVIDER_UNAVAILABLE"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "The identity provider does not answer as it should.", fix="Try again later, or sign in another way."
        )
        self.reason = reason


class CachedDocument(Generic[T]):
    """A document of the provider, fetched by one request at a time and at most once per interval."""

    def __init__(self, clock: Clock, fetch: Callable[[], Awaitable[T]]) -> None:
        self._clock, self._fetch, self._lock = clock, fetch, asyncio.Lock()
        self._value: T | None = None
        self._fetched_at = self._tried_at = float("-inf")
        self._error: ProviderUnavailable | None = None

    async def get(self, *, newer: bool = False) -> T:
        """Return the document, if possible newer than the last one. Raises ProviderUnavailable if there is none.

        While another request fetches it, or the provider is down, the last one is returned.
        """
        if self._value is not None and not newer and (self._lock.locked() or not self._is_old()):
            return self._value
        async with self._lock:
            at = self._clock.monotonic()
            if (newer or self._is_old()) and at - self._tried_at >= REFETCH_INTERVAL_SECONDS:
                self._tried_at = at
                try:
                    self._value, self._fetched_at = await self._fetch(), at
                except ProviderUnavailable as error:
                    log.warning("could not read identity provider error=%s", error.reason)
                    self._error = error
            if self._value is None:
                raise self._error or ProviderUnavailable("the last request to it was interrupted")
            return self._value

    def _is_old(self) -> bool:
        return self._clock.monotonic() - self._fetched_at > MAX_AGE_SECONDS
