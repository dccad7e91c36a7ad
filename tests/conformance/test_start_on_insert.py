"""Start on insert: the firing transaction starts jobs immediately if no limit, hold or earlier job prevents it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from timebell.model.job import Hold
from timebell.model.limits import Limits
from timebell.store.jobs import queues, serial, start_on_insert
from timebell.store.schedules import schedules as verbs

from .helpers import (
    ALL_ROUTES,
    NODE,
    JobState,
    Overlap,
    Routes,
    Store,
    after,
    build_job,
    claim,
    create,
    ending,
    everything,
    fire,
    job,
    put,
    schedule,
    stored,
)

DUE = after(minutes=1)


async def _fire(store: Store, at: datetime = DUE, *, most: int = 100, routes: Routes = ALL_ROUTES) -> verbs.FireResult:
    return await store.run(
        verbs.fire_due_schedules, build_job, at, 500, start_on_insert.SlotReservation(NODE, routes, most)
    )


async def _started(store: Store, at: datetime = DUE, **room: Any) -> list[str]:
    return [attempt.topic for attempt in (await _fire(store, at, **room)).started_attempts]


@stored
async def test_a_fired_job_starts_as_if_it_had_been_claimed(store: Store) -> None:
    fields = {"payload": {"a": [0]}, "metadata": {"m": 1}, "timeout": 9.0, "expires_after": 60.0, "priority": 3}
    await put(store, schedule(**fields))
    fired = await _fire(store)
    (started_attempt,) = fired.started_attempts
    (seen,) = await everything(store)
    assert (fired.jobs, seen.state, seen.attempt, seen.started_at) == (1, JobState.RUNNING, 1, DUE)
    assert await claim(store, after(hours=1), priority=3) == []
    # Claimed instead, the same schedule gives the same attempt except for the id of the job.
    assert await store.run(serial.complete_serial, [ending(started_attempt)], [started_attempt.schedule_id])
    await fire(store, after(minutes=2))
    (claimed,) = await claim(store, after(minutes=2), priority=3)
    for name in type(started_attempt).__slots__:
        if name not in ("id", "scheduled_at", "run_at", "started_at", "expires_at"):
            assert getattr(started_attempt, name) == getattr(claimed, name), name
    assert started_attempt.expires_at == DUE + timedelta(minutes=1)


@stored
async def test_free_slots_are_filled_by_highest_priority_first(store: Store) -> None:
    for name, priority in (("late", 9), ("first", 1), ("then", 5)):
        await put(store, schedule(name=name, topic=name, priority=priority))
    assert await _started(store, most=2) == ["first", "then"]
    assert {made.topic: made.state for made in await everything(store)}["late"] is JobState.PENDING
    assert await _started(store, after(minutes=2), most=0) == []


@stored
async def test_only_jobs_of_handled_topics_start(store: Store) -> None:
    await put(store, schedule(name="a", topic="a"))
    await put(store, schedule(name="b", topic="b"))
    assert await _started(store, routes=Routes(frozenset({"b"}))) == ["b"]


@stored
@pytest.mark.parametrize("limit", [Limits(concurrency=5), Limits(rate=5), Limits(concurrency_per_group=1), None])
async def test_jobs_of_limited_or_paused_queues_wait_for_a_claim(store: Store, limit: Limits | None) -> None:
    await put(store, schedule(queue="q"))
    if limit is None:
        await store.run(queues.pause, "q", None)
    else:
        await store.run(queues.set_limits, "q", limit)
    assert await _started(store) == []
    assert (await everything(store))[0].state is JobState.PENDING


@stored
async def test_a_fired_job_does_not_overtake_a_due_job_of_its_lane(store: Store) -> None:
    await put(store, schedule())
    await create(store, job(topic="other", run_at=DUE))
    assert await _started(store) == []


@stored
async def test_a_job_due_later_does_not_delay_a_fired_job(store: Store) -> None:
    await put(store, schedule())
    await create(store, job(topic="other", run_at=DUE + timedelta(seconds=1)))
    assert await _started(store) == ["t"]


@stored
async def test_a_held_serial_job_does_not_start(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    assert await _started(store) == ["t"]
    assert await _started(store, after(minutes=2)) == []
    assert [made.hold for made in await everything(store) if made.state is JobState.PENDING] == [Hold.OVERLAP]


@stored
async def test_jitter_delays_the_start(store: Store) -> None:
    await put(store, schedule(jitter=30.0))
    assert await _started(store) == []
    assert (await everything(store))[0].run_at > DUE
