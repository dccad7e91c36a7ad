"""The webhook target: dialed addresses and TLS names."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tls import Authority
from tests.unit.targets.sink import NOW, SECRET, Post, Run, Sink, deliver_once, local, resolver, sink
from timebell import http_client
from timebell.engine import named_targets
from timebell.errors import Refused
from timebell.model.target import ResolvedTarget
from timebell.targets import http_connections
from timebell.targets.address import AddressGuard, Endpoint
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget

# --- Addresses ------------------------------------------------------------------------------------------


class Guard(AddressGuard):
    """Counts the endpoints that it refuses."""

    refused = 0

    async def resolve(self, place: Endpoint) -> list[str]:
        try:
            return await super().resolve(place)
        except Refused:
            self.refused += 1
            raise

    async def gather_rounds(
        self, rounds: list[asyncio.Task[Outcome]], expire_connections: Callable[[], None]
    ) -> list[Outcome]:
        """Return the outcomes; connections expire once each round is finished, or was refused and waits."""
        while self.refused + sum(one.done() for one in rounds) < len(rounds):
            await asyncio.sleep(0.01)
        expire_connections()
        return await asyncio.gather(*rounds)


@pytest.fixture
def expire_connections(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that expires the connect timeouts, which never expire by themselves.

    On a busy machine a thousand connections may take longer than the timeout of the failing ones.
    """
    connecting: list[asyncio.Timeout] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        created = asyncio.timeout(None)
        if seconds == http_connections.CONNECT_SECONDS:
            connecting.append(created)
        return created

    def end() -> None:
        for one in connecting:
            with suppress(RuntimeError):  # already connected
                one.reschedule(asyncio.get_running_loop().time())

    monkeypatch.setattr(http_connections, "CONNECT_SECONDS", 60.0)
    monkeypatch.setattr(http_connections, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))
    return end


def test_dns_answer_that_changes_after_the_check_has_no_effect(
    run: Run, delivery: Delivery, expire_connections: Callable[[], None]
) -> None:
    lookups: list[str] = []

    async def flip(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) % 2 else ["169.254.169.254"]

    async def main() -> tuple[list[Outcome], Sink]:
        guard = Guard(allow_private=True, allow_http=True, resolve=flip)
        target = HttpTarget(SECRET, now=lambda: NOW, guard=guard)
        async with sink() as server:
            options = target.check({"url": f"http://hooks.example:{server.port}/status/200"})
            rounds = [asyncio.create_task(target.deliver(delivery, options)) for _ in range(200)]
            outcomes = await guard.gather_rounds(rounds, expire_connections)
            await target.close()
            return outcomes, server

    outcomes, server = run(main())
    assert len(lookups) == 200  # one lookup each: a second one would return the other answer
    assert [outcome.code for outcome in outcomes] == [None, "ADDRESS_REFUSED"] * 100
    assert len(server.requests) == 100


class Public(http_client.Stream):
    """A connection to a public receiver that answers every request with 200."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    @property
    def peer_address(self) -> str:
        return self.address

    async def open(self, *_: Any) -> None: ...

    async def read(self, limit: int) -> bytes:
        read, self.answer = self.answer[:limit], self.answer[limit:]
        return read

    async def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def test_a_thousand_rounds_of_dns_rebinding_reach_no_internal_server(
    run: Run, delivery: Delivery, expire_connections: Callable[[], None]
) -> None:
    """A resolver alternates between a public and a private address: only checked addresses are dialed."""
    lookups = 0
    dialed: list[str] = []

    async def flip(host: str, port: int) -> list[str]:
        nonlocal lookups
        lookups += 1
        answer = ["93.184.216.34"] if lookups % 2 else ["127.0.0.1"]
        await asyncio.sleep(0)  # yields to the other rounds, as a real lookup does
        return answer

    class Dial(http_client.Network):
        async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
            dialed.append(address)
            if address == "93.184.216.34":
                return Public(address)
            return await super().connect(address, port, timeout)

    async def main() -> tuple[list[Outcome], int]:
        reached = 0

        async def inside(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal reached
            reached += 1
            writer.close()

        canary = await asyncio.start_server(inside, "127.0.0.1", 0)
        guard = Guard(resolve=flip)
        target = HttpTarget(SECRET, now=lambda: NOW, guard=guard, tls=ssl.create_default_context())
        target.connections.network = Dial()
        options = target.check({"url": f"https://hooks.example:{canary.sockets[0].getsockname()[1]}/"})
        rounds = [asyncio.create_task(target.deliver(delivery, options)) for _ in range(1000)]
        outcomes = await guard.gather_rounds(rounds, expire_connections)
        canary.close()
        return outcomes, reached

    outcomes, reached = run(main())
    assert (reached, set(dialed), len(dialed)) == (0, {"93.184.216.34"}, 500)
    assert lookups == 1000  # one lookup per round: a second one could return another answer
    assert sum(outcome.delivered for outcome in outcomes) == 500
    assert {outcome.code for outcome in outcomes if not outcome.delivered} == {"ADDRESS_REFUSED"}


def test_only_checked_addresses_are_dialed(run: Run, delivery: Delivery) -> None:
    dialed: list[str] = []
    answers = iter([["93.184.216.34"], ["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], ["8.8.8.8", "1.1.1.1"]])

    async def resolve(host: str, port: int) -> list[str]:
        return next(answers)

    class Recorder(http_client.Network):
        async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
            dialed.append(address)
            raise http_client.ConnectError

    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolve))
    target.connections.network = Recorder()
    codes = [run(target.deliver(delivery, {"url": "https://hooks.example/"})).code for _ in range(4)]
    assert codes == ["CONNECT_FAILED", "ADDRESS_REFUSED", "ADDRESS_REFUSED", "CONNECT_FAILED"]
    assert dialed == ["93.184.216.34", "8.8.8.8", "1.1.1.1"]


def test_connection_makes_no_second_dns_lookup(run: Run, delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: lookups.append(arguments))

    async def main() -> Outcome:
        async with sink() as server:
            return await deliver_once(local(), delivery, {"url": f"http://hooks.example:{server.port}/status/200"})

    assert run(main()).delivered
    assert lookups == []


def test_connection_to_an_unexpected_peer_is_closed_before_sending(run: Run, delivery: Delivery) -> None:
    closed: list[bool] = []

    class Elsewhere(http_client.Stream):
        @property
        def peer_address(self) -> str:
            return "10.0.0.1"

        async def write(self, data: bytes) -> None:
            raise AssertionError

        def close(self) -> None:
            closed.append(True)

    class Backend(http_client.Network):
        async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
            return Elsewhere()

    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolver("93.184.216.34")))
    target.connections.network = Backend()
    assert run(target.deliver(delivery, {"url": "https://hooks.example/"})).code == "CONNECT_FAILED"
    assert closed == [True]


def test_next_address_is_tried_after_a_failure(run: Run, delivery: Delivery) -> None:
    async def main() -> Outcome:
        guard = AddressGuard(True, True, resolve=resolver("127.0.0.2", "127.0.0.1"))
        async with sink() as server:
            url = f"http://hooks.example:{server.port}/status/200"
            return await deliver_once(HttpTarget(SECRET, now=lambda: NOW, guard=guard), delivery, {"url": url})

    assert run(main()).delivered


def test_hanging_resolver_is_a_failed_connection(run: Run, delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(http_connections, "CONNECT_SECONDS", 0.05)
    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolve))
    assert run(target.deliver(delivery, {"url": "https://hooks.example/"})).code == "CONNECT_FAILED"


def test_stricter_rules_apply_to_existing_jobs(run: Run, delivery: Delivery) -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    outcome = run(target.deliver(delivery, {"url": "http://127.0.0.1:8080/"}))
    assert (outcome.code, outcome.retryable) == ("ADDRESS_REFUSED", True)  # another node may have other settings
    resolved = ResolvedTarget(name="orders", kind="http", revision=1, options={"url": "http://127.0.0.1:8080/"})
    outcome = run(named_targets.deliver(target, resolved, delivery))
    assert (outcome.code, outcome.retryable, outcome.uses_attempt) == ("HTTP_OFF", True, True)


# --- TLS ------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def post_tls(run: Run, delivery: Delivery) -> Callable[..., tuple[Outcome, Sink]]:
    def post_tls(client: ssl.SSLContext | None, server: ssl.SSLContext) -> tuple[Outcome, Sink]:
        async def main() -> tuple[Outcome, Sink]:
            async with sink(server) as receiver:
                url = f"https://hooks.example:{receiver.port}/status/200"
                return await deliver_once(local(tls=client), delivery, {"url": url}), receiver

        result: tuple[Outcome, Sink] = run(main())
        return result

    return post_tls


def test_tls_verifies_the_host_name_not_the_address(post_tls: Post, authority: Authority) -> None:
    outcome, server = post_tls(authority.client(), authority.server("hooks.example"))
    assert outcome.delivered
    assert server.names == ["hooks.example"]
    assert server.requests[0].headers["host"] == f"hooks.example:{server.port}"


@pytest.mark.parametrize("name", ["other.example", "127.0.0.1"])
def test_a_certificate_of_another_name_is_refused(post_tls: Post, authority: Authority, name: str) -> None:
    outcome, server = post_tls(authority.client(), authority.server(name))
    assert (outcome.code, outcome.retryable) == ("TLS_FAILED", True)
    assert server.requests == []


def test_an_unknown_authority_is_refused(post_tls: Post, authority: Authority) -> None:
    assert post_tls(None, authority.server("hooks.example"))[0].code == "TLS_FAILED"


def test_server_without_tls_is_a_tls_failure(run: Run, delivery: Delivery) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> Outcome:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await local().deliver(delivery, {"url": f"https://hooks.example:{port}/"})

    assert run(main()).code == "TLS_FAILED"
