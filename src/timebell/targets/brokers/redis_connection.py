"""Redis connections, the outcomes of Redis errors, and marker keys that reveal whether Redis has lost its data."""

from __future__ import annotations

from collections.abc import Sequence

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from timebell.errors import InvalidInput
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.brokers.broker import message_refused, refused, unreachable

MARKER_TTL_SECONDS = 7 * 86_400
"""Each check of the reconciler renews the markers; they expire only if no check runs for this long."""
CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 20  # in a burst, publishes wait for a free connection, within the confirmation timeout


class RedisConnections:
    """One connection pool per URL."""

    def __init__(self) -> None:
        self._clients: dict[str, Redis] = {}

    def client_for(self, url: str) -> Redis:
        """Return the client of a URL, which connects on first use. Raises InvalidInput (INVALID_BROKER_URL)."""
        if url not in self._clients:
            try:
                # One immediate retry, for a connection that was closed while idle.
                pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
                    url, decode_responses=True, retry=Retry(NoBackoff(), 1), socket_connect_timeout=CONNECT_SECONDS,
                    max_connections=MAX_CONNECTIONS, timeout=None,
                )  # fmt: skip
                self._clients[url] = Redis.from_pool(pool)
            except ValueError as error:
                raise InvalidInput(
                    "The URL of the Redis connection is invalid.", code="INVALID_BROKER_URL",
                    fix="Use redis://user:password@host:6379/0, or rediss:// with TLS.",
                ) from error  # fmt: skip
        return self._clients[url]

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()


def outcome_of_error(error: Exception) -> Outcome | None:
    """Map an error of redis-py to an outcome; None for other errors."""
    if isinstance(error, InvalidInput):
        return refused(error.message.rstrip("."))
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return refused("the user, password or permissions are wrong")
    if isinstance(error, exceptions.BusyLoadingError | exceptions.ReadOnlyError | exceptions.ClusterDownError):
        return unreachable("the server is starting, or is not the primary")
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in str(
        error
    ):  # in scripts, only the text tells
        return unreachable("its memory is full")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return unreachable("no connection")
    if isinstance(error, exceptions.ResponseError):
        return message_refused(str(error)[:200])
    return None


def marker_key(delivery: Delivery) -> str:
    """Return the marker key of an attempt's message."""
    return f"timebell:sent:{message_id(delivery)}:{delivery.attempt}"


async def find_unmarked(client: Redis, sent: Sequence[Delivery]) -> set[str]:
    """Return the ids of jobs whose marker is gone, which means that Redis lost its data; renew the other markers."""
    async with client.pipeline(transaction=False) as pipe:
        for delivery in sent:
            pipe.expire(marker_key(delivery), MARKER_TTL_SECONDS)
        renewed = await pipe.execute()
    return {delivery.job_id for delivery, exists in zip(sent, renewed, strict=True) if not exists}
