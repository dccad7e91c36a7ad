"""Connections of the HTTP server: their number, the size of a request head, and the time to send it or to read."""

from __future__ import annotations

import asyncio
import re
import resource
import sys
from collections import Counter
from http import HTTPStatus
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from timebell.api.client_address import client_network
from timebell.api.problems import problem_response

MAX_CONNECTIONS = 5000
MAX_HEAD_BYTES = 16 * 1024
HEAD_TOO_LARGE = f"The URL and the headers exceed {MAX_HEAD_BYTES:,} bytes."
HEAD_TIMEOUT_SECONDS = 10.0  # to send a complete request head
READ_TIMEOUT_SECONDS = 60.0  # without reading any part of a response
HTTP2_OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)


def connection_limit() -> int:
    """Return how many connections a server accepts: at most half of the files that this process may open.

    The other half is for the database and the deliveries of the engine.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


class OpenConnections:
    """The open connections of a server by client network.

    When there are too many, the network with most of them loses the one that has been without a complete request for
    the longest time. So a client that opens connections and does not use them closes only its own.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[LimitedProtocol, None]] = {}
        self._total = 0

    def add(self, connection: LimitedProtocol) -> None:
        """Count a new connection, and close one if there are too many now."""
        self._open[connection.network] += 1
        self._total += 1
        self.note_idle(connection)
        if self._total > self._max_connections:
            busiest = max(self._idle, key=self._open.__getitem__)
            victim = next(iter(self._idle[busiest]))
            self.remove(victim)
            victim.transport.abort()

    def remove(self, connection: LimitedProtocol) -> None:
        """Forget a connection, unless that has happened."""
        if connection.is_counted:
            connection.is_counted = False
            self.note_busy(connection)
            self._total -= 1
            self._open[connection.network] -= 1
            if not self._open[connection.network]:
                del self._open[connection.network]

    def note_idle(self, connection: LimitedProtocol) -> None:
        """Note that a connection has no complete request."""
        self._idle.setdefault(connection.network, {})[connection] = None

    def note_busy(self, connection: LimitedProtocol) -> None:
        """Note that the request of a connection is complete."""
        idle = self._idle.get(connection.network, {})
        if connection in idle:
            del idle[connection]
            if not idle:
                del self._idle[connection.network]


class ResponseUntilClose(RequestResponseCycle):
    """Response to an HTTP/1.0 client: without a length, it ends with the connection, as 1.0 has no chunks."""

    async def send(self, message: Message) -> None:  # type: ignore[override]
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding, self.expected_content_length = False, sys.maxsize
        elif self.chunked_encoding is False and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]


class LimitedProtocol(HttpToolsProtocol):
    """Refuse too long request heads; close a connection whose client does not send a head or read the response in time.

    HEAD_TIMEOUT_SECONDS count from the start of the connection, and from the end of each response. The body of a
    request that was answered already does not extend them.
    """

    def __init__(self, connections: OpenConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        # `_refuse_head` in the server refuses requests with two lengths instead of the parser, because it has a code.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_chunked_length=True)
        self._connections = connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._head_size: int | None = 0
        """Bytes received of an incomplete head, including the rest of their packets; None during a body."""
        self.network = ""
        self.is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.network, self.is_counted = client_network(self.client[0] if self.client else ""), True
        self._await_head()
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._head_size is not None:
            self._head_size += len(data)
            if b"h2c" in data:
                data = _remove_http2_offer(data)
        super().data_received(data)
        if self._is_head_too_large() and not self.transport.is_closing():
            self.send_400_response("")
        self._follow_request()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_size = None
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = ResponseUntilClose  # the protocol offers no other way; its task has not begun

    def on_message_complete(self) -> None:
        self._head_size = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._await_head()
        if self.is_counted:
            self._connections.note_idle(self)
        super().on_response_complete()  # may begin the next request, if the client has sent it already
        self._follow_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self._connections.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that is too long, or that the parser refuses, and close the connection."""
        close = {"Connection": "close"}
        if self._is_head_too_large():
            response = problem_response(431, "HEAD_TOO_LARGE", HEAD_TOO_LARGE, close)
        else:
            response = problem_response(400, "INVALID_HTTP", "The request is not valid HTTP.", close)
        lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()

    def _is_head_too_large(self) -> bool:
        return self._head_size is not None and self._head_size > MAX_HEAD_BYTES

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.close)

    def _follow_request(self) -> None:
        """Note whether a request has begun, and whether it is complete."""
        if self.cycle is None or self.cycle.response_complete:
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self.is_counted and not self.cycle.more_body:
            self._connections.note_busy(self)

    def _await_reading(self, unread_bytes: int) -> None:
        def check() -> None:
            still_unread = self.transport.get_write_buffer_size()
            if still_unread >= unread_bytes:
                self.transport.abort()
            else:
                self._await_reading(still_unread)

        self._read_timer = self.loop.call_later(READ_TIMEOUT_SECONDS, check)


def _remove_http2_offer(data: bytes) -> bytes:
    """Return data that begins within a head without its offer of HTTP/2, which a server may ignore.

    Java's client makes this offer in each request over a plain connection, and the parser would discard its body.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return HTTP2_OFFER.sub(b"", head + b"\r\n").removesuffix(b"\r\n") + end + rest
