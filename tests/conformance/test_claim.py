"""Claims: never early, oldest first, each job once, only for handled topics and within the limits of the queue."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest

from timebell.ids import new_id
from timebell.model.job import Completion, Hold
from timebell.model.limits import Limits
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete, queue_limits, queues, repository

from .helpers import (
    ALL_ROUTES,
    NODE,
    OTHER_NODE,
    T0,
    JobState,
    Routes,
    Store,
    after,
    again,
    claim,
    create,
    end,
    ending,
    get,
    job,
    lane,
    one,
    started,
    stored,
)


async def _lanes(store: Store, routes: Routes = ALL_ROUTES, now: datetime = T0) -> list[tuple[str, int]]:
    return [(found.queue, found.priority) for found in await store.run_autocommit(job_claim.list_lanes, routes, now)]


@stored
async def test_nothing_is_claimed_before_its_instant_and_everything_at_it(store: Store) -> None:
    id_ = await one(store, run_at=after(seconds=1))
    assert await claim(store, after(seconds=1) - timedelta(microseconds=1)) == []
    assert [attempt.id for attempt in await claim(store, after(seconds=1))] == [id_]


@stored
async def test_a_job_is_claimed_however_long_ago_it_was_due(store: Store) -> None:
    id_ = await one(store)
    assert [attempt.id for attempt in await claim(store, after(days=4000))] == [id_]


@stored
async def test_the_oldest_due_job_is_claimed_first(store: Store) -> None:
    for seconds in (3, 1, 4, 1.5, 9, 2.6):
        await one(store, run_at=after(seconds=seconds), owner_id="o")
    claimed = await claim(store, after(minutes=1), most=3)
    assert [a.scheduled_at for a in claimed] == [after(seconds=s) for s in (1, 1.5, 2.6)]
    assert [a.scheduled_at for a in await claim(store, after(minutes=1))] == [after(seconds=s) for s in (3, 4, 9)]


@stored
async def test_no_more_jobs_than_requested_are_claimed(store: Store) -> None:
    await create(store, *(job() for _ in range(10)))
    assert [len(await claim(store, most=most)) for most in (4, 4, 4, 4)] == [4, 4, 2, 0]


@stored
async def test_a_claim_starts_the_job_and_raises_its_fence(store: Store) -> None:
    attempt = await started(store, after(seconds=2))
    seen = await get(store, attempt.id)
    assert (seen.state, seen.attempt, seen.attempts_used, seen.node_id) == (JobState.RUNNING, 1, 0, NODE)
    assert seen.started_at == attempt.started_at == after(seconds=2)
    assert attempt.number == 1
    await store.run_autocommit(complete.schedule_retries, [again(attempt, T0)])
    (second,) = await claim(store)
    assert second.number == 2


@stored
async def test_an_attempt_carries_the_whole_job(store: Store) -> None:
    new = job(
        topic="a.b", tenant_id="acme", payload='{"x":1}', metadata='{"m":2}', owner_id="o", retry='{"attempts":2}',
        target='{"kind":"http","options":{}}', route="@http", timeout=2.5, expires_at=after(hours=1),
        timezone="Asia/Seoul",
    )  # fmt: skip
    await create(store, new)
    (attempt,) = await claim(store)
    assert (attempt.id, attempt.tenant_id, attempt.topic, attempt.timezone) == (new.id, "acme", "a.b", "Asia/Seoul")
    assert (attempt.payload, attempt.metadata, attempt.retry) == ('{"x":1}', '{"m":2}', '{"attempts":2}')
    assert (attempt.target, attempt.timeout, attempt.expires_at) == (new.target, 2.5, after(hours=1))
    assert (attempt.schedule_id, attempt.scheduled_at, attempt.errors, attempt.serial) == (None, T0, None, False)
    assert attempt.occurrence_key == new.id


@stored
async def test_a_running_job_is_not_claimed_again(store: Store) -> None:
    await started(store)
    assert await claim(store, after(days=1)) == []


@pytest.mark.parametrize("hold", list(Hold))
@stored
async def test_a_job_on_hold_is_in_no_claim_and_no_lane(store: Store, hold: Hold) -> None:
    await one(store, hold=hold)
    assert await claim(store) == []
    assert await _lanes(store) == []


@stored
async def test_a_claim_takes_only_its_own_lane(store: Store) -> None:
    mail = await one(store, queue="mail", priority=2)
    await one(store, queue="mail", priority=3)
    await one(store, queue="post", priority=2)
    assert [attempt.id for attempt in await claim(store, queue="mail", priority=2)] == [mail]


@pytest.mark.parametrize("paused", ["mail", queues.ALL_QUEUES])
@stored
async def test_a_scanned_lane_is_not_claimed_after_its_queue_is_paused(store: Store, paused: str) -> None:
    id_ = await one(store, queue="mail")
    (seen,) = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, T0)
    claim_scanned = (job_claim.claim_batch, seen, ALL_ROUTES, NODE, 10, T0)
    await store.run(queues.pause, paused, None)
    assert await store.run_autocommit(*claim_scanned, recheck_queue=True) == []
    await store.run(queues.resume, paused)
    assert [attempt.id for attempt in await store.run_autocommit(*claim_scanned, recheck_queue=True)] == [id_]


@pytest.mark.parametrize(
    "limited", [Limits(concurrency=9), Limits(rate=9, per=1.0), Limits(concurrency_per_group=9)]
)  # fmt: skip
@stored
async def test_a_scanned_lane_is_not_claimed_after_its_queue_gets_a_limit(store: Store, limited: Limits) -> None:
    for _ in range(2):
        await one(store, queue="mail")
    (seen,) = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, T0)
    claim_scanned = (job_claim.claim_batch, seen, ALL_ROUTES, NODE, 1, T0)
    await store.run(queues.set_limits, "post", limited)
    await store.run(queues.pause, "post", None)
    assert len(await store.run_autocommit(*claim_scanned, recheck_queue=True)) == 1
    await store.run(queues.set_limits, "mail", limited)
    assert await store.run_autocommit(*claim_scanned, recheck_queue=True) == []


# Lanes.


@stored
async def test_an_empty_store_has_no_lanes(store: Store) -> None:
    assert await _lanes(store) == []


@stored
async def test_every_lane_is_listed_once_most_urgent_first(store: Store) -> None:
    for queue, priority in [("b", 5), ("a", 5), ("c", -32_768), ("a", 32_767), ("b", 0), ("b", 0), ("default", 0)]:
        await one(store, queue=queue, priority=priority, run_at=after(seconds=ord(queue[0])))
    listed = await _lanes(store)
    assert listed == [("c", -32_768), ("b", 0), ("default", 0), ("a", 5), ("b", 5), ("a", 32_767)]


@stored
async def test_a_lane_has_the_instant_of_its_first_job(store: Store) -> None:
    await one(store, run_at=after(hours=2))
    await one(store, run_at=after(hours=1, microseconds=1))
    (found,) = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, T0)
    assert (found.next_due, found.free_capacity, found.has_limits) == (after(hours=1, microseconds=1), None, False)


@stored
async def test_a_lane_skips_jobs_of_unhandled_topics(store: Store) -> None:
    await one(store, topic="deaf")
    await one(store, topic="mine", run_at=after(hours=1))
    (found,) = await store.run_autocommit(job_claim.list_lanes, Routes(frozenset({"mine"})), T0)
    assert found.next_due == after(hours=1)
    assert await _lanes(store, Routes(frozenset({"other"})), after(hours=2)) == []


@stored
async def test_a_lane_of_unhandled_topics_has_its_next_scan_time(store: Store) -> None:
    """Finding the first handled job would need a scan of all pending jobs."""
    await one(store, topic="theirs", run_at=after(hours=1))
    await one(store, topic="mine", run_at=after(hours=2))
    mine = Routes(frozenset({"mine"}))
    for now, look in [(T0, after(hours=1)), (after(hours=1), after(hours=2)), (after(hours=3), after(hours=2))]:
        (found,) = await store.run_autocommit(job_claim.list_lanes, mine, now)
        assert found.next_due == look


@stored
async def test_a_scan_can_resume_at_the_positions_of_the_last_one(store: Store) -> None:
    """A position is the first due job, or slightly before now if there is none, because inserts need time to commit."""
    await one(store, topic="theirs", run_at=after(minutes=-2))
    await one(store, topic="mine", run_at=after(minutes=-1))
    await one(store, topic="mine", queue="later", run_at=after(hours=1))
    await one(store, topic="mine", queue="paused", run_at=T0)
    await store.run(queues.pause, "paused", None)
    mine = Routes(frozenset({"mine"}))
    seen = await store.run_autocommit(job_claim.scan_lanes, mine, T0)
    moment = T0 - job_claim.SCAN_OVERLAP
    assert seen.positions == {("default", 0): after(minutes=-1), ("later", 0): moment, ("paused", 0): moment}
    assert await store.run_autocommit(job_claim.scan_lanes, mine, T0, seen.positions) == seen
    await one(store, topic="mine", queue="later", run_at=moment)
    await one(store, topic="mine", queue="new", run_at=T0)
    await one(store, topic="mine", priority=1, run_at=T0)
    again = await store.run_autocommit(job_claim.scan_lanes, mine, T0, seen.positions)
    assert [(found.queue, found.next_due) for found in again.lanes] == [
        ("default", after(minutes=-1)), ("later", moment)
    ]  # fmt: skip


@stored
async def test_a_scan_from_a_position_ignores_earlier_jobs(store: Store) -> None:
    await one(store, run_at=after(minutes=-1))
    since = {("default", 0): T0 - job_claim.SCAN_OVERLAP}
    assert await store.run_autocommit(job_claim.scan_lanes, ALL_ROUTES, T0, since) == ([], since)
    assert await store.run_autocommit(job_claim.scan_lanes, ALL_ROUTES, T0, {}) == ([], {})


@stored
async def test_running_jobs_create_no_lane(store: Store) -> None:
    await started(store)
    assert await _lanes(store) == []


# Routes.


@pytest.mark.parametrize(
    ("routes", "taken"),
    [
        (Routes(frozenset({"a.b"})), {"a.b"}),
        (Routes(prefixes=frozenset({"a."})), {"a.b", "a.bc", "a.b.c", "a.B"}),
        (Routes(prefixes=frozenset({"a_", "zz"})), {"a_b"}),
        (Routes(all_topics=True), {"a.b", "a.bc", "a.b.c", "a.B", "a", "ab", "a_b", "a-b"}),
        (Routes(frozenset({"@http"})), {"@http"}),
        (Routes(frozenset({"@http"}), frozenset({"a."})), {"@http", "a.b", "a.bc", "a.b.c", "a.B"}),
        (Routes(frozenset({"none"}), frozenset({"none."})), set()),
        (Routes(), set()),
        (ALL_ROUTES, {"a.b", "a.bc", "a.b.c", "a.B", "a", "ab", "a_b", "a-b", "@http", "@command"}),
    ],
)
@stored
async def test_only_jobs_of_handled_topics_are_claimed(store: Store, routes: Routes, taken: set[str]) -> None:
    topics = ["a.b", "a.bc", "a.b.c", "a.B", "a", "ab", "a_b", "a-b", "@http", "@command"]
    await create(store, *(job(topic=topic) for topic in topics))
    claimed = await claim(store, routes=routes)
    assert {attempt.topic for attempt in claimed} == taken == {topic for topic in topics if routes.handles(topic)}


# Several claimers.


@stored
async def test_two_claimers_never_share_a_job(store: Store) -> None:
    await create(store, *(job() for _ in range(300)), bulk=True)
    nodes = [new_id(T0) for _ in range(6)]
    batches = []
    while len(batches) < 300:
        found = await asyncio.gather(*(claim(store, most=17, node=node) for node in nodes))
        batches += found
        if not any(found):
            break
    claimed = [attempt.id for batch in batches for attempt in batch]
    assert len(claimed) == len(set(claimed)) == 300


@stored
async def test_a_claim_and_a_cancel_at_the_same_time_have_one_winner(store: Store) -> None:
    for _ in range(15):
        id_ = await one(store)
        answer, attempts = await asyncio.gather(store.run(repository.cancel, None, id_, T0), claim(store))
        assert answer is not None
        state = (await get(store, id_)).state
        if attempts:
            assert (answer.outcome, state) == ("in_flight", JobState.RUNNING)
        else:
            assert (answer.outcome, state) == ("prevented", JobState.CANCELLED)


# Queues with a limit or a pause.


async def _claim_limited(store: Store, most: int = 100, node: str = NODE) -> list[str]:
    taken = await store.run(queue_limits.claim_limited, lane("q"), ALL_ROUTES, node, most, T0)
    return [attempt.id for attempt in taken]


@stored
async def test_a_queue_never_runs_more_than_its_concurrency_over_all_nodes(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=3))
    await create(store, *(job(queue="q") for _ in range(9)))
    first = await _claim_limited(store, node=NODE)
    assert (len(first), await _claim_limited(store, node=OTHER_NODE)) == (3, [])
    await end(store, Completion(first[0], 1, JobState.COMPLETED, T0))
    assert len(await _claim_limited(store, node=OTHER_NODE)) == 1


@stored
async def test_a_queue_limit_holds_under_simultaneous_claims(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=5))
    await create(store, *(job(queue="q", priority=n % 2) for n in range(40)))
    taken = await asyncio.gather(
        *(
            store.run(queue_limits.claim_limited, lane("q", n % 2), ALL_ROUTES, NODE if n < 4 else OTHER_NODE, 3, T0)
            for n in range(8)
        )
    )
    assert sum(map(len, taken)) == 5


@stored
async def test_a_limit_counts_every_priority_of_its_queue_and_no_other_queue(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=2))
    await started(store, queue="q", priority=1)
    await started(store, queue="other")
    await create(store, *(job(queue="q") for _ in range(3)))
    assert len(await _claim_limited(store)) == 1


@stored
async def test_lanes_contain_the_free_slots_of_their_queue(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=2))
    await started(store, queue="q")
    await one(store, queue="q")
    (found,) = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, T0)
    assert (found.free_capacity, found.has_limits) == (1, True)


@stored
async def test_a_limit_can_be_lowered_below_the_running_count_and_removed(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=3))
    await create(store, *(job(queue="q") for _ in range(9)))
    assert len(await _claim_limited(store)) == 3
    await store.run(queues.set_limits, "q", Limits(concurrency=1))
    (found,) = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, T0)
    assert found.free_capacity == 0
    assert await _claim_limited(store) == []
    await store.run(queues.set_limits, "q", Limits())
    assert len(await _claim_limited(store)) == 6


@stored
async def test_a_job_waiting_for_retry_frees_its_slot(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=1))
    attempt = await started(store, queue="q")
    await store.run_autocommit(complete.schedule_retries, [again(attempt, after(hours=1))])
    other = await one(store, queue="q")
    assert await _claim_limited(store) == [other]


@stored
async def test_a_paused_queue_has_no_lane_and_its_jobs_are_not_claimed(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=5))
    await one(store, queue="q")
    await store.run(queues.pause, "q", "because")
    assert await _lanes(store) == []
    assert await _claim_limited(store) == []
    await store.run(queues.resume, "q")
    assert await _lanes(store) == [("q", 0)]
    assert len(await _claim_limited(store)) == 1


@stored
async def test_a_queue_without_a_row_can_be_paused(store: Store) -> None:
    await one(store, queue="q")
    await one(store)
    await store.run(queues.pause, "q", None)
    assert await _lanes(store) == [("default", 0)]


@stored
async def test_running_jobs_of_a_paused_queue_can_finish(store: Store) -> None:
    attempt = await started(store, queue="q")
    await store.run(queues.pause, "q", None)
    assert await end(store, ending(attempt)) == {attempt.id}


@stored
async def test_a_pause_keeps_the_limit_and_a_limit_keeps_the_pause(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=1))
    await store.run(queues.pause, "q", None)
    await store.run(queues.set_limits, "q", Limits(concurrency=2))
    await create(store, job(queue="q"), job(queue="q"), job(queue="q"))
    assert await _claim_limited(store) == []
    await store.run(queues.resume, "q")
    assert len(await _claim_limited(store)) == 2
