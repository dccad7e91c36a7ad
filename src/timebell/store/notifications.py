"""How hints get from one process to all others that listen: PostgreSQL's NOTIFY, or a channel of a Redis.

A hint is a short text. It reaches who listens when it is sent, once at most: who is away does not get it later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import orjson

from timebell.errors import InvalidInput, Refused, StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

CHANNEL = "timebell_arrived"
ASK_EVERY = 5.0  # seconds
ASKED_FOR = 15.0  # seconds in which hints are sent after somebody asked for them
PATIENCE = 5.0  # seconds
ARRIVALS = "arrivals"
"""The word by which listeners ask the nodes of a PostgreSQL to send hints."""

Take = Callable[[str], None]


class Bridge(Protocol):
    """One way between processes."""

    on_request: bool
    """Whether hints are sent only while somebody asks for them."""

    async def tell(self, texts: list[str]) -> None:
        """Send hints. Raises whatever its driver raises."""

    async def connect(self, take: Take) -> Callable[[], Awaitable[None]]:
        """Listen: `take` is called with every text. Returns what looks after the connection: call it again and again,
        it returns when it was time to and raises when the connection is lost. Raises StoreUnreachable."""

    async def close(self) -> None:
        """Listen no more."""


def bridge_of(url: str | None, store: Store) -> Bridge | None:
    """The bridge of an installation: the Redis it names, or its PostgreSQL; None on SQLite.

    Raises InvalidInput (ARRIVALS_URL_INVALID), Refused (EXTRA_MISSING).
    """
    if url is not None:
        return RedisBridge(url)
    address = getattr(store, "url", "")
    return PostgresBridge(store, address) if store.many_nodes and address.startswith("postgres") else None


TELL = Statement("WITH $rows SELECT pg_notify('timebell_arrived', hint) FROM d", hint="text")
ASK = "SELECT pg_notify('timebell', 'arrivals')"


def _tell(tx: Transaction, texts: list[str]) -> None:
    tx.fetch(TELL, [{"hint": text} for text in texts])


class PostgresBridge:
    """NOTIFY, which takes a lock over all commits: so hints are gathered, and sent only when somebody asked."""

    on_request = True

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        self._url = url
        self._connection: Any = None

    async def tell(self, texts: list[str]) -> None:
        """As in Bridge."""
        await self._store.hot(_tell, texts)

    async def connect(self, take: Take) -> Callable[[], Awaitable[None]]:
        """As in Bridge. A connection of its own, which a pooler in transaction mode cannot give."""
        import asyncpg

        from timebell.store.dialects.postgres.store import plain, unreachable

        try:
            connection = await asyncpg.connect(plain(self._url), timeout=PATIENCE, command_timeout=PATIENCE)
            self._connection = connection
            await connection.add_listener(CHANNEL, lambda *heard: take(str(heard[-1])))
            await connection.execute(ASK)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as failed:
            raise unreachable(self._url, failed) from failed

        async def ask() -> None:
            await connection.execute(ASK)

        return ask

    async def close(self) -> None:
        """As in Bridge."""
        if self._connection is not None:
            with suppress(Exception):
                await self._connection.close(timeout=1)
            self._connection = None


class RedisBridge:
    """PUBLISH, which costs next to nothing where nobody listens."""

    on_request = False

    def __init__(self, url: str) -> None:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise InvalidInput(
                "TIMEBELL_ARRIVALS_URL is no URL of a Redis.", code="ARRIVALS_URL_INVALID",
                fix="Write it like redis://host:6379; leave it out for PostgreSQL's own NOTIFY.",
            )  # fmt: skip
        try:
            import redis.asyncio as client
        except ImportError:
            raise Refused(
                "TIMEBELL_ARRIVALS_URL needs the package redis, which is not installed.", code="EXTRA_MISSING",
                fix='Run: pip install "timebell[redis]".',
            ) from None  # fmt: skip
        self._client = client.Redis.from_url(
            url, socket_connect_timeout=PATIENCE, socket_timeout=None, health_check_interval=int(ASK_EVERY)
        )
        self._heard: Any = None

    async def tell(self, texts: list[str]) -> None:
        """As in Bridge."""
        async with asyncio.timeout(PATIENCE), self._client.pipeline(transaction=False) as pipe:
            for text in texts:
                pipe.publish(CHANNEL, text)
            await pipe.execute()

    async def connect(self, take: Take) -> Callable[[], Awaitable[None]]:
        """As in Bridge."""
        self._heard = heard = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            async with asyncio.timeout(PATIENCE):
                await heard.subscribe(CHANNEL)
                await heard.get_message(ignore_subscribe_messages=False, timeout=PATIENCE)
        except Exception as failed:
            raise StoreUnreachable(
                f"The Redis of TIMEBELL_ARRIVALS_URL does not answer: {type(failed).__name__}.",
                code="ARRIVALS_UNREACHABLE", fix="Check that it runs, and the URL.",
            ) from failed  # fmt: skip

        async def read() -> None:
            message = await heard.get_message(timeout=ASK_EVERY)
            while message is not None:
                take(message["data"].decode())
                message = await heard.get_message(timeout=ASK_EVERY)
            await heard.check_health()  # type: ignore[no-untyped-call]

        return read

    async def close(self) -> None:
        """As in Bridge."""
        if self._heard is not None:
            with suppress(Exception):
                await self._heard.aclose()
            self._heard = None
        with suppress(Exception):
            await self._client.aclose()


def packed(hints: list[tuple[str, ...]], most: int = 7900) -> list[str]:
    """Hints as few texts of at most `most` bytes: NOTIFY carries less than 8000 (PostgreSQL, NOTIFY)."""
    texts: list[str] = []
    lines: list[bytes] = []
    size = 0
    for hint in hints:
        line = orjson.dumps(list(hint))
        if lines and size + len(line) + 1 > most:
            texts.append(b"\n".join(lines).decode())
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        texts.append(b"\n".join(lines).decode())
    return texts


def unpacked(text: str) -> list[tuple[str, ...]]:
    """The inverse; nothing for what is not ours."""
    try:
        found = [orjson.loads(line) for line in text.split("\n")]
    except ValueError:
        return []
    return [tuple(one) for one in found if isinstance(one, list) and all(isinstance(each, str) for each in one)]
