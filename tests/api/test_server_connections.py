"""Limits of connections: one client cannot use up those of a server, by idling, sending slowly, or not reading."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from timebell.api import connections, server

from .live import serve
from .web import wait_until

Make = Callable[..., Any]
OTHER_CLIENT = "127.0.0.3"
GET = b"GET /api/v1/schedules HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HALF = GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n{")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: ", GET, HALF])
async def test_idle_connections_of_a_client_displace_only_each_other(
    make: Make, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    _require_address(OTHER_CLIENT)
    monkeypatch.setattr(server, "connection_limit", lambda: 10)
    async with make() as web, serve(web) as live:
        mine = await live.connect()
        opened = []
        for _ in range(40):
            opened.append(await asyncio.open_connection("127.0.0.1", live.port, local_addr=(OTHER_CLIENT, 0)))
            with suppress(ConnectionError):
                opened[-1][1].write(sent)
        mine[1].write(GET)
        assert (await mine[0].readline()).split()[1] == b"200"
        assert (await live.send(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).split()[1] == b"200"
        for _, writer in (mine, *opened):
            writer.close()


async def test_the_body_of_an_answered_request_does_not_keep_a_connection(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_SECONDS", 0.5)
    async with make(open_here=False) as web, serve(web) as live:
        reader, writer = await live.connect()
        writer.write(HALF.replace(b"Length: 9", b"Length: 99999"))
        assert (await reader.readline()).split()[1] == b"401"

        rest = asyncio.create_task(reader.read())

        def drip() -> bool:
            writer.write(b" ")
            return rest.done()

        await wait_until(drip)
        await asyncio.gather(rest, return_exceptions=True)  # the end, or a reset
        writer.close()


async def test_a_client_that_does_not_read_is_disconnected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_TIMEOUT_SECONDS", 0.3)
    async with make() as web, serve(web) as live:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", live.port))
            # Together the responses are larger than the buffers of the operating system.
            await loop.sock_sendall(client, GET.replace(b"schedules", b"openapi.json") * 100)
            await wait_until(lambda: _is_refused(client))


async def test_a_request_that_offers_http2_is_answered_with_http1(make: Make) -> None:
    """Java's client offers it in each request over a plain connection."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nContent-Type: application/json\r\nUpgrade: h2c\r\n"
    body = b'{"topic": "a", "timezone": "UTC", "payload": "sent"}'
    length = b"HTTP2-Settings: AAEAAEAA\r\nContent-Length: %d\r\n\r\n" % len(body)
    request = GET.replace(b"GET /api/v1/schedules", b"POST /api/v1/jobs").removesuffix(b"\r\n") + offer + length + body
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with make() as web, serve(web) as live:
        answers = await live.send(request + last)
    assert answers.count(b"HTTP/1.1 201 Created") == 1, answers
    assert b'"payload":"sent"' in answers
    assert answers.count(b"HTTP/1.1 200 OK") == 1


def _is_refused(client: socket.socket) -> bool:
    try:
        client.send(b"x")
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False


def _require_address(address: str) -> None:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            pytest.skip(f"This machine has no address {address}.")
