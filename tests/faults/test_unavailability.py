"""Every error that means "the database is unavailable", raised by a statement, keeps its code.

`test_unavailability_postgres.py` and `test_unavailability_mariadb.py` cause the errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text

from tests.servers import MariaDB, Postgres
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.open import open_store
from timebell.store.transaction import Transaction
from timebell.store.unavailability import MARIADB_ERRORS, POSTGRES_STATES, READ_ONLY

CLIENT_ERRORS = range(2000, 3000)  # of the driver, not of the server


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url, system_now)
    try:
        yield store
    finally:
        await store.close()


def execute(tx: Transaction, *statements: str) -> None:
    for statement in statements:
        tx.execute(text(statement.replace(":", "\\:"))).close()


async def _code(store: Store, *statements: str) -> str:
    """Return the code of the error of statements."""
    with pytest.raises(StoreUnreachable) as raised:
        await store.run(execute, *statements)
    return raised.value.code


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="module")
def mariadb_server() -> Iterator[MariaDB]:
    server = MariaDB()
    yield server
    server.close()


def test_every_state_of_postgres_is_classified(postgres_server: Postgres) -> None:
    async def body() -> None:
        async with _opened(postgres_server.url) as store:
            for state, kind in POSTGRES_STATES.items():
                raised = f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$"
                assert await _code(store, raised) == kind.code, state
                with pytest.raises(StoreUnreachable) as in_request:
                    async with store.begin() as connection:
                        await store.join(connection, execute, raised)
                assert in_request.value.code == kind.code, state
            await store.run(execute, "SELECT 1")

    asyncio.run(body())


@pytest.mark.soak  # hundreds of errors of a server of its own
def test_every_error_of_mariadb_is_classified(mariadb_server: MariaDB) -> None:
    async def body() -> None:
        async with _opened(mariadb_server.url) as store:
            for number, kind in MARIADB_ERRORS.items():
                if number and number not in CLIENT_ERRORS:
                    raised = f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}"
                    assert await _code(store, raised) == kind.code, number
            await store.run(execute, "SELECT 1")

    asyncio.run(body())


def test_a_read_only_server_keeps_results_and_refuses_requests(postgres_server: Postgres) -> None:
    async def body() -> None:
        async with _opened(postgres_server.url) as store:
            await store.run(execute, "CREATE TABLE IF NOT EXISTS written (id int)")
            await asyncio.to_thread(postgres_server.set, default_transaction_read_only="on")
            try:
                assert await _code(store, "INSERT INTO written VALUES (1)") == READ_ONLY.code
                with pytest.raises(StoreUnreachable):
                    await store.run_autocommit(execute, "INSERT INTO written VALUES (1)")
            finally:
                await asyncio.to_thread(_write_again, postgres_server)
            await store.run(execute, "INSERT INTO written VALUES (1)")

    asyncio.run(body())


def _write_again(server: Postgres) -> None:
    server.set(default_transaction_read_only="off")
