"""The HTTP/2 client against the `h2` library: small windows, small tables, split frames and faulty servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from timebell.features.campaigns.push.http2 import UNPROCESSED, Http2Connection, RequestFailure, Response

HEADERS = [
    (":method", "POST"),
    (":scheme", "https"),
    (":authority", "a"),
    (":path", "/p"),
    ("authorization", "x" * 300),
]


class Wire(asyncio.Transport):
    """A transport between an Http2Connection and an `h2` server; `cut` is the size in bytes of the delivered pieces."""

    def __init__(self, cut: int = 1 << 20, **settings: int) -> None:
        super().__init__()
        self.ended: list[tuple[Any, Any]] = []
        self.cut, self.closed = cut, False
        self.server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.bodies: dict[int, bytes] = {}
        self.completed_streams: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.reset: list[int] = []
        self.connection = Http2Connection(
            HEADERS, lambda item, result: self.ended.append((item, result)), lambda connection: None, 100
        )
        self.connection.connection_made(self)
        self.server.initiate_connection()
        self.deliver_server_output()
        if settings:
            self.server.update_settings({getattr(SettingCodes, name): value for name, value in settings.items()})
            self.deliver_server_output()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        for event in self.server.receive_data(bytes(data)):
            if isinstance(event, RequestReceived):
                self.headers.append(dict(event.headers))
                self.bodies[event.stream_id] = b""
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] += event.data
                self.server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.completed_streams.append(event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.append(event.stream_id)

    def deliver_server_output(self) -> None:
        """Deliver the output of the server until it has none left."""
        while data := self.server.data_to_send():
            for at in range(0, len(data), self.cut):
                self.connection.data_received(data[at : at + self.cut])

    def post(self, *bodies: bytes) -> None:
        for body in bodies:
            assert self.connection.capacity > 0
            self.connection.post(body, body[:10], 0.0)
        self.connection.flush()
        self.deliver_server_output()

    def answer(self, stream: int, body: bytes = b"{}", status: str = "200", **more: Any) -> None:
        self.server.send_headers(stream, [(":status", status), ("content-type", "json")])
        self.server.send_data(stream, body, end_stream=True, **more)
        self.deliver_server_output()

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def on_loop(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test inside an event loop, which futures need."""

    def run(**arguments: Any) -> None:
        async def body() -> None:
            test(**arguments)

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
@pytest.mark.parametrize("table", [0, 100, 4096])
def test_responses_are_matched_to_requests(cut: int, table: int) -> None:
    @on_loop
    def body() -> None:
        wire = Wire(cut, HEADER_TABLE_SIZE=table)
        wire.post(b"one", b"two", b"three")
        wire.answer(3, b"second")
        wire.answer(1, b"first", status="404")
        wire.answer(5, b"third", pad_length=9)
        wire.post(b"four")
        assert [(item, result.status, result.body) for item, result in wire.ended] == [
            (b"two", 200, b"second"), (b"one", 404, b"first"), (b"three", 200, b"third"),
        ]  # fmt: skip
        assert wire.ended[0][1].headers["content-type"] == "json"
        assert wire.headers == [dict(HEADERS)] * 4
        assert wire.bodies == {1: b"one", 3: b"two", 5: b"three", 7: b"four"}

    body()


def test_changes_of_the_header_table_are_followed() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(*[b"x"] * 6)
        for stream, header in zip(range(1, 13, 2), "aaabbb", strict=True):
            wire.server.send_headers(stream, [(":status", "200"), ("x-header", header)], end_stream=True)
            wire.deliver_server_output()
        assert [result.headers["x-header"] for _, result in wire.ended] == [*"aaabbb"]

    body()


def test_headers_may_change_between_requests() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two")
        other = [*HEADERS[:-1], ("authorization", "new")]
        wire.connection.set_headers(other)
        wire.post(b"three", b"four")
        assert [sent["authorization"][:3] for sent in wire.headers] == ["xxx", "xxx", "new", "new"]

    body()


def test_small_windows_delay_requests_but_lose_nothing() -> None:
    @on_loop
    def body() -> None:
        wire = Wire(INITIAL_WINDOW_SIZE=1_000, MAX_FRAME_SIZE=16_384)
        long = [bytes([65 + n]) * 30_000 for n in range(5)]
        wire.post(*long)
        for _ in range(500):
            if len(wire.completed_streams) == 5:
                break
            wire.connection.flush()
            wire.deliver_server_output()
        assert list(wire.bodies.values()) == long

    body()


def test_the_server_limits_concurrent_streams() -> None:
    @on_loop
    def body() -> None:
        wire = Wire(MAX_CONCURRENT_STREAMS=2)
        wire.post(b"one", b"two")
        assert wire.connection.capacity == 0
        wire.answer(1)
        assert wire.connection.capacity == 1

    body()


def test_refused_streams_and_streams_above_a_goaway_are_unprocessed() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two", b"three", b"four")
        wire.server.reset_stream(3, 7)
        wire.deliver_server_output()
        wire.connection.data_received(goaway(5))
        assert wire.connection.capacity == 0
        assert wire.ended == [(b"two", UNPROCESSED), (b"four", UNPROCESSED)]
        wire.answer(1)
        assert not wire.closed
        wire.answer(5)
        assert [item for item, result in wire.ended if isinstance(result, Response)] == [b"one", b"three"]
        assert wire.closed

    body()


def goaway(last: int) -> bytes:
    return b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + last.to_bytes(4, "big") + bytes(4)


def test_other_resets_and_a_lost_connection_leave_the_result_unknown() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two")
        wire.server.reset_stream(1, 2)
        wire.deliver_server_output()
        wire.connection.connection_lost(None)
        codes = [result.code for _, result in wire.ended if isinstance(result, RequestFailure)]
        assert codes == ["STREAM_RESET", "CONNECTION_LOST"]
        assert wire.connection.disconnected

    body()


def test_timed_out_requests_are_reset_and_others_continue() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.connection.post(b"old", "old", 1.0)
        wire.connection.post(b"new", "new", 5.0)
        wire.connection.flush()
        wire.connection.time_out(2.0)
        assert [(item, result.code) for item, result in wire.ended] == [("old", "TIMEOUT")]
        assert wire.reset == [1]
        wire.answer(3)
        assert wire.ended[-1][0] == "new"

    body()


def test_trailers_and_early_hints_are_not_responses() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one")
        wire.server.send_headers(1, [(":status", "103"), ("link", "x")])
        wire.server.send_headers(1, [(":status", "200")])
        wire.server.send_data(1, b"body")
        wire.server.send_headers(1, [("grpc-status", "0")], end_stream=True)
        wire.deliver_server_output()
        ((_, result),) = wire.ended
        assert (result.status, result.body) == (200, b"body")

    body()


def test_an_endless_response_is_cut_off() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one")
        wire.server.send_headers(1, [(":status", "200")])
        for _ in range(5):
            wire.server.send_data(1, b"x" * 16_000)
        wire.deliver_server_output()
        assert [result.code for _, result in wire.ended] == ["FCM_RESPONSE_UNREADABLE"]

    body()


FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 11), st.integers(0, 255), st.sampled_from([0, 1, 3, 5, 2]), st.binary(max_size=40),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(FRAMES | st.binary(max_size=30), max_size=12), st.integers(1, 50))
def test_arbitrary_frames_end_each_request_once(frames: list[bytes], cut: int) -> None:
    """Nothing raises, and each request ends exactly once, at the latest when the connection ends."""

    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two")
        wire.write = lambda data: None  # type: ignore[method-assign]
        data = b"".join(frames)
        for at in range(0, len(data), cut):
            wire.connection.data_received(data[at : at + cut])
        wire.connection.connection_lost(None)
        assert sorted(item for item, _ in wire.ended) == [b"one", b"two"]

    body()
