"""Cancel: prevented, in flight or already done; the first result is final, and no further attempt starts."""

from __future__ import annotations

import pytest

from timebell.ids import new_id
from timebell.model.job import CancelOutcome, Hold
from timebell.store.jobs import complete, repository

from .helpers import (
    T0,
    JobState,
    Store,
    after,
    again,
    claim,
    create,
    end,
    ending,
    everything,
    get,
    job,
    one,
    started,
    stored,
)


async def cancel(store: Store, id_: str, tenant: str | None = None) -> CancelOutcome | None:
    answer = await store.run(repository.cancel, tenant, id_, after(seconds=9))
    return None if answer is None else answer.outcome


@stored
async def test_cancel_of_a_pending_job_prevents_it_for_good(store: Store) -> None:
    id_ = await one(store)
    assert await cancel(store, id_) == "prevented"
    assert await claim(store) == []
    seen = await get(store, id_)
    assert (seen.state, seen.finished_at) == (JobState.CANCELLED, after(seconds=9))
    assert (seen.attempt, seen.attempts_used) == (0, 0)


@pytest.mark.parametrize("hold", list(Hold))
@stored
async def test_a_job_on_hold_can_be_cancelled(store: Store, hold: Hold) -> None:
    assert await cancel(store, await one(store, hold=hold)) == "prevented"


@stored
async def test_cancel_of_a_job_waiting_for_its_retry_prevents_it_and_keeps_its_history(store: Store) -> None:
    attempt = await started(store)
    await store.run_autocommit(complete.schedule_retries, [again(attempt, after(hours=1), errors='[{"attempt":1}]')])
    assert await cancel(store, attempt.id) == "prevented"
    seen = await get(store, attempt.id)
    assert (seen.state, seen.attempts_used, seen.attempts) == (JobState.CANCELLED, 1, [{"attempt": 1}])


@stored
async def test_cancel_of_a_running_job_is_in_flight_and_leaves_it_running(store: Store) -> None:
    attempt = await started(store)
    answer = await store.run(repository.cancel, None, attempt.id, T0)
    assert answer is not None
    assert (answer.outcome, answer.job.state) == ("in_flight", JobState.RUNNING)
    assert await store.run_autocommit(complete.renew_leases, [(attempt.id, 1)]) == {attempt.id}


@stored
async def test_a_success_after_the_cancel_is_recorded_as_completed(store: Store) -> None:
    attempt = await started(store)
    await cancel(store, attempt.id)
    assert await end(store, ending(attempt, result="1")) == {attempt.id}
    assert ((await get(store, attempt.id)).state, (await get(store, attempt.id)).result) == (JobState.COMPLETED, 1)
    assert await cancel(store, attempt.id) == "in_flight"


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED])
@stored
async def test_any_other_completion_after_the_cancel_is_cancelled(store: Store, state: JobState) -> None:
    attempt = await started(store)
    await cancel(store, attempt.id)
    await end(store, ending(attempt, state, error="e"))
    seen = await get(store, attempt.id)
    assert (seen.state, seen.error) == (JobState.CANCELLED, "e")
    assert await cancel(store, attempt.id) == "in_flight"


@stored
async def test_no_further_attempt_starts_after_a_cancel(store: Store) -> None:
    attempt = await started(store)
    await cancel(store, attempt.id)
    assert await store.run_autocommit(complete.schedule_retries, [again(attempt, T0)]) == set()
    assert await claim(store, after(days=1)) == []


@stored
async def test_a_cancelled_job_in_a_batch_does_not_block_the_retries_of_the_others(store: Store) -> None:
    await create(store, job(), job())
    first, second = await claim(store)
    await cancel(store, first.id)
    assert await store.run_autocommit(complete.schedule_retries, [again(first, T0), again(second, T0)]) == {second.id}


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.SKIPPED])
@stored
async def test_cancel_of_a_finished_job_is_already_done_and_changes_nothing(store: Store, state: JobState) -> None:
    attempt = await started(store)
    await end(store, ending(attempt, state))
    before = await get(store, attempt.id)
    assert [await cancel(store, attempt.id) for _ in range(2)] == ["already_done"] * 2
    assert await get(store, attempt.id) == before


@stored
async def test_a_job_that_cancelled_itself_is_already_done(store: Store) -> None:
    attempt = await started(store)
    await end(store, ending(attempt, JobState.CANCELLED, reason="enough"))
    assert await cancel(store, attempt.id) == "already_done"


@stored
async def test_a_repeated_cancel_returns_the_first_result(store: Store) -> None:
    pending, running = await one(store, queue="q"), await started(store)
    assert [await cancel(store, pending) for _ in range(3)] == ["prevented"] * 3
    assert [await cancel(store, running.id) for _ in range(3)] == ["in_flight"] * 3
    assert len(await everything(store)) == 2


@stored
async def test_cancel_of_an_unknown_job_returns_none(store: Store) -> None:
    assert await cancel(store, new_id(T0)) is None


@stored
async def test_cancel_of_another_tenants_job_changes_nothing(store: Store) -> None:
    id_ = await one(store, tenant_id="acme")
    assert await cancel(store, id_, "bolt") is None
    assert (await get(store, id_)).state is JobState.PENDING
    assert await cancel(store, id_, "acme") == "prevented"


@stored
async def test_a_running_job_of_another_tenant_is_not_marked_for_cancel(store: Store) -> None:
    attempt = await started(store, tenant_id="acme")
    assert await cancel(store, attempt.id, "bolt") is None
    assert await store.run_autocommit(complete.schedule_retries, [again(attempt, T0)]) == {attempt.id}
