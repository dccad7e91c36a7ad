"""The errors of PostgreSQL that mean "the database is unavailable", each caused on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import text

from tests.servers import Postgres
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.open import open_store
from timebell.store.transaction import Transaction, read_only
from timebell.store.unavailability import POSTGRES_STATES
from timebell_torture import capabilities

DISK_SIZE_BYTES = 4 * 2**20
Cause = Callable[[Transaction, "Server"], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class Server(Postgres):
    """A server with an additional session, which conflicts with the one under test."""

    @contextmanager
    def other_session(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            yield connection

    def execute(self, statement: str) -> None:
        with self.other_session() as other:
            other.execute(statement)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url, system_now)
    try:
        yield store
    finally:
        await store.close()


def execute(tx: Transaction, statement: str) -> Any:
    result = tx.execute(text(statement.replace(":", "\\:")))
    return result.scalar() if result.returns_rows else None


async def error_of(url: str, cause: Callable[..., Any], *args: Any) -> StoreUnreachable:
    """Return the error of an operation on a new store, which must work afterwards."""
    async with opened(url) as store:
        with pytest.raises(StoreUnreachable) as raised:
            await store.run(cause, *args)
    return raised.value


def kill_another_session(tx: Transaction, server: Server) -> None:
    with psycopg.connect(server.url) as other:
        os.kill(other.info.backend_pid, signal.SIGKILL)  # the server ends all sessions
        execute(tx, "SELECT pg_sleep(60)")


def state_of(error: StoreUnreachable) -> str:
    cause: Any = error.__cause__
    return str(getattr(getattr(cause, "orig", None) or cause, "sqlstate", ""))


def write_in_read_only_transaction(tx: Transaction, _: Server) -> None:
    execute(tx, "SET TRANSACTION READ ONLY")
    execute(tx, "CREATE TABLE x (id int)")


def stay_idle_in_transaction(tx: Transaction, server: Server) -> None:
    session = execute(tx, "SELECT pg_backend_pid()")
    execute(tx, "SET LOCAL idle_in_transaction_session_timeout = 10")
    with server.other_session() as other:
        while other.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [session]).fetchone() is not None:
            time.sleep(0.01)
    execute(tx, "SELECT 1")


def change_what_another_changed(tx: Transaction, server: Server) -> None:
    execute(tx, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    execute(tx, "SELECT 1 FROM counted")
    server.execute("UPDATE counted SET count = count + 1")
    execute(tx, "UPDATE counted SET count = count + 1")


def wait_for_each_other(tx: Transaction, server: Server) -> None:
    execute(tx, "SET LOCAL deadlock_timeout = 10")  # less than the other's, so this one is the victim
    execute(tx, "SELECT pg_advisory_xact_lock(1)")
    is_locked = threading.Event()

    def lock_in_other_order() -> None:
        with server.other_session() as other, other.transaction():
            other.execute("SELECT pg_advisory_xact_lock(2)")
            is_locked.set()
            other.execute("SELECT pg_advisory_xact_lock(1)")

    threading.Thread(target=lock_in_other_order).start()
    assert is_locked.wait(60)
    execute(tx, "SELECT pg_advisory_xact_lock(2)")


def fill_disk(tx: Transaction, server: Server) -> None:
    execute(tx, "CREATE TABLE filling TABLESPACE small AS SELECT i FROM generate_series(1, 1000000) i")


def take_all_locks(tx: Transaction, _: Server) -> None:
    execute(tx, "SELECT count(pg_advisory_xact_lock(i)) FROM generate_series(1, 1000000) i")


def spill_much(tx: Transaction, _: Server) -> None:
    execute(tx, "SET LOCAL temp_file_limit = 64")
    execute(tx, "SET LOCAL work_mem = 64")
    execute(
        tx,
        "SELECT count(*) FROM (SELECT i FROM generate_series(1, 100000) i ORDER BY md5(CAST(i AS text))) x",
    )


def wait_for_locked_table(tx: Transaction, server: Server) -> None:
    execute(tx, "SET LOCAL lock_timeout = 10")
    with server.other_session() as other, other.transaction():
        other.execute("LOCK TABLE counted")
        execute(tx, "SELECT 1 FROM counted")


def run_into_timeout(tx: Transaction, _: Server) -> None:
    execute(tx, "SET LOCAL statement_timeout = 1")
    execute(tx, "SELECT pg_sleep(60)")


def terminate_session(tx: Transaction, _: Server) -> None:
    execute(tx, "SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(60)")


def read_broken_file(tx: Transaction, _: Server) -> None:
    execute(tx, "SELECT pg_read_file('/proc/self/mem')")


def connect_elsewhere(tx: Transaction, _: Server) -> None:
    execute(tx, "SELECT dblink_connect('host=127.0.0.1 port=1')")


def use_missing_connection(tx: Transaction, _: Server) -> None:
    execute(tx, "SELECT dblink_disconnect('none')")


CAUSES: dict[str, Cause] = {
    "08001": connect_elsewhere, "08003": use_missing_connection, "25006": write_in_read_only_transaction,
    "40001": change_what_another_changed, "40P01": wait_for_each_other, "53100": fill_disk, "53200": take_all_locks,
    "53400": spill_much, "55P03": wait_for_locked_table, "57014": run_into_timeout, "58030": read_broken_file,
}  # fmt: skip
ENDED_SESSIONS: dict[str, Cause] = {
    "25P03": stay_idle_in_transaction, "57P01": terminate_session, "57P02": kill_another_session,
}  # fmt: skip
REFUSED_CONNECTIONS = {  # user and database, with the statements before
    "28000": ("missing", "postgres", ()),
    "28P01": ("locked", "postgres", ("CREATE ROLE locked LOGIN PASSWORD 'right'",)),
    "3D000": ("timebell", "missing", ()),
    "53300": ("limited", "postgres", ("CREATE ROLE limited LOGIN CONNECTION LIMIT 0",)),
}
ELSEWHERE = {
    "08P01": "test_pgbouncer.py",
    "57P03": "test_a_server_that_shuts_down_is_restarting",
    "57P05": "test_an_idle_session_that_the_server_ended_is_replaced",
}
NOT_CAUSED = {
    "08000": "raised by no version of the server", "08004": "raised by poolers", "08006": "raised by foreign servers",
    "08007": "raised by drivers", "53000": "raised by no version of the server",
    "57P04": "raised in sessions of a standby only",
}  # fmt: skip


def test_each_state_is_caused_or_has_a_reason_why_not() -> None:
    groups = (CAUSES, ENDED_SESSIONS, REFUSED_CONNECTIONS, ELSEWHERE, NOT_CAUSED)
    assert sorted(state for group in groups for state in group) == sorted(POSTGRES_STATES)


@pytest.fixture
def small_disk(server: Server) -> Iterator[None]:
    """A tablespace that is full soon; the test is skipped if none can be mounted."""
    if (missing := capabilities.missing_requirement("diskfull", "postgres")) is not None:
        pytest.skip(missing)
    folder = server.folder / "small"
    capabilities.mount_tmpfs(folder, DISK_SIZE_BYTES)
    try:
        server._own(folder)
        server.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
        yield
        server.execute("DROP TABLESPACE small")
    finally:
        capabilities.unmount(folder)


@pytest.mark.parametrize("state", CAUSES)
async def test_a_statement_that_fails_has_the_code_of_its_cause(
    state: str, server: Server, request: pytest.FixtureRequest
) -> None:
    if CAUSES[state] is fill_disk:
        request.getfixturevalue("small_disk")
    server.execute("CREATE TABLE IF NOT EXISTS counted AS SELECT 1 AS count")
    server.execute("CREATE EXTENSION IF NOT EXISTS dblink")
    error = await error_of(server.url, CAUSES[state], server)
    assert (state_of(error), error.code) == (state, POSTGRES_STATES[state].code)


@pytest.mark.parametrize("state", ENDED_SESSIONS)
async def test_a_session_that_the_server_ends_is_unavailable(state: str, server: Server) -> None:
    error = await error_of(server.url, ENDED_SESSIONS[state], server)
    # asyncpg often reports the closed connection instead of the last message.
    assert error.code in ("DATABASE_UNREACHABLE", "DATABASE_RESTARTING")
    await wait_until_accepting(server.url)


async def wait_until_accepting(url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await (await asyncpg.connect(url)).close()
                return
            except (asyncpg.PostgresError, OSError):
                await asyncio.sleep(0.05)


async def test_a_read_is_repeated_if_its_session_ends(server: Server) -> None:
    sessions = []

    @read_only
    def end_first_session(tx: Transaction) -> int:
        sessions.append(execute(tx, "SELECT pg_backend_pid()"))
        if len(sessions) == 1:
            server.execute(f"SELECT pg_terminate_backend({sessions[0]}, 10000)")
        return int(execute(tx, "SELECT 7"))

    async with opened(server.url) as store:
        assert await store.run(end_first_session) == 7
    assert len(set(sessions)) == 2


async def test_an_idle_session_that_the_server_ended_is_replaced(server: Server) -> None:
    def limit_idle_time(tx: Transaction) -> int:
        execute(tx, "SET idle_session_timeout = 10")
        return int(execute(tx, "SELECT pg_backend_pid()"))

    def is_open(tx: Transaction, pid: int) -> bool:
        return bool(execute(tx, f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"))

    async with opened(server.url) as store, opened(server.url) as observer:
        pid = await store.run(limit_idle_time)
        async with asyncio.timeout(60):
            while await observer.run(is_open, pid):
                await asyncio.sleep(0.01)
        assert await store.run(execute, "SELECT pg_backend_pid()") != pid


@pytest.mark.parametrize("state", REFUSED_CONNECTIONS)
async def test_a_refused_connection_has_the_code_of_its_cause(state: str, server: Server) -> None:
    user, database, statements = REFUSED_CONNECTIONS[state]
    rules = server.data / "pg_hba.conf"
    if "host all locked" not in rules.read_text():
        rules.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
    for statement in (*statements, "SELECT pg_reload_conf()"):
        server.execute(statement)
    url = f"postgresql://{user}:wrong@127.0.0.1:{server.port}/{database}"
    error = await error_of(url, execute, "SELECT 1")
    assert (state_of(error), error.code) == (state, POSTGRES_STATES[state].code)
    assert ("refuses the connection" in error.message) == (state != "53300")


async def test_a_server_that_shuts_down_is_restarting(server: Server) -> None:
    with psycopg.connect(server.url):  # for whose end the server waits
        os.kill(server.pid, signal.SIGTERM)
        error = await error_of(server.url, execute, "SELECT 1")
    assert (state_of(error), error.code) == ("57P03", "DATABASE_RESTARTING")
    while (server.data / "postmaster.pid").exists():
        await asyncio.sleep(0.05)
    server.start()
