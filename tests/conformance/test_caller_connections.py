"""`connection=`: writes on a caller's connection exist if and only if the caller commits."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, closing
from datetime import UTC
from typing import Any

import asyncpg
import pymysql
import pytest
from pymysql.cursors import DictCursor
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from timebell.errors import Conflict, InvalidInput
from timebell.ids import new_id
from timebell.store.jobs import repository
from timebell.store.schedules import queries, schedules

from .helpers import (
    NODE,
    T0,
    Store,
    after,
    build_job,
    claim,
    end,
    ending,
    everything,
    get,
    job,
    one,
    put,
    schedule,
    started,
    stored,
    stored_schedule,
)

Use = Callable[[Any], Awaitable[None]]


class Rollback(Exception):
    """Raised to roll back the caller's transaction."""


@asynccontextmanager
async def _sync(url: str, session: bool) -> Any:
    """Yield a Connection or Session in a transaction that commits unless the block raises."""
    driver = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql"}.get(url.partition(":")[0], "sqlite")
    if "psycopg" in driver:
        pytest.importorskip("psycopg", reason="no synchronous PostgreSQL driver here: pip install psycopg[binary]")
    engine = create_engine(make_url(url).set(drivername=driver))
    try:
        if session:
            with Session(engine) as opened, opened.begin():
                yield opened
        else:
            with engine.begin() as connection:
                yield connection
    finally:
        engine.dispose()


@asynccontextmanager
async def _async(url: str, session: bool) -> Any:
    """Yield an AsyncConnection or AsyncSession in such a transaction."""
    engine = create_async_engine(make_url(url).set(drivername="postgresql+asyncpg"))
    try:
        if session:
            async with AsyncSession(engine) as opened, opened.begin():
                yield opened
        else:
            async with engine.begin() as connection:
                yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def _psycopg(url: str, awaited: bool) -> Any:
    """Yield a psycopg connection whose rows are dicts and whose time zone is not UTC."""
    psycopg = pytest.importorskip(
        "psycopg", reason="no synchronous PostgreSQL driver here: pip install psycopg[binary]"
    )
    options = {"row_factory": psycopg.rows.dict_row, "options": "-c timezone=Asia/Seoul"}
    if awaited:
        async with await psycopg.AsyncConnection.connect(url, **options) as connection:
            yield connection
    else:
        with psycopg.connect(url, **options) as connection:
            yield connection


@asynccontextmanager
async def _asyncpg(url: str, pooled: bool) -> Any:
    """Yield an asyncpg connection with a JSON codec, or one of a pool."""
    if pooled:
        async with asyncpg.create_pool(url, min_size=1) as pool, pool.acquire() as connection, connection.transaction():
            yield connection
        return
    connection = await asyncpg.connect(url)
    await connection.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _sqlite3(url: str, legacy: bool) -> Any:
    """Yield a sqlite3 connection with implicit or explicit transactions."""
    with closing(sqlite3.connect(make_url(url).database or "")) as connection:
        connection.row_factory = sqlite3.Row
        if not legacy:
            connection.isolation_level = None
            connection.execute("BEGIN")
        with connection:
            yield connection


@asynccontextmanager
async def _pymysql(url: str, by_hand: bool) -> Any:
    """Yield a PyMySQL connection with dict rows, a time zone other than UTC and another collation."""
    place = make_url(url)
    connection = pymysql.connect(
        host=place.host, port=place.port or 3306, user=place.username, database=place.database, autocommit=by_hand,
        cursorclass=DictCursor, collation="utf8mb4_general_ci", init_command="SET time_zone = '+09:00'",
    )  # fmt: skip
    with closing(connection):
        if by_hand:
            connection.begin()
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()


WAYS = {
    "Connection": lambda url: _sync(url, session=False),
    "Session": lambda url: _sync(url, session=True),
    "AsyncConnection": lambda url: _async(url, session=False),
    "AsyncSession": lambda url: _async(url, session=True),
}
WAYS_OF_SQLITE = {
    "Connection": WAYS["Connection"],
    "Session": WAYS["Session"],
    "sqlite3": lambda url: _sqlite3(url, legacy=True),
    "sqlite3 by hand": lambda url: _sqlite3(url, legacy=False),
}
WAYS |= {
    "psycopg": lambda url: _psycopg(url, awaited=False),
    "psycopg async": lambda url: _psycopg(url, awaited=True),
    "asyncpg": lambda url: _asyncpg(url, pooled=False),
    "asyncpg pool": lambda url: _asyncpg(url, pooled=True),
}
ON_POSTGRES = [("postgres", way) for way in WAYS]
ON_SQLITE = [("sqlite", way) for way in WAYS_OF_SQLITE]
WAYS_OF_MARIADB = {
    "Connection": WAYS["Connection"],
    "Session": WAYS["Session"],
    "PyMySQL": lambda url: _pymysql(url, by_hand=False),
    "PyMySQL by hand": lambda url: _pymysql(url, by_hand=True),
}
ON_MARIADB = [("mariadb", way) for way in WAYS_OF_MARIADB]
WAYS |= WAYS_OF_SQLITE | WAYS_OF_MARIADB
every_way = pytest.mark.parametrize(("store", "way"), [*ON_SQLITE, *ON_POSTGRES, *ON_MARIADB], indirect=["store"])


async def _say(connection: Any, statement: str) -> None:
    """Execute a statement of the caller."""
    if isinstance(connection, pymysql.connections.Connection):
        with connection.cursor() as cursor:
            cursor.execute(statement)
        return
    of_sqlalchemy = type(connection).__module__.startswith("sqlalchemy")
    ran = connection.execute(text(statement) if of_sqlalchemy else statement)
    if hasattr(ran, "__await__"):
        await ran


async def _create(store: Store, connection: Any, *new: Any, on_conflict: str = "error") -> dict[str, str]:
    return await store.join(connection, repository.create, new, on_conflict)


async def _ids(store: Store) -> list[str]:
    return [seen.id for seen in await everything(store)]


@every_way
@stored
async def test_a_job_exists_if_and_only_if_the_caller_commits(store: Store, way: str) -> None:
    kept, lost = job(key="kept", request_id="r"), job(tenant_id="ghost", request_id="lost")
    async with WAYS[way](store.url) as connection:
        await _create(store, connection, kept)
    with pytest.raises(Rollback):
        async with WAYS[way](store.url) as connection:
            await _create(store, connection, lost)
            raise Rollback
    assert await _ids(store) == [kept.id]
    await one(store, request_id="lost")


@pytest.mark.parametrize(("store", "way"), ON_POSTGRES, indirect=["store"])
@stored
async def test_the_job_is_invisible_before_the_commit(store: Store, way: str) -> None:
    new = job()
    async with WAYS[way](store.url) as connection:
        await _create(store, connection, new)
        assert await claim(store) == []
    assert [attempt.id for attempt in await claim(store)] == [new.id]


@every_way
@stored
async def test_the_job_commits_with_the_callers_own_writes(store: Store, way: str) -> None:
    async with WAYS[way](store.url) as connection:
        await _say(connection, "CREATE TABLE orders (id text)")
    try:
        for commits in (False, True):
            new = job()
            try:
                async with WAYS[way](store.url) as connection:
                    await _say(connection, f"INSERT INTO orders VALUES ('{new.id}')")
                    await _create(store, connection, new)
                    if not commits:
                        raise Rollback
            except Rollback:
                assert not commits
            orders = await store.run(lambda tx: [row.id for row in tx.execute(text("SELECT id FROM orders"))])
            assert orders == await _ids(store) == ([new.id] if commits else [])
    finally:
        await store.run(lambda tx: tx.execute(text("DROP TABLE orders")) and None)


@every_way
@stored
async def test_conflicts_are_raised_in_the_callers_transaction(store: Store, way: str) -> None:
    taken = await one(store, key="k", request_id="r")
    with pytest.raises(Conflict) as refused:
        async with WAYS[way](store.url) as connection:
            await _create(store, connection, job(key="k"))
    assert refused.value.existing == taken
    new = job(key="k", request_id="r")
    async with WAYS[way](store.url) as connection:
        assert await _create(store, connection, new, on_conflict="keep") == {new.id: taken}


@every_way
@stored
@pytest.mark.parametrize(
    "conflicting", [[{"request_id": "new"}, {"request_id": "r"}], [{"request_id": "new"}, {"key": "k"}],
                    [{"key": "k", "request_id": "new"}]],
)  # fmt: skip
async def test_a_caller_may_commit_after_a_conflict(store: Store, way: str, conflicting: list[dict[str, str]]) -> None:
    taken = await one(store, key="k", request_id="r")
    async with WAYS[way](store.url) as connection:
        with pytest.raises(Conflict):
            await _create(store, connection, *[job(**options) for options in conflicting])
    assert await _ids(store) == [taken]
    await one(store, request_id="new")


@every_way
@stored
async def test_a_replacement_rolls_back_as_a_whole(store: Store, way: str) -> None:
    old = await one(store, key="k")
    with pytest.raises(Rollback):
        async with WAYS[way](store.url) as connection:
            await _create(store, connection, job(key="k"), on_conflict="replace")
            raise Rollback
    assert (await get(store, old)).state == "pending"
    assert await _ids(store) == [old]
    async with WAYS[way](store.url) as connection:
        await _create(store, connection, job(key="k"), on_conflict="replace")
    assert (await get(store, old)).state == "cancelled"


@every_way
@stored
@pytest.mark.parametrize("second_key", ["running", "pending"])
async def test_no_job_is_replaced_if_a_caller_commits_after_a_conflict(
    store: Store, way: str, second_key: str
) -> None:  # fmt: skip
    running, pending = await started(store, key="running"), await one(store, key="pending")
    async with WAYS[way](store.url) as connection:
        with pytest.raises(Conflict):
            await _create(store, connection, job(key="pending"), job(key=second_key), on_conflict="replace")
    assert set(await _ids(store)) == {running.id, pending}
    assert (await get(store, pending)).state == "pending"


@every_way
@stored
async def test_a_cancel_holds_if_and_only_if_the_caller_commits(store: Store, way: str) -> None:
    pending, running = await one(store, run_at=after(hours=1)), await started(store, queue="q")
    with pytest.raises(Rollback):
        async with WAYS[way](store.url) as connection:
            for id_, outcome in ((pending, "prevented"), (running.id, "in_flight"), (new_id(T0), None)):
                answer = await store.join(connection, repository.cancel, None, id_, T0)
                assert (answer and answer.outcome) == outcome
            raise Rollback
    assert ((await get(store, pending)).state, await end(store, ending(running))) == ("pending", {running.id})
    async with WAYS[way](store.url) as connection:
        await store.join(connection, repository.cancel, None, pending, T0)
    assert (await get(store, pending)).state == "cancelled"


@every_way
@stored
async def test_a_schedule_exists_if_and_only_if_the_caller_commits(store: Store, way: str) -> None:
    with pytest.raises(Rollback):
        async with WAYS[way](store.url) as connection:
            await store.join(connection, schedules.upsert_schedule, schedule(), build_job, T0, replace=False)
            raise Rollback
    assert await store.run(queries.find_schedule, "default", name="s") is None
    await put(store, schedule(payload=1))
    async with WAYS[way](store.url) as connection:
        edited = schedule(payload=2)
        await store.join(
            connection, schedules.upsert_schedule, edited, build_job, after(minutes=1, seconds=1), replace=True
        )
    assert (await stored_schedule(store)).action.payload == 2
    assert [seen.payload for seen in await everything(store)] == [1]


@every_way
@stored
async def test_text_written_in_the_callers_transaction_is_read_back_exactly(store: Store, way: str) -> None:
    new = job(payload="[\"약 💊 :rows %s %% $1 {x} \\\\ 'q'\"]", owner_id="%(x)s :y", key="100%")
    async with WAYS[way](store.url) as connection:
        await _create(store, connection, new)
    seen = await get(store, new.id)
    assert (seen.payload, seen.owner_id, seen.key) == (["약 💊 :rows %s %% $1 {x} \\ 'q'"], "%(x)s :y", "100%")


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@stored
async def test_nodes_are_notified_with_the_commit_or_not_at_all(store: Store) -> None:
    heard = asyncio.Event()
    assert await store.listen()
    with store.subscribers.subscribed(lambda _: heard.set()):
        with pytest.raises(Rollback):
            async with WAYS["AsyncConnection"](store.url) as connection:
                await _create(store, connection, job())
                raise Rollback
        async with WAYS["AsyncConnection"](store.url) as connection:
            await _create(store, connection, job())
            assert not heard.is_set()
        await asyncio.wait_for(heard.wait(), 60)
    assert len(await claim(store, node=NODE)) == 1


@every_way
@stored
async def test_a_borrowed_connection_is_returned_unchanged(store: Store, way: str) -> None:
    """It is neither closed nor committed and keeps its row type; returned instants are UTC."""
    id_ = await one(store)
    async with WAYS[way](store.url) as connection:
        cancelled = await store.join(connection, repository.cancel, None, id_, T0)
        assert cancelled is not None
        assert cancelled.job.run_at == T0
        assert cancelled.job.run_at.tzinfo is UTC
        await _say(connection, "SELECT 1")
        if hasattr(connection, "row_factory"):
            assert connection.row_factory is not None
        if way == "asyncpg":
            assert await connection.fetchval("SELECT '[1]'::json") == [1]
    assert (await get(store, id_)).state == "cancelled"


@pytest.mark.parametrize(
    ("store", "way"),
    [("sqlite", "sqlite3"), ("postgres", "psycopg"), ("postgres", "psycopg async"), ("postgres", "asyncpg")],
    indirect=["store"],
)
@stored
async def test_a_connection_without_a_transaction_is_refused(store: Store, way: str) -> None:
    if way == "sqlite3":
        connection: Any = sqlite3.connect(make_url(store.url).database or "", isolation_level=None)
    elif way == "asyncpg":
        connection = await asyncpg.connect(store.url)
    else:
        psycopg = pytest.importorskip("psycopg")
        kind = psycopg.Connection if way == "psycopg" else psycopg.AsyncConnection
        connection = kind.connect(store.url, autocommit=True)
        connection = await connection if way != "psycopg" else connection
    with pytest.raises(InvalidInput) as refused:
        await _create(store, connection, job())
    assert refused.value.code == "TRANSACTION_MISSING"
    closed = connection.close()
    if hasattr(closed, "__await__"):
        await closed
    assert await _ids(store) == []


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@stored
async def test_errors_of_the_driver_are_raised_unchanged(store: Store) -> None:
    async with WAYS["asyncpg"](store.url) as connection:
        with pytest.raises(asyncpg.PostgresSyntaxError):
            await store.join(connection, lambda tx: tx.execute(text("SELEKT 1")))


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@stored
async def test_a_connection_to_another_kind_of_database_is_refused(store: Store) -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(InvalidInput) as refused:
        await _create(store, connection, job())
    assert refused.value.code == "INVALID_CONNECTION"
