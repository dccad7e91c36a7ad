"""Every error that means "the database is unavailable", produced by a real server, keeps its code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from sqlalchemy import text

from tests.servers import MariaDB, Postgres
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.open import open_store
from timebell.store.transaction import Transaction
from timebell.store.unavailability import (
    BUSY,
    EXHAUSTED,
    MARIADB_ERRORS,
    POSTGRES_STATES,
    READ_ONLY,
    UNREACHABLE,
    Unavailability,
)

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


@pytest.mark.slow
def test_every_error_of_mariadb_is_classified(mariadb_server: MariaDB) -> None:
    async def body() -> None:
        async with _opened(mariadb_server.url) as store:
            for number, kind in MARIADB_ERRORS.items():
                if number and number not in CLIENT_ERRORS:
                    raised = f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}"
                    assert await _code(store, raised) == kind.code, number
            await store.run(execute, "SELECT 1")

    asyncio.run(body())


POSTGRES_CAUSES: dict[str, Any] = {
    "read-only transaction": (READ_ONLY, "SET TRANSACTION READ ONLY", "CREATE TABLE x (id int)"),
    "statement timeout": (BUSY, "SET LOCAL statement_timeout = 1", "SELECT pg_sleep(60)"),
    "temporary files": (
        EXHAUSTED, "SET LOCAL temp_file_limit = 64", "SET LOCAL work_mem = 64",
        "SELECT count(*) FROM (SELECT i FROM generate_series(1, 100000) i ORDER BY md5(CAST(i AS text))) x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", POSTGRES_CAUSES)
def test_a_cause_on_postgres_has_its_code(cause: str, postgres_server: Postgres) -> None:
    kind, *statements = POSTGRES_CAUSES[cause]

    async def body() -> None:
        async with _opened(postgres_server.url) as store:
            assert await _code(store, *statements) == kind.code
            await store.run(execute, "SELECT 1")

    asyncio.run(body())


MARIADB_CAUSES: dict[str, Any] = {
    "read-only transaction": (
        READ_ONLY, "START TRANSACTION READ ONLY", "DELETE FROM mysql.db WHERE Db = ''",
    ),
    "killed": (UNREACHABLE, "KILL CONNECTION_ID()"),
    "statement timeout": (BUSY, "SET STATEMENT max_statement_time = 0.01 FOR SELECT SLEEP(60)"),
    "table full": (EXHAUSTED, "SET max_heap_table_size = 16384",
                   "CREATE TEMPORARY TABLE x (a varchar(1000)) ENGINE=MEMORY",
                   "INSERT INTO x SELECT REPEAT('a', 900) FROM information_schema.COLLATIONS"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cause", MARIADB_CAUSES)
def test_a_cause_on_mariadb_has_its_code(cause: str, mariadb_server: MariaDB) -> None:
    kind, *statements = MARIADB_CAUSES[cause]

    async def body() -> None:
        async with _opened(mariadb_server.url) as store:
            assert await _code(store, *statements) == kind.code
            await store.run(execute, "SELECT 1")

    asyncio.run(body())


def _as_user(url: str, user: str, database: str | None = None) -> str:
    parts = urlsplit(url)
    path = parts.path if database is None else database
    return urlunsplit(parts._replace(netloc=f"{user}@{parts.hostname}:{parts.port}", path=path))


@pytest.mark.parametrize(
    ("prepare", "url_of", "kind"),
    [
        ((), lambda url: _as_user(url, "nobody_of_this_name"), UNREACHABLE),
        ((), lambda url: _as_user(url, "timebell", "/no_such_database"), UNREACHABLE),
        (("CREATE ROLE limited LOGIN CONNECTION LIMIT 0",), lambda url: _as_user(url, "limited"),
         EXHAUSTED),
    ],
    ids=["unknown role", "unknown database", "too many connections"],
)  # fmt: skip
def test_a_refused_connection_to_postgres_has_its_code(
    prepare: tuple[str, ...], url_of: Callable[[str], str], kind: Unavailability, postgres_server: Postgres
) -> None:
    async def body() -> None:
        async with _opened(postgres_server.url) as store:
            for statement in prepare:
                await store.run(execute, statement)
        async with _opened(url_of(postgres_server.url)) as store:
            assert await _code(store, "SELECT 1") == kind.code

    asyncio.run(body())


@pytest.mark.slow
def test_a_refused_connection_to_mariadb_has_its_code(mariadb_server: MariaDB) -> None:
    mariadb_server.execute(
        "CREATE USER limited WITH MAX_USER_CONNECTIONS 1", "CREATE USER local IDENTIFIED VIA unix_socket",
    )  # fmt: skip

    async def code_of(url: str, *, concurrent: int = 1) -> set[Any]:
        async with _opened(url) as store:
            calls = [store.run(execute, "SELECT SLEEP(0.5)") for _ in range(concurrent)]
            results = await asyncio.gather(*calls, return_exceptions=True)
        return {getattr(result, "code", result) for result in results}

    async def body() -> None:
        url = mariadb_server.url
        assert await code_of(_as_user(url, "unknown")) == {"DATABASE_UNREACHABLE"}
        assert await code_of(_as_user(url, "local", "/")) == {"DATABASE_UNREACHABLE"}
        assert await code_of(_as_user(url, "root", "/no_such_database")) == {"DATABASE_UNREACHABLE"}
        assert await code_of(_as_user(url, "limited", "/"), concurrent=3) == {None, "DATABASE_EXHAUSTED"}

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
