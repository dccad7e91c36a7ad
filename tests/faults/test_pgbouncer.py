"""A store behind PgBouncer: several clients share few connections to the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import text

from tests.debian_packages import install
from tests.servers import Postgres
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.dialects import liveness
from timebell.store.dialects.base import Store
from timebell.store.open import open_store
from timebell.store.transaction import Transaction
from timebell_torture.pgbouncer import SERVER_CONNECTIONS, PgBouncer, find_program

SECONDS = 20.0  # much less than the timeout of a statement
CLIENTS = 40
StartBouncer = Callable[..., PgBouncer]


@pytest.fixture
def server() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(params=["transaction", pytest.param("session", marks=pytest.mark.slow)])
def start_bouncer(request: pytest.FixtureRequest) -> Iterator[StartBouncer]:
    """Start a PgBouncer in each mode before a server."""
    if find_program() is None:
        install("pgbouncer")
    bouncers: list[PgBouncer] = []
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)

        def start(port: int, **options: Any) -> PgBouncer:
            if request.param == "session":  # each client occupies a connection to the server
                options["server_connections"] = CLIENTS
            bouncer = PgBouncer(Path(folder) / str(len(bouncers)), port, mode=request.param, **options)
            bouncer.start()
            bouncers.append(bouncer)
            deadline = monotonic() + SECONDS
            while not bouncer.is_listening():
                assert monotonic() < deadline
            return bouncer

        yield start
        for bouncer in bouncers:
            bouncer.kill()


@asynccontextmanager
async def opened(bouncer: PgBouncer) -> AsyncIterator[Store]:
    store = open_store(f"postgresql://timebell@127.0.0.1:{bouncer.port}/postgres", system_now)
    try:
        yield store
    finally:
        await store.close()


def read_one(tx: Transaction) -> Any:
    return tx.execute(text("SELECT 1")).scalar()


def write(tx: Transaction) -> None:
    tx.execute(text("CREATE TABLE IF NOT EXISTS written (id int)")).close()


def sleep(tx: Transaction, seconds: float) -> None:
    tx.execute(text(f"SELECT pg_sleep({seconds})")).close()


async def run_until_answered(store: Store) -> None:
    """Repeat an operation until the database answers."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await store.run(read_one)
                return
            except StoreUnreachable:
                await asyncio.sleep(0.05)


async def test_many_operations_share_few_connections(server: Postgres, start_bouncer: StartBouncer) -> None:
    async with opened(start_bouncer(server.port)) as store:
        assert CLIENTS > SERVER_CONNECTIONS
        for _ in range(5):
            assert await asyncio.gather(*(store.run(read_one) for _ in range(CLIENTS))) == [1] * CLIENTS
            await asyncio.gather(*(store.read_clock() for _ in range(CLIENTS)))


async def test_a_slow_statement_is_not_taken_for_a_silent_server(server: Postgres, start_bouncer: StartBouncer) -> None:
    async with opened(start_bouncer(server.port)) as store:
        calls: list[Transaction] = []

        def sleep_long(tx: Transaction) -> None:
            calls.append(tx)
            sleep(tx, 4 * liveness.SUSPECT_AFTER_SECONDS)

        await store.run(sleep_long)
        assert len(calls) == 1


@pytest.mark.slow
async def test_a_restart_of_the_server_or_of_the_pooler_is_survived(
    server: Postgres, start_bouncer: StartBouncer
) -> None:
    bouncer = start_bouncer(server.port)
    async with opened(bouncer) as store:
        await asyncio.gather(*(store.run(read_one) for _ in range(CLIENTS)))
        await asyncio.to_thread(server.stop)
        with pytest.raises(StoreUnreachable) as raised:
            await store.run(read_one)
        assert raised.value.code in ("DATABASE_UNREACHABLE", "DATABASE_RESTARTING")
        await asyncio.to_thread(server.start)
        await run_until_answered(store)
        bouncer.kill()
        with pytest.raises(StoreUnreachable):
            await store.run(read_one)
        bouncer.start()
        await run_until_answered(store)


async def test_a_stopped_server_behind_the_pooler_is_noticed_before_the_timeout_of_a_statement(
    server: Postgres, start_bouncer: StartBouncer
) -> None:
    """With the defaults of PgBouncer, which refuses new clients then, and lets earlier ones wait for two minutes."""
    async with opened(start_bouncer(server.port, login_retry=15)) as store:
        await store.run(read_one)
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(StoreUnreachable):
                await store.run(read_one)


async def test_errors_of_the_server_keep_their_codes(server: Postgres, start_bouncer: StartBouncer) -> None:
    async with opened(start_bouncer(server.port)) as store:
        await store.run(read_one)
        await asyncio.to_thread(server.set, default_transaction_read_only="on")
        with pytest.raises(StoreUnreachable) as raised:
            await store.run(write)
        assert raised.value.code == "DATABASE_READ_ONLY"


async def test_a_pooler_with_too_many_clients_is_unavailable(server: Postgres, start_bouncer: StartBouncer) -> None:
    async with opened(start_bouncer(server.port, max_clients=2)) as store:
        await store.run(read_one)
        results = await asyncio.gather(*(store.run(sleep, 0.5) for _ in range(CLIENTS)), return_exceptions=True)
        refused = [result for result in results if result is not None]
        assert {getattr(each, "code", each) for each in refused} <= {"DATABASE_UNREACHABLE", "DATABASE_EXHAUSTED"}
        assert refused
        await run_until_answered(store)


async def test_another_server_behind_the_pooler_is_noticed_without_an_error(
    server: Postgres, start_bouncer: StartBouncer
) -> None:
    async with opened(start_bouncer(server.port)) as store:
        await store.run(read_one)
        assert not await store.listen()
        assert not store.recent_writes.is_unverified
        await asyncio.to_thread(server.stop, "fast")
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(SECONDS):
            while not store.recent_writes.is_unverified:
                await store.listen()


async def test_a_node_warns_of_idle_transactions_without_a_limit(
    server: Postgres, start_bouncer: StartBouncer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(start_bouncer(server.port)) as store:
        await store.run(read_one)
        await store.run(read_one)
    assert caplog.text.count("idle transactions have no limit") == 1
    caplog.clear()
    await asyncio.to_thread(server.set, idle_in_transaction_session_timeout="10s")
    async with opened(start_bouncer(server.port)) as store:
        await store.run(read_one)
    assert caplog.text.count("idle transactions have no limit") == 0
