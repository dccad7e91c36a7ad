"""The webhook target against hostile receivers, and against tenants that probe the network through errors."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.unit.targets.sink import Run, local, resolver, sink
from tests.unit.targets.ssrf import CLASSES, Canary, target_for
from timebell import http_client
from timebell.errors import InvalidInput
from timebell.sim.loop import run_virtual
from timebell.targets import http_connections, http_options
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OPEN = AddressGuard(True, True, resolve=resolver("127.0.0.1"))
BOMB = bytes(10 * 1024 * 1024)


class Counting(http_client.Network):
    """Connects to loopback, counts the bytes read and records the bytes sent."""

    def __init__(self) -> None:
        self.read = 0
        self.sent = b""

    async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
        stream = await super().connect(address, port, timeout)
        read, write = stream.read, stream.write

        async def counted(limit: int) -> bytes:
            data = await read(limit)
            self.read += len(data)
            return data

        async def record_write(data: bytes) -> None:
            self.sent += data
            await write(data)

        stream.read, stream.write = counted, record_write  # type: ignore[method-assign]
        return stream


async def deliver_to(
    script: Script, delivery: Delivery, *, scheme: str = "http", timeout: float = 10.0, **options: Any
) -> tuple[Outcome, Counting, float]:
    """Deliver to a receiver that runs a script; return the outcome, the traffic and the duration."""

    serving: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with suppress(ConnectionError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            await script(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    network = Counting()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"{scheme}://hooks.example:{server.sockets[0].getsockname()[1]}/"
    began = asyncio.get_running_loop().time()
    target = target_for(network, OPEN, timeout)
    outcome = await target.deliver(delivery, {"url": url, **options})
    took = asyncio.get_running_loop().time() - began
    await target.close()
    server.close()
    for task in filter(None, serving):
        task.cancel()
    await asyncio.gather(*filter(None, serving), return_exceptions=True)
    return outcome, network, took


def answering(*parts: bytes, after: bytes = b"", pause: float = 0) -> Script:
    """Reads a request, sends the parts, then `after` again and again."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        for part in parts:
            writer.write(part)
            await writer.drain()
        while after:
            writer.write(after)
            await writer.drain()
            await asyncio.sleep(pause)

    return script


async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)


async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(60)


async def send_banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()


async def slow_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"\x16\x03\x03\x40\x00")  # a TLS record of 16 KiB, a byte at a time
    while True:
        writer.write(b"\x02")
        await writer.drain()
        await asyncio.sleep(0.01)


DRIPS: list[tuple[str, str, Script]] = [
    ("http", "before", answering(after=b"H", pause=0.05)),
    ("http", "status", answering(b"HTTP/1.1 ", after=b"2", pause=0.01)),
    ("http", "header", answering(b"HTTP/1.1 200 OK\r\nX: ", after=b"x", pause=0.01)),
    ("http", "body", answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n", after=b"x", pause=0.01)),
    ("http", "chunk", answering(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", after=b"1\r\nx\r\n", pause=0.01)),
    ("http", "size", answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0", after=b"0", pause=0.1)),
    ("http", "trailer", answering(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", after=b"x", pause=0.01)),
    ("http", "100", answering(after=b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.05)),
    ("http", "never_answer", never_answer),
    ("http", "never_read", never_read),
    ("https", "handshake", slow_handshake),
    ("https", "never_answer", never_answer),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "where", "script"), DRIPS, ids=[f"{scheme}-{name}" for scheme, name, _ in DRIPS])
def test_deadline_applies_wherever_a_receiver_drips(
    run: Run, delivery: Delivery, scheme: str, where: str, script: Script
) -> None:
    delivery.payload = "x" * 60_000
    outcome, _, took = run(deliver_to(script, delivery, scheme=scheme, timeout=0.5))
    assert outcome.code == "TIMEOUT"
    assert 0.4 < took < 15


def test_timeout_is_at_most_30_minutes() -> None:
    assert http_options.MAX_TIMEOUT_SECONDS == 1800
    with pytest.raises(InvalidInput) as caught:
        target_for(Canary(), OPEN, 1800.001)
    assert caught.value.code == "INVALID_TIMEOUT"


def answer(headers: bytes, body: bytes) -> Script:
    return answering(b"HTTP/1.1 200 OK\r\n" + headers + b"Content-Length: %d\r\n\r\n" % len(body), body)


LARGE: list[tuple[str, Script, str | None]] = [
    ("one header of 1 MB", answer(b"X: " + b"x" * 1_000_000 + b"\r\n", b""), "RESPONSE_UNREADABLE"),
    ("a name of 1 MB", answer(b"x" * 1_000_000 + b": x\r\n", b""), "RESPONSE_UNREADABLE"),
    ("17 KiB of headers", answer(b"".join(b"X-%d: y\r\n" % n for n in range(2000)), b""), "RESPONSE_UNREADABLE"),
    ("headers without end", answering(
        b"HTTP/1.1 200 OK\r\n", after=b"X: yyyyyyyyyyyyyyyyyy\r\n"), "RESPONSE_UNREADABLE"),
    ("a reason of 1 MB", answering(b"HTTP/1.1 200 " + b"x" * 1_000_000 + b"\r\n\r\n"), "RESPONSE_UNREADABLE"),
    ("100 without end", answering(after=b"HTTP/1.1 100 Continue\r\n\r\n"), "RESPONSE_UNREADABLE"),
    ("15 KiB of headers", answer(b"X: " + b"x" * 15_000 + b"\r\n", b"fine"), None),
    ("10 MB", answer(b"", BOMB), None),
    ("gzip", answer(b"Content-Encoding: gzip\r\n", gzip.compress(BOMB)), None),
    ("gzip in gzip", answer(b"Content-Encoding: gzip, gzip\r\n", gzip.compress(gzip.compress(BOMB))), None),
    ("deflate", answer(b"Content-Encoding: deflate\r\n", zlib.compress(BOMB)), None),
    ("br and zstd that are none", answer(b"Content-Encoding: br, zstd\r\n", b"\xff" * 100), None),
    ("a length of 10 to the 18", answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000000\r\n\r\n", after=b"x" * 999), None),
    ("a chunk of 2 to the 60", answering(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000000000000000\r\n", after=b"x" * 999), None),
    ("no length and no end", answering(b"HTTP/1.1 200 OK\r\n\r\n", after=b"x" * 999), None),
    ("two lengths", answer(b"Content-Length: 1\r\n", b"xx"), "RESPONSE_UNREADABLE"),
    ("a length that is none", answering(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), "RESPONSE_UNREADABLE"),
    ("HTTP/0.9", answering(b"<html>"), "RESPONSE_UNREADABLE"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "code"), [case[1:] for case in LARGE], ids=[case[0] for case in LARGE])
def test_at_most_80_kib_of_a_response_are_read(run: Run, delivery: Delivery, script: Script, code: str | None) -> None:
    outcome, network, took = run(deliver_to(script, delivery))
    assert outcome.code == code
    assert network.read <= http_client.MAX_HEAD_BYTES + http_connections.MAX_RESPONSE_BYTES == 80 * 1024
    assert took < 9
    assert b"accept-encoding: identity\r\n" in network.sent
    if outcome.result:
        assert len(outcome.result["body"]) <= 4096


def test_hostile_response_body_is_stored_as_short_text(run: Run, delivery: Delivery) -> None:
    body = b"<script>\x00\x1b[2J\xff\xed\xa0\x80\xe2\x80\xae" * 1000
    outcome, _, _ = run(deliver_to(answer(b"", body), delivery))
    stored = outcome.result["body"]
    assert len(stored) <= 4096
    assert "\x00" not in stored
    stored.encode()
    assert set(outcome.result) == {"status", "body"}  # no response header is stored


# --- Request headers, and information in failures -------------------------------------------------------

STORED = [
    {"Host": "evil"}, {"x-a": "b\r\nHost: evil"}, {"x-a\r\nHost": "evil"}, {"content-length": "0"}, {"x": "é"},
    {"Transfer-Encoding": "chunked"}, {"webhook-id": "other"}, {"connection": "upgrade"}, ["x"], {"x": 1},
]  # fmt: skip


@pytest.mark.parametrize("headers", STORED, ids=repr)
def test_stored_headers_are_validated_again_on_delivery(run: Run, delivery: Delivery, headers: Any) -> None:
    outcome, network, _ = run(deliver_to(answer(b"", b""), delivery, headers=headers))
    assert (outcome.code, outcome.retryable, network.sent) == ("ADDRESS_REFUSED", False, b"")


def test_options_that_were_valid_once_do_not_vouch_for_others(run: Run, delivery: Delivery) -> None:
    async def main() -> list[tuple[bool, str | None]]:
        async with sink() as server:
            target, outcomes = local(), []
            options = target.check({"url": f"http://hooks.example:{server.port}/status/200", "headers": {"x-a": "b"}})
            for headers in ({"x-a": "b"}, {"x-a": "b"}, {"x-a": "b", "host": "evil"}, {"x-a": "b"}):
                outcome = await target.deliver(delivery, {**options, "headers": headers})
                outcomes.append((outcome.delivered, outcome.code))
            await target.close()
            return outcomes

    assert run(main()) == [(True, None), (True, None), (False, "ADDRESS_REFUSED"), (True, None)]


def test_request_has_exactly_the_expected_headers(run: Run, delivery: Delivery) -> None:
    delivery.payload = "a\r\nHost: evil\r\n\r\n"
    delivery.topic = "t\r\nX: y"
    _, network, _ = run(deliver_to(answer(b"", b""), delivery, headers={"X-Own": "a: b"}))
    head, _, body = network.sent.partition(b"\r\n\r\n")
    names = sorted(line.split(b":")[0].decode().lower() for line in head.split(b"\r\n")[1:])
    assert names == ["accept-encoding", "connection", "content-length", "content-type", "host", "timebell-attempt",
                     "user-agent", "webhook-id", "webhook-signature", "webhook-timestamp", "x-own"]  # fmt: skip
    assert b"\r\n" not in body


class Silent(http_client.Network):
    """A firewall that answers nothing."""

    async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.Event().wait()
        except TimeoutError:
            raise http_client.ConnectError from None
        raise AssertionError


class Closed(http_client.Network):
    """A closed port."""

    async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
        raise http_client.ConnectError("Connection refused")


async def _deliver_timed(target: HttpTarget, delivery: Delivery) -> tuple[Outcome, float]:
    began = asyncio.get_running_loop().time()
    outcome = await target.deliver(delivery, {"url": "https://hooks.example/"})
    return outcome, asyncio.get_running_loop().time() - began


def guards(answers: Sequence[str | None]) -> list[AddressGuard]:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("Name or service not known")

    return [AddressGuard(resolve=resolver(each) if each else unknown) for each in answers]


@pytest.mark.parametrize(("timeout", "code"), [(10.0, "CONNECT_FAILED"), (0.5, "TIMEOUT")])
def test_closed_and_filtered_ports_are_indistinguishable(delivery: Delivery, timeout: float, code: str) -> None:
    async def main() -> list[tuple[Outcome, float]]:
        (guard,) = guards(["93.184.216.34"])
        return await asyncio.gather(
            *(_deliver_timed(target_for(each, guard, timeout), delivery) for each in (Silent(), Closed()))
        )

    (filtered, slow), (closed, quick) = run_virtual(main())
    assert filtered == closed
    assert closed.code == code
    assert (slow, quick) == pytest.approx((min(timeout, http_connections.CONNECT_SECONDS),) * 2)


def test_unknown_and_private_names_are_indistinguishable(delivery: Delivery) -> None:
    async def main() -> list[tuple[Outcome, float]]:
        all_guards = guards([None, "10.0.0.1", "127.0.0.1", "169.254.169.254"])
        return await asyncio.gather(*(_deliver_timed(target_for(Closed(), guard), delivery) for guard in all_guards))

    outcomes = run_virtual(main())
    assert len({repr(outcome) for outcome, _ in outcomes}) == 1
    assert outcomes[0][0].code == "ADDRESS_REFUSED"
    assert [took for _, took in outcomes] == pytest.approx([http_connections.CONNECT_SECONDS] * 4)


def test_receiver_can_cause_at_most_six_failure_codes(run: Run, delivery: Delivery) -> None:
    async def main() -> set[str | None]:
        scripts = [script for _, script, _ in LARGE] + [script for _, _, script in DRIPS] + [send_banner]
        scripts += [answering(b"HTTP/1.1 %d X\r\n\r\n" % status) for status in (101, 204, 302, 404, 410, 503, 999)]
        few = asyncio.Semaphore(8)

        async def one(script: Script, scheme: str) -> tuple[Outcome, Counting, float]:
            async with few:
                return await deliver_to(script, delivery, scheme=scheme, timeout=1)

        done = await asyncio.gather(*(one(script, scheme) for script in scripts for scheme in ("http", "https")))
        failing = [
            _deliver_timed(target_for(Closed(), guard), delivery) for guard in guards([None, "10.0.0.1", "8.8.8.8"])
        ]
        seen = [outcome for outcome, *_ in [*done, *await asyncio.gather(*failing)]]
        assert not any("127.0.0.1" in (outcome.error or "") for outcome in seen)
        return {outcome.code for outcome in seen}

    assert run(main()) - {None} == CLASSES
    assert len(CLASSES) == 6
