"""A real server on loopback, for tests that need a connection: streams, slow bodies, header limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from timebell.api import server

from .web import Web


@dataclass
class Live:
    """A running server: its port, and raw requests to it."""

    web: Web
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, raw: bytes, seconds: float = 40) -> bytes:
        """Send bytes and return the response, read until the server closes. Raises TimeoutError after `seconds`."""
        transport, collector = await asyncio.get_running_loop().create_connection(_Collector, "127.0.0.1", self.port)
        transport.write(raw)
        try:
            async with asyncio.timeout(seconds):
                await collector.closed.wait()
        finally:
            transport.close()
        return collector.received


class _Collector(asyncio.Protocol):
    """Collect all received bytes; unlike a StreamReader, it keeps them after a connection reset."""

    def __init__(self) -> None:
        self.received, self.closed = b"", asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


@asynccontextmanager
async def serve(web: Web) -> AsyncIterator[Live]:
    """Serve on a free port while the block runs."""
    listening = server.bind("127.0.0.1", 0)
    async with server.serving(web.site, listening):
        yield Live(web, listening.getsockname()[1])


@dataclass
class Listener:
    """A client of /events."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int

    async def next(self, seconds: float = 40) -> tuple[str, dict[str, Any]]:
        """Return the id and the body of the next event."""
        lines: dict[str, str] = {}
        async with asyncio.timeout(seconds):
            while True:
                line = (await self.reader.readline()).decode()
                if not line:
                    raise EOFError
                if line.strip() == "" and "data" in lines:
                    return lines.get("id", ""), json.loads(lines["data"])
                name, _, value = line.rstrip("\n").partition(": ")
                if name in ("id", "data", "event"):
                    lines[name] = value

    async def ended(self, seconds: float = 40) -> bool:
        """Wait until the server ends the stream."""
        async with asyncio.timeout(seconds):
            while await self.reader.readline():
                pass
        return True


@asynccontextmanager
async def listening(
    live: Live, query: str = "", *, key: str | None = None, last: str | None = None
) -> AsyncIterator[Listener]:
    """Listen to /events while the block runs; HTTP/1.0 avoids chunked encoding."""
    reader, writer = await live.connect()
    head = f"GET /api/v1/events{query} HTTP/1.0\r\nHost: 127.0.0.1\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    head += f"Last-Event-ID: {last}\r\n" if last else ""
    writer.write(f"{head}\r\n".encode())
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    if status == 200:
        assert await reader.readline() == b": connected\n"
    try:
        yield Listener(reader, writer, status)
    finally:
        writer.close()
