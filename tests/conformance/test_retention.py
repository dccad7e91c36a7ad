"""Retention of finished jobs: by row on every store, by whole weeks on databases with partitions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from sqlalchemy import create_engine, func, make_url, select, text

from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import retention
from timebell.store.open import open_store
from timebell.store.schema import requests

from .helpers import T0, Store, after, claim, create, end, ending, everything, execute, job, started, stored

WEEK = timedelta(weeks=1)


async def _finish(store: Store, *instants: datetime) -> None:
    await create(store, *(job() for _ in instants))
    attempts = await claim(store)
    await end(store, *(ending(attempt, at=at) for attempt, at in zip(attempts, instants, strict=True)))


@stored
async def test_only_jobs_finished_before_the_instant_are_deleted(store: Store) -> None:
    await _finish(store, *(after(days=n) for n in range(5)))
    live = await started(store)
    await store.run(retention.prune, after(days=2))
    kept = [seen.finished_at for seen in await everything(store)]
    assert sorted(at for at in kept if at is not None) == [after(days=n) for n in (2, 3, 4)]
    assert live.id in {seen.id for seen in await everything(store)}


@stored
async def test_a_batch_deletes_no_more_rows_than_requested_oldest_first(store: Store) -> None:
    await _finish(store, *(after(minutes=n) for n in range(6)))
    assert await store.run(retention.prune, after(days=1), 4) == 4
    assert [seen.finished_at for seen in await everything(store)] == [after(minutes=4), after(minutes=5)]
    assert [await store.run(retention.prune, after(days=1), 4) for _ in range(2)] == [2, 0]


@stored
async def test_live_jobs_are_kept_however_old(store: Store) -> None:
    await create(store, job(created_at=T0 - timedelta(days=4000)))
    await store.run(retention.prune, after(days=4000))
    assert len(await everything(store)) == 1


@stored
async def test_request_ids_are_never_deleted(store: Store) -> None:
    attempt = await started(store, request_id="r")
    await end(store, ending(attempt))
    await store.run(retention.prune, after(days=4000))
    assert await everything(store) == []
    assert (await execute(store, select(func.count()).select_from(requests)))[0][0] == 1


@stored
async def test_preparing_partitions_again_changes_nothing(store: Store) -> None:
    try:
        await store.run(retention.create_partitions, T0)
        assert await store.run(retention.create_partitions, T0) == []
    finally:
        await store.run(retention.prune, after(weeks=99))


def test_weeks_get_partitions_and_whole_weeks_are_dropped(postgres_url: str) -> None:
    async def body() -> None:
        store = open_store(postgres_url, lambda: T0, server_clock=False)
        try:
            made = await store.run(retention.create_partitions, T0)
            assert made == [f"timebell_finished_{day}" for day in ("20270301", "20270308", "20270315")]
            assert await store.run(retention.create_partitions, T0 + WEEK) == ["timebell_finished_20270322"]
            monday = datetime(2027, 3, 8, tzinfo=UTC)
            tiny = timedelta(microseconds=1)
            await _finish(store, T0, monday - tiny, monday, monday + WEEK - tiny, monday + WEEK, after(weeks=50))
            assert await _rows_in(store, "timebell_finished_20270301") == 2
            assert await _rows_in(store, "timebell_finished_20270308") == 2
            assert await _rows_in(store, "timebell_finished_rest") == 1

            assert await store.run(retention.prune, monday) == 1  # one week, dropped as a partition
            assert not await _exists(store, "timebell_finished_20270301")
            assert len(await everything(store)) == 4
            assert await store.run(retention.prune, monday + WEEK - tiny) == 1  # one row of an unfinished week
            assert await _exists(store, "timebell_finished_20270308")
            await store.run(retention.prune, monday + WEEK)
            assert [seen.finished_at for seen in await everything(store)] == [monday + WEEK, after(weeks=50)]
        finally:
            await store.close()

    asyncio.run(body())


def test_rows_older_than_their_partition_stay_in_the_default_partition(postgres_url: str) -> None:
    async def body() -> None:
        store = open_store(postgres_url, lambda: T0, server_clock=False)
        try:
            await _finish(store, after(days=1))
            assert await store.run(retention.create_partitions, T0) == [
                "timebell_finished_20270308",
                "timebell_finished_20270315",
            ]
            await _finish(store, after(days=2))
            assert len(await everything(store)) == 2
            await store.run(retention.prune, after(days=60))
            assert await everything(store) == []
        finally:
            await store.close()

    asyncio.run(body())


def test_partitions_are_created_without_blocking_writers(postgres_url: str) -> None:
    async def body() -> None:
        store = open_store(postgres_url, lambda: T0, server_clock=False)
        engine = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"))
        try:
            with engine.begin() as writer:  # locks in the order of an INSERT: the table, then the partition of the row
                writer.execute(text("LOCK TABLE ONLY timebell_finished IN ROW EXCLUSIVE MODE"))
                making = asyncio.create_task(store.run(retention.create_partitions, T0))
                waits = text(
                    "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database"
                    " WHERE NOT granted AND datname = current_database()"
                )
                async with asyncio.timeout(20):
                    while not writer.scalar(waits):
                        await asyncio.sleep(0.01)
                writer.execute(text("LOCK TABLE timebell_finished_rest IN ROW EXCLUSIVE MODE NOWAIT"))
            assert len(await making) == 3
        finally:
            engine.dispose()
            await store.close()

    asyncio.run(body())


async def _rows_in(store: Store, table: str) -> int:
    count: int = (await execute(store, text(f"SELECT count(*) FROM {table}")))[0][0]
    return count


async def _exists(store: Store, table: str) -> bool:
    return bool((await execute(store, text(f"SELECT to_regclass('{table}') IS NOT NULL")))[0][0])


@stored
async def test_skipped_occurrences_are_deleted_like_other_jobs(store: Store) -> None:
    await store.run(job_claim.record_skipped, [(job(), "overlap", 1, T0)], T0)
    assert len(await everything(store)) == 1
    await store.run(retention.prune, after(seconds=1), 10)
    assert await everything(store) == []
