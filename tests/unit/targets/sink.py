"""A webhook receiver on loopback, and a target that resolves every name to it."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLDER = "whsec_" + "QUJD" * 8
NOW = datetime(2027, 3, 14, 9, 26, 53, 589793, tzinfo=UTC)
MEGABYTES = 10 * 1024 * 1024
Run = Callable[[Any], Any]
Post = Callable[..., tuple[Outcome, "Sink"]]


@dataclass
class Request:
    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Sink:
    """A receiver whose behavior is selected by the path, and which records the requests."""

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any] | None] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            raw = dict(line.split(": ", 1) for line in head[1:] if line)
            self.requests.append(Request(head[0], {k.lower(): v for k, v in raw.items()}, body))
            await getattr(self, head[0].split("/")[1].split(" ")[0].split("?")[0])(reader, writer, head[0])
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async def answer(self, writer: asyncio.StreamWriter, head: str, body: bytes = b"") -> None:
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def status(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        number = line.split("/")[2][:3]
        await self.answer(writer, f"{number} Whatever\r\nLocation: /status/200", b'{"said":"hi"}')

    async def moved(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        """Redirect with a status to the rest of the path, or to the URL in the query."""
        _, _, number, *rest = line.split(" ")[1].split("/")
        path, _, query = "/".join(["", *rest]).partition("?to=")
        await self.answer(writer, f"{number} Moved\r\nLocation: {query or path}")

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        """Answer with the headers and the body of the request."""
        request = self.requests[-1]
        await self.answer(writer, "200 OK", json.dumps(request.headers).encode() + request.body)

    async def later(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        number = line.split("/")[2][:3]
        wait = "7" if number == "429" else "Sun, 14 Mar 2027 09:27:53 GMT"
        await self.answer(writer, f"{number} Later\r\nRetry-After: {wait}")

    async def cookie(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK\r\nSet-Cookie: a=b")

    async def nul(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK", b"a\x00\xff")

    async def hang(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await reader.read()
        self.gone.set()

    async def drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        await self.repeat(writer, b"x", 0.01)

    async def dripheader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX: ")
        await self.repeat(writer, b"x", 0.01)

    async def hundred(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.repeat(writer, b"HTTP/1.1 100 Continue\r\n\r\n")

    async def headers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await self.repeat(writer, b"X-Filler: " + b"x" * 100 + b"\r\n")

    async def chunks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.repeat(writer, b"1\r\nx\r\n" * 100)  # one at a time would take seconds of a busy machine

    async def big(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK", b"x" * MEGABYTES)

    async def bomb(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK\r\nContent-Encoding: gzip", gzip.compress(bytes(MEGABYTES), mtime=0))

    async def cut(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello")
        await writer.drain()

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        """Close the connection without an answer."""

    async def reset(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await writer.drain()

    async def repeat(self, writer: asyncio.StreamWriter, data: bytes, pause: float = 0) -> None:
        while True:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(pause)


@asynccontextmanager
async def sink(tls: ssl.SSLContext | None = None, server_state: Sink | None = None) -> AsyncIterator[Sink]:
    server_state = server_state or Sink()
    if tls:
        tls.sni_callback = lambda _socket, name, _context: server_state.names.append(name)
    server = await asyncio.start_server(server_state.serve, "127.0.0.1", 0, ssl=tls)
    server_state.port = server.sockets[0].getsockname()[1]
    try:
        yield server_state
    finally:
        server.close()
        for task in server_state.tasks:
            assert task
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*filter(None, server_state.tasks), return_exceptions=True), 60)


def resolver(*answers: str) -> Callable[[str, int], Awaitable[list[str]]]:
    async def resolve(host: str, port: int) -> list[str]:
        return list(answers)

    return resolve


async def deliver_once(target: HttpTarget, delivery: Delivery, options: dict[str, Any]) -> Outcome:
    """Deliver, and close the target."""
    try:
        return await target.deliver(delivery, options)
    finally:
        await target.close()


def local(
    timeout: float = 10.0, secret: str = SECRET, tls: ssl.SSLContext | None = None, secret_key: str | None = None
) -> HttpTarget:
    """Return a target that resolves every name to this machine."""
    guard = AddressGuard(allow_private=True, allow_http=True, resolve=resolver("127.0.0.1"))
    return HttpTarget(secret, timeout=timeout, now=lambda: NOW, guard=guard, tls=tls, secret_key=secret_key)
