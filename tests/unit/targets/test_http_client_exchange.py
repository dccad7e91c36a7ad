"""Exchanges of the HTTP client over a scripted stream: bytes of requests, limits, and parts of responses."""

from __future__ import annotations

import asyncio

import pytest

from timebell import http_client
from timebell.http_client import HttpResponse, NoResponse, ProtocolError, ProxyRefused, ResponseTimeout, exchange
from timebell.sim.loop import run_virtual

MAX_HEAD = 16 * 1024
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Parts(http_client.Stream):
    """A stream that receives the parts one after another, then its end; it records what is sent and requested."""

    def __init__(self, *parts: bytes) -> None:
        super().__init__()
        self.parts = [*parts, b""]
        self.sent = b""
        self.limits: list[int] = []

    async def read(self, max_bytes: int) -> bytes:
        assert self.parts, "read after the end"
        self.limits.append(max_bytes)
        part = self.parts.pop(0)
        if part[max_bytes:]:
            self.parts.insert(0, part[max_bytes:])
        return part[:max_bytes]

    async def write(self, data: bytes) -> None:
        self.sent += data


async def _exchange(*parts: bytes, method: str = "POST", kept: int = 10**6) -> HttpResponse:
    return await exchange(Parts(*parts), method, "/", {"host": "a"}, b"", max_bytes=10**6, kept_bytes=kept)


# --- Requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [("POST", b"ab", b"content-length: 2\r\n"), ("POST", b"", b"content-length: 0\r\n"), ("GET", b"", b""),
     ("GET", b"a", b"content-length: 1\r\n")],
)  # fmt: skip
async def test_a_request_has_a_length_unless_its_method_has_no_content(method: str, body: bytes, length: bytes) -> None:
    stream = Parts(OK)
    await exchange(stream, method, "/a", {"host": "b"}, body, max_bytes=9, kept_bytes=9)
    assert stream.sent == b"%s /a HTTP/1.1\r\nhost: b\r\n%s\r\n%s" % (method.encode(), length, body)


# --- Limits ---------------------------------------------------------------------------------------------


def _head(size: int) -> bytes:
    start, end = b"HTTP/1.1 204 No Content\r\n", b"\r\n\r\n"
    return start + b"x: " + b"y" * (size - len(start) - len(end) - 3) + end


async def test_a_head_of_the_largest_size_is_accepted() -> None:
    head = _head(MAX_HEAD)
    assert (await _exchange(head[:-1], head[-1:])).status == 204


async def test_a_larger_head_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        await _exchange(_head(MAX_HEAD + 1))


async def test_no_more_than_the_maximum_of_a_body_is_requested() -> None:
    stream = Parts(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b"x" * 49, b"y" * 50)
    response = await exchange(stream, "POST", "/", {"host": "a"}, b"", max_bytes=50, kept_bytes=50)
    assert stream.limits == [MAX_HEAD, 50, 1]
    assert response.body == b"x" * 49 + b"y"
    assert (response.is_complete, response.keeps_connection) == (False, False)


async def test_a_body_is_received_whole_and_its_first_bytes_are_kept() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"
    response = await _exchange(head, b"abc", b"def", kept=4)
    assert (response.body, response.is_complete, response.keeps_connection) == (b"abcd", False, True)


def test_a_silent_peer_is_a_timeout() -> None:
    class Silent(Parts):
        async def read(self, max_bytes: int) -> bytes:
            await asyncio.sleep(8)
            return await super().read(max_bytes)

    def answer(**limit: float) -> HttpResponse:
        stream = Silent(OK)
        return run_virtual(exchange(stream, "POST", "/", {"host": "a"}, b"", max_bytes=9, kept_bytes=9, **limit))

    assert answer().body == answer(idle_timeout=9).body == b"ok"
    with pytest.raises(ResponseTimeout, match="no data for 7 s"):
        answer(idle_timeout=7)


# --- Responses ------------------------------------------------------------------------------------------


async def test_informational_responses_and_their_headers_are_skipped() -> None:
    response = await _exchange(b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n", b"HTTP/1.1 199 Almost\r\n\r\n", OK)
    assert (response.status, response.headers, response.body) == (200, [(b"content-length", b"2")], b"ok")
    assert (response.header(b"content-length"), response.header(b"a")) == ("2", "")


async def test_the_answer_to_head_has_no_body() -> None:
    response = await _exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", method="HEAD")
    assert (response.status, response.body, response.is_complete) == (200, b"", True)


@pytest.mark.parametrize(
    ("parts", "keeps"),
    [
        ((OK,), True),
        ((OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),), False),
        ((OK + b"garbage\r\n\r\n",), False),
        ((OK + b"HTTP/1.1 200",), False),
        ((OK + b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno",), False),
        ((b"HTTP/1.1 200 OK\r\n\r\n", b"ok"), False),
    ],
    ids=["nothing follows", "close", "garbage", "beginning", "response", "until it closes"],
)
async def test_a_connection_is_kept_if_nothing_follows_the_response(parts: tuple[bytes, ...], keeps: bool) -> None:
    response = await _exchange(*parts)
    assert (response.status, response.body, response.is_complete, response.keeps_connection) == (
        200, b"ok", True, keeps,
    )  # fmt: skip


async def test_an_invalid_response_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="HttpParser"):
        await _exchange(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def test_an_end_before_the_response_differs_from_an_incomplete_response() -> None:
    class Reset(Parts):
        async def read(self, max_bytes: int) -> bytes:
            raise ProtocolError("ConnectionResetError")

    with pytest.raises(NoResponse, match="no response"):
        await _exchange()
    with pytest.raises(NoResponse, match="ConnectionResetError"):
        await exchange(Reset(), "POST", "/", {"host": "a"}, b"", max_bytes=9, kept_bytes=9)
    with pytest.raises(ProtocolError, match="incomplete") as caught:
        await _exchange(OK[:-1])
    assert type(caught.value) is ProtocolError


# --- Tunnels --------------------------------------------------------------------------------------------


async def _open_tunnel(*parts: bytes) -> Parts:
    stream = Parts(*parts)
    await http_client.open_tunnel(stream, "[::1]:443", {"proxy-authorization": "Basic eA=="})
    return stream


async def test_a_tunnel_is_requested_and_open_after_the_answer() -> None:
    stream = await _open_tunnel(b"HTTP/1.1 200 Connection", b" established\r\n\r\n", b"from the destination")
    assert stream.sent == (
        b"CONNECT [::1]:443 HTTP/1.1\r\nhost: [::1]:443\r\nproxy-authorization: Basic eA==\r\n\r\n"
    )  # fmt: skip
    assert await stream.read(99) == b"from the destination"


async def test_the_refusal_of_a_proxy_has_its_status() -> None:
    with pytest.raises(ProxyRefused, match=r"^407$"):
        await _open_tunnel(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((), "no complete answer"), ((b"HTTP/1.1 200 OK\r\n",), "no complete answer"),
        ((_head(MAX_HEAD + 1),), "no complete answer"), ((b"SSH-2.0-OpenSSH_9.2\r\n\r\n",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\n\r\nmore",), "not HTTP"),
    ],
    ids=["nothing", "incomplete", "too long", "not HTTP", "data of the destination too early"],
)  # fmt: skip
async def test_invalid_answers_of_a_proxy_are_refused(parts: tuple[bytes, ...], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        await _open_tunnel(*parts)


async def test_the_largest_answer_of_a_proxy_is_accepted() -> None:
    head = _head(MAX_HEAD)
    await _open_tunnel(head[:-1], head[-1:])
