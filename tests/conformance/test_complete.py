"""Completions, retries and heartbeats of attempts, each fenced by the attempt number; release of serial jobs."""

from __future__ import annotations

import pytest

from timebell.model.job import Completion, Hold, Kind
from timebell.model.payload import encode
from timebell.model.progress import Progress, encode_progress
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete as ending_ops
from timebell.store.jobs import repository, serial
from timebell.store.jobs.progress import write_progress

from .helpers import (
    NODE,
    OTHER_NODE,
    T0,
    JobState,
    Store,
    after,
    again,
    at_minutes,
    claim,
    create,
    end,
    ending,
    everything,
    get,
    job,
    one,
    schedule,
    started,
    stored,
)

FINAL = [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED]


async def _retry(store: Store, *endings: Completion) -> set[str]:
    return await store.run_autocommit(ending_ops.schedule_retries, endings)


@pytest.mark.parametrize("state", FINAL)
@stored
async def test_a_completion_moves_the_job_to_the_finished_table_with_all_fields(store: Store, state: JobState) -> None:
    given = {
        "payload": encode({"a": 0}), "metadata": encode({"m": 1}), "owner_id": "o", "key": "k", "queue": "q",
        "priority": 2, "retry": encode({"attempts": 2}), "timeout": 1.5, "expires_at": after(days=1),
        "target": encode({"kind": "http", "options": {}}), "tenant_id": "acme", "topic": "a.b",
        "timezone": "Asia/Seoul",
    }  # fmt: skip
    attempt = await started(store, after(seconds=1), **given)
    running = await get(store, attempt.id)
    errors = encode([{"attempt": 1}])
    assert await end(
        store, ending(attempt, state, after(seconds=3), reason="why", error="e", code="C", result="[0]", errors=errors)
    ) == {attempt.id}
    seen = await get(store, attempt.id)
    changed = {name for name in seen.__slots__ if getattr(seen, name) != getattr(running, name)}
    assert changed == {"state", "attempts_used", "finished_at", "reason", "error", "error_code", "result", "attempts"}
    assert (seen.state, seen.attempts_used, seen.finished_at) == (state, 1, after(seconds=3))
    assert (seen.reason, seen.error, seen.result, seen.attempts) == ("why", "e", [0], [{"attempt": 1}])
    assert len(await everything(store)) == 1


@stored
async def test_a_completion_that_does_not_count_uses_up_no_attempt(store: Store) -> None:
    attempt = await started(store)
    await end(store, ending(attempt, JobState.SKIPPED, uses_attempt=False))
    assert (await get(store, attempt.id)).attempts_used == 0


@pytest.mark.parametrize("result", ["null", "0", '""', "[]", "false"])
@stored
async def test_falsy_results_are_stored(store: Store, result: str) -> None:
    attempt = await started(store)
    await end(store, ending(attempt, result=result))
    assert encode((await get(store, attempt.id)).result) == result


@pytest.mark.parametrize("state", FINAL)
@stored
async def test_an_earlier_attempt_cannot_complete_the_job(store: Store, state: JobState) -> None:
    old = await started(store)
    await _retry(store, again(old, T0))
    (new,) = await claim(store, node=OTHER_NODE)
    assert await end(store, ending(old, state)) == set()
    assert (await get(store, old.id)).state is JobState.RUNNING
    assert await end(store, ending(new)) == {new.id}


@stored
async def test_a_future_attempt_cannot_complete_the_job(store: Store) -> None:
    attempt = await started(store)
    assert await end(store, Completion(attempt.id, 2, JobState.COMPLETED, T0)) == set()
    assert (await get(store, attempt.id)).state is JobState.RUNNING


@stored
async def test_a_pending_job_cannot_be_completed_as_running(store: Store) -> None:
    id_ = await one(store)
    assert await end(store, Completion(id_, 0, JobState.COMPLETED, T0)) == set()
    assert await end(store, Completion(id_, 0, JobState.CANCELLED, T0, expected_state=JobState.PENDING)) == {id_}


@stored
async def test_a_running_job_cannot_be_completed_as_pending(store: Store) -> None:
    attempt = await started(store)
    assert await end(store, ending(attempt, JobState.CANCELLED, expected_state=JobState.PENDING)) == set()


@stored
async def test_a_second_completion_changes_nothing(store: Store) -> None:
    attempt = await started(store)
    assert await end(store, ending(attempt, result="1")) == {attempt.id}
    assert await end(store, ending(attempt, JobState.FAILED)) == set()
    assert ((await get(store, attempt.id)).state, len(await everything(store))) == (JobState.COMPLETED, 1)


@stored
async def test_a_batch_applies_only_the_completions_whose_fence_holds(store: Store) -> None:
    await create(store, *(job() for _ in range(6)))
    attempts = await claim(store)
    await _retry(store, again(attempts[0], after(days=1)))
    states = [JobState.COMPLETED, *FINAL, JobState.COMPLETED]
    batch = [ending(attempt, state) for attempt, state in zip(attempts, states, strict=True)]
    assert await end(store, *batch) == {attempt.id for attempt in attempts[1:]}
    assert [(await get(store, a.id)).state for a in attempts] == [JobState.PENDING, *FINAL, JobState.COMPLETED]


@stored
async def test_the_text_of_a_completion_is_read_back_exactly(store: Store) -> None:
    text = "it's \"broken\" \\ 💥 :rows $1 %s {x}\n\t'"
    attempt = await started(store)
    await end(store, ending(attempt, JobState.FAILED, error=text, result=encode({text: text})))
    seen = await get(store, attempt.id)
    assert (seen.error, seen.result) == (text, {text: text})


@stored
async def test_a_long_reason_and_a_long_code_are_stored(store: Store) -> None:
    attempt = await started(store)
    reason = "the customer asked us to forget about the whole thing, twice"
    await end(store, ending(attempt, JobState.CANCELLED, reason=reason))
    assert (await get(store, attempt.id)).reason == reason


# Retries.


@stored
async def test_a_retry_requeues_the_job_and_uses_up_an_attempt(store: Store) -> None:
    attempt = await started(store)
    errors = encode([{"attempt": 1, "error": "e"}])
    assert await _retry(store, again(attempt, after(minutes=5), errors=errors)) == {attempt.id}
    seen = await get(store, attempt.id)
    assert (seen.state, seen.attempt, seen.attempts_used, seen.node_id) == (JobState.PENDING, 1, 1, None)
    assert (seen.run_at, seen.scheduled_at) == (after(minutes=5), T0)
    assert seen.attempts == [{"attempt": 1, "error": "e"}]
    assert await claim(store, after(minutes=4)) == []
    (second,) = await claim(store, after(minutes=5))
    assert (second.number, second.attempts_used, second.errors) == (2, 1, errors)


@stored
async def test_a_retry_that_does_not_count_uses_up_no_attempt(store: Store) -> None:
    attempt = await started(store)
    await _retry(store, again(attempt, T0, uses_attempt=False))
    seen = await get(store, attempt.id)
    assert (seen.attempts_used, seen.attempt) == (0, 1)


@stored
async def test_the_occurrence_key_is_the_same_for_every_attempt(store: Store) -> None:
    first = await started(store)
    await _retry(store, again(first, after(minutes=5)))
    (second,) = await claim(store, after(minutes=5))
    assert second.occurrence_key == first.occurrence_key


@stored
async def test_an_earlier_attempt_cannot_retry_the_job(store: Store) -> None:
    old = await started(store)
    await _retry(store, again(old, T0))
    await claim(store, node=OTHER_NODE)
    assert await _retry(store, again(old, T0)) == set()
    assert (await get(store, old.id)).state is JobState.RUNNING


@stored
async def test_a_finished_job_cannot_be_retried(store: Store) -> None:
    attempt = await started(store)
    await end(store, ending(attempt, JobState.FAILED))
    assert await _retry(store, again(attempt, T0)) == set()
    assert await claim(store) == []


# Heartbeats and leases.


@stored
async def test_a_heartbeat_renews_exactly_the_attempts_still_owned(store: Store) -> None:
    await create(store, *(job() for _ in range(4)))
    mine, taken, done, back = await claim(store)
    await _retry(store, again(taken, T0), again(back, after(days=1)))
    await claim(store, node=OTHER_NODE)
    await end(store, ending(done))
    batch = [(attempt.id, attempt.number) for attempt in (mine, taken, done, back)]
    assert await store.run_autocommit(ending_ops.renew_leases, batch) == {mine.id}
    assert await store.run_autocommit(ending_ops.renew_leases, batch) == {mine.id}
    assert await store.run_autocommit(job_claim.list_running_attempts) == {
        (mine.id, 1): (2, None),
        (taken.id, 2): (0, None),
    }


@stored
async def test_a_heartbeat_without_attempts_succeeds(store: Store) -> None:
    assert await store.run_autocommit(ending_ops.renew_leases, []) == set()


@stored
async def test_every_running_attempt_is_listed_and_no_other(store: Store) -> None:
    attempt = await started(store)
    await one(store)
    await one(store, hold=Hold.UNHANDLED)
    await end(store, ending(await started(store, queue="q")))
    assert await store.run_autocommit(job_claim.list_running_attempts) == {(attempt.id, 1): (0, None)}


@stored
async def test_live_attempts_are_loaded_completely_while_they_run(store: Store) -> None:
    errors = encode([{"attempt": 1}])
    first = await started(store, payload="[1]", owner_id="o", retry=encode({"attempts": 2}))
    await _retry(store, again(first, T0, errors=errors))
    (second,) = await claim(store)
    done = await started(store, queue="q")
    await end(store, ending(done))
    keys = [(first.id, 1), (second.id, 2), (done.id, 1)]
    ((found, node_id),) = await store.run(job_claim.load_live_attempts, keys)
    assert (found.id, found.number, found.attempts_used, found.errors) == (second.id, 2, 1, errors)
    assert (found.started_at, node_id) == (second.started_at, NODE)
    assert (found.payload, found.retry) == ("[1]", encode({"attempts": 2}))


# Serial jobs of a schedule.


async def _chain(store: Store, count: int, **fields: object) -> list[str]:
    """Insert serial jobs of one schedule, a minute apart; all but the first are held."""
    made = schedule()
    chained = [
        job(
            schedule_id=made.id, scheduled_at=after(minutes=n), run_at=after(minutes=n), kind=Kind.PLANNED,
            serial=True, hold=Hold.OVERLAP if n else None, **fields,
        )
        for n in range(count)
    ]  # fmt: skip
    await create(store, *chained)
    return [one.id for one in chained]


async def _end_in_turn(store: Store, schedule_id: str | None, *endings: Completion) -> set[str]:
    assert schedule_id is not None
    return await store.run(serial.complete_serial, endings, [schedule_id])


@stored
async def test_the_next_serial_job_is_released_when_its_predecessor_completes(store: Store) -> None:
    await _chain(store, 3)
    order = []
    for _ in range(3):
        (attempt,) = await claim(store, after(hours=1))
        order.append(await get(store, attempt.id))
        assert await claim(store, after(hours=1)) == []
        assert await _end_in_turn(store, attempt.schedule_id, ending(attempt)) == {attempt.id}
    assert at_minutes(order) == [0, 1, 2]


@pytest.mark.parametrize("state", FINAL)
@stored
async def test_the_next_serial_job_is_released_after_any_completion(store: Store, state: JobState) -> None:
    _, second = await _chain(store, 2)
    (attempt,) = await claim(store, after(hours=1))
    await _end_in_turn(store, attempt.schedule_id, ending(attempt, state))
    assert [one.id for one in await claim(store, after(hours=1))] == [second]


@stored
async def test_an_earlier_attempt_releases_no_serial_job(store: Store) -> None:
    await _chain(store, 2)
    (old,) = await claim(store, after(hours=1))
    await _retry(store, again(old, T0))
    (new,) = await claim(store, after(hours=1))
    assert await _end_in_turn(store, old.schedule_id, ending(old)) == set()
    assert await claim(store, after(hours=1)) == []
    assert await _end_in_turn(store, new.schedule_id, ending(new)) == {new.id}


@stored
async def test_a_retrying_serial_job_keeps_its_order(store: Store) -> None:
    first, _ = await _chain(store, 2)
    (attempt,) = await claim(store, after(hours=1))
    await _retry(store, again(attempt, after(hours=2)))
    assert await claim(store, after(hours=1)) == []
    assert [one.id for one in await claim(store, after(hours=2))] == [first]


@stored
async def test_cancelling_the_first_serial_job_releases_the_next(store: Store) -> None:
    first, second, _ = await _chain(store, 3)
    await store.run(repository.cancel, None, first, T0)
    assert [one.id for one in await claim(store, after(hours=1))] == [second]


@stored
async def test_cancelling_a_held_serial_job_removes_it_from_the_chain(store: Store) -> None:
    first, second, third = await _chain(store, 3)
    await store.run(repository.cancel, None, second, T0)
    (attempt,) = await claim(store, after(hours=1))
    assert attempt.id == first
    await _end_in_turn(store, attempt.schedule_id, ending(attempt))
    assert [one.id for one in await claim(store, after(hours=1))] == [third]


@stored
async def test_two_schedules_do_not_wait_for_each_other(store: Store) -> None:
    await _chain(store, 2)
    await _chain(store, 2)
    a, b = await claim(store, after(hours=1))
    ended = await store.run(serial.complete_serial, [ending(a), ending(b)], [str(a.schedule_id), str(b.schedule_id)])
    assert ended == {a.id, b.id}
    assert len(await claim(store, after(hours=1), node=NODE)) == 2


@stored
async def test_large_batches_are_claimed_and_completed_like_single_jobs(store: Store) -> None:
    for round_ in (1, 2):  # a store may switch to another plan after a large batch
        at = after(minutes=round_)
        given = [
            {"payload": encode({"text": f'"{n}" \u0001\u2028 é'}), "timeout": n / 8 or None, "owner_id": "o"}
            for n in range(20)
        ]
        new = [job(run_at=at, **fields) for fields in given]
        await create(store, *new)
        made = [each.id for each in new]
        attempts = {attempt.id: attempt for attempt in await claim(store, at)}
        assert len(attempts) == len(made) == 20
        for id_, fields in zip(made, given, strict=True):
            attempt = attempts[id_]
            assert (attempt.number, attempt.payload, attempt.timeout) == (1, fields["payload"], fields["timeout"])
            assert (attempt.run_at, attempt.started_at, attempt.serial) == (at, at, False)
        ended = [ending(attempts[id_], at=at, result=f"[{n}]" if n % 3 else None) for n, id_ in enumerate(made)]
        ended[4].attempt = 2  # a stale fence
        assert await end(store, *ended) == set(made) - {ended[4].id}
        for n, id_ in enumerate(made):
            seen = await get(store, id_)
            assert (seen.state, seen.attempt, seen.attempts_used, seen.result) == (
                (JobState.RUNNING, 1, 0, None) if n == 4 else (JobState.COMPLETED, 1, 1, [n] if n % 3 else None)
            )


@stored
async def test_progress_of_a_running_attempt_is_stored_with_its_job(store: Store) -> None:
    attempt, other = await started(store), await started(store)
    value = encode_progress(Progress(0.4, "page 3 \N{SNOWMAN}", T0), 1)
    reports = [(attempt.id, 1, value), (other.id, 2, value)]
    assert await store.run(write_progress, reports, skip_locked=store.multi_node) == {attempt.id}
    assert (await get(store, attempt.id)).progress == Progress(0.4, "page 3 \N{SNOWMAN}", T0)
    assert (await get(store, other.id)).progress is None
    ((recovered, _),) = await store.run(job_claim.load_live_attempts, [(attempt.id, 1)])
    assert recovered.progress == Progress(0.4, "page 3 \N{SNOWMAN}", T0)


@stored
async def test_progress_of_an_ended_or_earlier_attempt_is_not_stored(store: Store) -> None:
    old = await started(store)
    value = encode_progress(Progress(0.4, None, T0), 1)
    await store.run(write_progress, [(old.id, 1, value)], skip_locked=store.multi_node)
    await _retry(store, again(old, T0))
    assert await store.run(write_progress, [(old.id, 1, value)], skip_locked=store.multi_node) == set()
    (new,) = await claim(store, node=OTHER_NODE)
    assert await store.run(write_progress, [(old.id, 1, value)], skip_locked=store.multi_node) == set()
    assert (await get(store, old.id)).progress is None  # the one of the first attempt is not shown for the second
    await end(store, ending(new))
    assert await store.run(write_progress, [(old.id, 2, value)], skip_locked=store.multi_node) == set()
