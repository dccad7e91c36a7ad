"""Jobs that start as they are made: by the transaction that fires them, where nothing speaks against it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from timebell.model.job import Hold
from timebell.model.limits import Limits
from timebell.store.jobs import queues, serial, start_on_insert
from timebell.store.schedules import schedules as verbs

from .helpers import (
    ANYONE,
    NODE,
    JobState,
    Overlap,
    Routes,
    Store,
    after,
    claim,
    create,
    ending,
    everything,
    fire,
    job,
    job_of,
    put,
    schedule,
    stored,
)

DUE = after(minutes=1)


async def _fire(store: Store, at: datetime = DUE, *, most: int = 100, routes: Routes = ANYONE) -> verbs.Fired:
    return await store.run(verbs.fire, job_of, at, 500, start_on_insert.Room(NODE, routes, most))


async def _started(store: Store, at: datetime = DUE, **room: Any) -> list[str]:
    return [attempt.topic for attempt in (await _fire(store, at, **room)).started]


@stored
async def test_what_fires_starts_with_it_as_if_it_had_been_claimed(store: Store) -> None:
    fields = {"payload": {"a": [0]}, "metadata": {"m": 1}, "timeout": 9.0, "expires_after": 60.0, "priority": 3}
    await put(store, schedule(**fields))
    fired = await _fire(store)
    (begun,) = fired.started
    (seen,) = await everything(store)
    assert (fired.jobs, seen.state, seen.attempt, seen.started_at) == (1, JobState.RUNNING, 1, DUE)
    assert await claim(store, after(hours=1), priority=3) == []
    # The same schedule, claimed: the same attempt, but for the job's id.
    assert await store.run(serial.end_in_turn, [ending(begun)], [begun.schedule_id])
    await fire(store, after(minutes=2))
    (claimed,) = await claim(store, after(minutes=2), priority=3)
    for name in type(begun).__slots__:
        if name not in ("id", "scheduled_at", "run_at", "started_at", "expires_at"):
            assert getattr(begun, name) == getattr(claimed, name), name
    assert begun.expires_at == DUE + timedelta(minutes=1)


@stored
async def test_no_more_start_than_there_is_room_for_and_the_most_urgent_first(store: Store) -> None:
    for name, priority in (("late", 9), ("first", 1), ("then", 5)):
        await put(store, schedule(name=name, topic=name, priority=priority))
    assert await _started(store, most=2) == ["first", "then"]
    assert {made.topic: made.state for made in await everything(store)}["late"] is JobState.PENDING
    assert await _started(store, after(minutes=2), most=0) == []


@stored
async def test_only_what_the_routes_hear_starts(store: Store) -> None:
    await put(store, schedule(name="a", topic="a"))
    await put(store, schedule(name="b", topic="b"))
    assert await _started(store, routes=Routes(frozenset({"b"}))) == ["b"]


@stored
@pytest.mark.parametrize("limit", [Limits(concurrency=5), Limits(rate=5), Limits(concurrency_per_group=1), None])
async def test_what_a_queue_limits_is_left_to_a_claim(store: Store, limit: Limits | None) -> None:
    await put(store, schedule(queue="q"))
    if limit is None:
        await store.run(queues.pause, "q", None)
    else:
        await store.run(queues.put, "q", limit)
    assert await _started(store) == []
    assert (await everything(store))[0].state is JobState.PENDING


@stored
async def test_nobody_who_waits_in_its_lane_is_passed_over(store: Store) -> None:
    await put(store, schedule())
    await create(store, job(topic="other", run_at=DUE))
    assert await _started(store) == []


@stored
async def test_what_is_due_later_is_in_nobodys_way(store: Store) -> None:
    await put(store, schedule())
    await create(store, job(topic="other", run_at=DUE + timedelta(seconds=1)))
    assert await _started(store) == ["t"]


@stored
async def test_what_waits_for_its_turn_or_its_time_does_not_start(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    assert await _started(store) == ["t"]
    assert await _started(store, after(minutes=2)) == []
    assert [made.hold for made in await everything(store) if made.state is JobState.PENDING] == [Hold.OVERLAP]


@stored
async def test_jitter_puts_a_start_off(store: Store) -> None:
    await put(store, schedule(jitter=30.0))
    assert await _started(store) == []
    assert (await everything(store))[0].run_at > DUE
