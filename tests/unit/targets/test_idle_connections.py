"""Webhooks reuse open connections, only of their own tenant, endpoint and checked address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.targets.sink import NOW, SECRET, Run, resolver
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery
from timebell.targets.http import HttpTarget

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Receiver:
    """Records the connection of each request; answers with `answer`, after which it may close the connection."""

    def __init__(self, answer: bytes = OK, closes_after: int = 1_000) -> None:
        self.answer, self.closes_after = answer, closes_after
        self.port = self.connections = 0
        self.requests: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        try:
            for _ in range(self.closes_after):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                self.requests.append(connection)
                writer.write(self.answer)
            await reader.readuntil(b"\r\n\r\n")  # the connection ends when the next request arrives
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[Receiver]:
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver


def _target(*addresses: str) -> HttpTarget:
    return HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(True, True, resolve=resolver(*addresses)))


def _connections(run: Run, receiver: Receiver, *deliveries: Delivery, hosts: tuple[str, ...] = ("a.example",)) -> Any:
    """Deliver one after another; return the connection of each request."""

    async def main() -> list[int]:
        target = _target("127.0.0.1")
        async with receiving(receiver):
            for delivery in deliveries:
                for host in hosts:
                    outcome = await target.deliver(delivery, {"url": f"http://{host}:{receiver.port}/"})
                    assert outcome.delivered
            await target.close()
        return receiver.requests

    return run(main())


def test_deliveries_of_a_tenant_to_one_endpoint_share_a_connection(run: Run, delivery: Delivery) -> None:
    assert _connections(run, Receiver(), delivery, delivery, delivery) == [1, 1, 1]


def test_tenants_never_share_a_connection(run: Run, delivery: Delivery) -> None:
    others = [replace(delivery, tenant_id=tenant) for tenant in ("a", "b", "a")]
    assert _connections(run, Receiver(), *others) == [1, 2, 1]


def test_hosts_never_share_a_connection(run: Run, delivery: Delivery) -> None:
    assert _connections(run, Receiver(), delivery, delivery, hosts=("a.example", "b.example")) == [1, 2, 1, 2]


def test_a_delivery_uses_only_a_connection_to_an_address_checked_for_it(run: Run, delivery: Delivery) -> None:
    addresses = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1"]])

    async def resolve(host: str, port: int) -> list[str]:
        return next(addresses)

    async def main() -> list[str | None]:
        target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(True, True, resolve=resolve))
        async with receiving(Receiver()) as receiver:  # does not listen on 127.0.0.2
            outcomes = [await target.deliver(delivery, {"url": f"http://a.example:{receiver.port}/"}) for _ in range(3)]
            await target.close()
            assert receiver.requests == [1, 1]
        return [outcome.code for outcome in outcomes]

    assert run(main()) == [None, "CONNECT_FAILED", None]


def test_a_connection_that_ends_without_a_response_is_replaced(run: Run, delivery: Delivery) -> None:
    assert _connections(run, Receiver(closes_after=1), delivery, delivery, delivery) == [1, 2, 3]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 500 Injected\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000,
    ],
    ids=["close", "HTTP/1.0", "data after the response", "cut"],
)
def test_connections_that_may_contain_other_data_are_not_reused(run: Run, delivery: Delivery, answer: bytes) -> None:
    assert _connections(run, Receiver(answer), delivery, delivery) == [1, 2]
