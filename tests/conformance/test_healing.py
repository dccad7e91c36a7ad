"""Rows that were damaged are put right: with nothing missed and nothing doubled, and what is sound is left alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import delete, update

from tests.zone_data import MEXICO, SUMMER_TIME, release
from timebell.model.job import Hold
from timebell.model.repair_report import Healed
from timebell.recurrence import Every
from timebell.recurrence.tzdata_diff import under
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
    claim,
    end,
    ending,
    everything,
    execute,
    fire,
    get,
    job_of,
    one,
    put,
    replace,
    schedule,
    started,
    stored,
    stored_schedule,
)

FAR = after(days=900)


async def look(store: Store, now: datetime, most: int = 100) -> Healed:
    """Every schedule, and the holds."""
    since = repair.since_of(now, 30 * 86_400.0)
    found, last = await store.run(repair.holds), None
    while True:
        some, last = await store.run(repair.all_next, last, since, now, most)
        found += some
        if last is None:
            return found


async def cursor(store: Store, at: datetime | None, **values: Any) -> None:
    """Damage: set the next instant of every schedule."""
    await execute(store, update(schedules).values(next_fire_at=at, **values))


@stored
async def test_a_lost_next_instant_comes_back_and_nothing_is_missed_or_doubled(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    await fire(store, after(minutes=3))
    await cursor(store, None)
    assert (await fire(store, after(minutes=5))).schedules == 0
    found = await store.run(repair.without_next, after(days=-30), after(minutes=5), 100)
    assert (found.scanned, found.healed, found.what) == (1, 1, {"schedule": 1})
    assert (await stored_schedule(store)).next_fire_at == after(minutes=4)
    await fire(store, after(minutes=6))
    assert at_minutes(await everything(store)) == [1, 2, 3, 4, 5, 6]
    found = await store.run(repair.without_next, after(days=-30), after(minutes=6), 100)
    assert found.scanned == 0


@stored
async def test_a_next_instant_that_leaves_occurrences_out_is_brought_back(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    await fire(store, after(minutes=3))
    await cursor(store, FAR)
    assert (await look(store, after(minutes=5))).what["schedule"] == 1
    await fire(store, after(minutes=5))
    assert at_minutes(await everything(store)) == [1, 2, 3, 4, 5]


@stored
async def test_what_was_skipped_is_decided_and_not_decided_again(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.SKIP))
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))  # skipped: the first is live
    assert at_minutes(await everything(store)) == [1, 2]
    assert (await look(store, after(minutes=2.5))).healed == 0  # ahead of what fired last, as it should be
    await cursor(store, None)
    await look(store, after(minutes=2.5))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=3)


@stored
async def test_a_long_backlog_in_one_row_counts_as_decided_to_its_end(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(days=2))
    await cursor(store, None)
    await look(store, after(days=2, seconds=30))
    assert (await stored_schedule(store)).next_fire_at == after(days=2, minutes=1)


@stored
async def test_an_edit_decided_all_up_to_it(store: Store) -> None:
    await put(store, schedule(Cron("0 * * * *")))
    await put(store, schedule(Cron("* * * * *")), after(minutes=30), replace=True)
    await cursor(store, None)
    await look(store, after(minutes=30.5))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=31)


@stored
async def test_a_pause_stays_left_out(store: Store) -> None:
    made = await put(store, schedule())
    await store.run(actions.pause, "default", made.id, None, job_of, T0)
    assert (await look(store, after(minutes=1))).reasons == {"paused": 1}
    await store.run(actions.resume, "default", made.id, False, job_of, after(minutes=10))
    await cursor(store, None)
    await look(store, after(minutes=10.5))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=11)


@stored
async def test_sound_schedules_are_left_as_they_are(store: Store) -> None:
    await put(store, schedule(name="sound"))
    await put(store, schedule(name="over", end=after(minutes=1.5), overlap=Overlap.ALLOW))
    await put(store, schedule(name="once", spec=Cron("0 0 1 1 *"), max_runs=1))
    await put(store, schedule(name="broken", fault="no such zone"))
    await put(store, schedule(Every("PT10M", since="last_end"), name="delay"))
    await fire(store, after(minutes=10))
    before = {name: (await stored_schedule(store, name)).next_fire_at for name in ("sound", "over", "once", "delay")}
    assert (before["over"], before["delay"]) == (None, None)
    found = await look(store, after(minutes=10.5), most=2)
    assert (found.healed, found.reasons) == (0, {"sound": 2, "over": 1, "fault": 1, "running": 1})
    assert before == {name: (await stored_schedule(store, name)).next_fire_at for name in before}


@stored
async def test_a_fixed_delay_whose_end_set_nothing_goes_on_from_that_end(store: Store) -> None:
    await put(store, schedule(Every("PT10M", since="last_end")))
    await fire(store, after(minutes=10))
    (attempt,) = await claim(store, after(minutes=10))
    await end(store, ending(attempt, at=after(minutes=12)))  # as of a job of no schedule: the next instant is not set
    assert (await stored_schedule(store)).next_fire_at is None
    assert (await look(store, after(minutes=13))).what["schedule"] == 1
    assert (await stored_schedule(store)).next_fire_at == after(minutes=22)


@stored
async def test_a_turn_that_nobody_hands_on_is_handed_on(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    for minute in (1, 2, 3):
        await fire(store, after(minutes=minute))
    first, second, third = await everything(store)
    assert (first.hold, second.hold, third.hold) == (None, Hold.OVERLAP, Hold.OVERLAP)
    found = await store.run(repair.holds)
    assert (found.healed, found.reasons) == (0, {"overlap": 2})
    await execute(store, delete(table).where(table.c.id == first.id))
    found = await store.run(repair.holds)
    assert (found.what, found.reasons) == ({"turn": 1, "hold": 0}, {"overlap": 1})
    assert ((await get(store, second.id)).hold, (await get(store, third.id)).hold) == (None, Hold.OVERLAP)


@stored
async def test_a_hold_that_nobody_will_end_is_ended(store: Store) -> None:
    alone, unknown, fine = await one(store), await one(store), await one(store)
    for id_, hold in ((alone, "overlap"), (unknown, "stopping"), (fine, "unheard")):
        await execute(store, update(table).where(table.c.id == id_).values(hold=hold))
    running = await started(store, queue="other")
    await execute(store, update(table).where(table.c.id == running.id).values(hold="stopping"))
    found = await store.run(repair.holds)
    assert (found.what["hold"], found.reasons) == (2, {"unheard": 1, "stopping": 1})
    assert {attempt.id for attempt in await claim(store)} == {alone, unknown}


@stored
async def test_a_backlog_that_waits_for_recover_is_left_waiting(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, hold_above=1))
    await fire(store, after(minutes=30))
    waiting = [job for job in await everything(store) if job.hold == Hold.RECOVER]
    assert waiting
    found = await store.run(repair.holds)
    assert (found.healed, found.reasons["recover"]) == (0, len(waiting))


@stored
async def test_two_that_look_at_once_heal_once(store: Store) -> None:
    await put(store, schedule())
    await cursor(store, None)
    assert [(await look(store, T0)).healed for _ in range(2)] == [1, 0]


@stored
async def test_an_occurrence_of_other_zone_data_is_decided_at_its_local_time(store: Store, tmp_path: Path) -> None:
    newer = release(tmp_path, "2099z", {MEXICO: SUMMER_TIME})
    july = datetime(2027, 6, 30, 20, tzinfo=UTC)
    plain = schedule(Cron("0 9 * * *"), timezone=MEXICO)
    recurrence = under(plain.recurrence, newer)
    await put(store, replace(plain, recurrence=recurrence, next_fire_at=recurrence.next(july)), july)
    await fire(store, july.replace(day=30) + timedelta(hours=18))  # 14:00 by the newer data, 15:00 by this node's
    assert (await stored_schedule(store)).last_fired_at == datetime(2027, 7, 1, 14, tzinfo=UTC)
    now = datetime(2027, 7, 1, 14, 30, tzinfo=UTC)
    assert (await look(store, now)).reasons == {"sound": 1}
    await cursor(store, None)
    await look(store, now)
    assert (await stored_schedule(store)).next_fire_at == datetime(2027, 7, 2, 15, tzinfo=UTC)
