"""A database that accepts connections and sends nothing, as behind a cut cable, is reported as unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from timebell.errors import StoreUnreachable
from timebell.store.dialects.mariadb import connections
from timebell.store.dialects.mariadb.store import MariaStore
from timebell.store.dialects.postgres import pooler
from timebell.store.dialects.postgres.store import PostgresStore


@asynccontextmanager
async def _silent(said: bytes) -> AsyncIterator[str]:
    """Yield the URL of a server that goes silent after its first bytes."""
    over = asyncio.Event()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await over.wait()
        writer.close()

    server = await asyncio.start_server(joined, "127.0.0.1", 0)
    yield f"postgresql://nobody@127.0.0.1:{server.sockets[0].getsockname()[1]}/none"
    over.set()
    server.close()


@pytest.mark.parametrize("seen", [True, False], ids=["known address", "new address"])
def test_a_silent_database_is_reported_as_unreachable(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with _silent(b"N") as url:
            if seen:
                monkeypatch.setitem(pooler._pooled_urls, url, False)
            store = PostgresStore(url)
            with pytest.raises(StoreUnreachable):
                await store.read_clock()
            await store.close()

    asyncio.run(ask())


def test_a_silent_mariadb_is_reported_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STATEMENT_TIMEOUT_SECONDS", 1)

    async def ask() -> None:
        async with _silent(b"") as url:
            store = MariaStore(url.replace("postgresql", "mariadb"))
            with pytest.raises(StoreUnreachable):
                await store.read_clock()
            await store.close()

    asyncio.run(ask())
