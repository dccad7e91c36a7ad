"""Repair of damaged rows: no occurrence is missed or repeated, and correct rows are not changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import delete, update

from tests.zone_data import MEXICO, SUMMER_TIME, release
from timebell.model.job import Hold
from timebell.model.repair_report import RepairReport
from timebell.recurrence import Every
from timebell.recurrence.tzdata_diff import with_release
from timebell.store.cluster import repair
from timebell.store.schedules import actions
from timebell.store.schema import jobs as table
from timebell.store.schema import schedules

from .helpers import (
    T0,
    CatchUp,
    Cron,
    Overlap,
    Store,
    after,
    at_minutes,
    build_job,
    claim,
    end,
    ending,
    everything,
    execute,
    fire,
    get,
    one,
    put,
    replace,
    schedule,
    started,
    stored,
    stored_schedule,
)

FAR = after(days=900)


async def run_repair(store: Store, now: datetime, most: int = 100) -> RepairReport:
    """Repair every schedule and all holds; return the report."""
    since = repair.history_start(now, 30 * 86_400.0)
    found, last = await store.run(repair.repair_holds), None
    while True:
        some, last = await store.run(repair.repair_every_next, last, since, now, most)
        found += some
        if last is None:
            return found


async def cursor(store: Store, at: datetime | None, **values: Any) -> None:
    """Damage the next instant of every schedule."""
    await execute(store, update(schedules).values(next_fire_at=at, **values))


@stored
async def test_a_lost_next_instant_is_restored_without_gaps_or_duplicates(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    await fire(store, after(minutes=3))
    await cursor(store, None)
    assert (await fire(store, after(minutes=5))).schedules == 0
    found = await store.run(repair.repair_missing_next, after(days=-30), after(minutes=5), 100)
    assert (found.scanned, found.repaired, found.repairs) == (1, 1, {"schedule": 1})
    assert (await stored_schedule(store)).next_fire_at == after(minutes=4)
    await fire(store, after(minutes=6))
    assert at_minutes(await everything(store)) == [1, 2, 3, 4, 5, 6]
    found = await store.run(repair.repair_missing_next, after(days=-30), after(minutes=6), 100)
    assert found.scanned == 0


@stored
async def test_a_next_instant_that_skips_occurrences_is_set_back(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    await fire(store, after(minutes=3))
    await cursor(store, FAR)
    assert (await run_repair(store, after(minutes=5))).repairs["schedule"] == 1
    await fire(store, after(minutes=5))
    assert at_minutes(await everything(store)) == [1, 2, 3, 4, 5]


@stored
async def test_skipped_occurrences_are_not_decided_again(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.SKIP))
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))  # skipped, because the first job is live
    assert at_minutes(await everything(store)) == [1, 2]
    assert (
        await run_repair(store, after(minutes=2.5))
    ).repaired == 0  # later than the last fired instant, which is correct
    await cursor(store, None)
    await run_repair(store, after(minutes=2.5))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=3)


@stored
async def test_a_range_row_counts_as_decided_until_its_end(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(days=2))
    await cursor(store, None)
    await run_repair(store, after(days=2, seconds=30))
    assert (await stored_schedule(store)).next_fire_at == after(days=2, minutes=1)


@stored
async def test_all_instants_before_an_edit_count_as_decided(store: Store) -> None:
    await put(store, schedule(Cron("0 * * * *")))
    await put(store, schedule(Cron("* * * * *")), after(minutes=30), replace=True)
    await cursor(store, None)
    await run_repair(store, after(minutes=30.5))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=31)


@stored
async def test_instants_in_a_pause_are_not_decided_again(store: Store) -> None:
    made = await put(store, schedule())
    await store.run(actions.pause_schedule, "default", made.id, None, build_job, T0)
    assert (await run_repair(store, after(minutes=1))).skip_reasons == {"paused": 1}
    await store.run(actions.resume_schedule, "default", made.id, False, build_job, after(minutes=10))
    await cursor(store, None)
    await run_repair(store, after(minutes=10.5))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=11)


@stored
async def test_correct_schedules_are_not_changed(store: Store) -> None:
    await put(store, schedule(name="sound"))
    await put(store, schedule(name="over", end=after(minutes=1.5), overlap=Overlap.ALLOW))
    await put(store, schedule(name="once", spec=Cron("0 0 1 1 *"), max_runs=1))
    await put(store, schedule(name="broken", error="no such zone"))
    await put(store, schedule(Every("PT10M", since="last_end"), name="delay"))
    await fire(store, after(minutes=10))
    before = {name: (await stored_schedule(store, name)).next_fire_at for name in ("sound", "over", "once", "delay")}
    assert (before["over"], before["delay"]) == (None, None)
    found = await run_repair(store, after(minutes=10.5), most=2)
    assert (found.repaired, found.skip_reasons) == (0, {"sound": 2, "over": 1, "errored": 1, "running": 1})
    assert before == {name: (await stored_schedule(store, name)).next_fire_at for name in before}


@stored
async def test_a_fixed_delay_without_next_instant_continues_from_its_last_completion(store: Store) -> None:
    await put(store, schedule(Every("PT10M", since="last_end")))
    await fire(store, after(minutes=10))
    (attempt,) = await claim(store, after(minutes=10))
    await end(store, ending(attempt, at=after(minutes=12)))  # as a one-time job: sets no next instant
    assert (await stored_schedule(store)).next_fire_at is None
    assert (await run_repair(store, after(minutes=13))).repairs["schedule"] == 1
    assert (await stored_schedule(store)).next_fire_at == after(minutes=22)


@stored
async def test_a_missed_release_of_a_serial_job_is_repaired(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    for minute in (1, 2, 3):
        await fire(store, after(minutes=minute))
    first, second, third = await everything(store)
    assert (first.hold, second.hold, third.hold) == (None, Hold.OVERLAP, Hold.OVERLAP)
    found = await store.run(repair.repair_holds)
    assert (found.repaired, found.skip_reasons) == (0, {"overlap": 2})
    await execute(store, delete(table).where(table.c.id == first.id))
    found = await store.run(repair.repair_holds)
    assert (found.repairs, found.skip_reasons) == ({"turn": 1, "hold": 0}, {"overlap": 1})
    assert ((await get(store, second.id)).hold, (await get(store, third.id)).hold) == (None, Hold.OVERLAP)


@stored
async def test_an_orphaned_hold_is_cleared(store: Store) -> None:
    alone, unknown, fine = await one(store), await one(store), await one(store)
    for id_, hold in ((alone, "overlap"), (unknown, "stopping"), (fine, "unhandled")):
        await execute(store, update(table).where(table.c.id == id_).values(hold=hold))
    running = await started(store, queue="other")
    await execute(store, update(table).where(table.c.id == running.id).values(hold="stopping"))
    found = await store.run(repair.repair_holds)
    assert (found.repairs["hold"], found.skip_reasons) == (2, {"unhandled": 1, "stopping": 1})
    assert {attempt.id for attempt in await claim(store)} == {alone, unknown}


@stored
async def test_a_backlog_that_waits_for_release_stays_on_hold(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, hold_above=1))
    await fire(store, after(minutes=30))
    waiting = [job for job in await everything(store) if job.hold == Hold.BACKLOG]
    assert waiting
    found = await store.run(repair.repair_holds)
    assert (found.repaired, found.skip_reasons["backlog"]) == (0, len(waiting))


@stored
async def test_two_simultaneous_repairs_repair_once(store: Store) -> None:
    await put(store, schedule())
    await cursor(store, None)
    assert [(await run_repair(store, T0)).repaired for _ in range(2)] == [1, 0]


@stored
async def test_an_occurrence_of_another_tzdata_release_is_decided_at_its_local_time(
    store: Store, tmp_path: Path
) -> None:
    newer = release(tmp_path, "2099z", {MEXICO: SUMMER_TIME})
    july = datetime(2027, 6, 30, 20, tzinfo=UTC)
    plain = schedule(Cron("0 9 * * *"), timezone=MEXICO)
    recurrence = with_release(plain.recurrence, newer)
    await put(store, replace(plain, recurrence=recurrence, next_fire_at=recurrence.next(july)), july)
    await fire(store, july.replace(day=30) + timedelta(hours=18))  # 14:00 by the newer tzdata, 15:00 by the installed
    assert (await stored_schedule(store)).last_fired_at == datetime(2027, 7, 1, 14, tzinfo=UTC)
    now = datetime(2027, 7, 1, 14, 30, tzinfo=UTC)
    assert (await run_repair(store, now)).skip_reasons == {"sound": 1}
    await cursor(store, None)
    await run_repair(store, now)
    assert (await stored_schedule(store)).next_fire_at == datetime(2027, 7, 2, 15, tzinfo=UTC)
