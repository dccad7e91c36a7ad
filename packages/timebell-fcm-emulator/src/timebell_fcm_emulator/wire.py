"""The network protocols of the fake FCM: a fast, minimal server for HTTP/2 and HTTP/1.1 over TLS.

HTTP/2 follows RFC 9113, reduced to the needs of small POST requests. Frames are encoded here, header blocks by `hpack`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable

from hpack import Decoder, Encoder

from timebell_fcm_emulator.rules import Reply

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REFUSED_STREAM, NO_ERROR = 7, 0
WINDOW = 1 << 24
# The response headers of Google's front ends, so that clients parse as much data as with the real service.
COMMON_HEADERS = [("content-type", "application/json; charset=UTF-8"), ("vary", "Origin, X-Origin, Referer"),
          ("server", "scaffolding on HTTPServer2"), ("x-xss-protection", "0"), ("x-frame-options", "SAMEORIGIN"),
          ("x-content-type-options", "nosniff")]  # fmt: skip

RequestHandler = Callable[[str, str, str, bytes], Reply]
"""A function that handles a request (method, path, authorization, body) and returns the reply."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class Connection(asyncio.Protocol):
    """A connection; TLS (ALPN) negotiates which of the two protocols it uses.

    `handle` is called for each request, `streams` limits concurrent HTTP/2 streams, and `connections` is the set of
    open connections, which contains this one while it is open.
    """

    def __init__(self, handle: RequestHandler, streams: int, connections: set[Connection]) -> None:
        self.handle, self.streams, self.connections = handle, streams, connections
        self.protocol: Http1 | Http2 | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.connections.add(self)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        is_http2 = tls is not None and tls.selected_alpn_protocol() == "h2"
        self.protocol = Http2(self) if is_http2 else Http1(self)

    def connection_lost(self, failed: Exception | None) -> None:
        self.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        assert self.protocol is not None
        self.protocol.feed(data)

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        """Call a function after `delay` seconds if the connection is still open."""
        asyncio.get_running_loop().call_later(delay, lambda: None if self.transport.is_closing() else function())


class Http1:
    """HTTP/1.1 with sequential requests, each with a Content-Length."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Process received bytes and reply to every complete request."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            request_line, *header_lines = bytes(self.buffer[:end]).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in header_lines)}
            size = end + 4 + int(headers.get("content-length", "0"))
            if len(self.buffer) < size:
                return
            body = bytes(self.buffer[end + 4 : size])
            del self.buffer[:size]
            method, path, _ = request_line.split(" ", 2)
            self._reply(self.connection.handle(method, path, headers.get("authorization", ""), body))

    def _reply(self, reply: Reply) -> None:
        if reply.delay:
            delay, reply.delay = reply.delay, 0.0
            self.connection.call_later(delay, lambda: self._reply(reply))
        elif reply.fault in ("DROP", "REFUSE", "GOAWAY"):
            self.connection.transport.abort()
        elif reply.fault is None:
            headers = "".join(
                f"{name}: {value}\r\n" for name, value in (dict(COMMON_HEADERS) | dict(reply.headers)).items()
            )
            head = f"HTTP/1.1 {reply.status} \r\n{headers}content-length: {len(reply.body)}\r\n\r\n"
            self.connection.transport.write(head.encode() + reply.body)


class Http2:
    """HTTP/2 with concurrent requests on one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.preface_received = False
        self.decoder, self.encoder = Decoder(), Encoder()
        self.decoder.max_allowed_table_size = 4096
        self.decoded_blocks: dict[bytes, dict[str, str]] = {}
        self.encoded_heads: dict[bytes, bytes] = {}
        self.open_streams: dict[int, tuple[dict[str, str], bytearray]] = {}
        self.block, self.block_stream, self.block_flags = bytearray(), 0, 0
        self.last_stream = 0
        self.goaway_stream: int | None = None
        self.unacknowledged_bytes = 0
        self.window = 65_535
        self.pending_replies: deque[bytes] = deque()
        self.output = bytearray()

    def feed(self, data: bytes) -> None:
        """Process received bytes, reply to complete requests, and send all output in one write."""
        self.buffer += data
        if not self.preface_received:
            if len(self.buffer) < len(PREFACE):
                return
            del self.buffer[: len(PREFACE)]
            self.preface_received = True
            settings = (
                b"\x00\x03" + self.connection.streams.to_bytes(4, "big") + b"\x00\x04" + WINDOW.to_bytes(4, "big")
            )
            self.output += frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, WINDOW.to_bytes(4, "big"))
        buffer, position = self.buffer, 0
        while len(buffer) - position >= 9 and not self.connection.transport.is_closing():
            size = int.from_bytes(buffer[position : position + 3], "big")
            if len(buffer) - position < 9 + size:
                break
            stream = int.from_bytes(buffer[position + 5 : position + 9], "big") & 0x7FFFFFFF
            self._handle_frame(
                buffer[position + 3], buffer[position + 4], stream, bytes(buffer[position + 9 : position + 9 + size])
            )
            position += 9 + size
        del buffer[:position]
        self.flush()

    def _handle_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._handle_data(flags, stream, payload)
        elif kind in (HEADERS, CONTINUATION):
            if kind == HEADERS:
                self.block, self.block_stream, self.block_flags = bytearray(), stream, flags
                payload = _unpadded(payload, flags)[5 if flags & PRIORITY else 0 :]
            self.block += payload
            if flags & END_HEADERS:
                self._handle_headers()
        elif kind == SETTINGS and not flags & ACK:
            self.output += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self.output += frame(PING, ACK, 0, payload)
        elif kind == RST_STREAM:
            self.open_streams.pop(stream, None)
        elif kind == WINDOW_UPDATE and stream == 0:
            self.window += int.from_bytes(payload, "big")

    def _handle_headers(self) -> None:
        block = bytes(self.block)
        headers = self.decoded_blocks.get(block)
        if headers is None:
            table = self.decoder.header_table
            entries_before = tuple(table.dynamic_entries)
            headers = {_text(name): _text(value) for name, value in self.decoder.decode(block)}
            if (
                tuple(table.dynamic_entries) == entries_before
            ):  # the block does not change the table, so it always decodes to the same headers
                self.decoded_blocks[block] = headers
            else:
                self.decoded_blocks.clear()
        if self.goaway_stream is not None and self.block_stream > self.goaway_stream:
            return
        self.last_stream = max(self.last_stream, self.block_stream)
        if len(self.open_streams) >= self.connection.streams:
            self.output += frame(RST_STREAM, 0, self.block_stream, REFUSED_STREAM.to_bytes(4, "big"))
            return
        self.open_streams[self.block_stream] = headers, bytearray()
        if self.block_flags & END_STREAM:
            self._handle_request(self.block_stream)

    def _handle_data(self, flags: int, stream: int, payload: bytes) -> None:
        self.unacknowledged_bytes += len(payload)
        if self.unacknowledged_bytes > WINDOW // 2:
            self.output += frame(WINDOW_UPDATE, 0, 0, self.unacknowledged_bytes.to_bytes(4, "big"))
            self.unacknowledged_bytes = 0
        if stream in self.open_streams:
            self.open_streams[stream][1].extend(_unpadded(payload, flags))
            if flags & END_STREAM:
                self._handle_request(stream)

    def _handle_request(self, stream: int) -> None:
        headers, body = self.open_streams[stream]
        reply = self.connection.handle(
            headers[":method"], headers[":path"], headers.get("authorization", ""), bytes(body)
        )
        if reply.delay:

            def reply_later() -> None:
                self._reply(stream, reply)
                self.flush()

            self.connection.call_later(reply.delay, reply_later)
        else:
            self._reply(stream, reply)

    def _reply(self, stream: int, reply: Reply) -> None:
        if stream not in self.open_streams or reply.fault == "HANG":
            return
        del self.open_streams[stream]
        if reply.fault == "DROP":
            self.connection.transport.abort()
        elif reply.fault == "REFUSE":
            self.output += frame(RST_STREAM, 0, stream, REFUSED_STREAM.to_bytes(4, "big"))
        elif reply.fault == "GOAWAY":  # the stream was not processed, but all earlier ones were
            self.send_goaway(stream - 2)
            self.flush()
            self.connection.transport.close()
        else:
            head = frame(HEADERS, END_HEADERS, stream, self._encode_head(reply))
            self.pending_replies.append(head + frame(DATA, END_STREAM, stream, reply.body))

    def send_goaway(self, last: int) -> None:
        """Send GOAWAY: no stream above `last` was or will be processed."""
        self.goaway_stream = max(0, last)
        self.output += frame(GOAWAY, 0, 0, self.goaway_stream.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big"))

    def _encode_head(self, reply: Reply) -> bytes:
        if reply.headers or reply.status != 200:
            headers = dict(COMMON_HEADERS) | dict(reply.headers)
            encoded = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers.items())
            return b"\x08" + _literal(str(reply.status)) + encoded
        head = self.encoded_heads.get(b"")
        if head is None:
            head = self.encoder.encode([(":status", "200"), *COMMON_HEADERS])
            if (
                b"first" in self.encoded_heads
            ):  # all headers are in the dynamic table now, so the encoding no longer changes
                self.encoded_heads[b""] = head
            self.encoded_heads[b"first"] = head
        return head

    def flush(self) -> None:
        """Send pending replies that fit into the flow control window, and all other output."""
        while self.pending_replies and self.window >= len(self.pending_replies[0]):
            reply = self.pending_replies.popleft()
            self.window -= len(reply)  # includes frame headers, so the window is slightly underestimated
            self.output += reply
        if self.output and not self.connection.transport.is_closing():
            self.connection.transport.write(bytes(self.output))
        self.output.clear()


def _unpadded(payload: bytes, flags: int) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _literal(text: str) -> bytes:
    """Encode an uncompressed HPACK string of at most 126 bytes."""
    raw = text.encode("latin-1")[:126]
    return bytes((len(raw),)) + raw
