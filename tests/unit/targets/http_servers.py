"""A token endpoint with an API that accepts its tokens, and a forward proxy, both on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from tests.unit.targets.sink import Sink


@dataclass
class TokenSink(Sink):
    """Issues tokens at /token and /identity; /api accepts only those that were not revoked."""

    lifetime: int | None = 3600
    forms: list[dict[str, str]] = field(default_factory=list)
    certificates: list[Any] = field(default_factory=list)
    """The client certificates of the requests for tokens."""
    accepted: set[str] = field(default_factory=set)
    refusal: str | None = None
    """The answer of the token endpoint instead of a token, such as `400 Bad Request`."""

    async def token(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self._issue(writer, "access_token")

    async def identity(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self._issue(writer, "id_token")

    async def _issue(self, writer: asyncio.StreamWriter, member: str) -> None:
        self.certificates.append(writer.get_extra_info("peercert"))
        self.forms.append(dict(parse_qsl(self.requests[-1].body.decode())))
        if self.refusal is not None:
            await self.answer(writer, self.refusal, b'{"error": "invalid_client", "error_description": "hunter2"}')
            return
        token = f"issued-token-{len(self.forms)}"
        self.accepted.add(token)
        answer = {member: token, "token_type": "Bearer", "expires_in": self.lifetime}
        await self.answer(writer, "200 OK", json.dumps(answer).encode())

    async def api(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        header = self.requests[-1].headers.get("authorization", "")
        is_accepted = header.removeprefix("Bearer ") in self.accepted
        await self.answer(writer, "200 OK" if is_accepted else "401 Unauthorized", f"you sent {header}".encode())

    @property
    def paths(self) -> list[str]:
        return [request.line.split(" ")[1].split("?")[0] for request in self.requests]


@dataclass
class ForwardProxy:
    """A proxy that supports only CONNECT, and records the requested addresses."""

    port: int = 0
    answer: str = "200 Connection established"
    destinations: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            method, destination, _ = line.split(" ")
            assert method == "CONNECT"
            self.destinations.append(destination)
            self.headers.append(dict(each.lower().split(": ", 1) for each in lines))
            if not self.answer.startswith("200"):
                writer.write(f"HTTP/1.1 {self.answer}\r\nContent-Length: 0\r\n\r\n".encode())
                return
            host, _, port = destination.rpartition(":")
            upstream_reader, upstream_writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(f"HTTP/1.1 {self.answer}\r\n\r\n".encode())
            await asyncio.gather(_pipe(reader, upstream_writer), _pipe(upstream_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError), closing(writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def forward_proxy(answer: str = "200 Connection established") -> AsyncIterator[ForwardProxy]:
    proxy = ForwardProxy(answer=answer)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
