"""Fixed delay: the transaction that completes a run sets the next instant."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import update

from timebell.model.job import Completion, Hold, Kind
from timebell.recurrence import Every, Spec
from timebell.store import transaction
from timebell.store.jobs import complete, repository, serial
from timebell.store.schedules import schedules
from timebell.store.schema import finished, revisions
from timebell.store.schema import schedules as table
from timebell.store.transaction import Transaction

from .helpers import (
    NODE,
    Cron,
    JobState,
    Overlap,
    Store,
    after,
    again,
    at_minutes,
    claim,
    create,
    ending,
    everything,
    execute,
    fire,
    job,
    put,
    schedule,
    stored,
    stored_schedule,
)

FROM_END = Every("PT10M", since="last_end")
FROM_START = Every("PT10M", since="last_start")
FINAL = [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED]


def made(spec: Spec = FROM_END, **fields: Any) -> Any:
    bound = schedule(spec, **fields)
    return schedule(spec, **fields, id=bound.id, next_fire_at=bound.recurrence.first_fire(bound.created_at))


async def end(store: Store, *endings: Completion) -> set[str]:
    (id_,) = {one.schedule_id for one in await everything(store) if one.schedule_id}
    return await store.run(serial.complete_serial, endings, [str(id_)])


async def cursor(store: Store) -> datetime | None:
    return (await stored_schedule(store)).next_fire_at


async def running(store: Store, spec: Spec = FROM_END, **fields: Any) -> Any:
    """Fire and claim the first run at minute 10; return its attempt."""
    await put(store, made(spec, **fields))
    await fire(store, after(minutes=10))
    (attempt,) = await claim(store, after(minutes=10))
    return attempt


@stored
async def test_firing_clears_the_next_instant_and_the_completion_sets_it(store: Store) -> None:
    await put(store, made())
    assert await cursor(store) == after(minutes=10)
    fired = await fire(store, after(minutes=10, seconds=2))
    assert (fired.jobs, fired.next_fire_at, await cursor(store)) == (1, None, None)
    (attempt,) = await claim(store, after(minutes=11))
    assert (attempt.scheduled_at, attempt.serial) == (after(minutes=10), True)
    ended = await store.run(serial.complete_serial, [ending(attempt, at=after(minutes=15))], [str(attempt.schedule_id)])
    assert ended == {attempt.id}
    assert await cursor(store) == await store.run(schedules.find_next_fire_at) == after(minutes=25)
    await fire(store, after(minutes=25))
    assert at_minutes(await everything(store)) == [10, 25]


@pytest.mark.parametrize(("took", "due"), [(3, 20), (10, 20), (45, 55)])
@stored
async def test_a_delay_since_the_start_is_never_before_the_end(store: Store, took: int, due: int) -> None:
    attempt = await running(store, FROM_START)
    await end(store, ending(attempt, at=after(minutes=10 + took)))
    assert await cursor(store) == after(minutes=due)


@pytest.mark.parametrize("state", FINAL)
@stored
async def test_any_completion_sets_the_next_instant(store: Store, state: JobState) -> None:
    attempt = await running(store)
    await end(store, ending(attempt, state, after(minutes=12)))
    assert await cursor(store) == after(minutes=22)


@stored
async def test_a_retry_or_an_earlier_attempt_sets_no_next_instant(store: Store) -> None:
    old = await running(store)
    await store.run_autocommit(complete.schedule_retries, [again(old, after(minutes=30))])
    assert await end(store, ending(old, at=after(minutes=11))) == set()
    assert await cursor(store) is None
    (new,) = await claim(store, after(minutes=30))
    assert await end(store, ending(old, at=after(minutes=31))) == set()
    assert await cursor(store) is None
    await end(store, ending(new, at=after(minutes=40)))
    assert await cursor(store) == after(minutes=50)


@pytest.mark.parametrize("spec", [FROM_END, FROM_START])
@stored
async def test_cancelling_a_pending_run_sets_the_next_instant(store: Store, spec: Spec) -> None:
    await put(store, made(spec))
    await fire(store, after(minutes=10))
    (waiting,) = await everything(store)
    await store.run(repository.cancel, None, waiting.id, after(minutes=14))
    assert await cursor(store) == after(minutes=24)


@pytest.mark.parametrize("spec", [FROM_END, FROM_START])
@stored
async def test_a_crash_while_completing_leaves_the_run_and_no_next_instant(store: Store, spec: Spec) -> None:
    attempt = await running(store, spec)

    def crash(tx: Transaction) -> None:
        serial.complete_serial(tx, [ending(attempt, at=after(minutes=12))], [str(attempt.schedule_id)])
        raise ConnectionAbortedError

    with pytest.raises(Exception):  # noqa: B017 - each driver raises its own error
        await store.run(crash)
    assert ((await everything(store))[0].state, await cursor(store)) == (JobState.RUNNING, None)
    await end(store, ending(attempt, at=after(minutes=13)))
    assert await cursor(store) is not None


@stored
async def test_completions_of_other_jobs_need_no_additional_statement(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def count(tx: Any, attempt: Any) -> None:
        serial.complete_serial(tx, [ending(attempt)], [str(attempt.schedule_id)])

    for name, spec in (("grid", Cron("* * * * *")), ("delay", FROM_END)):
        await put(store, made(spec, name=name))
        await fire(store, after(minutes=10))
        (attempt,) = await claim(store, after(minutes=10))
        points: list[str] = []
        with monkeypatch.context() as watched:
            watched.setattr(transaction, "probe", points.append)
            await store.run(count, attempt)
        own = [point.removeprefix("count.") for point in points if point.startswith("count.")]
        counted.append(sum(map(str.isdigit, own)))
    # MariaDB copies and deletes like SQLite, selects the next job like PostgreSQL, and updates in two statements.
    maria = store.url.startswith("mariadb")
    assert counted[0] == (4 if maria else 3)
    assert counted[1] == counted[0] + (2 if maria else 1)


@stored
async def test_the_last_instant_is_before_the_end_of_the_schedule(store: Store) -> None:
    attempt = await running(store, end=after(minutes=22))
    await end(store, ending(attempt, at=after(minutes=11)))
    assert await cursor(store) == after(minutes=21)
    await fire(store, after(minutes=21))
    (attempt,) = await claim(store, after(minutes=21))
    await end(store, ending(attempt, at=after(minutes=21)))
    assert await cursor(store) is None
    assert (await fire(store, after(hours=9))).jobs == 0


@stored
async def test_an_outage_is_one_late_run(store: Store) -> None:
    await put(store, made())
    fired = await fire(store, after(days=9))
    assert (fired.jobs, fired.skips) == (1, 0)
    assert at_minutes(await everything(store)) == [10]


@stored
async def test_an_identical_upsert_during_a_run_changes_nothing(store: Store) -> None:
    attempt = await running(store)
    again_put = await put(store, made(), after(minutes=11), replace=True)
    assert (again_put.revision, again_put.next_fire_at) == (1, None)
    await end(store, ending(attempt, at=after(minutes=12)))
    assert await cursor(store) == after(minutes=22)


@stored
async def test_an_edit_concurrent_with_the_completion_loses_neither(store: Store) -> None:
    for number in range(10):
        attempt = await running(store, name="s")
        edited = made(Every("PT20M", since="last_end"), payload=number)
        await asyncio.gather(
            end(store, ending(attempt, at=after(minutes=10))), put(store, edited, after(minutes=10), replace=True)
        )
        found = await stored_schedule(store)
        assert found.revision == 2
        assert found.next_fire_at == after(minutes=30)
        assert [one.state for one in await everything(store)] == [JobState.COMPLETED]
        for each in (table, revisions, finished):
            await execute(store, each.delete())


@stored
async def test_concurrent_jobs_from_before_an_edit_do_not_block_the_delay(store: Store) -> None:
    await put(store, schedule(Cron("5 * * * *"), overlap=Overlap.ALLOW))
    await fire(store, after(minutes=5))
    (beside,) = await claim(store, after(minutes=5))
    await put(store, made(), after(minutes=11), replace=True)
    assert await cursor(store) == after(minutes=21)
    fired = await fire(store, after(minutes=21))
    assert (fired.jobs, fired.skips, await cursor(store)) == (0, 1, after(minutes=31))
    await store.run(complete.complete_jobs, [ending(beside, at=after(minutes=25))])
    assert (await fire(store, after(minutes=31))).jobs == 1


@stored
async def test_the_delay_does_not_wait_for_a_concurrent_job(store: Store) -> None:
    attempt = await running(store)
    at = after(minutes=11)
    await create(store, job(schedule_id=attempt.schedule_id, scheduled_at=at, run_at=at, kind=Kind.PLANNED))
    await end(store, ending(attempt, at=after(minutes=12)))
    assert await cursor(store) == after(minutes=22)


@stored
async def test_a_held_backlog_does_not_block_the_delay(store: Store) -> None:
    await put(store, schedule(Cron("0 * * * *")))
    bound = await stored_schedule(store)
    held = job(
        schedule_id=bound.id, scheduled_at=after(hours=1), kind=Kind.PLANNED, serial=True, hold=Hold.BACKLOG,
    )  # fmt: skip
    await create(store, held)
    await put(store, made(), after(minutes=11), replace=True)
    assert await cursor(store) == after(minutes=21)
    await fire(store, after(minutes=21))
    (attempt,) = await claim(store, after(minutes=21))
    await end(store, ending(attempt, at=after(minutes=22)))
    assert await cursor(store) == after(minutes=32)


@stored
async def test_the_delay_starts_when_the_last_serial_job_has_finished(store: Store) -> None:
    attempt = await running(store)
    held = job(
        schedule_id=attempt.schedule_id, scheduled_at=after(minutes=11), run_at=after(minutes=11), kind=Kind.PLANNED,
        serial=True, hold="overlap",
    )  # fmt: skip
    await create(store, held)
    await end(store, ending(attempt, at=after(minutes=12)))
    assert await cursor(store) is None
    (second,) = await claim(store, after(minutes=12), node=NODE)
    await end(store, ending(second, at=after(minutes=13)))
    assert await cursor(store) == after(minutes=23)


@stored
async def test_an_unreadable_schedule_completes_its_run_and_becomes_errored(store: Store) -> None:
    attempt = await running(store)
    await execute(store, update(table).values(recurrence='{"kind":"from-a-newer-release","since":"last_end"}'))
    assert await end(store, ending(attempt, at=after(minutes=12))) == {attempt.id}
    await fire(store, after(minutes=12))
    ((fault,),) = await execute(store, table.select().with_only_columns(table.c.error))
    assert "kind" in fault
