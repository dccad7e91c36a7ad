"""What only MariaDB can get wrong: conflicts, packets, sessions, rights, and servers that are none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pymysql
import pytest
from sqlalchemy import text, update

from tests.servers import MariaDB
from timebell.errors import Refused, StoreUnreachable
from timebell.store.dialects import mariadb as dialect
from timebell.store.dialects.mariadb import MariaStore
from timebell.store.open import open_store
from timebell.store.schema import jobs as table
from timebell.store.sql import audit

from .helpers import T0, Store, claim, create, end, ending, everything, get, job, stored

pytestmark = pytest.mark.parametrize("store", ["mariadb"], indirect=True)


def _touch(tx: Any, first: str, second: str) -> None:
    for id_ in (first, second):
        tx.execute(update(table).where(table.c.id == id_).values(priority=table.c.priority + 1))
        tx.execute(text("SELECT SLEEP(0.3)"))


@stored
async def test_deadlocks_are_tried_again(store: Store) -> None:
    one, other = job(), job()
    await create(store, one, other)
    ways = ((one.id, other.id), (other.id, one.id))
    await asyncio.gather(*(store.run(_touch, *way) for way in ways))
    assert [(await get(store, each.id)).priority for each in (one, other)] == [2, 2]


@stored
async def test_who_waits_too_long_for_a_lock_tries_again(store: Store) -> None:
    first = job()
    await create(store, first)
    tried = 0

    def wait(tx: Any) -> None:
        nonlocal tried
        tried += 1
        tx.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        tx.execute(update(table).where(table.c.id == first.id).values(priority=7))
        tx.execute(text(f"SET SESSION innodb_lock_wait_timeout = {dialect.WAIT}"))

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
async def test_more_than_a_packet_takes_is_written_in_several(store: Store) -> None:
    payload = '"' + "\u00e4\U0001f514'\\\\" * 60_000 + '"'
    await create(store, *(job(payload=payload) for _ in range(40)))
    await create(store, *(job(payload=payload) for _ in range(40)), bulk=True)
    found = await claim(store, most=40)
    assert {attempt.payload for attempt in found} == {payload}
    assert len(await end(store, *(ending(attempt, result=payload) for attempt in found))) == 40
    assert len(await everything(store)) == 80


@stored
async def test_keys_are_the_same_only_to_the_letter(store: Store) -> None:
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
    """The URL for a user who may only read."""
    place = urlsplit(store.url)
    name = f"reader{os.getpid()}"
    mariadb.execute(f"CREATE USER {name}@'%'", f"GRANT SELECT ON `{place.path[1:]}`.* TO {name}@'%'")
    yield urlunsplit(place._replace(netloc=place.netloc.replace("root@", f"{name}@")))
    mariadb.execute(f"DROP USER {name}@'%'")


@stored
async def test_who_may_only_read_can_audit_and_no_session_of_an_audit_can_write(store: Store, reader: str) -> None:
    await create(store, job())
    for url in (reader, store.url):
        reading = open_store(url, lambda: T0, read_only=True)
        try:
            assert await reading.hot(audit.ids, None, 10) == []
            with pytest.raises(Exception, match=r"READ ONLY|denied"):
                await reading.hot(_lock, job().id)
        finally:
            await reading.close()


@stored
async def test_a_wrong_password_and_a_database_that_is_not_there_are_said(store: Store) -> None:
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
async def test_servers_without_what_it_takes_are_refused(store: Store, version: str, good: bool) -> None:
    if good:
        dialect._check(version)
        return
    with pytest.raises(Refused) as refused:
        dialect._check(version)
    assert refused.value.code == "DATABASE_UNSUPPORTED"


@stored
async def test_a_connection_that_was_killed_is_replaced(store: Store, mariadb: MariaDB) -> None:
    killed = await store.run(lambda tx: tx.execute(text("SELECT CONNECTION_ID()")).scalar_one())
    with pytest.raises(pymysql.MySQLError):
        await asyncio.to_thread(mariadb.execute, f"KILL {killed}", "KILL 999999999")
    with pytest.raises(StoreUnreachable):
        for _ in range(20):
            await store.run(lambda tx: tx.execute(text("SELECT 1")) and None)
    await create(store, job())
    assert len(await everything(store)) == 1
