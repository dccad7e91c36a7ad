"""On a server a node's idea of the time can make it late, never early: the server's own clock must agree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

import pytest

from timebell.clock import wall
from timebell.model.limits import Limits
from timebell.recurrence import Every
from timebell.store.dialects.base import Store
from timebell.store.jobs import queue_limits, queues
from timebell.store.jobs.start_on_insert import Room
from timebell.store.open import open_store
from timebell.store.schedules import schedules

from .helpers import (
    ANYONE,
    NODE,
    JobState,
    Overlap,
    claim,
    create,
    everything,
    fire,
    job,
    job_of,
    lane,
    put,
    schedule,
)

HOUR = timedelta(hours=1)


@pytest.fixture(params=["postgres", pytest.param("mariadb", marks=pytest.mark.slow)])
def nodes_url(request: pytest.FixtureRequest) -> str:
    """A database with a clock of its own."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def _by_the_server(url: str, test: Callable[[Store, datetime], Awaitable[None]]) -> None:
    async def body() -> None:
        store = open_store(url, wall)
        await store.open()
        try:
            await test(store, await store.reading())
        finally:
            await store.close()

    asyncio.run(body())


def test_S1_F1_a_node_an_hour_ahead_claims_nothing_early(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        due, later = job(run_at=now), job(run_at=now + timedelta(minutes=5))
        await create(store, due, later)
        assert [attempt.id for attempt in await claim(store, now + HOUR)] == [due.id]
        await store.run(queues.put, "default", Limits(concurrency=5))
        assert await store.run(queue_limits.claim_limited, lane(), ANYONE, NODE, 5, now + HOUR) == []

    _by_the_server(nodes_url, test)


def test_a_node_an_hour_ahead_fires_no_schedule_early(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        soon = now + timedelta(minutes=5)
        await put(store, schedule(next_fire_at=soon))
        fired = await fire(store, now + HOUR)
        assert (fired.schedules, fired.next_fire_at, await everything(store)) == (0, soon, [])

    _by_the_server(nodes_url, test)


def test_a_node_an_hour_ahead_starts_nothing_early_that_it_fires(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        every = Every("PT1M", anchor=now)
        await put(store, schedule(every, next_fire_at=now, overlap=Overlap.ALLOW, missed_after=7200.0))
        fired = await store.run(schedules.fire, job_of, now + timedelta(minutes=9), 10, Room(NODE, ANYONE, 100))
        assert [attempt.scheduled_at for attempt in fired.started] == [now]
        states = [made.state for made in await everything(store)]
        assert (fired.jobs, states.count(JobState.RUNNING), states.count(JobState.PENDING)) == (10, 1, 9)

    _by_the_server(nodes_url, test)


def test_a_node_an_hour_behind_is_late_and_not_wrong(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        due = job(run_at=now)
        await create(store, due)
        assert await claim(store, now - HOUR) == []
        assert [attempt.id for attempt in await claim(store, now)] == [due.id]

    _by_the_server(nodes_url, test)


def test_the_reading_is_the_clock_of_the_database(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        assert now.utcoffset() == timedelta(0)
        assert now <= await store.reading() <= now + timedelta(minutes=1)

    _by_the_server(nodes_url, test)
