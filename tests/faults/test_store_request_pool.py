"""Requests that use up their connection pool: the engine has its own, and the next request is refused."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from timebell.errors import StoreUnreachable
from timebell.store.dialects.mariadb import store as mariadb
from timebell.store.dialects.mariadb.store import MariaStore
from timebell.store.dialects.postgres import store as postgres
from timebell.store.dialects.postgres.store import PostgresStore


def test_a_waiting_request_gets_the_next_connection_that_is_not_used_any_more(postgres_url: str) -> None:
    async def ask() -> None:
        store = PostgresStore(postgres_url)
        async with AsyncExitStack() as held:
            for _ in range(2 * postgres.REQUEST_POOL_SIZE - 1):
                await held.enter_async_context(store.begin())
            async with store.begin():
                waiting = asyncio.create_task(held.enter_async_context(store.begin()))
                await asyncio.sleep(0)
            await waiting
        await store.close()

    asyncio.run(ask())


def test_requests_do_not_use_the_connections_of_the_engine(nodes_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_postgres = nodes_url.startswith("postgres")
    monkeypatch.setattr(postgres if of_postgres else mariadb, "REQUEST_POOL_TIMEOUT_SECONDS", 0.2)

    async def ask() -> None:
        store = (PostgresStore if of_postgres else MariaStore)(nodes_url, pool_size=1)
        async with AsyncExitStack() as held:
            for _ in range(2 * postgres.REQUEST_POOL_SIZE if of_postgres else mariadb.HANDLER_POOL_SIZE):
                await held.enter_async_context(store.begin())
            with pytest.raises(StoreUnreachable):
                await held.enter_async_context(store.begin())
            await asyncio.wait_for(store.read_clock(), 60)
        async with store.begin():
            pass
        await store.close()

    asyncio.run(ask())
