"""Requests that hold all the connections there are for them: the engine has its own, and the next one is told."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from timebell.errors import StoreUnreachable
from timebell.store.dialects import postgres
from timebell.store.dialects.postgres import ASKED, PostgresStore


def test_requests_do_not_take_the_connections_of_the_engine(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "ASKED_PATIENCE", 0.2)

    async def ask() -> None:
        store = PostgresStore(postgres_url, pool_size=1)
        async with AsyncExitStack() as held:
            for _ in range(2 * ASKED):
                await held.enter_async_context(store.begin())
            with pytest.raises(StoreUnreachable):
                await held.enter_async_context(store.begin())
            await asyncio.wait_for(store.reading(), 60)
        async with store.begin():
            pass
        await store.close()

    asyncio.run(ask())
