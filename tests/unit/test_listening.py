"""A node that could not listen to PostgreSQL does not take itself for one that does."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from timebell.store.dialects.postgres.store import PostgresStore


class Refusing:
    """A connection whose server answers no LISTEN."""

    def __init__(self) -> None:
        self.open = True

    async def add_listener(self, *_: Any) -> None:
        raise TimeoutError

    def is_closed(self) -> bool:
        return not self.open

    def terminate(self) -> None:
        self.open = False


def test_who_could_not_listen_tries_again_and_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Refusing] = []

    async def connect(*_: Any, **__: Any) -> Refusing:
        made.append(Refusing())
        return made[-1]

    monkeypatch.setattr(asyncpg, "connect", connect)

    async def body() -> list[bool]:
        store = PostgresStore("postgresql://localhost/timebell")
        return [await store.listen(lambda _: None) for _ in range(2)]

    assert asyncio.run(body()) == [False, False]
    assert [one.open for one in made] == [False, False]
