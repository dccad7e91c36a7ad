"""The stream of the HTTP client: what it returns and asks of its transport, call by call."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

import pytest

from timebell.http_client import HttpClientError, Network, ProtocolError, Stream, TLSError

CAPACITY = 16 * 1024  # received bytes at which a stream pauses its peer


class Transport(asyncio.Transport):
    """Records the calls of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str | bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "abort" in self.calls


def connected() -> tuple[Stream, Transport]:
    stream, transport = Stream(), Transport()
    stream.connection_made(transport)
    return stream, transport


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task that has run as far as it can."""
    task = asyncio.create_task(work)
    await settle()
    return task


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


# --- Reading --------------------------------------------------------------------------------------------


async def test_received_data_is_returned_once_and_at_most_the_requested_bytes() -> None:
    stream, transport = connected()
    stream.data_received(b"abc")
    stream.data_received(b"de")
    for expected in (b"ab", b"cd", b"e"):
        assert (await started(stream.read(2))).result() == expected
    assert transport.calls == []


async def test_a_reader_waits_for_data_or_the_end() -> None:
    stream, _ = connected()
    for expected in (b"a", b"b"):
        reader = await started(stream.read(9))
        assert not reader.done()
        stream.data_received(expected)
        await settle()
        assert reader.result() == expected
    reader = await started(stream.read(9))
    stream.eof_received()
    await settle()
    assert reader.result() == b""
    assert (await started(stream.read(9))).result() == b""


async def test_data_before_the_end_is_returned_before_the_error() -> None:
    stream, _ = connected()
    stream.data_received(b"a")
    stream.connection_lost(ConnectionResetError())
    assert (await started(stream.read(9))).result() == b"a"
    with pytest.raises(ProtocolError, match="ConnectionResetError"):
        await stream.read(9)


@pytest.mark.parametrize(
    ("lost", "error"), [(ssl.SSLError(), TLSError), (OSError(), ProtocolError), (None, None)]
)  # fmt: skip
async def test_a_lost_connection_ends_the_wait_of_a_reader(
    lost: Exception | None, error: type[HttpClientError] | None
) -> None:
    stream, _ = connected()
    reader = await started(stream.read(9))
    stream.connection_lost(lost)
    await settle()
    assert type(reader.exception()) is (error or type(None))


async def test_the_peer_is_paused_until_all_received_data_is_read() -> None:
    stream, transport = connected()
    for _ in range(2):
        transport.calls.clear()
        stream.data_received(bytes(CAPACITY - 1))
        assert transport.calls == []
        stream.data_received(b"x")
        assert transport.calls == ["pause"]
        stream.data_received(b"x")  # was on its way
        assert transport.calls == ["pause"]
        await stream.read(CAPACITY)
        assert transport.calls == ["pause"]
        await stream.read(CAPACITY)
        assert transport.calls == ["pause", "resume"]


async def test_data_after_a_cancelled_read_is_kept() -> None:
    stream, _ = connected()
    reader = await started(stream.read(9))
    reader.cancel()
    await settle()
    stream.data_received(b"a")
    assert (await started(stream.read(9))).result() == b"a"


# --- Writing --------------------------------------------------------------------------------------------


async def test_a_writer_waits_while_the_transport_is_full() -> None:
    stream, transport = connected()
    assert (await started(stream.write(b"a"))).done()
    stream.pause_writing()
    writer = await started(stream.write(b"b"))
    assert not writer.done()
    stream.resume_writing()
    await settle()
    assert writer.result() is None
    assert (await started(stream.write(b"c"))).done()
    assert transport.calls == [b"a", b"b", b"c"]


@pytest.mark.parametrize("lost", [None, BrokenPipeError()])
async def test_a_lost_connection_is_an_error_of_the_waiting_writer(lost: Exception | None) -> None:
    stream, _ = connected()
    stream.pause_writing()
    writer = await started(stream.write(b"a"))
    stream.connection_lost(lost)
    stream.resume_writing()
    await settle()
    with pytest.raises(ProtocolError, match=type(lost or ConnectionResetError()).__name__):
        writer.result()


async def test_a_connection_lost_without_a_writer_is_not_reported() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    stream, _ = connected()
    stream.pause_writing()
    stream.connection_lost(None)
    del stream
    gc.collect()
    assert reported == []


async def test_a_cancelled_writer_does_not_disturb_the_stream() -> None:
    for end in (Stream.resume_writing, lambda stream: stream.connection_lost(None)):
        stream, _ = connected()
        stream.pause_writing()
        writer = await started(stream.write(b"a"))
        writer.cancel()
        await settle()
        end(stream)
        stream.resume_writing()


async def test_a_closed_stream_aborts_and_refuses_data() -> None:
    stream, transport = connected()
    stream.close()
    with pytest.raises(ProtocolError, match="ConnectionResetError"):
        await stream.write(b"a")
    assert transport.calls == ["abort"]


# --- State ----------------------------------------------------------------------------------------------


async def test_a_stream_is_idle_while_it_is_open_and_nothing_is_unread() -> None:
    assert not Stream().is_idle
    stream, _ = connected()
    assert stream.is_idle
    stream.data_received(b"a")
    assert not stream.is_idle
    await stream.read(9)
    assert stream.is_idle
    stream.eof_received()
    assert not stream.is_idle
    aborted, _ = connected()
    aborted.close()
    assert not aborted.is_idle


async def test_a_new_connection_has_keepalive_and_no_delay_and_its_peer_is_known_until_it_opens() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        stream = await Network().connect("127.0.0.1", server.sockets[0].getsockname()[1], 60)
        connected = stream._socket
        assert connected is not None
        assert connected.gettimeout() == 0
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert stream.peer_address == "127.0.0.1"
        await stream.open()
        assert stream.peer_address is None
        stream.close()


def test_a_stream_that_was_never_opened_closes_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Stream(ours).close()
        assert ours.fileno() == -1
