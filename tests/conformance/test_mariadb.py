"""Behaviour specific to MariaDB: conflicts, packet size, sessions, privileges and unsupported servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pymysql
import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from tests.servers import MariaDB
from timebell.errors import Refused, StoreUnreachable
from timebell.store.audit import audit
from timebell.store.dialects.handler_transactions import no_finish
from timebell.store.dialects.mariadb import connections
from timebell.store.dialects.mariadb import store as dialect
from timebell.store.dialects.mariadb.store import MariaStore
from timebell.store.open import open_store
from timebell.store.schema import jobs as table

from .helpers import T0, Store, claim, create, end, ending, everything, get, job, stored

pytestmark = pytest.mark.parametrize("store", ["mariadb"], indirect=True)


def _touch(tx: Any, first: str, second: str) -> None:
    for id_ in (first, second):
        tx.execute(update(table).where(table.c.id == id_).values(priority=table.c.priority + 1))
        tx.execute(text("SELECT SLEEP(0.3)"))


@stored
async def test_deadlocks_are_retried(store: Store) -> None:
    one, other = job(), job()
    await create(store, one, other)
    ways = ((one.id, other.id), (other.id, one.id))
    await asyncio.gather(*(store.run(_touch, *way) for way in ways))
    assert [(await get(store, each.id)).priority for each in (one, other)] == [2, 2]


@stored
async def test_lock_wait_timeouts_are_retried(store: Store) -> None:
    first = job()
    await create(store, first)
    tried = 0

    def wait(tx: Any) -> None:
        nonlocal tried
        tried += 1
        tx.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        tx.execute(update(table).where(table.c.id == first.id).values(priority=7))
        tx.execute(text(f"SET SESSION innodb_lock_wait_timeout = {connections.LOCK_TIMEOUT_SECONDS}"))

    async with store.begin() as connection:
        await store.join(connection, _lock, first.id)
        waiting = asyncio.create_task(store.run(wait))
        while tried < 2:
            await asyncio.sleep(0.02)
    await waiting
    assert (await get(store, first.id)).priority == 7


def _lock(tx: Any, id_: str) -> None:
    tx.execute(update(table).where(table.c.id == id_).values(priority=1))


@stored
async def test_batches_larger_than_a_packet_are_split(store: Store) -> None:
    payload = '"' + "\u00e4\U0001f514'\\\\" * 60_000 + '"'
    await create(store, *(job(payload=payload) for _ in range(40)))
    await create(store, *(job(payload=payload) for _ in range(40)), bulk=True)
    found = await claim(store, most=40)
    assert {attempt.payload for attempt in found} == {payload}
    assert len(await end(store, *(ending(attempt, result=payload) for attempt in found))) == 40
    assert len(await everything(store)) == 80


@stored
async def test_keys_are_compared_exactly(store: Store) -> None:
    keys = ["a", "A", "a ", "\u00e1", "\u1e9e", "ss"]
    await create(store, *(job(key=key) for key in keys))
    assert sorted(each.key or "" for each in await everything(store)) == sorted(keys)


@stored
async def test_sessions_are_strict_and_in_utc(store: Store) -> None:
    def look(tx: Any) -> Any:
        asked = "SELECT @@time_zone AS zone, @@sql_mode AS mode, @@tx_isolation AS level, @@collation_connection AS by_"
        return tx.execute(text(asked)).one()

    found = await store.run(look)
    assert (found.zone, found.level, found.by_) == ("+00:00", "READ-COMMITTED", "utf8mb4_nopad_bin")
    assert "STRICT_ALL_TABLES" in found.mode


@pytest.fixture
def reader(mariadb: MariaDB, store: Store) -> Iterator[str]:
    """The URL of a read-only user."""
    place = urlsplit(store.url)
    name = f"reader{os.getpid()}"
    mariadb.execute(f"CREATE USER {name}@'%'", f"GRANT SELECT ON `{place.path[1:]}`.* TO {name}@'%'")
    yield urlunsplit(place._replace(netloc=place.netloc.replace("root@", f"{name}@")))
    mariadb.execute(f"DROP USER {name}@'%'")


@stored
async def test_a_read_only_user_can_audit_and_audit_sessions_cannot_write(store: Store, reader: str) -> None:
    await create(store, job())
    for url in (reader, store.url):
        reading = open_store(url, lambda: T0, read_only=True)
        try:
            assert await reading.run_autocommit(audit.list_schedule_ids, None, 10) == []
            with pytest.raises(Exception, match=r"READ ONLY|denied"):
                await reading.run_autocommit(_lock, job().id)
        finally:
            await reading.close()


@stored
async def test_a_wrong_password_and_a_missing_database_are_reported(store: Store) -> None:
    for url, said in ((store.url.replace("root@", "root:wrong@"), "denied"), (f"{store.url}x", "Unknown database")):
        wrong = MariaStore(url)
        with pytest.raises(StoreUnreachable, match=said) as failed:
            await wrong.open()
        assert "wrong@" not in str(failed.value)
        await wrong.close()


@pytest.mark.parametrize(
    ("version", "good"),
    [("10.11.19-MariaDB-0+deb12u1", True), ("5.5.5-10.6.1-MariaDB", True), ("11.8.2-MariaDB", True),
     ("10.5.29-MariaDB", False), ("8.4.3", False), ("9.1.0-commercial", False)],
)  # fmt: skip
@stored
async def test_unsupported_servers_are_refused(store: Store, version: str, good: bool) -> None:
    if good:
        connections.check_server_version(version)
        return
    with pytest.raises(Refused) as refused:
        connections.check_server_version(version)
    assert refused.value.code == "DATABASE_UNSUPPORTED"


@stored
async def test_a_connection_that_was_killed_is_replaced(store: Store, mariadb: MariaDB) -> None:
    killed = await store.run(lambda tx: tx.execute(text("SELECT CONNECTION_ID()")).scalar_one())
    with pytest.raises(pymysql.MySQLError):
        await asyncio.to_thread(mariadb.execute, f"KILL {killed}", "KILL 999999999")
    assert [await store.run(lambda tx: tx.execute(text("SELECT 1")).scalar()) for _ in range(20)] == [1] * 20
    await create(store, job())
    assert len(await everything(store)) == 1


@stored
async def test_more_transactions_than_connections_all_complete(store: Store) -> None:
    fresh = MariaStore(store.url)  # without pooled connections

    async def lent() -> int:
        async with fresh.handler_transaction(no_finish) as connection:
            return int((await connection.execute(text("SELECT SLEEP(0.01)"))).scalar_one())

    try:
        assert sum(await asyncio.gather(*(lent() for _ in range(4 * dialect.HANDLER_POOL_SIZE)))) == 0
    finally:
        await fresh.close()


@stored
async def test_a_cancelled_statement_has_ended_before_its_caller_continues(store: Store) -> None:
    async def lent(statement: str) -> int:
        async with store.handler_transaction(no_finish) as connection:
            return int((await connection.execute(text(statement))).scalar_one())

    def under_way(tx: Any) -> bool:
        asked = "SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE 'SELECT SLEEP(%'"
        return bool(tx.execute(text(asked)).scalar_one())

    going = asyncio.create_task(lent("SELECT SLEEP(0.5)"))
    while not await store.run(under_way):
        await asyncio.sleep(0.01)
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert not await store.run(under_way)
    assert [await lent(f"SELECT {number}") for number in range(3)] == [0, 1, 2]


def _own_id(tx: Any) -> int:
    return int(tx.execute(text("SELECT CONNECTION_ID()")).scalar_one())


@pytest.mark.parametrize("whose", ["its own", "a request's", "a handler's"])
@stored
async def test_a_connection_cut_in_a_transaction_rolls_it_back(store: Store, mariadb: MariaDB, whose: str) -> None:
    first = job()
    await create(store, first)

    def cut(tx: Any) -> None:
        _lock(tx, first.id)
        mariadb.execute(f"KILL {_own_id(tx)}")
        _lock(tx, first.id)

    async def begun() -> None:
        async with store.begin() as connection:
            await store.join(connection, cut)

    async def lent() -> None:
        async with store.handler_transaction(no_finish) as connection:
            await store.join(connection, cut)

    ways = {"its own": lambda: store.run(cut), "a request's": begun, "a handler's": lent}
    with pytest.raises(DBAPIError if whose == "a handler's" else StoreUnreachable):
        await ways[whose]()
    assert (await get(store, first.id)).priority == 0
    async with store.begin() as connection:
        await store.join(connection, _lock, first.id)
    assert (await get(store, first.id)).priority == 1


@stored
async def test_only_one_handler_fails_after_a_server_restart(store: Store, mariadb: MariaDB) -> None:
    async with AsyncExitStack() as held:
        several = [await held.enter_async_context(store.handler_transaction(no_finish)) for _ in range(3)]
        ids = [await store.join(one, _own_id) for one in several]
    with pytest.raises(pymysql.MySQLError):  # terminates all connections and waits for the server
        await asyncio.to_thread(mariadb.execute, *(f"KILL {id_}" for id_ in ids), "KILL 999999999")
    with pytest.raises((DBAPIError, StoreUnreachable)):
        async with store.handler_transaction(no_finish) as connection:
            await store.join(connection, _own_id)
    for _ in range(3):
        async with store.handler_transaction(no_finish) as connection:
            assert await store.join(connection, _own_id) not in ids


@pytest.mark.parametrize(
    ("number", "tries", "code"),
    [
        (1213, dialect.MAX_CONFLICT_ATTEMPTS, "DATABASE_BUSY"),
        (1205, dialect.MAX_CONFLICT_ATTEMPTS, "DATABASE_BUSY"),
        (1021, 1, "DATABASE_EXHAUSTED"),
        (1114, 1, "DATABASE_EXHAUSTED"),
    ],
)
@stored
async def test_transient_errors_are_retried_and_a_full_disk_is_raised_immediately(
    store: Store, number: int, tries: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialect, "CONFLICT_RETRY_DELAY_SECONDS", 0.0)
    tried = 0

    def fail(tx: Any) -> None:
        nonlocal tried
        tried += 1
        tx.execute(text(f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'as if'"))

    with pytest.raises(StoreUnreachable, match="as if") as raised:
        await store.run(fail)
    assert raised.value.code == code
    assert tried == tries
    await store.read_clock()
