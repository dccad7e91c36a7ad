"""Attempts with outside workers: handed over under the fence, ended by it, called in when nothing is reported."""

from __future__ import annotations

import dataclasses

from timebell.model.job import Attempt, Ending
from timebell.model.limits import Limits
from timebell.model.policy import Overlap
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete, external_reports, queue_limits, queues

from .helpers import (
    ANYONE,
    OTHER_NODE,
    T0,
    JobState,
    Store,
    after,
    again,
    claim,
    end,
    ending,
    fire,
    get,
    lane,
    one,
    put,
    schedule,
    started,
    stored,
)


async def handed(store: Store, until: float = 60, **fields: object) -> Attempt:
    """An attempt that an outside worker has, for so many seconds from T0."""
    attempt = await started(store, **fields)
    ids = await store.hot(complete.dispatch, [ending(attempt, JobState.DISPATCHED, run_at=after(seconds=until))])
    assert ids == {attempt.id}
    return attempt


def outside(attempt: Attempt, state: JobState = JobState.COMPLETED, **fields: object) -> Ending:
    return ending(attempt, state, was=JobState.DISPATCHED, **fields)


@stored
async def test_only_the_attempt_that_runs_is_handed_over(store: Store) -> None:
    attempt = await started(store)
    stale = ending(attempt, JobState.DISPATCHED, run_at=after(seconds=9))
    stale.attempt += 1
    assert await store.hot(complete.dispatch, [stale]) == set()
    stale.attempt -= 1
    assert await store.hot(complete.dispatch, [stale]) == {attempt.id}
    assert (await get(store, attempt.id)).state is JobState.DISPATCHED
    assert await store.hot(complete.dispatch, [stale]) == set()
    assert await claim(store, after(days=9)) == []


@stored
async def test_the_node_that_handed_it_over_has_nothing_more_to_say(store: Store) -> None:
    attempt = await handed(store)
    assert await end(store, ending(attempt)) == set()
    assert await store.hot(complete.retry, [again(attempt, T0)]) == set()
    assert await store.hot(complete.beat, [(attempt.id, attempt.number)]) == set()
    assert await store.hot(job_claim.running) == {}
    assert await end(store, outside(attempt)) == {attempt.id}
    assert (await get(store, attempt.id)).state is JobState.COMPLETED


@stored
async def test_what_is_not_reported_in_time_is_found_once(store: Store) -> None:
    late, early = await handed(store, 10), await handed(store, 30)
    assert await store.hot(job_claim.overdue, 10, after(seconds=9)) == []
    (found,) = await store.hot(job_claim.overdue, 10, after(seconds=10))
    assert (found.id, found.state, found.number) == (late.id, JobState.DISPATCHED, 1)
    await store.run(external_reports.beat, early, after(seconds=99))
    assert [one.id for one in await store.hot(job_claim.overdue, 10, after(seconds=50))] == [late.id]
    assert await store.hot(complete.retry, [again(found, T0, was=found.state)]) == {late.id}
    assert await store.hot(job_claim.overdue, 10, after(seconds=50)) == []
    (second,) = await claim(store)
    assert (second.id, second.number) == (late.id, 2)
    assert await end(store, outside(late)) == set()


@stored
async def test_an_attempt_is_held_for_its_tenant_and_its_number(store: Store) -> None:
    attempt = await handed(store)
    held = await store.run(external_reports.held, "default", attempt.id, 1)
    assert held is not None
    assert held.attempt is not None
    assert (held.attempt, held.cancel_asked) == (
        dataclasses.replace(attempt, state=JobState.DISPATCHED, started_at=held.attempt.started_at), False
    )  # fmt: skip
    assert await store.run(external_reports.held, "other", attempt.id, 1) is None
    later = await store.run(external_reports.held, "default", attempt.id, 2)
    assert later is not None
    assert (later.job.state, later.attempt) == (JobState.DISPATCHED, None)


@stored
async def test_a_limit_counts_what_is_outside(store: Store) -> None:
    await store.run(queues.put, "q", Limits(concurrency=2))
    first = await handed(store, queue="q")
    for _ in range(3):
        await one(store, queue="q")
    claimed = await store.run(queue_limits.claim_limited, lane("q"), ANYONE, OTHER_NODE, 10, T0)
    assert len(claimed) == 1
    assert await end(store, outside(first)) == {first.id}
    assert len(await store.run(queue_limits.claim_limited, lane("q"), ANYONE, OTHER_NODE, 10, T0)) == 1


@stored
async def test_one_that_makes_way_for_a_later_occurrence_is_told_of(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.CANCEL_PREVIOUS))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await store.hot(complete.dispatch, [ending(attempt, JobState.DISPATCHED, run_at=after(hours=1))])
    assert await store.hot(job_claim.running) == {}
    await fire(store, after(minutes=2))
    assert list(await store.hot(job_claim.running)) == [(attempt.id, 1)]
    (found,) = await store.run(job_claim.abandoned, [(attempt.id, 1)], after(minutes=2))
    assert found.state is JobState.DISPATCHED


@stored
async def test_a_delivery_is_on_record_whichever_is_written_first_it_or_its_report(store: Store) -> None:
    done, failed = await started(store), await started(store)
    assert await end(store, ending(done)) == {done.id}
    said = '[{"attempt":1,"code":"REPORTED","error":"disk full"}]'
    assert await store.hot(complete.retry, [again(failed, after(hours=1), errors=said)]) == {failed.id}
    sent = '[{"attempt":1,"to":"host","code":null,"error":null}]'
    for attempt, expected in (
        (done, {"attempt": 1, "to": "host", "code": None, "error": None}),
        (failed, {"attempt": 1, "to": "host", "code": "REPORTED", "error": "disk full"}),
    ):
        late = ending(attempt, JobState.DISPATCHED, run_at=after(seconds=60), errors=sent)
        assert await store.hot(complete.dispatch, [late]) == set()
        for _ in range(2):  # a batch that fails half-way is written again
            await store.run(external_reports.record, late)
        job = await get(store, attempt.id)
        assert job.attempts == [expected]
        assert job.state in (JobState.COMPLETED, JobState.PENDING)
