"""Minimal HTTP/2 client (RFC 9113) for many concurrent small POST requests on one connection.

Header blocks are encoded and decoded by `hpack`. The `h2` library is not used, because it rejects every response after
a GOAWAY, although responses to earlier streams are still in flight: each time a server closes a connection gracefully,
messages would be left with an unknown result. It also takes three times as long.

Each request ends with a Response; with UNPROCESSED, if the protocol proves that the server did not process it
(REFUSED_STREAM, or a GOAWAY with a lower stream id: sections 8.7 and 6.8); or with a RequestFailure, if unknown.
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
RECEIVE_WINDOW_BYTES = 1 << 24
"""Bytes that the server may send before an acknowledgement (WINDOW_UPDATE)."""
MAX_FRAME_BYTES = 16_384
MAX_BODY_BYTES = 64 * 1024
LAST_STREAM = 2**31 - 3
MAX_CACHED_BLOCKS = 1_000

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """No response will arrive. `code` is UPPER_SNAKE."""

    code: str
    reason: str


UNPROCESSED = object()
OnEnded = Callable[[Any, Any], None]
"""Called with the `item` of `post`, and a Response, UNPROCESSED or a RequestFailure."""


class _Stream:
    __slots__ = ("body", "headers", "item", "started_at", "status", "unsent", "window")

    def __init__(self, item: Any, started_at: float, unsent: bytes, window: int) -> None:
        self.item, self.started_at, self.unsent, self.window = item, started_at, unsent, window
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""


class ProtocolError(Exception):
    """The server violated HTTP/2."""


class Http2Connection(asyncio.Protocol):
    """A connection. It is `ready` after the server's SETTINGS; `capacity` is the number of requests that can be posted.

    `on_ended` is called with each result, `on_changed` after every batch of events: responses, more capacity, or the
    loss of the connection.
    """

    def __init__(
        self, headers: Headers, on_ended: OnEnded, on_changed: Callable[[Http2Connection], None], max_streams: int
    ) -> None:
        self.ready = self.draining = self.disconnected = False
        self.streams: dict[int, _Stream] = {}
        self.idle_since = 0.0
        self._headers, self._on_ended, self._on_changed, self._max_streams = headers, on_ended, on_changed, max_streams
        self._transport: asyncio.Transport
        self.closed: asyncio.Future[None]
        """Done when the transport is closed."""
        self._encoder, self._decoder = Encoder(), Decoder()
        self._cached_block: bytes | None = None
        self._decoded_blocks: dict[bytes, dict[str, str]] = {}
        self._next_stream_id = 1
        self._peer_max_streams = 100
        self._window, self._stream_window, self._frame_size = 65_535, 65_535, MAX_FRAME_BYTES
        self._paused = False
        self._receive_buffer, self._send_buffer = bytearray(), bytearray()
        self._header_buffer, self._header_stream, self._header_flags = bytearray(), 0, 0
        self._unacknowledged_bytes = 0

    @property
    def capacity(self) -> int:
        """The number of requests that may be posted now."""
        if not self.ready or self.draining or self.disconnected or self._paused:
            return 0
        return min(self._max_streams, self._peer_max_streams) - len(self.streams)

    @property
    def was_used(self) -> bool:
        """True if a request was ever posted."""
        return self._next_stream_id > 1

    def set_headers(self, headers: Headers) -> None:
        """Set the headers of subsequent requests, pseudo-headers first."""
        if headers != self._headers:
            self._headers, self._cached_block = headers, None

    def post(self, body: bytes, item: Any, now: float) -> None:
        """Buffer a request, to be sent by `flush`. Requires `capacity`; `now` is its start for `time_out`."""
        stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
        if self._next_stream_id > LAST_STREAM:
            self.draining = True
        block = self._cached_block or self._encode_headers()
        flags = END_HEADERS
        self._send_buffer += (
            len(block).to_bytes(3, "big") + bytes((HEADERS, flags)) + stream_id.to_bytes(4, "big") + block
        )
        stream = self.streams[stream_id] = _Stream(item, now, body, self._stream_window)
        self._send_body(stream_id, stream)

    def flush(self) -> None:
        """Write all buffered frames to the transport."""
        if self._send_buffer and not self.disconnected:
            self._transport.write(bytes(self._send_buffer))
            self._send_buffer.clear()

    def time_out(self, started_before: float) -> None:
        """Cancel the requests that started before this time (RequestFailure TIMEOUT)."""
        for stream_id, stream in list(self.streams.items()):
            if stream.started_at > started_before:
                break  # streams are in start order
            self._send_buffer += _encode_frame(RST_STREAM, 0, stream_id, CANCEL.to_bytes(4, "big"))
            self._finish_stream(stream_id, RequestFailure("TIMEOUT", "The server did not respond in time."))
        self.flush()

    def close(self) -> None:
        """Close immediately, without a call of `on_changed`; requests in flight end with a RequestFailure."""
        if not self.disconnected:
            self._send_buffer += _encode_frame(GOAWAY, 0, 0, bytes(8))
            self.flush()
            self._transport.close()
            self._end("The connection was closed.")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface and settings; close if the server did not select HTTP/2."""
        self._transport, self.closed = cast("asyncio.Transport", transport), asyncio.get_running_loop().create_future()
        settings = b"".join(
            name.to_bytes(2, "big") + value.to_bytes(4, "big")
            for name, value in ((ENABLE_PUSH, 0), (INITIAL_WINDOW, RECEIVE_WINDOW_BYTES))
        )  # fmt: skip
        window = (RECEIVE_WINDOW_BYTES - 65_535).to_bytes(4, "big")
        self._send_buffer += (
            PREFACE + _encode_frame(SETTINGS, 0, 0, settings) + _encode_frame(WINDOW_UPDATE, 0, 0, window)
        )
        secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != "h2":
            self._transport.abort()
            self._disconnect("The server does not support HTTP/2.")
            return
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Process the complete frames received so far."""
        if self.disconnected:
            return
        self._receive_buffer += data
        buffer, offset, available = self._receive_buffer, 0, len(self._receive_buffer)
        try:
            while available - offset >= 9:
                size = int.from_bytes(buffer[offset : offset + 3], "big")
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError("a frame is too long")
                if available - offset < 9 + size:
                    break
                stream_id = int.from_bytes(buffer[offset + 5 : offset + 9], "big") & 0x7FFFFFFF
                self._on_frame(
                    buffer[offset + 3], buffer[offset + 4], stream_id, bytes(buffer[offset + 9 : offset + 9 + size])
                )
                offset += 9 + size
        except (ProtocolError, HPACKError, IndexError) as error:
            self._transport.abort()
            self._disconnect(f"The server violated HTTP/2: {error}")
            return
        del buffer[:offset]
        if self.draining and not self.streams:
            self.close()
        self._on_changed(self)
        self.flush()

    def pause_writing(self) -> None:
        """Stop posting until the transport's buffer drains."""
        self._paused = True

    def resume_writing(self) -> None:
        """Allow posting again."""
        self._paused = False
        self._on_changed(self)
        self.flush()

    def eof_received(self) -> bool:
        """Let asyncio close the transport."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests and mark the connection as closed."""
        self._disconnect("The connection was lost.")
        if not self.closed.done():
            self.closed.set_result(None)

    # Frames from the server

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._header_stream and kind != CONTINUATION:
            raise ProtocolError("a header block was interrupted")
        if kind == DATA:
            self._on_data(flags, stream_id, payload)
        elif kind in (HEADERS, CONTINUATION):
            self._on_header_block(kind, flags, stream_id, payload)
        elif kind == SETTINGS:
            if not flags & ACK:
                self._on_settings(payload)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, int.from_bytes(payload[:4], "big") & 0x7FFFFFFF)
        elif kind == RST_STREAM:
            code = int.from_bytes(payload[:4], "big")
            failure = RequestFailure("STREAM_RESET", f"The server reset the stream (HTTP/2 error {code}).")
            self._finish_stream(stream_id, UNPROCESSED if code == REFUSED_STREAM else failure)
        elif kind == GOAWAY:
            self._on_goaway(int.from_bytes(payload[:4], "big") & 0x7FFFFFFF)
        elif kind == PING:
            if not flags & ACK:
                self._send_buffer += _encode_frame(PING, ACK, 0, payload)
        elif kind == PUSH_PROMISE:
            raise ProtocolError("a PUSH_PROMISE although push is disabled")

    def _on_settings(self, payload: bytes) -> None:
        for offset in range(0, len(payload) - 5, 6):
            name, value = (
                int.from_bytes(payload[offset : offset + 2], "big"),
                int.from_bytes(payload[offset + 2 : offset + 6], "big"),
            )
            if name == HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, 65_536)
                self._cached_block = None
            elif name == MAX_STREAMS:
                self._peer_max_streams = value
            elif name == MAX_FRAME:
                self._frame_size = min(value, 65_536)
            elif name == INITIAL_WINDOW:
                for stream in self.streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        self._send_buffer += _encode_frame(SETTINGS, ACK, 0)
        self.ready = True

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self._window += increment
        elif stream_id in self.streams:
            self.streams[stream_id].window += increment
        for id_, stream in self.streams.items():
            if stream.unsent:
                self._send_body(id_, stream)

    def _on_header_block(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            self._header_buffer, self._header_stream, self._header_flags = bytearray(), stream_id, flags
            payload = payload[5:] if flags & WITH_PRIORITY else payload
        elif stream_id != self._header_stream:
            raise ProtocolError("a header block continues in another stream")
        self._header_buffer += payload
        if len(self._header_buffer) > MAX_BODY_BYTES:
            raise ProtocolError("a header block is too long")
        if not flags & END_HEADERS:
            return
        self._header_stream = 0
        # Also decoded for ended streams, because the compression table is shared.
        headers = self._decode_headers(bytes(self._header_buffer))
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if stream.status < 200:  # otherwise these are trailers
            stream.status, stream.headers = int(headers.get(":status", "0")), headers
        if self._header_flags & END_STREAM:
            self._finish_stream(stream_id, Response(stream.status, stream.headers, stream.body))

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._unacknowledged_bytes += len(payload)
        if self._unacknowledged_bytes > RECEIVE_WINDOW_BYTES // 2:
            self._send_buffer += _encode_frame(WINDOW_UPDATE, 0, 0, self._unacknowledged_bytes.to_bytes(4, "big"))
            self._unacknowledged_bytes = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        stream.body += payload
        if flags & END_STREAM:
            self._finish_stream(stream_id, Response(stream.status, stream.headers, stream.body))
        elif len(stream.body) > MAX_BODY_BYTES:
            self._send_buffer += _encode_frame(RST_STREAM, 0, stream_id, CANCEL.to_bytes(4, "big"))
            self._finish_stream(stream_id, RequestFailure("FCM_RESPONSE_UNREADABLE", "The response is too long."))

    def _on_goaway(self, last: int) -> None:
        self.draining = True
        for stream_id in [stream_id for stream_id in self.streams if stream_id > last]:
            self._finish_stream(stream_id, UNPROCESSED)

    # Internals

    def _finish_stream(self, stream_id: int, result: Any) -> None:
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return
        if stream.unsent and isinstance(result, Response):  # answered before the body was sent: cancel the rest
            self._send_buffer += _encode_frame(RST_STREAM, 0, stream_id, CANCEL.to_bytes(4, "big"))
        self._on_ended(stream.item, result)

    def _disconnect(self, reason: str) -> None:
        if not self.disconnected:
            self._end(reason)
            self._on_changed(self)

    def _end(self, reason: str) -> None:
        self.disconnected = True
        for stream_id in list(self.streams):
            self._finish_stream(stream_id, RequestFailure("CONNECTION_LOST", reason))

    def _send_body(self, stream_id: int, stream: _Stream) -> None:
        """Buffer as much of the body as flow control allows; the rest follows a WINDOW_UPDATE."""
        while stream.unsent:
            size = min(len(stream.unsent), self._window, stream.window, self._frame_size)
            if size <= 0:
                return
            part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._window -= size
            stream.window -= size
            self._send_buffer += _encode_frame(DATA, 0 if stream.unsent else END_STREAM, stream_id, part)

    def _encode_headers(self) -> bytes:
        """Encode the request headers. Once they are all in the compression table, the block is constant and cached."""
        block = self._encoder.encode(self._headers)
        trial_encoder = copy.deepcopy(self._encoder)
        next_block = trial_encoder.encode(self._headers)
        if trial_encoder.header_table.dynamic_entries == self._encoder.header_table.dynamic_entries:
            self._cached_block = next_block
        return block

    def _decode_headers(self, block: bytes) -> dict[str, str]:
        """Decode a header block. Blocks that leave the compression table unchanged are cached until it changes."""
        cached = self._decoded_blocks.get(block)
        if cached is not None:
            return cached
        table = tuple(self._decoder.header_table.dynamic_entries)
        headers = {_text(name): _text(value) for name, value in self._decoder.decode(block)}
        if tuple(self._decoder.header_table.dynamic_entries) == table and len(self._decoded_blocks) < MAX_CACHED_BLOCKS:
            self._decoded_blocks[block] = headers
        else:
            self._decoded_blocks.clear()
        return headers


def _encode_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
