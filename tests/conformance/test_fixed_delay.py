"""Fixed delay, on every store: the transaction that ends a run sets when the next one is due."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import update

from timebell.model.job import Ending, Hold, Kind
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
    return schedule(spec, **fields, id=bound.id, next_fire_at=bound.recurrence.first(bound.created_at))


async def end(store: Store, *endings: Ending) -> set[str]:
    (id_,) = {one.schedule_id for one in await everything(store) if one.schedule_id}
    return (await store.run(serial.end_in_turn, endings, [str(id_)])).ids


async def cursor(store: Store) -> datetime | None:
    return (await stored_schedule(store)).next_fire_at


async def running(store: Store, spec: Spec = FROM_END, **fields: Any) -> Any:
    """The attempt of its first run, fired and claimed at minute 10."""
    await put(store, made(spec, **fields))
    await fire(store, after(minutes=10))
    (attempt,) = await claim(store, after(minutes=10))
    return attempt


@stored
async def test_firing_leaves_no_next_instant_and_the_end_sets_it(store: Store) -> None:
    await put(store, made())
    assert await cursor(store) == after(minutes=10)
    fired = await fire(store, after(minutes=10, seconds=2))
    assert (fired.jobs, fired.next_fire_at, await cursor(store)) == (1, None, None)
    (attempt,) = await claim(store, after(minutes=11))
    assert (attempt.scheduled_at, attempt.serial) == (after(minutes=10), True)
    ended = await store.run(serial.end_in_turn, [ending(attempt, at=after(minutes=15))], [str(attempt.schedule_id)])
    assert ended == serial.Ended({attempt.id}, let_go=0, put_off=True)
    assert await cursor(store) == await store.run(schedules.next_fire) == after(minutes=25)
    await fire(store, after(minutes=25))
    assert at_minutes(await everything(store)) == [10, 25]


@pytest.mark.parametrize(("took", "due"), [(3, 20), (10, 20), (45, 55)])
@stored
async def test_since_the_start_it_is_not_before_the_end(store: Store, took: int, due: int) -> None:
    attempt = await running(store, FROM_START)
    await end(store, ending(attempt, at=after(minutes=10 + took)))
    assert await cursor(store) == after(minutes=due)


@pytest.mark.parametrize("state", FINAL)
@stored
async def test_however_a_run_ends_the_next_is_set(store: Store, state: JobState) -> None:
    attempt = await running(store)
    await end(store, ending(attempt, state, after(minutes=12)))
    assert await cursor(store) == after(minutes=22)


@stored
async def test_a_retry_and_an_old_attempt_are_no_end(store: Store) -> None:
    old = await running(store)
    await store.hot(complete.retry, [again(old, after(minutes=30))])
    assert await end(store, ending(old, at=after(minutes=11))) == set()
    assert await cursor(store) is None
    (new,) = await claim(store, after(minutes=30))
    assert await end(store, ending(old, at=after(minutes=31))) == set()
    assert await cursor(store) is None
    await end(store, ending(new, at=after(minutes=40)))
    assert await cursor(store) == after(minutes=50)


@pytest.mark.parametrize("spec", [FROM_END, FROM_START])
@stored
async def test_cancelling_what_never_started_is_an_end(store: Store, spec: Spec) -> None:
    await put(store, made(spec))
    await fire(store, after(minutes=10))
    (waiting,) = await everything(store)
    await store.run(repository.cancel, None, waiting.id, after(minutes=14))
    assert await cursor(store) == after(minutes=24)


@pytest.mark.parametrize("spec", [FROM_END, FROM_START])
@stored
async def test_a_crash_while_the_end_is_written_leaves_the_run_and_no_next_instant(store: Store, spec: Spec) -> None:
    attempt = await running(store, spec)

    def crash(tx: Transaction) -> None:
        serial.end_in_turn(tx, [ending(attempt, at=after(minutes=12))], [str(attempt.schedule_id)])
        raise ConnectionAbortedError

    with pytest.raises(Exception):  # noqa: B017 - what a crash looks like differs
        await store.run(crash)
    assert ((await everything(store))[0].state, await cursor(store)) == (JobState.RUNNING, None)
    await end(store, ending(attempt, at=after(minutes=13)))
    assert await cursor(store) is not None


@stored
async def test_other_jobs_cost_no_further_statement(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(tx: Any, attempt: Any) -> None:
        serial.end_in_turn(tx, [ending(attempt)], [str(attempt.schedule_id)])

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
    # MariaDB copies and deletes as SQLite does, asks for the next as PostgreSQL does, and updates in two statements.
    maria = store.url.startswith("mariadb")
    assert counted[0] == (4 if maria else 3)
    assert counted[1] == counted[0] + (2 if maria else 1)


@stored
async def test_it_ends_with_its_last_instant_before_the_end(store: Store) -> None:
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
async def test_the_same_spec_again_while_a_run_goes_on_changes_nothing(store: Store) -> None:
    attempt = await running(store)
    again_put = await put(store, made(), after(minutes=11), replace=True)
    assert (again_put.revision, again_put.next_fire_at) == (1, None)
    await end(store, ending(attempt, at=after(minutes=12)))
    assert await cursor(store) == after(minutes=22)


@stored
async def test_an_edit_that_meets_the_end_loses_neither(store: Store) -> None:
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
async def test_jobs_that_ran_side_by_side_before_an_edit_hold_nothing_up(store: Store) -> None:
    await put(store, schedule(Cron("5 * * * *"), overlap=Overlap.ALLOW))
    await fire(store, after(minutes=5))
    (beside,) = await claim(store, after(minutes=5))
    await put(store, made(), after(minutes=11), replace=True)
    assert await cursor(store) == after(minutes=21)
    fired = await fire(store, after(minutes=21))
    assert (fired.jobs, fired.skips, await cursor(store)) == (0, 1, after(minutes=31))
    await store.run(complete.end, [ending(beside, at=after(minutes=25))])
    assert (await fire(store, after(minutes=31))).jobs == 1


@stored
async def test_the_delay_does_not_wait_for_a_job_that_runs_beside_whose_end_would_not_begin_it(store: Store) -> None:
    attempt = await running(store)
    at = after(minutes=11)
    await create(store, job(schedule_id=attempt.schedule_id, scheduled_at=at, run_at=at, kind=Kind.PLANNED))
    await end(store, ending(attempt, at=after(minutes=12)))
    assert await cursor(store) == after(minutes=22)


@stored
async def test_what_waits_to_be_recovered_holds_nothing_up(store: Store) -> None:
    await put(store, schedule(Cron("0 * * * *")))
    bound = await stored_schedule(store)
    held = job(
        schedule_id=bound.id, scheduled_at=after(hours=1), kind=Kind.PLANNED, serial=True, hold=Hold.RECOVER,
    )  # fmt: skip
    await create(store, held)
    await put(store, made(), after(minutes=11), replace=True)
    assert await cursor(store) == after(minutes=21)
    await fire(store, after(minutes=21))
    (attempt,) = await claim(store, after(minutes=21))
    await end(store, ending(attempt, at=after(minutes=22)))
    assert await cursor(store) == after(minutes=32)


@stored
async def test_the_delay_begins_when_the_last_of_a_chain_has_ended(store: Store) -> None:
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
async def test_a_schedule_that_cannot_be_read_ends_its_run_and_is_set_aside_with_the_reason(store: Store) -> None:
    attempt = await running(store)
    await execute(store, update(table).values(recurrence='{"kind":"from-a-newer-release","since":"last_end"}'))
    assert await end(store, ending(attempt, at=after(minutes=12))) == {attempt.id}
    await fire(store, after(minutes=12))
    ((fault,),) = await execute(store, table.select().with_only_columns(table.c.fault))
    assert "kind" in fault
