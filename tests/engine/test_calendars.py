"""Calendars and overrides of single occurrences on the running engine: firing times and recorded outcomes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from timebell import Calendar, Cron, Every, errors

from .world import QUIET, Log, World, after, engine, offset, outcomes, virtual

HOUR = 3600.0


@virtual
async def test_occurrences_are_skipped_moved_and_restored(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)
    schedule = await app.schedule_repeat("t", Cron("0 * * * *"), name="hourly")  # 13:00 is the first
    await app.schedules.skip(schedule.id, after(hours=1))
    await app.schedules.move(schedule.id, after(hours=2), after(hours=2, minutes=30))
    await app.schedules.move(schedule.id, after(hours=4), after(hours=3, minutes=45))
    await app.schedules.skip(schedule.id, after(hours=5))
    undone = await app.schedules.undo(schedule.id, after(hours=5))
    assert undone.effective_next_fire_at == after(hours=2, minutes=30) and undone.next_fire_at == after(hours=1)
    async with engine(app, **QUIET):
        assert log.fired == []  # overrides fire nothing by themselves
        await world.until(after(hours=6, minutes=1))
    assert log.scheduled == [2.5 * HOUR, 3 * HOUR, 3.75 * HOUR, 5 * HOUR, 6 * HOUR]
    assert [round(fired) for fired in log.fired] == [round(at) for at in log.scheduled]
    assert [offset(at) / HOUR for at in log.events[0].upcoming] == [3, 3.75, 5]
    assert await outcomes(app) == [
        (1 * HOUR, "skipped", "override"),
        (2 * HOUR, "skipped", "override"),
        (2.5 * HOUR, "completed", None),
        (3 * HOUR, "completed", None),
        (3.75 * HOUR, "completed", None),
        (4 * HOUR, "skipped", "override"),
        (5 * HOUR, "completed", None),
        (6 * HOUR, "completed", None),
    ]
    with pytest.raises(errors.InvalidInput, match="passed"):
        await app.schedules.skip(schedule.id, after(hours=6))


@virtual
async def test_a_deploy_keeps_overrides(world: World) -> None:
    def define(payload: int) -> tuple[object, Log]:
        app, log = world.app(), Log()
        app.schedule("hourly", cron="0 * * * *", payload=payload)(log)
        return app, log

    app, _ = define(1)
    async with engine(app, **QUIET):  # type: ignore[arg-type]
        schedule = await app.schedules.get(name="hourly")  # type: ignore[attr-defined]
        await app.schedules.skip(schedule.id, after(hours=1))  # type: ignore[attr-defined]
    app, log = define(2)
    async with engine(app, **QUIET):  # type: ignore[arg-type]
        await world.until(after(hours=2, minutes=1))
    assert (log.scheduled, log.payloads) == ([2 * HOUR], [2])


@virtual
async def test_a_schedule_follows_its_calendar(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)
    with pytest.raises(errors.NotFound) as missing:
        await app.schedule_repeat("t", Cron("0 9 * * *"), name="daily", calendar="office")
    assert missing.value.code == "CALENDAR_NOT_FOUND"
    with pytest.raises(errors.NotFound):
        await app.schedules.get(name="daily")  # nothing was written
    saved = await app.save_calendar("office", Calendar())
    assert (saved.version, saved.schedules) == (1, 0)
    await app.schedule_repeat("t", Cron("0 9 * * *"), name="daily", calendar="office")
    await app.schedule_repeat("t", Cron("0 10 * * *"), name="pinned", calendar="office@1")
    await app.schedule_repeat("t", Cron("0 11 2 * *"), name="rolled", calendar="office", roll="next")
    tuesday = after(days=1).date()
    async with engine(app, **QUIET):
        saved = await app.save_calendar("office", Calendar(holidays=[tuesday]))
        assert (saved.version, saved.schedules) == (2, 2)
        await world.until(after(days=2))
    assert [offset(event.scheduled_at) / HOUR for event in log.events] == [
        22,
        45,
        46,
        47,
    ]  # Tuesday: the pinned one
    assert await app.calendar("office", 1) == Calendar().with_name("office", 1)
    assert (await app.calendar("office")).holidays == (tuesday,)


@virtual
async def test_a_calendar_in_code_is_looked_up_when_the_engine_starts(world: World) -> None:
    app, log = world.app(), Log()
    app.schedule("daily", cron="0 9 * * *", calendar="office", roll="skip")(log)
    with pytest.raises(errors.NotFound):
        async with engine(app, **QUIET):
            pass
    await app.save_calendar("office", Calendar(holidays=[after(days=1).date()]))
    async with engine(app, **QUIET):
        await world.until(after(days=2))
    assert log.scheduled == [45 * HOUR]


@virtual
async def test_invalid_calendars_are_refused(world: World) -> None:
    app = world.app()
    for options, code in (
        ({"calendar": 3}, "INVALID_CALENDAR"), ({"calendar": "a@b"}, "INVALID_CALENDAR"),
        ({"calendar": "@1"}, "INVALID_CALENDAR"), ({"calendar": "a@0"}, "INVALID_CALENDAR"),
        ({"roll": "next"}, "INVALID_ROLL"), ({"calendar": Calendar(), "roll": "up"}, "INVALID_ROLL"),
    ):  # fmt: skip
        with pytest.raises(errors.InvalidInput) as refused:
            await app.schedule_repeat("t", Cron("0 9 * * *"), **options)
        assert refused.value.code == code
    with pytest.raises(errors.InvalidInput) as refused:
        await app.schedule_repeat("t", Every("PT15M"), calendar=Calendar(), roll="next")
    assert refused.value.code == "INVALID_ROLL"
    for never in (Cron("0 9 * * SAT").on(Calendar()), Cron("0 9 * * *") - Cron("0 9 * * *")):
        with pytest.raises(errors.InvalidRecurrence) as refused:
            await app.schedule_repeat("t", never)
        assert refused.value.code == "NEVER_FIRES"
    for name, calendar in (("a@1", Calendar()), ("", Calendar()), ("a", "KR")):
        with pytest.raises(errors.InvalidInput):
            await app.save_calendar(name, calendar)  # type: ignore[arg-type]


@virtual
async def test_a_combination_fires_its_last_occurrence_and_then_becomes_errored(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)
    ends = Every("PT1M", after()) - Every("PT1M", after(minutes=4))
    await app.schedule_repeat("t", ends, name="ends", overlap="allow")
    async with engine(app, **QUIET):
        await world.advance(minutes=10)
    assert log.scheduled == [60.0, 120.0, 180.0]
    over = await app.schedules.get(name="ends")
    assert over.next_fire_at is None and "removed" in str(over.error)


@virtual
async def test_calendar_changes_join_the_transaction_of_the_caller(world: World) -> None:
    from sqlalchemy import create_engine

    app = world.app()
    await app.save_calendar("office", Calendar(weekend=()))
    schedule = await app.schedule_repeat("t", Cron("0 9 * * *"), calendar="office", name="daily")
    database = create_engine(world.url)
    first = after(days=1) - timedelta(hours=3)
    for commits in (False, True):
        with database.connect() as connection:
            saved = await app.save_calendar("office", Calendar(weekend=("SUN",)), connection=connection)
            assert saved.version == 2 and saved.schedules == 1
            await app.schedules.skip(schedule.id, first, connection=connection)
            if commits:
                connection.commit()
            else:
                connection.rollback()
        now = await app.schedules.get(schedule.id)
        assert (now.revision, len(now.recurrence.overrides)) == ((3, 1) if commits else (1, 0))
    database.dispose()
