"""Closing a store in use: connections that are returned later are terminated, and late operations are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
from sqlalchemy import text

from timebell.clock import system_now
from timebell.errors import StoreError
from timebell.store.dialects.postgres.store import PostgresStore
from timebell.store.dialects.sqlite.store import SqliteStore
from timebell.store.transaction import Transaction

LOCK = "SELECT pg_advisory_xact_lock(1)"
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def locked(tx: Transaction) -> None:
    tx.execute(text(LOCK))


def test_connections_returned_after_the_close_are_terminated(postgres_url: str) -> None:
    async def body() -> None:
        store = PostgresStore(postgres_url)
        await store.open()
        beside = await asyncpg.connect(postgres_url)

        async def asked() -> None:
            async with store.begin() as connection:
                await store.join(connection, locked)

        async def until(query: str, count: int) -> None:
            async with asyncio.timeout(60):
                while await beside.fetchval(query) != count:
                    await asyncio.sleep(0.02)

        await beside.execute("SELECT pg_advisory_lock(1)")
        uses: list[Any] = [store.run(locked), store.run_autocommit(locked), asked()]
        going = [asyncio.create_task(use) for use in uses]
        await until(WAITING, len(going))
        await store.close()
        await beside.execute("SELECT pg_advisory_unlock(1)")
        await asyncio.gather(*going)
        await until(OTHERS, 0)
        await beside.close()

    asyncio.run(body())


def test_operations_queued_behind_the_close_are_refused(sqlite_url: str) -> None:
    async def body() -> None:
        store = SqliteStore(sqlite_url, system_now)
        await store.open()
        uses = (store.run(locked), store.run_autocommit(locked))
        closed, *refused = await asyncio.gather(store.close(), *uses, return_exceptions=True)
        assert closed is None
        for error in refused:
            assert isinstance(error, StoreError)
            assert error.code == "STORE_NOT_OPEN"

    asyncio.run(body())
