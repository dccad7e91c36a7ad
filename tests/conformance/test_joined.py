"""`connection=`: what is done on a caller's connection exists if and only if the caller commits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from timebell.errors import Conflict
from timebell.ids import new_id
from timebell.store.sql import ledger, schedules

from .helpers import (
    NODE,
    SOON,
    T0,
    Store,
    after,
    claim,
    end,
    ending,
    everything,
    get,
    job,
    job_of,
    one,
    put,
    schedule,
    started,
    stored,
    stored_schedule,
)

Use = Callable[[Any], Awaitable[None]]


class Rollback(Exception):
    """What makes a caller's transaction roll back."""


@asynccontextmanager
async def _sync(url: str, session: bool) -> Any:
    """A plain Connection or Session, in a transaction that commits unless the block raises."""
    driver = "postgresql+psycopg" if "postgres" in url else "sqlite"
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
    """An AsyncConnection or AsyncSession."""
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


WAYS = {
    "Connection": lambda url: _sync(url, session=False),
    "Session": lambda url: _sync(url, session=True),
    "AsyncConnection": lambda url: _async(url, session=False),
    "AsyncSession": lambda url: _async(url, session=True),
}
ON_POSTGRES = [("postgres", way) for way in WAYS]
ON_SQLITE = [("sqlite", "Connection"), ("sqlite", "Session")]
every_way = pytest.mark.parametrize(("store", "way"), [*ON_SQLITE, *ON_POSTGRES], indirect=["store"])


async def _create(store: Store, connection: Any, *new: Any, on_conflict: str = "error") -> dict[str, str]:
    return await store.join(connection, ledger.create, new, on_conflict, SOON)


async def _ids(store: Store) -> list[str]:
    return [seen.id for seen in await everything(store)]


@every_way
@stored
async def test_S2_F1_a_job_exists_if_and_only_if_the_caller_commits(store: Store, way: str) -> None:
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
async def test_nobody_sees_the_job_before_the_commit(store: Store, way: str) -> None:
    new = job()
    async with WAYS[way](store.url) as connection:
        await _create(store, connection, new)
        assert await claim(store) == []
    assert [attempt.id for attempt in await claim(store)] == [new.id]


@every_way
@stored
async def test_the_job_commits_with_the_callers_own_writes(store: Store, way: str) -> None:
    async with WAYS[way](store.url) as connection:
        ran = connection.execute(text("CREATE TABLE orders (id text)"))
        if asyncio.iscoroutine(ran) or hasattr(ran, "__await__"):
            await ran
    try:
        for commits in (False, True):
            new = job()
            try:
                async with WAYS[way](store.url) as connection:
                    ran = connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": new.id})
                    if hasattr(ran, "__await__"):
                        await ran
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
async def test_conflicts_are_seen_in_the_callers_transaction(store: Store, way: str) -> None:
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
async def test_a_cancel_holds_if_and_only_if_the_caller_commits(store: Store, way: str) -> None:
    pending, running = await one(store, run_at=after(hours=1)), await started(store, queue="q")
    with pytest.raises(Rollback):
        async with WAYS[way](store.url) as connection:
            for id_, outcome in ((pending, "prevented"), (running.id, "in_flight"), (new_id(T0), None)):
                answer = await store.join(connection, ledger.cancel, None, id_, T0)
                assert (answer and answer.outcome) == outcome
            raise Rollback
    assert ((await get(store, pending)).state, await end(store, ending(running))) == ("pending", {running.id})
    async with WAYS[way](store.url) as connection:
        await store.join(connection, ledger.cancel, None, pending, T0)
    assert (await get(store, pending)).state == "cancelled"


@every_way
@stored
async def test_a_schedule_exists_if_and_only_if_the_caller_commits(store: Store, way: str) -> None:
    with pytest.raises(Rollback):
        async with WAYS[way](store.url) as connection:
            await store.join(connection, schedules.put, schedule(), job_of, T0, replace=False)
            raise Rollback
    assert await store.run(schedules.find, "default", name="s") is None
    await put(store, schedule(payload=1))
    async with WAYS[way](store.url) as connection:
        edited = schedule(payload=2)
        await store.join(connection, schedules.put, edited, job_of, after(minutes=1, seconds=1), replace=True)
    assert (await stored_schedule(store)).action.payload == 2
    assert [seen.payload for seen in await everything(store)] == [1]


@every_way
@stored
async def test_text_comes_back_to_the_letter_from_a_joined_transaction(store: Store, way: str) -> None:
    new = job(payload="[\"약 💊 :rows %s %% $1 {x} \\\\ 'q'\"]", owner_id="%(x)s :y", key="100%")
    async with WAYS[way](store.url) as connection:
        await _create(store, connection, new)
    seen = await get(store, new.id)
    assert (seen.payload, seen.owner_id, seen.key) == (["약 💊 :rows %s %% $1 {x} \\ 'q'"], "%(x)s :y", "100%")


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@stored
async def test_the_hint_to_other_nodes_comes_with_the_commit_or_not_at_all(store: Store) -> None:
    heard = asyncio.Event()
    assert await store.listen(heard.set)
    with pytest.raises(Rollback):
        async with WAYS["AsyncConnection"](store.url) as connection:
            await _create(store, connection, job())
            raise Rollback
    async with WAYS["AsyncConnection"](store.url) as connection:
        await _create(store, connection, job())
        assert not heard.is_set()
    await asyncio.wait_for(heard.wait(), 10)
    assert len(await claim(store, node=NODE)) == 1
