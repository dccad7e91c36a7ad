"""Changes of existing jobs: reschedule, bulk cancel, manual retry of dead letters and erasure of an owner."""

from __future__ import annotations

from datetime import datetime

import pytest
from sqlalchemy import select

from timebell.errors import Conflict
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.model.job import CancelOutcome, Hold, Job
from timebell.store.jobs import complete, dead_letters, erasure, repository, serial
from timebell.store.schema import finished, requests, revisions
from timebell.store.schema import jobs as live_jobs

from .helpers import (
    T0,
    JobState,
    Overlap,
    Store,
    after,
    again,
    claim,
    create,
    end,
    ending,
    everything,
    execute,
    fire,
    get,
    job,
    one,
    put,
    schedule,
    started,
    stored,
    stored_schedule,
)

LATER = after(hours=5)


async def _move(store: Store, id_: str, to: datetime = LATER) -> str | None:
    when = {"run_at": to}
    new = await store.run(
        repository.reschedule, None, id_, new_id(T0), lambda old: {**when, "timezone": old.timezone}, T0
    )
    return None if new is None else new.id


@stored
async def test_a_rescheduled_job_is_a_new_job_linked_to_the_old_one(store: Store) -> None:
    made = job(
        payload='{"a":1}', metadata='{"b":2}', owner_id="o", key="k", queue="q", priority=3, timeout=9.0,
        timezone="Asia/Seoul", expires_at=after(minutes=30),
    )  # fmt: skip
    await create(store, made)
    id_ = await _move(store, made.id)
    assert id_ is not None
    old, new = await get(store, made.id), await get(store, id_)
    assert (old.state, old.reason, old.replaced_by) == (JobState.CANCELLED, "rescheduled", new.id)
    assert (new.state, new.replaces, new.run_at, new.scheduled_at) == (JobState.PENDING, old.id, LATER, LATER)
    assert new.expires_at == after(hours=5, minutes=30)
    same = ("payload", "metadata", "owner_id", "key", "queue", "priority", "timeout", "timezone", "topic")
    assert [getattr(new, name) for name in same] == [getattr(old, name) for name in same]
    cancelled = await store.run(repository.cancel, None, old.id, LATER)
    assert cancelled is not None
    assert cancelled.outcome is CancelOutcome.PREVENTED


@stored
async def test_a_retrying_job_that_is_rescheduled_keeps_its_time_until_expiry(store: Store) -> None:
    attempt = await started(store, expires_at=after(minutes=30))
    await store.run_autocommit(complete.schedule_retries, [again(attempt, after(minutes=20))])
    id_ = await _move(store, attempt.id)
    assert id_ is not None
    assert (await get(store, id_)).expires_at == after(hours=5, minutes=30)


@stored
async def test_a_running_or_finished_job_cannot_be_rescheduled(store: Store) -> None:
    attempt = await started(store)
    with pytest.raises(Conflict, match="is running") as running:
        await _move(store, attempt.id)
    await end(store, ending(attempt))
    with pytest.raises(Conflict, match="is completed; it cannot be rescheduled") as over:
        await _move(store, attempt.id)
    assert (running.value.code, over.value.code) == ("JOB_IN_FLIGHT", "JOB_FINISHED")
    assert await _move(store, new_id(T0)) is None
    assert len(await everything(store)) == 1


@stored
async def test_a_refused_time_leaves_the_job_as_it_was(store: Store) -> None:
    id_ = await one(store)

    def refuse(_: str) -> tuple[datetime, str]:
        raise ValueError("past")

    with pytest.raises(ValueError, match="past"):
        await store.run(repository.reschedule, None, id_, new_id(T0), refuse, T0)
    assert (await get(store, id_)).state is JobState.PENDING


@stored
async def test_a_rescheduled_occurrence_keeps_its_nominal_instant_and_its_order(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (first,) = await everything(store)
    id_ = await _move(store, first.id)
    assert id_ is not None
    moved = await get(store, id_)
    assert (moved.scheduled_at, moved.run_at, moved.schedule_id) == (after(minutes=1), LATER, first.schedule_id)
    assert (await fire(store, after(minutes=2))).skips == 1  # overlap skip: it is live


@stored
async def test_bulk_cancel_ends_pending_jobs_and_requests_cancel_of_running_jobs(store: Store) -> None:
    mine = [job(owner_id="ana", topic=topic) for topic in ("a", "a", "b")]
    others = [job(owner_id="bo"), job(owner_id="ana", tenant_id="acme")]
    await create(store, *mine, *others)
    running = await started(store, owner_id="ana", queue="q")
    where = {"owner_id": "ana", "tenant_id": "default"}
    first, at = await store.run(repository.cancel_matching, where, T0, None, 2)
    second, end_of_it = await store.run(repository.cancel_matching, where, T0, at, 100)
    assert (first.prevented, second.prevented, second.in_flight, end_of_it) == (2, 1, 1, None)
    states = {found.id: found.state for found in await everything(store)}
    assert {states[one.id] for one in mine} == {JobState.CANCELLED}
    assert {states[one.id] for one in others} == {JobState.PENDING}
    await end(store, ending(running, JobState.FAILED))
    assert (await get(store, running.id)).state is JobState.CANCELLED


@stored
async def test_bulk_cancel_releases_the_next_serial_job(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))
    first, second = await everything(store)
    assert second.hold is Hold.OVERLAP
    await store.run(repository.cancel_matching, {"id": first.id}, T0, None, 10)
    assert (await get(store, second.id)).hold is None


async def _dead(store: Store, **fields: object) -> Job:
    attempt = await started(store, **fields)
    await end(store, ending(attempt, JobState.FAILED, error="boom", errors='[{"attempt":1}]'))
    return await get(store, attempt.id)


@stored
async def test_a_manually_retried_job_is_pending_with_a_fresh_budget(store: Store) -> None:
    lost = await _dead(store, expires_at=after(minutes=1), payload='{"a":1}')
    assert await store.run(dead_letters.retry, None, lost.id, LATER) is True
    again = await get(store, lost.id)
    assert (again.state, again.run_at, again.attempts_used, again.attempt) == (JobState.PENDING, LATER, 0, 1)
    assert (again.payload, again.expires_at) == ({"a": 1}, None)
    assert again.attempts == [{"attempt": 1, "retriedAt": LATER.isoformat()}]
    (attempt,) = await claim(store, LATER)
    assert (attempt.id, attempt.number) == (lost.id, 2)
    assert len(await everything(store)) == 1


@stored
async def test_only_failed_jobs_can_be_retried_manually(store: Store) -> None:
    id_ = await one(store)
    assert await store.run(dead_letters.retry, None, id_, LATER) is False
    assert await store.run(dead_letters.retry, "acme", id_, LATER) is None
    assert await store.run(dead_letters.retry, None, new_id(T0), LATER) is None


@stored
async def test_a_manual_retry_does_not_take_a_key_from_its_new_holder(store: Store) -> None:
    lost = await _dead(store, key="k")
    holder = await one(store, key="k")
    with pytest.raises(Conflict) as conflict:
        await store.run(dead_letters.retry, None, lost.id, LATER)
    assert (conflict.value.code, conflict.value.existing) == ("KEY_IN_USE", holder)
    assert (await get(store, lost.id)).state is JobState.FAILED


@stored
async def test_a_manually_retried_serial_occurrence_waits_for_its_predecessor(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    failed = ending(attempt, JobState.FAILED, schedule_id=attempt.schedule_id)
    await store.run(serial.complete_serial, [failed], [str(attempt.schedule_id)])
    await fire(store, after(minutes=2))
    await store.run(dead_letters.retry, None, attempt.id, LATER)
    assert (await get(store, attempt.id)).hold is Hold.OVERLAP


@stored
async def test_erasure_keeps_the_rows_without_personal_data(store: Store) -> None:
    secret = {"payload": '"secret"', "metadata": '{"m":"secret"}', "owner_id": "ana", "key": "secret"}
    attempt = await started(store, **secret)
    await end(store, ending(attempt, JobState.FAILED, result='"secret"', error="secret", errors='["secret"]'))
    await create(store, job(**secret | {"key": "secret2"}, request_id="r-1"))
    running = await started(store, **secret | {"key": "secret3"}, queue="q")
    other = await one(store, owner_id="bo", payload='"kept"')
    made = schedule(owner_id="ana", payload="secret", metadata={"m": "secret"})
    await put(store, made)
    kept = schedule(owner_id="bo", payload="kept", name="kept")
    await put(store, kept)

    erased = await store.run(erasure.erase, "default", "ana", LATER, FEATURES)

    assert (erased.prevented, erased.in_flight, erased.finished, erased.schedules) == (1, 1, 2, 1)
    for table in (finished, live_jobs, revisions):
        assert "secret" not in repr(await execute(store, select(table)))
    assert [row.owner_id for row in await execute(store, select(finished))] == [None, None]
    assert (await get(store, other)).payload == "kept"
    assert (await stored_schedule(store)).enabled is False
    assert (await stored_schedule(store)).action.payload is None
    assert (await stored_schedule(store, "kept")).enabled is True
    assert len(await execute(store, select(requests))) == 1

    await end(store, ending(running, JobState.COMPLETED, result='"secret"'))
    again = await store.run(erasure.erase, "default", "ana", LATER, FEATURES)
    assert (again.in_flight, again.finished) == (0, 1)
    assert "secret" not in repr(await execute(store, select(finished)))
    assert await store.run(erasure.erase, "acme", "bo", LATER, FEATURES) == erasure.ErasureResult(0, 0, 0, 0)
