"""A node with a wrong clock may be late but never early, because the clock of the database server decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

import pytest

from timebell.clock import system_now
from timebell.model.limits import Limits
from timebell.recurrence import Every
from timebell.store.dialects.base import Store
from timebell.store.jobs import queue_limits, queues
from timebell.store.jobs.start_on_insert import SlotReservation
from timebell.store.open import open_store
from timebell.store.schedules import schedules

from .helpers import (
    ALL_ROUTES,
    NODE,
    JobState,
    Overlap,
    build_job,
    claim,
    create,
    everything,
    fire,
    job,
    lane,
    put,
    schedule,
)

HOUR = timedelta(hours=1)


@pytest.fixture(params=["postgres", pytest.param("mariadb", marks=pytest.mark.slow)])
def nodes_url(request: pytest.FixtureRequest) -> str:
    """A database server with its own clock."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def _by_the_server(url: str, test: Callable[[Store, datetime], Awaitable[None]]) -> None:
    async def body() -> None:
        store = open_store(url, system_now)
        await store.open()
        try:
            await test(store, await store.read_clock())
        finally:
            await store.close()

    asyncio.run(body())


def test_a_node_an_hour_ahead_claims_nothing_early(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        due, later = job(run_at=now), job(run_at=now + timedelta(minutes=5))
        await create(store, due, later)
        assert [attempt.id for attempt in await claim(store, now + HOUR)] == [due.id]
        await store.run(queues.set_limits, "default", Limits(concurrency=5))
        assert await store.run(queue_limits.claim_limited, lane(), ALL_ROUTES, NODE, 5, now + HOUR) == []

    _by_the_server(nodes_url, test)


def test_a_node_an_hour_ahead_fires_no_schedule_early(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        soon = now + timedelta(minutes=5)
        await put(store, schedule(next_fire_at=soon))
        fired = await fire(store, now + HOUR)
        assert (fired.schedules, fired.next_fire_at, await everything(store)) == (0, soon, [])

    _by_the_server(nodes_url, test)


def test_a_node_an_hour_ahead_starts_no_fired_job_early(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        every = Every("PT1M", anchor=now)
        await put(store, schedule(every, next_fire_at=now, overlap=Overlap.ALLOW, missed_after=7200.0))
        fired = await store.run(
            schedules.fire_due_schedules,
            build_job,
            now + timedelta(minutes=9),
            10,
            SlotReservation(NODE, ALL_ROUTES, 100),
        )
        assert [attempt.scheduled_at for attempt in fired.started_attempts] == [now]
        states = [made.state for made in await everything(store)]
        assert (fired.jobs, states.count(JobState.RUNNING), states.count(JobState.PENDING)) == (10, 1, 9)

    _by_the_server(nodes_url, test)


def test_a_node_an_hour_behind_is_late_but_correct(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        due = job(run_at=now)
        await create(store, due)
        assert await claim(store, now - HOUR) == []
        assert [attempt.id for attempt in await claim(store, now)] == [due.id]

    _by_the_server(nodes_url, test)


def test_read_clock_returns_the_time_of_the_database(nodes_url: str) -> None:
    async def test(store: Store, now: datetime) -> None:
        assert now.utcoffset() == timedelta(0)
        assert now <= await store.read_clock() <= now + timedelta(minutes=1)

    _by_the_server(nodes_url, test)
