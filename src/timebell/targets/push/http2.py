"""A connection that carries many small POSTs at once: the client's side of HTTP/2 (RFC 9113), cut to what that takes.

Header blocks are read and written by `hpack`. The `h2` library is not used because it refuses every answer that comes
after a GOAWAY, although those for the streams before are on their way: each time a server asks for a new connection,
messages would be left with an unknown fate. (It also takes three times as long.)

Each request ends in one of: a Response; UNPROCESSED, where the protocol proves that the server did nothing with it
(REFUSED_STREAM, a GOAWAY below it: sections 8.7 and 6.8); or Broken, where nobody knows.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from hpack import Decoder, Encoder, HPACKError

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 2, 3, 4, 5
REFUSED_STREAM, CANCEL = 7, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW = 1 << 24
"""What the server may send before we say that we have read it."""
LONGEST_FRAME = 16_384
LONGEST_BODY = 64 * 1024
LAST_STREAM = 2**31 - 3
KNOWN_BLOCKS = 1_000

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer will not come. `code` is UPPER_SNAKE."""

    code: str
    why: str


UNPROCESSED = object()
Ended = Callable[[Any, Any], None]
"""Called with what `post` was given, and a Response, UNPROCESSED or a Broken."""


class _Stream:
    __slots__ = ("began", "body", "headers", "item", "status", "unsent", "window")

    def __init__(self, item: Any, began: float, unsent: bytes, window: int) -> None:
        self.item, self.began, self.unsent, self.window = item, began, unsent, window
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""


class ProtocolError(Exception):
    """The server does not speak HTTP/2 as it should."""


class Line(asyncio.Protocol):
    """One connection. `ready` once the server has said what it allows; then `room` says how many more requests fit.

    `changed` is called after each batch of what happened: answers came, room was made, the line is gone.
    """

    def __init__(self, headers: Headers, ended: Ended, changed: Callable[[Line], None], most: int) -> None:
        self.ready = self.leaving = self.gone = False
        self.streams: dict[int, _Stream] = {}
        self.idle_since = 0.0
        self._headers, self._ended, self._changed, self._most = headers, ended, changed, most
        self._transport: asyncio.Transport
        self.closed: asyncio.Future[None]
        """Done when the network has let go of it."""
        self._encoder, self._decoder = Encoder(), Decoder()
        self._block: bytes | None = None
        self._known: dict[bytes, dict[str, str]] = {}
        self._next = 1
        self._allowed = 100
        self._window, self._stream_window, self._frame_size = 65_535, 65_535, LONGEST_FRAME
        self._paused = False
        self._in, self._out = bytearray(), bytearray()
        self._head, self._head_of, self._head_flags = bytearray(), 0, 0
        self._unsaid = 0

    @property
    def room(self) -> int:
        """How many requests may be posted now."""
        if not self.ready or self.leaving or self.gone or self._paused:
            return 0
        return min(self._most, self._allowed) - len(self.streams)

    @property
    def used(self) -> bool:
        """Whether it ever carried a request."""
        return self._next > 1

    def speak(self, headers: Headers) -> None:
        """The headers of requests from now on, pseudo-headers first."""
        if headers != self._headers:
            self._headers, self._block = headers, None

    def post(self, body: bytes, item: Any, now: float) -> None:
        """Send one; only with `room`. It goes out with `flush`."""
        stream, self._next = self._next, self._next + 2
        if self._next > LAST_STREAM:
            self.leaving = True
        block = self._block or self._encode()
        flags = END_HEADERS
        self._out += len(block).to_bytes(3, "big") + bytes((HEADERS, flags)) + stream.to_bytes(4, "big") + block
        opened = self.streams[stream] = _Stream(item, now, body, self._stream_window)
        self._send_body(stream, opened)

    def flush(self) -> None:
        """Hand what was posted to the network."""
        if self._out and not self.gone:
            self._transport.write(bytes(self._out))
            self._out.clear()

    def give_up(self, before: float) -> None:
        """Requests that began before this time have had theirs."""
        for stream, opened in list(self.streams.items()):
            if opened.began > before:
                break  # they are in order
            self._out += _frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big"))
            self._end(stream, Broken("TIMEOUT", "No answer came in time."))
        self.flush()

    def close(self) -> None:
        """At once; what is under way is Broken."""
        if not self.gone:
            self._out += _frame(GOAWAY, 0, 0, bytes(8))
            self.flush()
            self._transport.close()
            self._lost("The connection was closed.")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in Protocol."""
        self._transport, self.closed = cast("asyncio.Transport", transport), asyncio.get_running_loop().create_future()
        settings = b"".join(
            name.to_bytes(2, "big") + value.to_bytes(4, "big")
            for name, value in ((ENABLE_PUSH, 0), (INITIAL_WINDOW, WINDOW))
        )  # fmt: skip
        window = (WINDOW - 65_535).to_bytes(4, "big")
        self._out += PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window)
        secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != "h2":
            self._transport.abort()
            self._lost("The server does not speak HTTP/2.")
            return
        self.flush()

    def data_received(self, data: bytes) -> None:
        """As in Protocol."""
        if self.gone:
            return
        self._in += data
        buffer, at, there = self._in, 0, len(self._in)
        try:
            while there - at >= 9:
                size = int.from_bytes(buffer[at : at + 3], "big")
                if size > LONGEST_FRAME:
                    raise ProtocolError("a frame is too long")
                if there - at < 9 + size:
                    break
                stream = int.from_bytes(buffer[at + 5 : at + 9], "big") & 0x7FFFFFFF
                self._frame(buffer[at + 3], buffer[at + 4], stream, bytes(buffer[at + 9 : at + 9 + size]))
                at += 9 + size
        except (ProtocolError, HPACKError, IndexError) as wrong:
            self._transport.abort()
            self._lost(f"The server broke the protocol: {wrong}")
            return
        del buffer[:at]
        if self.leaving and not self.streams:
            self.close()
        self._changed(self)
        self.flush()

    def pause_writing(self) -> None:
        """As in Protocol."""
        self._paused = True

    def resume_writing(self) -> None:
        """As in Protocol."""
        self._paused = False
        self._changed(self)
        self.flush()

    def eof_received(self) -> bool:
        """As in Protocol."""
        return False

    def connection_lost(self, failed: Exception | None) -> None:
        """As in Protocol."""
        self._lost("The connection was lost.")
        if not self.closed.done():
            self.closed.set_result(None)

    # What the server says

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._head_of and kind != CONTINUATION:
            raise ProtocolError("a header block was interrupted")
        if kind == DATA:
            self._data(flags, stream, payload)
        elif kind in (HEADERS, CONTINUATION):
            self._header_block(kind, flags, stream, payload)
        elif kind == SETTINGS:
            if not flags & ACK:
                self._settings(payload)
        elif kind == WINDOW_UPDATE:
            self._more_window(stream, int.from_bytes(payload[:4], "big") & 0x7FFFFFFF)
        elif kind == RST_STREAM:
            code = int.from_bytes(payload[:4], "big")
            broken = Broken("STREAM_RESET", f"The server gave the request up (HTTP/2 error {code}).")
            self._end(stream, UNPROCESSED if code == REFUSED_STREAM else broken)
        elif kind == GOAWAY:
            self._goaway(int.from_bytes(payload[:4], "big") & 0x7FFFFFFF)
        elif kind == PING:
            if not flags & ACK:
                self._out += _frame(PING, ACK, 0, payload)
        elif kind == PUSH_PROMISE:
            raise ProtocolError("it pushes")

    def _settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            name, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, 65_536)
                self._block = None
            elif name == MAX_STREAMS:
                self._allowed = value
            elif name == MAX_FRAME:
                self._frame_size = min(value, 65_536)
            elif name == INITIAL_WINDOW:
                for opened in self.streams.values():
                    opened.window += value - self._stream_window
                self._stream_window = value
        self._out += _frame(SETTINGS, ACK, 0)
        self.ready = True

    def _more_window(self, stream: int, more: int) -> None:
        if stream == 0:
            self._window += more
        elif stream in self.streams:
            self.streams[stream].window += more
        for number, opened in self.streams.items():
            if opened.unsent:
                self._send_body(number, opened)

    def _header_block(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            self._head, self._head_of, self._head_flags = bytearray(), stream, flags
            payload = payload[5:] if flags & WITH_PRIORITY else payload
        elif stream != self._head_of:
            raise ProtocolError("a header block goes on in another stream")
        self._head += payload
        if len(self._head) > LONGEST_BODY:
            raise ProtocolError("a header block is too long")
        if not flags & END_HEADERS:
            return
        self._head_of = 0
        headers = self._decode(bytes(self._head))  # of any stream: the table is one for all
        opened = self.streams.get(stream)
        if opened is None:
            return
        if opened.status < 200:  # else they are trailers
            opened.status, opened.headers = int(headers.get(":status", "0")), headers
        if self._head_flags & END_STREAM:
            self._end(stream, Response(opened.status, opened.headers, opened.body))

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        self._unsaid += len(payload)
        if self._unsaid > WINDOW // 2:
            self._out += _frame(WINDOW_UPDATE, 0, 0, self._unsaid.to_bytes(4, "big"))
            self._unsaid = 0
        opened = self.streams.get(stream)
        if opened is None:
            return
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        opened.body += payload
        if flags & END_STREAM:
            self._end(stream, Response(opened.status, opened.headers, opened.body))
        elif len(opened.body) > LONGEST_BODY:
            self._out += _frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big"))
            self._end(stream, Broken("FCM_ANSWER_UNREADABLE", "The answer is too long."))

    def _goaway(self, last: int) -> None:
        self.leaving = True
        for stream in [stream for stream in self.streams if stream > last]:
            self._end(stream, UNPROCESSED)

    # Inside

    def _end(self, stream: int, result: Any) -> None:
        opened = self.streams.pop(stream, None)
        if opened is None:
            return
        if opened.unsent and isinstance(result, Response):  # answered before it was read: take the rest back
            self._out += _frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big"))
        self._ended(opened.item, result)

    def _lost(self, why: str) -> None:
        if self.gone:
            return
        self.gone = True
        for stream in list(self.streams):
            self._end(stream, Broken("CONNECTION_LOST", why))
        self._changed(self)

    def _send_body(self, stream: int, opened: _Stream) -> None:
        """As much of it as the windows let through; the rest when they open."""
        while opened.unsent:
            size = min(len(opened.unsent), self._window, opened.window, self._frame_size)
            if size <= 0:
                return
            part, opened.unsent = opened.unsent[:size], opened.unsent[size:]
            self._window -= size
            opened.window -= size
            self._out += _frame(DATA, 0 if opened.unsent else END_STREAM, stream, part)

    def _encode(self) -> bytes:
        """Our header block. Once the server's table holds all of it, each is like the last and need not be made."""
        block = self._encoder.encode(self._headers)
        trial = copy.deepcopy(self._encoder)
        following = trial.encode(self._headers)
        if trial.header_table.dynamic_entries == self._encoder.header_table.dynamic_entries:
            self._block = following
        return block

    def _decode(self, block: bytes) -> dict[str, str]:
        """A block that leaves the table as it was says the same each time it comes, until another changes the table."""
        known = self._known.get(block)
        if known is not None:
            return known
        before = tuple(self._decoder.header_table.dynamic_entries)
        headers = {_text(name): _text(value) for name, value in self._decoder.decode(block)}
        if tuple(self._decoder.header_table.dynamic_entries) == before and len(self._known) < KNOWN_BLOCKS:
            self._known[block] = headers
        else:
            self._known.clear()
        return headers


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
