"""Attempts of external workers: dispatch and reports are fenced, and unreported attempts time out."""

from __future__ import annotations

import dataclasses

from timebell.model.job import Attempt, Completion
from timebell.model.limits import Limits
from timebell.model.policy import Overlap
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete, external_reports, queue_limits, queues

from .helpers import (
    ALL_ROUTES,
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


async def dispatch_attempt(store: Store, until: float = 60, **fields: object) -> Attempt:
    """Return a dispatched attempt with a deadline, in seconds from T0."""
    attempt = await started(store, **fields)
    ids = await store.run_autocommit(
        complete.dispatch, [ending(attempt, JobState.DISPATCHED, run_at=after(seconds=until))]
    )
    assert ids == {attempt.id}
    return attempt


def external_completion(attempt: Attempt, state: JobState = JobState.COMPLETED, **fields: object) -> Completion:
    return ending(attempt, state, expected_state=JobState.DISPATCHED, **fields)


@stored
async def test_only_the_running_attempt_is_dispatched(store: Store) -> None:
    attempt = await started(store)
    stale = ending(attempt, JobState.DISPATCHED, run_at=after(seconds=9))
    stale.attempt += 1
    assert await store.run_autocommit(complete.dispatch, [stale]) == set()
    stale.attempt -= 1
    assert await store.run_autocommit(complete.dispatch, [stale]) == {attempt.id}
    assert (await get(store, attempt.id)).state is JobState.DISPATCHED
    assert await store.run_autocommit(complete.dispatch, [stale]) == set()
    assert await claim(store, after(days=9)) == []


@stored
async def test_the_dispatching_node_cannot_complete_a_dispatched_attempt(store: Store) -> None:
    attempt = await dispatch_attempt(store)
    assert await end(store, ending(attempt)) == set()
    assert await store.run_autocommit(complete.schedule_retries, [again(attempt, T0)]) == set()
    assert await store.run_autocommit(complete.renew_leases, [(attempt.id, attempt.number)]) == set()
    assert await store.run_autocommit(job_claim.list_running_attempts) == {}
    assert await end(store, external_completion(attempt)) == {attempt.id}
    assert (await get(store, attempt.id)).state is JobState.COMPLETED


@stored
async def test_an_attempt_not_reported_in_time_is_listed_until_it_is_retried(store: Store) -> None:
    late, early = await dispatch_attempt(store, 10), await dispatch_attempt(store, 30)
    assert await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=9)) == []
    (found,) = await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=10))
    assert (found.id, found.state, found.number) == (late.id, JobState.DISPATCHED, 1)
    await store.run(external_reports.extend_deadline, early, after(seconds=99))
    assert [one.id for one in await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=50))] == [
        late.id
    ]
    retry = again(found, T0, expected_state=found.state)
    assert await store.run_autocommit(complete.schedule_retries, [retry]) == {late.id}
    assert await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=50)) == []
    (second,) = await claim(store)
    assert (second.id, second.number) == (late.id, 2)
    assert await end(store, external_completion(late)) == set()


@stored
async def test_a_report_locks_only_the_attempt_of_its_tenant_and_number(store: Store) -> None:
    attempt = await dispatch_attempt(store)
    held = await store.run(external_reports.lock_job, "default", attempt.id, 1)
    assert held is not None
    assert held.attempt is not None
    assert (held.attempt, held.cancel_requested) == (
        dataclasses.replace(attempt, state=JobState.DISPATCHED, started_at=held.attempt.started_at), False
    )  # fmt: skip
    assert await store.run(external_reports.lock_job, "other", attempt.id, 1) is None
    later = await store.run(external_reports.lock_job, "default", attempt.id, 2)
    assert later is not None
    assert (later.job.state, later.attempt) == (JobState.DISPATCHED, None)


@stored
async def test_a_concurrency_limit_counts_dispatched_attempts(store: Store) -> None:
    await store.run(queues.set_limits, "q", Limits(concurrency=2))
    first = await dispatch_attempt(store, queue="q")
    for _ in range(3):
        await one(store, queue="q")
    claimed = await store.run(queue_limits.claim_limited, lane("q"), ALL_ROUTES, OTHER_NODE, 10, T0)
    assert len(claimed) == 1
    assert await end(store, external_completion(first)) == {first.id}
    assert len(await store.run(queue_limits.claim_limited, lane("q"), ALL_ROUTES, OTHER_NODE, 10, T0)) == 1


@stored
async def test_a_dispatched_attempt_to_cancel_for_a_later_occurrence_is_listed(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.CANCEL_PREVIOUS))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await store.run_autocommit(complete.dispatch, [ending(attempt, JobState.DISPATCHED, run_at=after(hours=1))])
    assert await store.run_autocommit(job_claim.list_running_attempts) == {}
    await fire(store, after(minutes=2))
    assert list(await store.run_autocommit(job_claim.list_running_attempts)) == [(attempt.id, 1)]
    ((found, _),) = await store.run(job_claim.load_live_attempts, [(attempt.id, 1)])
    assert found.state is JobState.DISPATCHED


@stored
async def test_a_delivery_is_recorded_before_or_after_its_report(store: Store) -> None:
    done, failed = await started(store), await started(store)
    assert await end(store, ending(done)) == {done.id}
    report_errors = '[{"attempt":1,"code":"REPORTED","error":"disk full"}]'
    assert await store.run_autocommit(
        complete.schedule_retries, [again(failed, after(hours=1), errors=report_errors)]
    ) == {failed.id}
    sent = '[{"attempt":1,"to":"host","code":null,"error":null}]'
    for attempt, expected in (
        (done, {"attempt": 1, "to": "host", "code": None, "error": None}),
        (failed, {"attempt": 1, "to": "host", "code": "REPORTED", "error": "disk full"}),
    ):
        late = ending(attempt, JobState.DISPATCHED, run_at=after(seconds=60), errors=sent)
        assert await store.run_autocommit(complete.dispatch, [late]) == set()
        for _ in range(2):  # a partially failed batch is written again
            await store.run(external_reports.record_delivery, late)
        job = await get(store, attempt.id)
        assert job.attempts == [expected]
        assert job.state in (JobState.COMPLETED, JobState.PENDING)
