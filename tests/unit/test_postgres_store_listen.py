"""A store whose LISTEN failed does not report that it listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from timebell.store.dialects.postgres.server import PostgresServer
from timebell.store.dialects.postgres.store import PostgresStore


class Refusing:
    """A connection on which LISTEN times out."""

    def __init__(self) -> None:
        self.open = True

    async def add_listener(self, *_: Any) -> None:
        raise TimeoutError

    def is_closed(self) -> bool:
        return not self.open

    def terminate(self) -> None:
        self.open = False


def test_failed_listen_returns_false_and_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[Refusing] = []

    async def connect(*_: Any, **__: Any) -> Refusing:
        connections.append(Refusing())
        return connections[-1]

    monkeypatch.setattr(PostgresServer, "connect", connect)

    async def body() -> list[bool]:
        store = PostgresStore("postgresql://localhost/timebell")
        return [await store.listen() for _ in range(2)]

    assert asyncio.run(body()) == [False, False]
    assert [one.open for one in connections] == [False, False]
