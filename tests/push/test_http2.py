"""Our side of HTTP/2 against the `h2` library's: small windows, small tables, frames in pieces, and bad servers."""

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

from timebell.targets.push.http2 import UNPROCESSED, Broken, Line, Response

HEADERS = [
    (":method", "POST"),
    (":scheme", "https"),
    (":authority", "a"),
    (":path", "/p"),
    ("authorization", "x" * 300),
]


class Wire(asyncio.Transport):
    """Between a Line and a server that is `h2`; `cut` is the size of the pieces the line gets."""

    def __init__(self, cut: int = 1 << 20, **settings: int) -> None:
        super().__init__()
        self.ended: list[tuple[Any, Any]] = []
        self.cut, self.closed = cut, False
        self.server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.bodies: dict[int, bytes] = {}
        self.whole: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.reset: list[int] = []
        self.line = Line(HEADERS, lambda item, result: self.ended.append((item, result)), lambda line: None, 100)
        self.line.connection_made(self)
        self.server.initiate_connection()
        self.tell()
        if settings:
            self.server.update_settings({getattr(SettingCodes, name): value for name, value in settings.items()})
            self.tell()

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
                self.whole.append(event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.append(event.stream_id)

    def tell(self) -> None:
        """What the server has to say, until both have nothing more."""
        while data := self.server.data_to_send():
            for at in range(0, len(data), self.cut):
                self.line.data_received(data[at : at + self.cut])

    def post(self, *bodies: bytes) -> None:
        for body in bodies:
            assert self.line.room > 0
            self.line.post(body, body[:10], 0.0)
        self.line.flush()
        self.tell()

    def answer(self, stream: int, body: bytes = b"{}", status: str = "200", **more: Any) -> None:
        self.server.send_headers(stream, [(":status", status), ("content-type", "json")])
        self.server.send_data(stream, body, end_stream=True, **more)
        self.tell()

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def on_loop(test: Callable[..., None]) -> Callable[..., None]:
    """Futures need a loop."""

    def run(**given: Any) -> None:
        async def body() -> None:
            test(**given)

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
@pytest.mark.parametrize("table", [0, 100, 4096])
def test_requests_and_answers(cut: int, table: int) -> None:
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


def test_the_same_bytes_mean_something_else_when_the_table_has_changed() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(*[b"x"] * 6)
        for stream, header in zip(range(1, 13, 2), "aaabbb", strict=True):
            wire.server.send_headers(stream, [(":status", "200"), ("x-header", header)], end_stream=True)
            wire.tell()
        assert [result.headers["x-header"] for _, result in wire.ended] == [*"aaabbb"]

    body()


def test_headers_may_change_between_requests() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two")
        other = [*HEADERS[:-1], ("authorization", "new")]
        wire.line.speak(other)
        wire.post(b"three", b"four")
        assert [said["authorization"][:3] for said in wire.headers] == ["xxx", "xxx", "new", "new"]

    body()


def test_small_windows_delay_and_lose_nothing() -> None:
    @on_loop
    def body() -> None:
        wire = Wire(INITIAL_WINDOW_SIZE=1_000, MAX_FRAME_SIZE=16_384)
        long = [bytes([65 + n]) * 30_000 for n in range(5)]
        wire.post(*long)
        for _ in range(500):
            if len(wire.whole) == 5:
                break
            wire.line.flush()
            wire.tell()
        assert list(wire.bodies.values()) == long

    body()


def test_the_server_says_how_many_at_once() -> None:
    @on_loop
    def body() -> None:
        wire = Wire(MAX_CONCURRENT_STREAMS=2)
        wire.post(b"one", b"two")
        assert wire.line.room == 0
        wire.answer(1)
        assert wire.line.room == 1

    body()


def test_refused_streams_and_those_above_a_goaway_were_not_processed() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two", b"three", b"four")
        wire.server.reset_stream(3, 7)
        wire.tell()
        wire.line.data_received(goaway(5))
        assert wire.line.room == 0
        assert wire.ended == [(b"two", UNPROCESSED), (b"four", UNPROCESSED)]
        wire.answer(1)
        assert not wire.closed
        wire.answer(5)
        assert [item for item, result in wire.ended if isinstance(result, Response)] == [b"one", b"three"]
        assert wire.closed

    body()


def goaway(last: int) -> bytes:
    return b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + last.to_bytes(4, "big") + bytes(4)


def test_other_resets_and_a_lost_connection_leave_it_unknown() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two")
        wire.server.reset_stream(1, 2)
        wire.tell()
        wire.line.connection_lost(None)
        codes = [result.code for _, result in wire.ended if isinstance(result, Broken)]
        assert codes == ["STREAM_RESET", "CONNECTION_LOST"]
        assert wire.line.gone

    body()


def test_what_takes_too_long_is_given_up_and_the_rest_goes_on() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.line.post(b"old", "old", 1.0)
        wire.line.post(b"new", "new", 5.0)
        wire.line.flush()
        wire.line.give_up(2.0)
        assert [(item, result.code) for item, result in wire.ended] == [("old", "TIMEOUT")]
        assert wire.reset == [1]
        wire.answer(3)
        assert wire.ended[-1][0] == "new"

    body()


def test_trailers_and_early_hints_are_no_answers() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one")
        wire.server.send_headers(1, [(":status", "103"), ("link", "x")])
        wire.server.send_headers(1, [(":status", "200")])
        wire.server.send_data(1, b"body")
        wire.server.send_headers(1, [("grpc-status", "0")], end_stream=True)
        wire.tell()
        ((_, result),) = wire.ended
        assert (result.status, result.body) == (200, b"body")

    body()


def test_an_answer_without_end_is_cut() -> None:
    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one")
        wire.server.send_headers(1, [(":status", "200")])
        for _ in range(5):
            wire.server.send_data(1, b"x" * 16_000)
        wire.tell()
        assert [result.code for _, result in wire.ended] == ["FCM_ANSWER_UNREADABLE"]

    body()


FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 11), st.integers(0, 255), st.sampled_from([0, 1, 3, 5, 2]), st.binary(max_size=40),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(FRAMES | st.binary(max_size=30), max_size=12), st.integers(1, 50))
def test_a_server_may_send_anything(frames: list[bytes], cut: int) -> None:
    """Nothing raises, and each request ends once, at the latest with the connection."""

    @on_loop
    def body() -> None:
        wire = Wire()
        wire.post(b"one", b"two")
        wire.write = lambda data: None  # type: ignore[method-assign]
        data = b"".join(frames)
        for at in range(0, len(data), cut):
            wire.line.data_received(data[at : at + cut])
        wire.line.connection_lost(None)
        assert sorted(item for item, _ in wire.ended) == [b"one", b"two"]

    body()
