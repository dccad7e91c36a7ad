"""The HTTP client: requests, accepted and rejected responses, and timeouts."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import pytest

from tests.unit.targets.sink import Run, sink
from timebell import http_client

HEADERS = {"x-own": "a: b"}


async def request(
    url: str, body: bytes = b"", *, timeout: float = 60.0, limit: int = 10**6, **more: Any
) -> http_client.HttpResponse:
    return await http_client.send_request(
        "POST", url, more.pop("headers", HEADERS), body, timeout=timeout, max_bytes=limit, **more
    )


@asynccontextmanager
async def answering(*parts: bytes, host: str = "127.0.0.1", closes: bool = False) -> AsyncIterator[tuple[int, Any]]:
    """Run a server that reads the head of a request and sends the parts; yield its port and a queue of heads."""
    heads: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError), closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
            if closes:
                writer.write_eof()
            heads.put_nowait(head)
            await reader.read()
        heads.put_nowait(b"")

    server = await asyncio.start_server(serve, host, 0)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, as if its process had died."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_request_has_the_expected_line_headers_and_body(run: Run) -> None:
    async def main() -> tuple[str, dict[str, str], http_client.HttpResponse]:
        async with sink() as server:
            url = f"http://ana:s%C3%A9same@127.0.0.1:{server.port}/echo/ä b?q=ü&r=%20#part"
            answer = await request(url, b"body")
            return server.requests[0].line, server.requests[0].headers | {"port": str(server.port)}, answer

    line, headers, answer = run(main())
    assert line == "POST /echo/%C3%A4%20b?q=%C3%BC&r=%20 HTTP/1.1"
    port = headers.pop("port")
    basic = base64.b64encode("ana:sésame".encode()).decode()
    assert headers == {"host": f"127.0.0.1:{port}", "user-agent": "timebell", "accept-encoding": "identity",
                       "connection": "close", "authorization": f"Basic {basic}", "x-own": "a: b",
                       "content-length": "4"}  # fmt: skip
    assert (answer.status, answer.is_complete) == (200, True)
    assert json.loads(answer.body[:-4])["x-own"] == "a: b"


@pytest.mark.skipif(not socket.has_ipv6, reason="listener is no IPv6")
def test_request_to_a_literal_ipv6_address(run: Run) -> None:
    async def main() -> tuple[bytes, http_client.HttpResponse]:
        async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", host="::1") as (port, heads):
            answer = await request(f"http://[::1]:{port}")
            return await heads.get(), answer

    head, answer = run(main())
    assert head.startswith(b"POST / HTTP/1.1\r\nhost: [::1]:")
    assert answer.body == b"ok"


@pytest.mark.parametrize(
    ("parts", "status", "body"),
    [
        ((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\n", b"HTTP/1.1 201 X\r\n",
          b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3;x=y\r\ncde\r\n0\r\nT: u\r\n\r\n"), 201, b"abcde"),
        ((b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",), 302, b""),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 500\r\n\r\n",), 200, b"ok"),
        ((b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",), 200, b"\x1f\x8b\x08"),
        ((b"HTTP/1.0 200 OK\r\n\r\nto the end",), 200, b"to the end"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), 204, b""),
    ],
    ids=["chunks", "redirect", "one answer", "compressed", "until it closes", "nothing"],
)  # fmt: skip
def test_valid_responses_are_read(run: Run, parts: tuple[bytes, ...], status: int, body: bytes) -> None:
    async def main() -> http_client.HttpResponse:
        async with answering(*parts, closes=True) as (port, _):
            return await request(f"http://localhost:{port}/")

    answer = run(main())
    assert (answer.status, answer.body, answer.is_complete) == (status, body, True)


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello",),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",),
        (b"SSH-2.0-OpenSSH_9.2\r\n",),
        (),
    ],
)
def test_invalid_responses_are_protocol_errors(run: Run, parts: tuple[bytes, ...]) -> None:
    async def main() -> None:
        async with answering(*parts, closes=True) as (port, _):
            with pytest.raises(http_client.ProtocolError):
                await request(f"http://127.0.0.1:{port}/")

    run(main())


def test_long_response_is_cut(run: Run) -> None:
    async def main() -> http_client.HttpResponse:
        async with sink() as server:
            return await request(f"http://127.0.0.1:{server.port}/big", limit=100_000)

    answer = run(main())
    assert (answer.status, answer.body, answer.is_complete) == (200, b"x" * 100_000, False)


@pytest.mark.parametrize(("path", "limits"), [("/hang", {"timeout": 0.3}), ("/hang", {"idle_timeout": 0.3}),
                                              ("/drip", {"timeout": 0.3})])  # fmt: skip
def test_slow_server_is_a_timeout_and_the_connection_closes(run: Run, path: str, limits: dict[str, float]) -> None:
    async def main() -> None:
        async with sink() as server:
            with pytest.raises(http_client.ResponseTimeout):
                await request(f"http://127.0.0.1:{server.port}{path}", **limits)
            if path == "/hang":
                await server.gone.wait()

    run(main())


def test_cancelled_request_closes_the_connection(run: Run) -> None:
    async def main() -> None:
        async with sink() as server:
            pending = asyncio.create_task(request(f"http://127.0.0.1:{server.port}/hang"))
            while not server.requests:
                await asyncio.sleep(0.01)
            pending.cancel()
            await server.gone.wait()
            with pytest.raises(asyncio.CancelledError):
                await pending

    run(main())


@pytest.mark.parametrize("headers", [{"a": "b\r\nhost: evil"}, {"a\r\nb": "c"}, {"a": "é"}, {"a b": "c"}])
def test_header_injection_is_refused(run: Run, headers: dict[str, str]) -> None:
    async def main() -> bytes:
        async with answering() as (port, heads):
            with pytest.raises(http_client.ProtocolError):
                await request(f"http://127.0.0.1:{port}/", headers=headers)
            return bytes(await heads.get())

    assert run(main()) == b""


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/", "https:///x", "http://", "127.0.0.1/", "http://[::1", "http://127.0.0.1:99999/",
            "http://straße.example/"],
)  # fmt: skip
def test_invalid_url_is_refused(run: Run, url: str) -> None:
    with pytest.raises(http_client.ConnectError):
        run(request(url))


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_port_depends_on_the_scheme(run: Run, monkeypatch: pytest.MonkeyPatch, scheme: str, port: int) -> None:
    dialed: list[tuple[str, int]] = []

    async def connect(self: http_client.Network, address: str, port: int, timeout: float) -> http_client.Stream:
        dialed.append((address, port))
        raise http_client.ConnectError

    monkeypatch.setattr(http_client.Network, "connect", connect)
    with pytest.raises(http_client.ConnectError):
        run(request(f"{scheme}://127.0.0.1/"))
    assert dialed == [("127.0.0.1", port)]


def test_closed_port_is_a_connect_error(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(http_client.ConnectError):
        run(request(f"http://127.0.0.1:{port}/"))


def test_response_sent_before_the_request_was_complete_is_returned(run: Run) -> None:
    """The server answers and resets the connection while the request is being sent."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno.")
        await writer.drain()
        reset(writer)

    async def main() -> http_client.HttpResponse:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        try:
            return await request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", bytes(32 * 2**20))
        finally:
            server.close()

    answer = run(main())
    assert (answer.status, answer.body) == (413, b"no.")


def test_reset_connection_is_a_protocol_error(run: Run) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async def main() -> None:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        stream = await http_client.Network().connect("127.0.0.1", server.sockets[0].getsockname()[1], 60)
        try:
            await stream.open()
            with pytest.raises(http_client.ProtocolError):
                await stream.read(1)
            with pytest.raises(http_client.ProtocolError):
                await stream.write(b"x")
        finally:
            stream.close()
            server.close()

    run(main())
