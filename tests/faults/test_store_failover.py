"""A database server that goes silent, is replaced or restarted: operations continue on another connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.faults.test_store_silent_connections import Relay
from tests.servers import MariaDB, Postgres, free_port
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.dialects import liveness
from timebell.store.dialects.base import Store
from timebell.store.dialects.handler_transactions import no_finish
from timebell.store.dialects.postgres.store import NOTIFY
from timebell.store.open import open_store, schema_version
from timebell.store.transaction import Transaction
from timebell_torture.proxy import Switch

SECONDS = 20.0  # much less than the timeout of a statement
MAX_RECONNECT_SECONDS = 4.0  # after an address answers again


def _through(url: str, *ports: int) -> str:
    parts = urlsplit(url)
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return urlunsplit(parts._replace(netloc=f"{parts.username}@{hosts}"))


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url, system_now)
    try:
        yield store
    finally:
        await store.close()


def read_one(tx: Transaction) -> Any:
    return tx.execute(text("SELECT 1")).scalar()


def notify(tx: Transaction) -> None:
    tx.run_sql(NOTIFY, channel="test", subjects="")


def read_port(tx: Transaction) -> int:
    statement = "SELECT @@port" if tx.dialect.name == "mysql" else "SELECT current_setting('port')"
    return int(tx.execute(text(statement)).scalar() or 0)


def sleep(tx: Transaction, seconds: float) -> None:
    tx.execute(text(f"SELECT {'SLEEP' if tx.dialect.name == 'mysql' else 'pg_sleep'}({seconds})")).close()


def test_a_transaction_on_a_silent_connection_is_repeated_on_another(nodes_url: str) -> None:
    async def body() -> None:
        parts = urlsplit(nodes_url)
        relay = Relay(parts.hostname or "", parts.port or 0)
        port = await relay.start()
        async with _opened(_through(nodes_url, port)) as store:
            try:
                await asyncio.gather(*(store.run(read_one) for _ in range(3)))
                relay.silence()
                async with asyncio.timeout(SECONDS):
                    assert await asyncio.gather(*(store.run(read_one) for _ in range(3))) == [1, 1, 1]
            finally:
                await relay.close()

    asyncio.run(body())


def test_a_slow_statement_is_not_taken_for_a_silent_server(nodes_url: str) -> None:
    async def body() -> None:
        async with _opened(nodes_url) as store:
            calls: list[Transaction] = []

            def sleep_long(tx: Transaction) -> None:
                calls.append(tx)
                sleep(tx, 4 * liveness.SUSPECT_AFTER_SECONDS)

            await store.run(sleep_long)
            assert len(calls) == 1

    asyncio.run(body())


def compute(tx: Transaction, seconds: float) -> None:
    read_one(tx)
    threading.Event().wait(seconds)  # as if there were no CPU


def test_an_operation_that_computes_for_long_does_not_wait_for_the_server(
    nodes_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with _opened(nodes_url) as store:
            await store.run(compute, 4 * liveness.SUSPECT_AFTER_SECONDS)

    asyncio.run(body())
    assert "dropped all connections" not in caplog.text


def test_connections_closed_by_a_restart_are_replaced_without_an_error(own_server: Postgres | MariaDB) -> None:
    async def body() -> None:
        async with _opened(own_server.url) as store:
            await asyncio.gather(*(store.run(read_one) for _ in range(3)))
            await store.read_clock()
            await asyncio.to_thread(own_server.stop, "fast")
            with pytest.raises(StoreUnreachable):
                await store.run(read_one)
            await asyncio.to_thread(own_server.start)
            await asyncio.gather(*(store.run(read_one) for _ in range(3)))
            await store.read_clock()
            await asyncio.to_thread(own_server.stop, "fast")
            await asyncio.to_thread(own_server.start)
            await asyncio.gather(*(store.run(read_one) for _ in range(3)))
            await store.read_clock()
            async with store.begin() as connection:
                assert await store.join(connection, read_one) == 1

    asyncio.run(body())


def test_a_connection_lost_in_a_transaction_is_replaced_without_a_traceback(
    own_server: Postgres | MariaDB, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with _opened(own_server.url) as store:
            for transaction in (lambda: store.handler_transaction(no_finish), store.begin):
                with pytest.raises((StoreUnreachable, DBAPIError)):
                    async with transaction() as connection:
                        await store.join(connection, read_one)
                        await asyncio.to_thread(own_server.stop)
                        await asyncio.to_thread(own_server.start)
                        await store.join(connection, read_one)
            assert await store.run(read_one) == 1

    asyncio.run(body())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_next_host_is_used_if_one_refuses_connections(own_server: Postgres | MariaDB) -> None:
    async def body() -> None:
        async with _opened(_through(own_server.url, free_port(), own_server.port)) as store:
            assert await store.run(read_port) == own_server.port
            async with store.begin() as connection:
                assert await store.join(connection, read_port) == own_server.port

    asyncio.run(body())


def test_the_next_host_is_used_if_one_is_silent(own_server: Postgres | MariaDB) -> None:
    async def body() -> None:
        accepted: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        async with _opened(_through(own_server.url, port, own_server.port)) as store:
            async with asyncio.timeout(SECONDS):
                assert await store.run(read_port) == own_server.port
        silent.close()
        for writer in accepted:
            writer.transport.abort()

    asyncio.run(body())


def test_an_address_that_was_silent_is_used_soon_after_it_answers(own_server: Postgres | MariaDB) -> None:
    async def body() -> None:
        switch = Switch(own_server.port)
        port = await switch.start()
        switch.strand(refuse=True)
        async with _opened(_through(own_server.url, port)) as store:
            connecting = asyncio.create_task(store.run(read_one))
            async with asyncio.timeout(SECONDS):
                while not switch.silent_count:
                    await asyncio.sleep(0.01)
            switch.point_at(own_server.port)
            async with asyncio.timeout(MAX_RECONNECT_SECONDS):
                while True:
                    try:
                        assert await connecting == 1
                        break
                    except StoreUnreachable:
                        connecting = asyncio.create_task(store.run(read_one))
        await switch.close()

    asyncio.run(body())


def test_a_host_that_accepts_no_writes_is_skipped_on_request(own_server: Postgres | MariaDB) -> None:
    other = type(own_server)()
    try:
        if isinstance(own_server, Postgres):
            own_server.set(default_transaction_read_only="on")
        else:
            own_server.execute("SET GLOBAL read_only = 1")
        url = f"{_through(own_server.url, own_server.port, other.port)}?target_session_attrs="

        async def body() -> None:
            async with _opened(f"{url}any") as store:
                assert await store.run(read_port) == own_server.port
            async with _opened(f"{url}read-write") as store:
                assert await store.run(read_port) == other.port
            with pytest.raises(StoreUnreachable) as refused:  # by the only host
                await schema_version(f"{own_server.url}?target_session_attrs=read-write")
            assert refused.value.code == "DATABASE_READ_ONLY"

        asyncio.run(body())
    finally:
        other.close()


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_a_connection_that_is_dropped_after_a_statement_was_prepared_is_unavailable(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = asyncpg.Connection._get_statement

    async def prepare_and_drop(connection: asyncpg.Connection[Any], *args: Any, **options: Any) -> Any:
        prepared = await prepare(connection, *args, **options)
        connection.terminate()
        return prepared

    async def notify_in_transaction(store: Store) -> None:
        async with store.begin() as connection:
            await store.join(connection, notify)

    async with _opened(store_url) as store:
        await store.run_autocommit(notify)
        await notify_in_transaction(store)
        monkeypatch.setattr(asyncpg.Connection, "_get_statement", prepare_and_drop)
        with pytest.raises(StoreUnreachable, match="dropped in the middle of a statement"):
            await store.run_autocommit(notify)
        with pytest.raises(StoreUnreachable, match="dropped in the middle of a statement"):
            await notify_in_transaction(store)
        monkeypatch.undo()
        await store.run_autocommit(notify)
        await notify_in_transaction(store)
