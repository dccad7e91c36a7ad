"""Due jobs whose topic no live node handles are held, and released when a node handles it."""

from __future__ import annotations

from timebell.model.job import Hold, Kind
from timebell.model.routes import COMPLETE_UNHANDLED_JSON
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


async def process(store: Store, handled: Routes, minutes: float = 0) -> tuple[int, int]:
    """Return the numbers of jobs (held, released)."""
    settled = await store.run(unhandled_topics.process_unhandled, handled, after(minutes=minutes))
    return settled.held, settled.released


@stored
async def test_a_due_unhandled_job_is_held_and_not_completed(store: Store) -> None:
    handled, unhandled = await one(store, topic="mail"), await one(store, topic="fax")
    assert await process(store, MAIL) == (1, 0)
    assert ((await get(store, unhandled)).hold, (await get(store, unhandled)).state) == (
        Hold.UNHANDLED,
        JobState.PENDING,
    )
    assert (await get(store, handled)).hold is None
    assert await process(store, MAIL) == (0, 0)


@stored
async def test_a_held_job_is_released_when_a_node_handles_its_topic(store: Store) -> None:
    unhandled = await one(store, topic="fax")
    await process(store, MAIL)
    assert await process(store, MAIL | Routes(frozenset({"fax"})), 60) == (0, 1)
    (attempt,) = await claim(store, after(hours=1), routes=Routes(frozenset({"fax"})))
    assert (attempt.id, attempt.scheduled_at, attempt.number) == (unhandled, T0, 1)


@stored
async def test_jobs_that_are_not_due_are_not_held(store: Store) -> None:
    await one(store, topic="fax", run_at=after(minutes=1))
    assert await process(store, MAIL) == (0, 0)
    assert await process(store, MAIL, 1) == (1, 0)


@stored
async def test_prefix_catch_all_and_target_routes_handle_their_jobs(store: Store) -> None:
    await create(store, job(topic="billing.due"), job(topic="billingdue"), job(topic="x", route="@http"))
    assert await process(store, MAIL) == (2, 0)
    assert await process(store, Routes(all_topics=True)) == (0, 1)
    assert await process(store, Routes(frozenset({"@http"}), all_topics=True)) == (0, 1)


@stored
async def test_unhandled_jobs_of_every_lane_are_held(store: Store) -> None:
    await create(store, *(job(topic="fax", queue=f"q{n % 3}", priority=n % 2) for n in range(12)))
    assert await process(store, MAIL) == (12, 0)


@stored
async def test_running_jobs_and_held_serial_jobs_are_not_changed(store: Store) -> None:
    await started(store, topic="fax")
    waits = await one(store, topic="fax", hold=Hold.OVERLAP)
    assert await process(store, MAIL) == (0, 0)
    assert await process(store, Routes(all_topics=True)) == (0, 0)
    assert (await get(store, waits)).hold is Hold.OVERLAP


@stored
async def test_without_any_live_node_everything_due_is_held(store: Store) -> None:
    await create(store, job(topic="a"), job(topic="b", route="@http"))
    assert await process(store, Routes()) == (2, 0)
    assert {seen.hold for seen in await everything(store)} == {Hold.UNHANDLED}


@stored
async def test_more_than_a_batch_of_unhandled_jobs_is_held_completely(store: Store) -> None:
    await create(store, *(job(topic="fax") for _ in range(1500)), bulk=True)
    held = [(await process(store, MAIL))[0] for _ in range(3)]
    assert (sum(held), held[-1]) == (1500, 0)


async def completed(store: Store, handled: Routes) -> int:
    return (await store.run(unhandled_topics.process_unhandled, handled, T0)).completed


@stored
async def test_a_job_with_on_unhandled_complete_is_completed(store: Store) -> None:
    unhandled, handled = [await one(store, topic=topic, target=COMPLETE_UNHANDLED_JSON) for topic in ("fax", "mail")]
    held = await one(store, topic="fax")
    assert await completed(store, MAIL) == 1
    done = await get(store, unhandled)
    assert (done.state, done.result, done.attempt, done.attempts_used) == (JobState.COMPLETED, {"listeners": 0}, 0, 0)
    assert ((await get(store, held)).hold, (await get(store, handled)).state) == (Hold.UNHANDLED, JobState.PENDING)
    assert await completed(store, MAIL) == 0


@stored
async def test_a_retried_job_is_held_despite_on_unhandled_complete(store: Store) -> None:
    attempt = await started(store, topic="fax", target=COMPLETE_UNHANDLED_JSON)
    await store.run(complete.schedule_retries, [again(attempt, T0)])
    assert await process(store, MAIL) == (1, 0)
    assert (await get(store, attempt.id)).hold is Hold.UNHANDLED


@stored
async def test_completing_an_unhandled_job_releases_the_next_serial_job(store: Store) -> None:
    await put(store, made := schedule(topic="fax"))
    turns = {"topic": "fax", "schedule_id": made.id, "serial": True, "target": COMPLETE_UNHANDLED_JSON}
    await one(store, **turns)
    waiting = await one(store, **turns, hold=Hold.OVERLAP, run_at=after(seconds=-1), kind=Kind.MANUAL)
    assert await completed(store, MAIL) == 1
    assert (await get(store, waiting)).hold is None
    assert await completed(store, MAIL) == 1


@stored
async def test_more_than_a_batch_of_unhandled_jobs_is_completed(store: Store) -> None:
    await create(store, *(job(topic="fax", target=COMPLETE_UNHANDLED_JSON) for _ in range(1200)), bulk=True)
    await one(store, topic="fax", run_at=after(seconds=0))
    assert [await completed(store, MAIL) for _ in range(3)] == [1000, 200, 0]
    assert [seen.hold for seen in await everything(store) if seen.state is JobState.PENDING] == [Hold.UNHANDLED]
