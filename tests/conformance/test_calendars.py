"""Calendar versions, the schedules that follow them, and overrides of single occurrences."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from timebell import Calendar
from timebell.errors import Conflict, InvalidInput, NotFound
from timebell.ids import new_id
from timebell.model.job import JobState
from timebell.recurrence import Every, OnCalendar, Override, Spec
from timebell.store.schedules import actions, calendars, overrides, queries
from timebell.store.schema import calendars as table
from timebell.store.schema import revisions

from .helpers import (
    T0,
    Cron,
    Store,
    after,
    at_minutes,
    build_job,
    everything,
    execute,
    fire,
    put,
    schedule,
    stored,
    stored_schedule,
)  # fmt: skip

WEEK = Calendar()
MARCH_2 = date(2027, 3, 2)  # T0 is noon on Monday, 2027-03-01
DAY = timedelta(days=1)


async def save(
    store: Store, calendar: Calendar, name: str = "kr", tenant_id: str = "default", at: datetime = T0
) -> Any:
    return await store.run(calendars.save_calendar, tenant_id, name, calendar, build_job, at)


async def find(store: Store, name: str = "kr", version: int | None = None, tenant_id: str = "default") -> Any:
    return await store.run(calendars.find_calendar, tenant_id, name, version)


async def following(
    store: Store, name: str, tenant_id: str = "default", spec: Spec | None = None, roll: Any = "skip", **fields: Any
) -> Any:
    """Upsert a schedule that follows the calendar `kr`."""
    calendar = await find(store, tenant_id=tenant_id)
    on = OnCalendar(spec or Cron("0 9 * * *"), calendar, roll, follows=True)
    return await store.run(
        calendars.upsert_schedule_on_calendar,
        schedule(on, name=name, tenant_id=tenant_id, **fields),
        build_job,
        T0,
        replace=False,
    )


@stored
async def test_calendar_versions_are_numbered_and_immutable(store: Store) -> None:
    off = Calendar(holidays=[MARCH_2])
    assert (await save(store, WEEK)).version == 1
    assert (await save(store, off)).version == 2
    assert (await save(store, off.with_name("other", 9))).version == 2  # the same content is no new version
    assert (await save(store, WEEK)).version == 3
    assert await find(store) == WEEK.with_name("kr", 3)
    assert await find(store, version=2) == off.with_name("kr", 2)
    assert await find(store, version=4) is None
    assert await find(store, "jp") is None
    assert len(await execute(store, select(table))) == 3


@stored
async def test_a_tenant_calendar_takes_precedence_over_the_shared_one(store: Store) -> None:
    await save(store, WEEK)
    assert await find(store, tenant_id="acme") == WEEK.with_name("kr", 1)
    own = Calendar(weekend=())
    await save(store, own, tenant_id="acme")
    assert await find(store, tenant_id="acme") == own.with_name("kr", 1)
    assert await find(store, tenant_id="other") == WEEK.with_name("kr", 1)
    assert await find(store, version=2, tenant_id="acme") is None


@stored
async def test_a_new_version_reaches_the_schedules_that_follow_the_calendar(store: Store) -> None:
    await save(store, WEEK)
    follows = await following(store, "follows")
    pinned = await put(store, schedule(Cron("0 9 * * *").on(await find(store)), name="pinned"))
    plain = await put(store, schedule(Cron("0 9 * * *"), name="plain"))
    assert follows.next_fire_at == after(days=1, hours=-3)
    saved = await save(store, Calendar(holidays=[MARCH_2]), at=after(hours=1))
    assert (saved.version, saved.schedules, saved.errored_schedules) == (2, 1, ())
    changed = await stored_schedule(store, "follows")
    assert changed.next_fire_at == after(days=2, hours=-3)
    assert (changed.revision, changed.recurrence.spec.calendar.version) == (2, 2)  # type: ignore[attr-defined]
    assert changed.recurrence.spec.follows  # type: ignore[attr-defined]
    for same in (pinned, plain):
        assert await stored_schedule(store, same.name) == same
    assert (await save(store, Calendar(holidays=[MARCH_2]))).schedules == 0
    rows = await execute(store, select(revisions.c.revision).where(revisions.c.schedule_id == follows.id))
    assert sorted(row.revision for row in rows) == [1, 2]
    assert await everything(store) == []


@stored
async def test_a_new_version_loses_nothing_and_fires_nothing_by_itself(store: Store) -> None:
    await save(store, Calendar(weekend=()))
    await following(store, "s", spec=Cron("* * * * *"), overlap="allow", next_fire_at=after(minutes=1))
    saved = await save(store, Calendar(weekend=(), holidays=[MARCH_2]), at=after(minutes=2, seconds=30))
    assert saved.schedules == 1
    assert sorted(at_minutes(await everything(store))) == [1, 2]  # due under the old version
    assert (await stored_schedule(store)).next_fire_at == after(minutes=3)
    await save(store, Calendar(weekend=("MON",)), at=after(minutes=2, seconds=40))
    assert (await stored_schedule(store)).next_fire_at == after(hours=12)
    assert sorted(at_minutes(await everything(store))) == [1, 2]


@stored
async def test_a_shared_calendar_reaches_every_tenant_without_its_own(store: Store) -> None:
    await save(store, WEEK)
    await save(store, WEEK, tenant_id="acme")
    for tenant_id in ("default", "acme", "other"):
        await following(store, f"of-{tenant_id}", tenant_id)
    assert (await save(store, Calendar(weekend=()))).schedules == 2
    found = [await store.run(queries.find_schedule, one, name=f"of-{one}") for one in ("default", "acme", "other")]
    assert [one.revision for one in found if one] == [2, 1, 2]
    assert (await save(store, Calendar(weekend=("MON",)), tenant_id="other")).schedules == 1
    mine = await store.run(queries.find_schedule, "other", name="of-other")
    assert mine is not None and mine.recurrence.spec.calendar == Calendar(weekend=("MON",)).with_name("kr", 1)  # type: ignore[attr-defined]


@stored
async def test_a_schedule_without_next_instant_is_errored_until_its_calendar_allows_one(store: Store) -> None:
    await save(store, Calendar(weekend=()))
    await following(store, "saturday", spec=Cron("0 9 * * SAT"))
    await following(store, "daily")
    saved = await save(store, WEEK)
    assert saved.schedules == 2
    aside = await stored_schedule(store, "saturday")
    assert saved.errored_schedules == (aside.id,)
    assert aside.next_fire_at is None and "business day of kr (version 2)" in str(aside.error)
    assert (await fire(store, after(days=1))).jobs == 1  # the other one
    await save(store, Calendar(weekend=("SUN",)), at=after(days=1, minutes=1))
    aside = await stored_schedule(store, "saturday")
    assert aside.error is None and aside.next_fire_at == datetime(2027, 3, 6, 9, tzinfo=UTC)


@stored
async def test_a_schedule_drafted_on_an_old_version_is_written_on_the_newest(store: Store) -> None:
    await save(store, WEEK)
    old = await find(store)
    await save(store, Calendar(holidays=[MARCH_2]))
    late = schedule(OnCalendar(Cron("0 9 * * *"), old, follows=True))
    written = await store.run(calendars.upsert_schedule_on_calendar, late, build_job, T0, replace=False)
    assert written.recurrence.spec.calendar.version == 2  # type: ignore[attr-defined]
    assert written.next_fire_at == after(days=2, hours=-3)


# Overrides.


async def override(
    store: Store, id_: str, action: Any, at: datetime, to: datetime | None = None, *, now: datetime = T0
) -> Any:
    return await store.run(overrides.override_occurrence, "default", id_, action, at, to, build_job, now)


def states(made: list[Any]) -> list[tuple[int, str, str | None]]:
    rows = [(round((job.scheduled_at - T0) / timedelta(minutes=1)), job.state.value, job.reason) for job in made]
    return sorted(rows)


@stored
async def test_a_skip_override_leaves_a_row_when_it_is_due(store: Store) -> None:
    made = await put(store, schedule(overlap="allow"))
    changed = await override(store, made.id, "skip", after(minutes=2))
    assert (changed.revision, changed.next_fire_at) == (2, after(minutes=1))
    assert changed.recurrence.overrides == (Override(after(minutes=2)),)
    assert await everything(store) == []
    for minute in (1, 2, 3):
        await fire(store, after(minutes=minute))
    assert states(await everything(store)) == [
        (1, "pending", None), (2, "skipped", "override"), (3, "pending", None),
    ]  # fmt: skip


@stored
async def test_a_moved_occurrence_fires_at_its_new_instant(store: Store) -> None:
    made = await put(store, schedule(Cron("*/10 * * * *"), overlap="allow"))
    later = await override(store, made.id, "move", after(minutes=10), after(minutes=13))
    assert later.effective_next_fire_at == after(minutes=13) and later.next_fire_at == after(minutes=10)
    await override(store, made.id, "move", after(minutes=40), after(minutes=5))  # earlier
    for minute in range(1, 52):
        await fire(store, after(minutes=minute))
    assert states(await everything(store)) == [
        (5, "pending", None), (10, "skipped", "override"), (13, "pending", None), (20, "pending", None),
        (30, "pending", None), (40, "skipped", "override"), (50, "pending", None),
    ]  # fmt: skip


@stored
async def test_after_an_outage_each_override_has_its_row(store: Store) -> None:
    made = await put(store, schedule(overlap="allow", catch_up="skip"))
    await override(store, made.id, "skip", after(minutes=20))
    await override(store, made.id, "move", after(minutes=30), after(minutes=150, seconds=30))
    await fire(store, after(minutes=200))
    found = await everything(store)
    assert sum(job.skipped_count for job in found) + sum(job.state == JobState.PENDING for job in found) >= 201
    assert sum(job.skipped_count if job.state == JobState.SKIPPED else 1 for job in found) == 201
    assert [row for row in states(found) if row[2] == "override"] == [
        (20, "skipped", "override"), (30, "skipped", "override"),
    ]  # fmt: skip


@stored
async def test_an_override_can_be_undone(store: Store) -> None:
    made = await put(store, schedule(overlap="allow"))
    await override(store, made.id, "skip", after(minutes=1))
    await override(store, made.id, "move", after(minutes=2), after(minutes=2, seconds=30))
    await override(store, made.id, "undo", after(minutes=1))
    undone = await override(store, made.id, "undo", after(minutes=2, seconds=30))  # identified by its new instant
    assert undone.recurrence == made.recurrence
    for minute in (1, 2, 3):
        await fire(store, after(minutes=minute))
    assert states(await everything(store)) == [(minute, "pending", None) for minute in (1, 2, 3)]
    with pytest.raises(NotFound) as refused:
        await override(store, made.id, "undo", after(minutes=9))
    assert refused.value.code == "OVERRIDE_NOT_FOUND"


@stored
async def test_a_moved_occurrence_is_found_by_both_its_instants(store: Store) -> None:
    made = await put(store, schedule(Cron("*/10 * * * *"), overlap="allow"))
    await override(store, made.id, "move", after(minutes=10), after(minutes=12))
    again = await override(store, made.id, "move", after(minutes=12), after(minutes=14))
    assert again.recurrence.overrides == (Override(after(minutes=10), after(minutes=14)),)
    await fire(store, after(minutes=10))
    gone = await override(store, made.id, "skip", after(minutes=14), now=after(minutes=11))
    assert gone.recurrence.overrides == () and gone.next_fire_at == after(minutes=20)
    await fire(store, after(minutes=20))
    assert states(await everything(store)) == [(10, "skipped", "override"), (20, "pending", None)]


@stored
async def test_invalid_overrides_are_refused(store: Store) -> None:
    made = await put(store, schedule(Cron("*/10 * * * *")))
    for action, at, to, error, code, fix in (
        ("skip", after(minutes=11), None, InvalidInput, "NOT_AN_OCCURRENCE", "2027-03-01T12:10:00Z"),
        ("move", after(minutes=16), after(minutes=17), InvalidInput, "NOT_AN_OCCURRENCE", "2027-03-01T12:20:00Z"),
        ("skip", T0, None, InvalidInput, "OCCURRENCE_PAST", ""),
        ("move", after(minutes=10), T0, InvalidInput, "OCCURRENCE_PAST", ""),
        ("move", after(minutes=10), after(minutes=20), Conflict, "OCCURRENCE_EXISTS", ""),
        ("move", after(minutes=10), after(minutes=10), Conflict, "OCCURRENCE_EXISTS", ""),
        ("undo", after(minutes=10), None, NotFound, "OVERRIDE_NOT_FOUND", ""),
    ):
        with pytest.raises(error) as refused:  # type: ignore[call-overload]
            await override(store, made.id, action, at, to)
        assert refused.value.code == code
        assert fix in refused.value.fix
    assert await stored_schedule(store) == made
    assert await override(store, new_id(T0), "skip", after(minutes=10)) is None
    skipped = await override(store, made.id, "skip", after(minutes=10))
    assert (await override(store, made.id, "skip", after(minutes=10))).revision == skipped.revision
    await override(store, made.id, "move", after(minutes=30), after(minutes=31))
    for taken in (after(minutes=10), after(minutes=31)):  # skipped occurrences have a row, too
        with pytest.raises(Conflict):
            await override(store, made.id, "move", after(minutes=40), taken)


@stored
async def test_overrides_survive_edits_that_keep_the_occurrence(store: Store) -> None:
    made = await put(store, schedule(Cron("*/10 * * * *"), overlap="allow"))
    for minute in (10, 25):
        if minute == 25:
            await override(store, made.id, "move", after(minutes=30), after(minutes=minute))
        else:
            await override(store, made.id, "skip", after(minutes=minute))
    same = await put(store, schedule(Cron("*/10 * * * *"), overlap="allow"), replace=True)
    assert same.revision == 3  # the same spec again is no edit
    payload = await put(store, schedule(Cron("*/10 * * * *"), overlap="allow", payload=7), replace=True)
    assert len(payload.recurrence.overrides) == 2 and payload.dropped_overrides == ()
    fewer = await put(store, schedule(Cron("*/30 * * * *"), overlap="allow", payload=7), replace=True)
    assert fewer.dropped_overrides == (Override(after(minutes=10)),)
    assert fewer.recurrence.overrides == (Override(after(minutes=30), after(minutes=25)),)
    for minute in range(1, 61):
        await fire(store, after(minutes=minute))
    assert states(await everything(store)) == [
        (25, "pending", None), (30, "skipped", "override"), (60, "pending", None),
    ]  # fmt: skip


@stored
async def test_a_new_calendar_version_keeps_overrides_that_still_apply(store: Store) -> None:
    await save(store, Calendar(weekend=()))
    made = await following(store, "s")
    await override(store, made.id, "skip", after(days=1, hours=-3))
    await override(store, made.id, "skip", after(days=2, hours=-3))
    await save(store, Calendar(weekend=(), holidays=[MARCH_2]))
    assert (await stored_schedule(store)).recurrence.overrides == (Override(after(days=2, hours=-3)),)


@stored
async def test_overrides_in_a_pause_and_a_backfill(store: Store) -> None:
    made = await put(store, schedule(Cron("*/10 * * * *"), overlap="allow"))
    await override(store, made.id, "skip", after(minutes=10))
    await override(store, made.id, "move", after(minutes=20), after(minutes=25))
    await store.run(actions.pause_schedule, "default", made.id, None, build_job, T0)
    await store.run(actions.resume_schedule, "default", made.id, False, build_job, after(minutes=35))
    assert states(await everything(store)) == [
        (10, "skipped", "override"), (20, "skipped", "override"), (25, "skipped", "paused"), (30, "skipped", "paused"),
    ]  # fmt: skip
    plan = await store.run(
        actions.backfill_schedule, "default", made.id, T0 + timedelta(seconds=1), after(minutes=35), None, True,
        build_job, after(minutes=35),
    )  # fmt: skip
    assert plan is not None and plan.instants == [after(minutes=25), after(minutes=30)]  # without the skipped ones


@stored
async def test_a_deleted_schedule_has_no_future_occurrences_in_its_revisions(store: Store) -> None:
    made = await put(store, schedule(Every("PT10M", T0), name="s"))
    await override(store, made.id, "move", after(minutes=10), after(minutes=55))
    await store.run(actions.delete_schedule, "default", made.id, build_job, after(minutes=15))
    last = (await store.run(actions.list_revisions, "default", made.id))[0]
    assert last.recurrence.next(after(minutes=15)) is None
    assert last.recurrence.overridden_instants(T0, after(minutes=60)) == [after(minutes=10)]
    assert replace(last.recurrence, overrides=()).count(T0, after(minutes=60)) == 2
