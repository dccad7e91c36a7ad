"""Connections to Redis, what their errors mean, and marks that tell whether a Redis still has what it was given."""

from __future__ import annotations

from collections.abc import Sequence

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from timebell.errors import InvalidInput
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.brokers.broker import message_refused, refused, unreachable

MARK_SECONDS = 7 * 86_400
"""A mark is renewed at each look of the reconciler; only if none looks for so long does it count as lost."""
CONNECT_SECONDS = 5.0
MOST = 20  # connections; a burst waits for one, within the time that a confirmation may take


class Connections:
    """One pool of connections a URL."""

    def __init__(self) -> None:
        self._open: dict[str, Redis] = {}

    def to(self, url: str) -> Redis:
        """Connects when it is used. Raises InvalidInput (BROKER_URL_INVALID)."""
        if url not in self._open:
            try:
                # One more try at once is for a connection that was closed while it idled.
                pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
                    url, decode_responses=True, retry=Retry(NoBackoff(), 1), socket_connect_timeout=CONNECT_SECONDS,
                    max_connections=MOST, timeout=None,
                )  # fmt: skip
                self._open[url] = Redis.from_pool(pool)
            except ValueError as bad:
                raise InvalidInput(
                    "The URL of the Redis connection is not one.", code="BROKER_URL_INVALID",
                    fix="Use redis://user:password@host:6379/0, or rediss:// with TLS.",
                ) from bad  # fmt: skip
        return self._open[url]

    async def close(self) -> None:
        """All of them."""
        for client in self._open.values():
            await client.aclose()
        self._open.clear()


def failure(error: Exception) -> Outcome | None:
    """What an error of redis-py means; None if it is none."""
    if isinstance(error, InvalidInput):
        return refused(error.message.rstrip("."))
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return refused("wrong user or password, or without the permission")
    if isinstance(error, exceptions.BusyLoadingError | exceptions.ReadOnlyError | exceptions.ClusterDownError):
        return unreachable("it is starting, or another server has taken over")
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error):  # the latter: scripts
        return unreachable("its memory is full")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return unreachable("no connection")
    if isinstance(error, exceptions.ResponseError):
        return message_refused(str(error)[:200])
    return None


def mark_of(delivery: Delivery) -> str:
    """The key of the mark of an attempt's message."""
    return f"timebell:sent:{message_id(delivery)}:{delivery.attempt}"


async def unmarked(client: Redis, sent: Sequence[Delivery]) -> set[str]:
    """The ids of jobs whose mark is gone, and so all else that this Redis held; the other marks are renewed."""
    async with client.pipeline(transaction=False) as pipe:
        for delivery in sent:
            pipe.expire(mark_of(delivery), MARK_SECONDS)
        kept = await pipe.execute()
    return {delivery.job_id for delivery, there in zip(sent, kept, strict=True) if not there}
