"""Broadcast hints about jobs and events between processes, by PostgreSQL's NOTIFY or a Redis channel.

A hint is a short text. Delivery is at most once: only processes that are subscribed when it is sent receive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import orjson

from timebell.errors import InvalidInput, Refused, StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.sql import SQL
from timebell.store.transaction import Transaction

CHANNEL = "timebell_arrived"
REQUEST_INTERVAL_SECONDS = 5.0  # between two requests for hints by a subscriber
REQUEST_VALIDITY_SECONDS = 15.0  # nodes send hints for this long after a request
NOTIFICATION_TIMEOUT_SECONDS = 5.0  # to connect, and for one statement or publication
ARRIVALS_REQUEST = "arrivals"
"""The NOTIFY payload by which subscribers request hints from the nodes of a PostgreSQL database."""

OnMessage = Callable[[str], None]


class NotificationChannel(Protocol):
    """A channel between processes."""

    on_request: bool
    """True if hints are sent only while a subscriber requests them."""

    async def publish(self, texts: list[str]) -> None:
        """Publish hints. Raises the errors of its driver."""

    async def connect(self, on_message: OnMessage) -> Callable[[], Awaitable[None]]:
        """Subscribe: call `on_message` with every text. Raises StoreUnreachable.

        Returns a coroutine function that maintains the subscription. Await it repeatedly: each call performs one round
        and raises if the connection is lost.
        """

    async def close(self) -> None:
        """End the subscription and close the connection."""


def channel_for(url: str | None, store: Store) -> NotificationChannel | None:
    """Return the channel of an installation: Redis at `url`, or else its PostgreSQL database; None if it has neither.

    Raises InvalidInput (INVALID_ARRIVALS_URL), Refused (EXTRA_MISSING).
    """
    if url is not None:
        return RedisChannel(url)
    address = getattr(store, "url", "")
    return PostgresChannel(store, address) if store.multi_node and address.startswith("postgres") else None


PUBLISH = SQL("SELECT pg_notify(:channel, hint) FROM unnest(CAST(:hints AS text[])) AS hint")
REQUEST_HINTS = "SELECT pg_notify($1, 'arrivals')"


def _publish(tx: Transaction, channel: str, texts: list[str]) -> None:
    tx.run_sql(PUBLISH, channel=channel, hints=texts)


class PostgresChannel:
    """Notifications by PostgreSQL's NOTIFY.

    NOTIFY serializes all commits of the database by a global lock, so hints are batched, and sent only on request.
    """

    on_request = True

    def __init__(self, store: Store, url: str) -> None:
        from timebell.store.dialects.postgres.server import PostgresServer

        self._store = store
        self._server = PostgresServer(url)
        self._channel = self._server.channel_name(CHANNEL)
        self._connection: Any = None

    async def publish(self, texts: list[str]) -> None:
        await self._store.run_autocommit(_publish, self._channel, texts)

    async def connect(self, on_message: OnMessage) -> Callable[[], Awaitable[None]]:
        """Subscribe on a dedicated connection. Does not work through a pooler in transaction mode."""
        import asyncpg

        from timebell.store.dialects.postgres.errors import unreachable

        async def request_hints() -> None:
            await connection.execute(REQUEST_HINTS, self._server.channel_name("timebell"))

        try:
            connection = await self._server.connect(
                timeout=NOTIFICATION_TIMEOUT_SECONDS, command_timeout=NOTIFICATION_TIMEOUT_SECONDS
            )
            self._connection = connection
            await connection.add_listener(self._channel, lambda *notification: on_message(str(notification[-1])))
            await request_hints()
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise unreachable(self._server.url, error) from error

        return request_hints

    async def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                await self._connection.close(timeout=1)
            self._connection = None


class RedisChannel:
    """Notifications by Redis PUBLISH, which is cheap without subscribers, so hints are always sent."""

    on_request = False

    def __init__(self, url: str) -> None:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise InvalidInput(
                "TIMEBELL_ARRIVALS_URL is not a Redis URL.", code="INVALID_ARRIVALS_URL",
                fix="Use a URL such as redis://host:6379, or omit it to use PostgreSQL's NOTIFY.",
            )  # fmt: skip
        try:
            import redis.asyncio as client
        except ImportError:
            raise Refused(
                "TIMEBELL_ARRIVALS_URL requires the package redis, which is not installed.", code="EXTRA_MISSING",
                fix='Run: pip install "timebell[redis]".',
            ) from None  # fmt: skip
        self._client = client.Redis.from_url(
            url,
            socket_connect_timeout=NOTIFICATION_TIMEOUT_SECONDS,
            socket_timeout=None,
            health_check_interval=int(REQUEST_INTERVAL_SECONDS),
        )
        self._pubsub: Any = None

    async def publish(self, texts: list[str]) -> None:
        async with asyncio.timeout(NOTIFICATION_TIMEOUT_SECONDS), self._client.pipeline(transaction=False) as pipe:
            for text in texts:
                pipe.publish(CHANNEL, text)
            await pipe.execute()

    async def connect(self, on_message: OnMessage) -> Callable[[], Awaitable[None]]:
        self._pubsub = pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            async with asyncio.timeout(NOTIFICATION_TIMEOUT_SECONDS):
                await pubsub.subscribe(CHANNEL)
                await pubsub.get_message(ignore_subscribe_messages=False, timeout=NOTIFICATION_TIMEOUT_SECONDS)
        except Exception as error:
            raise StoreUnreachable(
                f"The Redis server of TIMEBELL_ARRIVALS_URL does not answer: {type(error).__name__}.",
                code="ARRIVALS_UNREACHABLE", fix="Check that it is running, and check the URL.",
            ) from error  # fmt: skip

        async def deliver_messages() -> None:
            message = await pubsub.get_message(timeout=REQUEST_INTERVAL_SECONDS)
            while message is not None:
                on_message(message["data"].decode())
                message = await pubsub.get_message(timeout=REQUEST_INTERVAL_SECONDS)
            await pubsub.check_health()  # type: ignore[no-untyped-call]

        return deliver_messages

    async def close(self) -> None:
        if self._pubsub is not None:
            with suppress(Exception):
                await self._pubsub.aclose()
            self._pubsub = None
        with suppress(Exception):
            await self._client.aclose()


def pack_hints(hints: list[tuple[str, ...]], max_bytes: int = 7900) -> list[str]:
    """Pack hints into as few texts of at most `max_bytes` bytes as possible.

    The payload of NOTIFY must be shorter than 8000 bytes (PostgreSQL manual, NOTIFY).
    """
    texts: list[str] = []
    lines: list[bytes] = []
    size = 0
    for hint in hints:
        line = orjson.dumps(list(hint))
        if lines and size + len(line) + 1 > max_bytes:
            texts.append(b"\n".join(lines).decode())
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        texts.append(b"\n".join(lines).decode())
    return texts


def unpack_hints(text: str) -> list[tuple[str, ...]]:
    """Unpack a text of `pack_hints`; return [] for a text in another format."""
    try:
        hints = [orjson.loads(line) for line in text.split("\n")]
    except ValueError:
        return []
    return [tuple(hint) for hint in hints if isinstance(hint, list) and all(isinstance(part, str) for part in hint)]
