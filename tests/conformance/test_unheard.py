"""Jobs whose topic no live node takes are set aside when due, and let go when one takes it again."""

from __future__ import annotations

from timebell.model.job import Hold, Kind
from timebell.model.routes import COMPLETES_TEXT
from timebell.store.jobs import complete, unhandled_topics

from .helpers import (
    T0,
    JobState,
    Routes,
    Store,
    after,
    again,
    claim,
    create,
    everything,
    get,
    job,
    one,
    put,
    schedule,
    started,
    stored,
)

MAIL = Routes(frozenset({"mail"}), frozenset({"billing."}))


async def look(store: Store, heard: Routes, minutes: float = 0) -> tuple[int, int]:
    """(held, let go)."""
    settled = await store.run(unhandled_topics.settle, heard, after(minutes=minutes))
    return settled.held, settled.freed


@stored
async def test_S2_F7_a_due_job_that_nobody_hears_is_held_and_not_completed(store: Store) -> None:
    heard, deaf = await one(store, topic="mail"), await one(store, topic="fax")
    assert await look(store, MAIL) == (1, 0)
    assert ((await get(store, deaf)).hold, (await get(store, deaf)).state) == (Hold.UNHEARD, JobState.PENDING)
    assert (await get(store, heard)).hold is None
    assert await look(store, MAIL) == (0, 0)


@stored
async def test_a_held_job_is_let_go_when_a_listener_appears_and_keeps_its_time(store: Store) -> None:
    deaf = await one(store, topic="fax")
    await look(store, MAIL)
    assert await look(store, MAIL | Routes(frozenset({"fax"})), 60) == (0, 1)
    (attempt,) = await claim(store, after(hours=1), routes=Routes(frozenset({"fax"})))
    assert (attempt.id, attempt.scheduled_at, attempt.number) == (deaf, T0, 1)


@stored
async def test_jobs_that_are_not_due_are_left_alone(store: Store) -> None:
    await one(store, topic="fax", run_at=after(minutes=1))
    assert await look(store, MAIL) == (0, 0)
    assert await look(store, MAIL, 1) == (1, 0)


@stored
async def test_prefixes_everything_and_other_targets_are_heard_for_what_they_take(store: Store) -> None:
    await create(store, job(topic="billing.due"), job(topic="billingdue"), job(topic="x", route="@http"))
    assert await look(store, MAIL) == (2, 0)
    assert await look(store, Routes(everything=True)) == (0, 1)
    assert await look(store, Routes(frozenset({"@http"}), everything=True)) == (0, 1)


@stored
async def test_every_lane_is_looked_at(store: Store) -> None:
    await create(store, *(job(topic="fax", queue=f"q{n % 3}", priority=n % 2) for n in range(12)))
    assert await look(store, MAIL) == (12, 0)


@stored
async def test_running_jobs_and_jobs_held_for_their_turn_are_left_alone(store: Store) -> None:
    await started(store, topic="fax")
    waits = await one(store, topic="fax", hold=Hold.OVERLAP)
    assert await look(store, MAIL) == (0, 0)
    assert await look(store, Routes(everything=True)) == (0, 0)
    assert (await get(store, waits)).hold is Hold.OVERLAP


@stored
async def test_without_any_live_node_everything_due_is_held(store: Store) -> None:
    await create(store, job(topic="a"), job(topic="b", route="@http"))
    assert await look(store, Routes()) == (2, 0)
    assert {seen.hold for seen in await everything(store)} == {Hold.UNHEARD}


@stored
async def test_a_thousand_deaf_jobs_do_not_hide_the_deaf_ones_behind_them(store: Store) -> None:
    await create(store, *(job(topic="fax") for _ in range(1500)), bulk=True)
    held = [(await look(store, MAIL))[0] for _ in range(3)]
    assert (sum(held), held[-1]) == (1500, 0)


async def completed(store: Store, heard: Routes) -> int:
    return (await store.run(unhandled_topics.settle, heard, T0)).completed


@stored
async def test_S2_22_a_job_that_wants_no_listener_is_completed_with_none(store: Store) -> None:
    deaf, heard = [await one(store, topic=topic, target=COMPLETES_TEXT) for topic in ("fax", "mail")]
    held = await one(store, topic="fax")
    assert await completed(store, MAIL) == 1
    done = await get(store, deaf)
    assert (done.state, done.result, done.attempt, done.tries) == (JobState.COMPLETED, {"listeners": 0}, 0, 0)
    assert ((await get(store, held)).hold, (await get(store, heard)).state) == (Hold.UNHEARD, JobState.PENDING)
    assert await completed(store, MAIL) == 0


@stored
async def test_a_job_that_was_tried_before_is_held_whatever_it_wants(store: Store) -> None:
    attempt = await started(store, topic="fax", target=COMPLETES_TEXT)
    await store.run(complete.retry, [again(attempt, T0)])
    assert await look(store, MAIL) == (1, 0)
    assert (await get(store, attempt.id)).hold is Hold.UNHEARD


@stored
async def test_completing_lets_the_next_in_turn_go(store: Store) -> None:
    await put(store, made := schedule(topic="fax"))
    turns = {"topic": "fax", "schedule_id": made.id, "serial": True, "target": COMPLETES_TEXT}
    await one(store, **turns)
    waiting = await one(store, **turns, hold=Hold.OVERLAP, run_at=after(seconds=-1), kind=Kind.MANUAL)
    assert await completed(store, MAIL) == 1
    assert (await get(store, waiting)).hold is None
    assert await completed(store, MAIL) == 1


@stored
async def test_a_thousand_that_are_completed_hide_none_behind_them(store: Store) -> None:
    await create(store, *(job(topic="fax", target=COMPLETES_TEXT) for _ in range(1200)), bulk=True)
    await one(store, topic="fax", run_at=after(seconds=0))
    assert [await completed(store, MAIL) for _ in range(3)] == [1000, 200, 0]
    assert [seen.hold for seen in await everything(store) if seen.state is JobState.PENDING] == [Hold.UNHEARD]
