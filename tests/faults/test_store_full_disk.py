"""A full disk: requests fail as with an unreachable database and create nothing."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from timebell.app import Timebell
from timebell.errors import StoreUnreachable
from timebell.store.transaction import Transaction

FILL_DISK = "PRAGMA max_page_count = 1"  # than there are


def no_more(tx: Transaction) -> None:
    tx.execute(text(FILL_DISK)).close()


def test_a_request_on_a_full_disk_gets_store_unreachable(sqlite_url: str) -> None:
    async def ask() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.open()
        with pytest.raises(StoreUnreachable, match="full"):
            async with app.store.begin() as connection:
                await app.store.join(connection, no_more)
                for _ in range(20):
                    await app.schedule_at("a", payload="x" * 60_000, connection=connection)
        assert list(await app.list()) == []
        await app.close()

    asyncio.run(ask())
