"""Pooled connections on which the network went silent do not delay new connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import uvloop

from timebell.errors import StoreUnreachable
from timebell.store.dialects.postgres.server import PostgresServer
from timebell.store.dialects.postgres.store import PostgresStore

COUNT = 6
TIMEOUT_SECONDS = 10.0  # seconds; to end each silent one in good order takes longer


class Relay:
    """A TCP relay whose connections can be silenced or cut."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self.clients: list[asyncio.StreamWriter] = []
        self._servers: list[asyncio.StreamWriter] = []
        self._ways: set[asyncio.Task[None]] = set()
        self.last: asyncio.StreamWriter | None = None
        """Of who spoke last."""
        self.silence_at: bytes | None = None
        """What to wait for before all open connections are silenced."""

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        self.silence()
        for writer in (*self.clients, *self._servers):
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    def silence(self) -> None:
        """Silence all open connections."""
        for way in self._ways:
            way.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.append(writer)
        there, back = await asyncio.open_connection(*self._to)
        self._servers.append(back)
        for source, sink in ((reader, back), (there, writer)):
            way = asyncio.create_task(self._pass(source, sink, writer))
            self._ways.add(way)
            way.add_done_callback(self._ways.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                self.last = client
                if self.silence_at is not None and self.silence_at in data:
                    self.silence()
                    return
                sink.write(data)
                await sink.drain()
            sink.close()


def test_a_cut_connection_is_replaced_without_waiting_for_silent_ones(postgres_url: str) -> None:
    async def body() -> datetime:
        parts = urlsplit(postgres_url)
        relay = Relay(parts.hostname or "", parts.port or 5432)
        port = await relay.start()
        store = PostgresStore(urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}")))
        try:
            await asyncio.gather(*(store.read_clock() for _ in range(COUNT)))
            await store.read_clock()  # on one that the next takes, too
            relay.silence()
            assert relay.last is not None
            relay.last.transport.abort()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while True:
                    with suppress(StoreUnreachable):
                        return await store.read_clock()
        finally:
            await store.close()
            await relay.close()

    assert asyncio.run(body()).tzinfo is not None


def test_a_connection_that_goes_silent_directly_after_it_was_opened_ends_within_the_connect_timeout(
    postgres_url: str,
) -> None:
    async def body() -> None:
        parts = urlsplit(postgres_url)
        relay = Relay(parts.hostname or "", parts.port or 5432)
        relay.silence_at = b"pg_postmaster_start_time"  # of the first statement
        port = await relay.start()
        netloc = f"{parts.username}@127.0.0.1:{port}"
        server = PostgresServer(urlunsplit(parts._replace(netloc=netloc, query="connect_timeout=1")))
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS) as deadline:
                with pytest.raises(TimeoutError):
                    await server.connect(command_timeout=2 * TIMEOUT_SECONDS)
            assert not deadline.expired()
        finally:
            await relay.close()

    asyncio.run(body())


def test_a_probe_ignores_connections_that_were_closed_meanwhile(postgres_url: str) -> None:
    async def body() -> None:
        server = PostgresServer(postgres_url)
        connection = await server.connect()
        connection.terminate()
        assert await server.probe(lambda: [connection]) is None

    asyncio.run(body())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_that_is_lost_as_it_is_opened_is_an_error_of_the_connection(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]
) -> None:
    connect = asyncpg.connect

    async def connect_and_lose(*args: Any, **options: Any) -> Any:
        connection = await connect(*args, **options)
        connection.terminate()
        await asyncio.sleep(0)
        return connection

    async def body() -> None:
        with pytest.raises(asyncpg.InterfaceError):
            await PostgresServer(postgres_url).connect()

    with monkeypatch.context() as patched:
        patched.setattr(asyncpg, "connect", connect_and_lose)
        run(body())


def test_a_slower_attempt_to_connect_is_not_cancelled_and_its_connection_closed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were cancelled at its beginning, asyncio would log an unretrieved error of asyncpg."""
    connect, connected = asyncpg.connect, asyncio.Event()
    attempts: list[asyncio.Task[Any]] = []

    async def connect_second_first(*args: Any, **options: Any) -> Any:
        attempt = asyncio.current_task()
        assert attempt is not None
        attempts.append(attempt)
        if attempt is attempts[0]:
            await connected.wait()
        return await connect(*args, **options)

    async def body() -> None:
        connection = await PostgresServer(postgres_url).connect()
        connected.set()
        assert (await attempts[0]).is_closed()
        assert not connection.is_closed()
        connection.terminate()

    with monkeypatch.context() as patched:
        patched.setattr(asyncpg, "connect", connect_second_first)
        patched.setattr("timebell.store.dialects.postgres.server.NEXT_ATTEMPT_SECONDS", 0.05)
        asyncio.run(body())
