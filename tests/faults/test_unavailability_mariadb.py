"""The errors of MariaDB that mean "the database is unavailable", each caused on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pymysql
import pytest
from sqlalchemy import text

from tests.servers import MariaDB
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.open import open_store
from timebell.store.transaction import Transaction
from timebell.store.unavailability import MARIADB_ERRORS

pytestmark = pytest.mark.soak  # a server per test, on a machine without other work

CLIENT_ERRORS = range(2000, 3000)  # of the driver, not of the server
MIN_CONNECTIONS = 10  # the lowest limit that the server allows
ENDLESS = "SELECT SUM(SIN(seq)) FROM seq_1_to_1000000000000"
Cause = Callable[[Transaction, "Server"], None]


class Server(MariaDB):
    """A server with a small table, and an additional session, which conflicts with the one under test."""

    SETTINGS = (*MariaDB.SETTINGS, "--max-user-connections=250")  # can be changed only if it is set

    def __init__(self) -> None:
        super().__init__()
        self.execute("CREATE DATABASE test", "CREATE TABLE test.counted (id int PRIMARY KEY, count int)")
        self.execute("INSERT INTO test.counted VALUES (1, 0), (2, 0), (3, 0), (4, 0)", "CREATE USER plain")
        self.execute("CREATE USER frugal WITH MAX_QUERIES_PER_HOUR 2", "CREATE USER local IDENTIFIED VIA unix_socket")
        self.execute("GRANT ALL ON test.* TO plain", "GRANT ALL ON test.* TO frugal")

    def url_of(self, user: str = "root", database: str = "test") -> str:
        return f"mariadb://{user}@127.0.0.1:{self.port}/{database}"

    def connect(self) -> Any:
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", database="test")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url, system_now)
    try:
        yield store
    finally:
        await store.close()


def execute(tx: Transaction, *statements: str) -> Any:
    for statement in statements:
        result = tx.execute(text(statement))
    return result.scalar() if result.returns_rows else None


async def error_of(url: str, cause: Callable[..., Any], *args: Any) -> StoreUnreachable:
    """Return the error of an operation on a new store."""
    async with opened(url) as store:
        with pytest.raises(StoreUnreachable) as raised:
            await store.run(cause, *args)
    return raised.value


def number_of(error: StoreUnreachable) -> int:
    cause: Any = error.__cause__
    return int((getattr(cause, "orig", None) or cause).args[0])


def use_closed_connection(tx: Any, _: Server) -> None:
    tx.connection.connection.driver_connection.close()
    execute(tx, "SELECT 1")


def change_what_another_changed(tx: Transaction, server: Server) -> None:
    execute(tx, "ROLLBACK", "SET SESSION innodb_snapshot_isolation = 1")
    execute(tx, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT * FROM counted")
    server.execute("UPDATE test.counted SET count = count + 1")
    execute(tx, "UPDATE counted SET count = count + 1")


def sort_without_memory(tx: Transaction, _: Server) -> None:
    execute(tx, "SET sort_buffer_size = 1024, max_sort_length = 8388608")
    execute(tx, "SELECT seq FROM seq_1_to_100 ORDER BY REPEAT(seq, 1000000)")


def wait_for_locked_row(tx: Transaction, server: Server) -> None:
    execute(tx, "SET innodb_lock_wait_timeout = 0")
    with closing(server.connect()) as other, other.cursor() as cursor:
        cursor.execute("UPDATE counted SET count = 1 WHERE id = 1")
        execute(tx, "UPDATE counted SET count = 2 WHERE id = 1")


def wait_for_each_other(tx: Transaction, server: Server) -> None:
    execute(tx, "UPDATE counted SET count = 1 WHERE id = 1")
    is_locked = threading.Event()

    def lock_in_other_order() -> None:  # with more rows, so the other transaction is the victim
        with closing(server.connect()) as other, other.cursor() as cursor:
            cursor.execute("UPDATE counted SET count = 1 WHERE id > 1")
            is_locked.set()
            cursor.execute("UPDATE counted SET count = 1 WHERE id = 1")

    threading.Thread(target=lock_in_other_order).start()
    assert is_locked.wait(60)
    execute(tx, "UPDATE counted SET count = 1 WHERE id = 2")


def fill_table_in_memory(tx: Transaction, _: Server) -> None:
    execute(tx, "SET max_heap_table_size = 16384", "CREATE TEMPORARY TABLE x (a varchar(1000)) ENGINE=MEMORY")
    execute(tx, "INSERT INTO x SELECT REPEAT('a', 900) FROM information_schema.COLLATIONS")


def interrupt_query(tx: Transaction, _: Server) -> None:
    execute(tx, "KILL QUERY CONNECTION_ID()")


def write_in_read_only_transaction(tx: Transaction, _: Server) -> None:
    execute(tx, "START TRANSACTION READ ONLY", "DELETE FROM counted")


def kill_connection(tx: Transaction, _: Server) -> None:
    execute(tx, "KILL CONNECTION_ID()")


def run_into_timeout(tx: Transaction, _: Server) -> None:
    execute(tx, f"SET STATEMENT max_statement_time = 0.01 FOR {ENDLESS}")


def stay_idle(tx: Transaction, server: Server) -> None:
    own_id = execute(tx, "SET wait_timeout = 1, idle_transaction_timeout = 1", "SELECT CONNECTION_ID()")
    with closing(server.connect()) as other, other.cursor() as cursor:
        while cursor.execute(f"SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = {own_id}"):
            pass
    execute(tx, "SELECT 1")


CAUSES: dict[int, Cause] = {
    0: use_closed_connection, 1020: change_what_another_changed, 1038: sort_without_memory,
    1114: fill_table_in_memory, 1205: wait_for_locked_row, 1213: wait_for_each_other, 1317: interrupt_query,
    1792: write_in_read_only_transaction, 1927: kill_connection, 1969: run_into_timeout, 2006: stay_idle,
}  # fmt: skip
REFUSED_CONNECTIONS = {  # user and database
    1044: ("plain", "mysql"), 1045: ("missing", "test"), 1049: ("root", "missing"), 1226: ("frugal", "test"),
    1698: ("local", "test"),
}  # fmt: skip
ELSEWHERE = {
    1040: "test_a_full_server_is_exhausted", 1047: "test_clusters.py",
    1053: "test_a_statement_of_a_server_that_shuts_down_is_unavailable", 1203: "test_a_full_server_is_exhausted",
    1290: "test_a_read_only_server_keeps_its_code",
}  # fmt: skip
NOT_CAUSED = {
    1021: "needs a full disk; for tables the server waits", 1026: "needs a full disk", 1037: "needs a full memory",
    1041: "needs a full memory", 1077: "only logged", 1079: "only logged", 1152: "only logged",
    1180: "needs a member of Galera that loses its cluster within a commit", 4031: "of newer servers, instead of 2006",
}  # fmt: skip


def test_each_error_is_caused_or_has_a_reason_why_not() -> None:
    groups = (CAUSES, REFUSED_CONNECTIONS, ELSEWHERE, NOT_CAUSED)
    caused = {number for group in groups for number in group} - {*CLIENT_ERRORS}
    assert caused == MARIADB_ERRORS.keys() - {*CLIENT_ERRORS}


@pytest.mark.parametrize("number", CAUSES)
async def test_a_statement_that_fails_has_the_code_of_its_cause(number: int, server: Server) -> None:
    error = await error_of(server.url_of(), CAUSES[number], server)
    assert (number_of(error), error.code) == (number, MARIADB_ERRORS[number].code)
    async with opened(server.url_of()) as store:
        await store.run(execute, "SELECT 1")


@pytest.mark.parametrize("number", REFUSED_CONNECTIONS)
async def test_a_refused_connection_has_the_code_of_its_cause(number: int, server: Server) -> None:
    user, database = REFUSED_CONNECTIONS[number]
    error = await error_of(server.url_of(user, database), execute, "SELECT 1")
    assert (number_of(error), error.code) == (number, MARIADB_ERRORS[number].code)
    assert ("refuses the connection" in error.message) == (number != 1226)


@pytest.mark.parametrize(
    ("number", "limit", "count", "usual"),
    [(1040, "max_connections", MIN_CONNECTIONS, 300), (1203, "max_user_connections", 1, 250)],
)
async def test_a_full_server_is_exhausted(number: int, limit: str, count: int, usual: int, server: Server) -> None:
    server.execute(f"SET GLOBAL {limit} = {count}")
    async with opened(server.url_of("plain")) as store:
        with closing(server.connect()):
            results = await asyncio.gather(
                *(store.run(execute, "SELECT SLEEP(1)") for _ in range(MIN_CONNECTIONS)), return_exceptions=True
            )
        server.execute(f"SET GLOBAL {limit} = {usual}")
        assert await store.run(execute, "SELECT 1") == 1
    errors = [result for result in results if isinstance(result, StoreUnreachable)]
    assert {(number_of(error), error.code) for error in errors} == {(number, "DATABASE_EXHAUSTED")}


async def test_a_read_only_server_keeps_its_code(server: Server) -> None:
    server.execute("SET GLOBAL read_only = 1")
    try:
        error = await error_of(server.url_of("plain"), execute, "DELETE FROM counted WHERE id = 0")
    finally:
        server.execute("SET GLOBAL read_only = 0")
    assert (number_of(error), error.code) == (1290, "DATABASE_READ_ONLY")


async def test_a_statement_of_a_server_that_shuts_down_is_unavailable(server: Server) -> None:
    async def shut_down() -> None:
        async with opened(server.url_of()) as observer:
            running = f"SELECT count(*) FROM information_schema.PROCESSLIST WHERE INFO = '{ENDLESS}'"
            while not await observer.run(execute, running):
                await asyncio.sleep(0.02)
        os.kill(server.pid, signal.SIGTERM)

    async with opened(server.url_of()) as store:
        shutting_down = asyncio.create_task(shut_down())
        with pytest.raises(StoreUnreachable) as raised:
            await store.run(execute, ENDLESS)
        await shutting_down
    # 1053, or the closed connection, or the next one that is refused
    assert raised.value.code in ("DATABASE_RESTARTING", "DATABASE_UNREACHABLE")
    await asyncio.to_thread(server.stop, "fast")
    await asyncio.to_thread(server.start)
