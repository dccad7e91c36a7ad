"""The line of the fake FCM: HTTP/2 and HTTP/1.1 over TLS, as a server speaks them, at little cost.

HTTP/2 by RFC 9113, cut to what one needs whose requests are small POSTs: frames by hand, header blocks by `hpack`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

from hpack import Decoder, Encoder

from timebell.testing.fcm.rules import Reply

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REFUSED_STREAM, NO_ERROR = 7, 0
WINDOW = 1 << 24
# Those of Google's front ends, so that a client has as much to read.
ALWAYS = [("content-type", "application/json; charset=UTF-8"), ("vary", "Origin, X-Origin, Referer"),
          ("server", "scaffolding on HTTPServer2"), ("x-xss-protection", "0"), ("x-frame-options", "SAMEORIGIN"),
          ("x-content-type-options", "nosniff")]  # fmt: skip

Answer = Callable[[str, str, str, bytes], Reply]
"""(method, path, authorization, body) to a reply."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class Line(asyncio.Protocol):
    """One connection; which of the two protocols is spoken is agreed upon in TLS."""

    def __init__(self, answer: Answer, streams: int, lines: set[Line]) -> None:
        self.answer, self.streams, self.lines = answer, streams, lines
        self.spoken: Http1 | Http2 | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in Protocol."""
        self.transport = transport  # type: ignore[assignment]
        self.lines.add(self)
        secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        is_two = secure is not None and secure.selected_alpn_protocol() == "h2"
        self.spoken = Http2(self) if is_two else Http1(self)

    def connection_lost(self, failed: Exception | None) -> None:
        """As in Protocol."""
        self.lines.discard(self)

    def data_received(self, data: bytes) -> None:
        """As in Protocol."""
        assert self.spoken is not None
        self.spoken.feed(data)

    def later(self, delay: float, do: Callable[[], None]) -> None:
        """In so many seconds, if there still is a connection."""
        asyncio.get_running_loop().call_later(delay, lambda: None if self.transport.is_closing() else do())


class Http1:
    """Requests one after another, each with a Content-Length."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Answer every request that is whole."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            first, *rest = bytes(self.buffer[:end]).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
            whole = end + 4 + int(headers.get("content-length", "0"))
            if len(self.buffer) < whole:
                return
            body = bytes(self.buffer[end + 4 : whole])
            del self.buffer[:whole]
            method, path, _ = first.split(" ", 2)
            self._reply(self.line.answer(method, path, headers.get("authorization", ""), body))

    def _reply(self, reply: Reply) -> None:
        if reply.delay:
            delay, reply.delay = reply.delay, 0.0
            self.line.later(delay, lambda: self._reply(reply))
        elif reply.fault in ("DROP", "REFUSE", "GOAWAY"):
            self.line.transport.abort()
        elif reply.fault is None:
            headers = "".join(f"{name}: {value}\r\n" for name, value in (dict(ALWAYS) | dict(reply.headers)).items())
            head = f"HTTP/1.1 {reply.status} \r\n{headers}content-length: {len(reply.body)}\r\n\r\n"
            self.line.transport.write(head.encode() + reply.body)


class Http2:
    """Many requests at once on one connection."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.buffer = bytearray()
        self.greeted = False
        self.decoder, self.encoder = Decoder(), Encoder()
        self.decoder.max_allowed_table_size = 4096
        self.known: dict[bytes, dict[str, str]] = {}
        self.heads: dict[bytes, bytes] = {}
        self.open: dict[int, tuple[dict[str, str], bytearray]] = {}
        self.block, self.block_of, self.block_flags = bytearray(), 0, 0
        self.last = 0
        self.away: int | None = None
        self.unread = 0
        self.window = 65_535
        self.waiting: deque[bytes] = deque()
        self.out = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what came, answer what is whole, in one write."""
        self.buffer += data
        if not self.greeted:
            if len(self.buffer) < len(PREFACE):
                return
            del self.buffer[: len(PREFACE)]
            self.greeted = True
            settings = b"\x00\x03" + self.line.streams.to_bytes(4, "big") + b"\x00\x04" + WINDOW.to_bytes(4, "big")
            self.out += frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, WINDOW.to_bytes(4, "big"))
        buffer, at = self.buffer, 0
        while len(buffer) - at >= 9 and not self.line.transport.is_closing():
            size = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + size:
                break
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big") & 0x7FFFFFFF
            self._frame(buffer[at + 3], buffer[at + 4], stream, bytes(buffer[at + 9 : at + 9 + size]))
            at += 9 + size
        del buffer[:at]
        self._flush()

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._data(flags, stream, payload)
        elif kind in (HEADERS, CONTINUATION):
            if kind == HEADERS:
                self.block, self.block_of, self.block_flags = bytearray(), stream, flags
                payload = _unpadded(payload, flags)[5 if flags & PRIORITY else 0 :]
            self.block += payload
            if flags & END_HEADERS:
                self._headers()
        elif kind == SETTINGS and not flags & ACK:
            self.out += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self.out += frame(PING, ACK, 0, payload)
        elif kind == RST_STREAM:
            self.open.pop(stream, None)
        elif kind == WINDOW_UPDATE and stream == 0:
            self.window += int.from_bytes(payload, "big")

    def _headers(self) -> None:
        block = bytes(self.block)
        headers = self.known.get(block)
        if headers is None:
            table = self.decoder.header_table
            before = tuple(table.dynamic_entries)
            headers = {_text(name): _text(value) for name, value in self.decoder.decode(block)}
            if tuple(table.dynamic_entries) == before:  # the same bytes will say the same again
                self.known[block] = headers
            else:
                self.known.clear()
        if self.away is not None and self.block_of > self.away:
            return
        self.last = max(self.last, self.block_of)
        if len(self.open) >= self.line.streams:
            self.out += frame(RST_STREAM, 0, self.block_of, REFUSED_STREAM.to_bytes(4, "big"))
            return
        self.open[self.block_of] = headers, bytearray()
        if self.block_flags & END_STREAM:
            self._answer(self.block_of)

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        self.unread += len(payload)
        if self.unread > WINDOW // 2:
            self.out += frame(WINDOW_UPDATE, 0, 0, self.unread.to_bytes(4, "big"))
            self.unread = 0
        if stream in self.open:
            self.open[stream][1].extend(_unpadded(payload, flags))
            if flags & END_STREAM:
                self._answer(stream)

    def _answer(self, stream: int) -> None:
        headers, body = self.open[stream]
        answer = self.line.answer(headers[":method"], headers[":path"], headers.get("authorization", ""), bytes(body))
        if answer.delay:

            def late() -> None:
                self._reply(stream, answer)
                self._flush()

            self.line.later(answer.delay, late)
        else:
            self._reply(stream, answer)

    def _reply(self, stream: int, reply: Reply) -> None:
        if stream not in self.open or reply.fault == "HANG":
            return
        del self.open[stream]
        if reply.fault == "DROP":
            self.line.transport.abort()
        elif reply.fault == "REFUSE":
            self.out += frame(RST_STREAM, 0, stream, REFUSED_STREAM.to_bytes(4, "big"))
        elif reply.fault == "GOAWAY":  # this one was not processed, those before it were
            self.goaway(stream - 2)
            self._flush()
            self.line.transport.close()
        else:
            head = frame(HEADERS, END_HEADERS, stream, self._head(reply))
            self.waiting.append(head + frame(DATA, END_STREAM, stream, reply.body))

    def goaway(self, last: int) -> None:
        """No stream above `last` was, or will be, processed."""
        self.away = max(0, last)
        self.out += frame(GOAWAY, 0, 0, self.away.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big"))

    def _head(self, reply: Reply) -> bytes:
        if reply.headers or reply.status != 200:
            headers = dict(ALWAYS) | dict(reply.headers)
            rest = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers.items())
            return b"\x08" + _literal(str(reply.status)) + rest
        usual = self.heads.get(b"")
        if usual is None:
            usual = self.encoder.encode([(":status", "200"), *ALWAYS])
            if b"first" in self.heads:  # the table has it all by now, so the next one is the same
                self.heads[b""] = usual
            self.heads[b"first"] = usual
        return usual

    def _flush(self) -> None:
        while self.waiting and self.window >= len(self.waiting[0]):
            ready = self.waiting.popleft()
            self.window -= len(ready)  # a little more than its DATA
            self.out += ready
        if self.out and not self.line.transport.is_closing():
            self.line.transport.write(bytes(self.out))
        self.out.clear()


def _unpadded(payload: bytes, flags: int) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _literal(text: str) -> bytes:
    """A string of HPACK, not compressed, of at most 126 bytes."""
    raw = text.encode("latin-1")[:126]
    return bytes((len(raw),)) + raw
