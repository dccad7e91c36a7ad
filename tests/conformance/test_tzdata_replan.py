"""New tzdata: future instants move, due ones do not, and nothing fires twice or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from tests.zone_data import MEXICO, SUMMER_TIME, release
from timebell.engine.leader.continuous_audit import run_audit
from timebell.model.job import Completion, JobState, NewJob
from timebell.model.schedule import Schedule
from timebell.recurrence import Override, Release, Spec, installed_release
from timebell.recurrence.tzdata_diff import with_release
from timebell.store import schema, transaction
from timebell.store.jobs import complete
from timebell.store.schedules import actions, recurrence_column, tzdata_replan
from timebell.store.schedules import rows as schedule_rows

from .helpers import (
    T0,
    CatchUp,
    Cron,
    Overlap,
    Store,
    after,
    build_job,
    claim,
    create,
    end,
    ending,
    everything,
    execute,
    fire,
    get,
    job,
    put,
    replace,
    schedule,
    started,
    stored,
    stored_schedule,
)  # fmt: skip

HOUR = timedelta(hours=1)
CST, CDT = -21_600, -18_000
NINE = Cron("0 9 * * *")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.fixture
def old(tmp_path: Path) -> Release:
    """An earlier release, in which Mexico has summer time, unlike the installed data after 2022."""
    return release(tmp_path / "old", "2020a", {MEXICO: SUMMER_TIME})


@pytest.fixture
def newer(tmp_path: Path) -> Release:
    """A later release, in which Mexico has summer time again."""
    return release(tmp_path / "newer", "2099z", {MEXICO: SUMMER_TIME})


def schedule_by(data: Release, spec: Spec = NINE, at: datetime = T0, **fields: Any) -> Schedule:
    """Return a schedule in Mexico created at an instant by a node with this tzdata."""
    plain = schedule(spec, timezone=MEXICO, **fields)
    recurrence = with_release(plain.recurrence, data)
    return replace(plain, recurrence=recurrence, next_fire_at=recurrence.next(at))


def job_at_nine(data: Release, day: str = "2027-07-01", **fields: Any) -> NewJob:
    """Return a job for 09:00 local time there, created by a node with this tzdata."""
    local = datetime.fromisoformat(f"{day}T09:00")
    run_at = local.replace(tzinfo=data.zone(MEXICO).info).astimezone(UTC)
    given = {"local_time": local.isoformat(), "tzdata": data.version, "timezone": MEXICO, "run_at": run_at}
    return job(**{**given, **fields})


async def replan_all(store: Store, data: Release, now: datetime = T0, most: int = 500) -> int:
    """Replan all rows of earlier releases; return the number of transactions."""
    rounds, after_id = 0, None
    while True:
        rounds += 1
        after_id = await store.run(tzdata_replan.replan_schedules, data, after_id, now, most)
        if after_id is None:
            break
    while await store.run(tzdata_replan.replan_jobs, data, now, most):
        rounds += 1
    return rounds


async def moved(store: Store, data: Release | None = None) -> list[tuple[str, int, int, int, int, int]]:
    version = (data or installed_release()).version
    return [
        (one.timezone, one.offset_before, one.offset_after, one.examined, one.schedules, one.jobs)
        for one in await store.run(tzdata_replan.list_changes, version)
    ]


@stored
async def test_a_schedule_moves_to_its_local_time_and_fires_there_once(store: Store, old: Release) -> None:
    july = utc("2027-06-30T20:00")
    await put(store, schedule_by(old, at=july))
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-01T14:00")
    await replan_all(store, installed_release(), july)
    found = await stored_schedule(store)
    assert (found.next_fire_at, found.tzdata, found.utc_offset) == (
        utc("2027-07-01T15:00"),
        installed_release().version,
        CST,
    )
    assert found.revision == 1
    assert (await fire(store, utc("2027-07-01T14:30"))).jobs == 0
    await fire(store, utc("2027-07-01T15:00"))
    assert [one.scheduled_at for one in await everything(store)] == [utc("2027-07-01T15:00")]
    assert await moved(store) == [(MEXICO, CDT, CST, 1, 1, 0)]


@stored
async def test_overrides_keep_their_local_time(store: Store, old: Release) -> None:
    july = utc("2027-06-30T20:00")
    made = schedule_by(old, at=july)
    gone, moved_on = Override(utc("2027-07-01T14:00")), Override(utc("2027-07-02T14:00"), utc("2027-07-02T20:00"))
    await put(store, replace(made, recurrence=replace(made.recurrence, overrides=(gone, moved_on))))
    await replan_all(store, installed_release(), july)
    found = await stored_schedule(store)
    assert [one.at for one in found.recurrence.overrides] == [utc("2027-07-01T15:00"), utc("2027-07-02T15:00")]
    assert (found.next_fire_at, found.revision) == (utc("2027-07-01T15:00"), 2)
    for day in (1, 2, 3):
        for hour in (14, 15, 20):
            await fire(store, utc(f"2027-07-0{day}T{hour}:00"))
    assert [(one.scheduled_at, one.reason) for one in await everything(store) if one.reason] == [
        (utc("2027-07-01T15:00"), "override"),
        (utc("2027-07-02T15:00"), "override"),
        (utc("2027-07-03T15:00"), "overlap"),
    ]
    assert [one.scheduled_at for one in await everything(store) if not one.reason] == [utc("2027-07-02T20:00")]


@stored
async def test_an_unaffected_schedule_is_examined_and_not_changed(store: Store, old: Release) -> None:
    await put(store, schedule_by(old))
    await put(store, schedule_by(old, Cron("0 * * * *"), utc("2027-06-30T20:00"), name="hourly"))
    await replan_all(store, installed_release())
    assert {one.name: one.tzdata for one in [await stored_schedule(store), await stored_schedule(store, "hourly")]} == {
        "s": installed_release().version, "hourly": installed_release().version,
    }  # fmt: skip
    assert (await stored_schedule(store)).next_fire_at == utc("2027-03-01T15:00")
    assert await moved(store) == [(MEXICO, CST, CST, 2, 0, 0)]
    await replan_all(store, installed_release())
    assert await moved(store) == [(MEXICO, CST, CST, 2, 0, 0)]


@stored
async def test_a_due_occurrence_stays_due_and_its_local_time_fires_once(store: Store, old: Release) -> None:
    await put(store, schedule_by(old, at=utc("2027-06-30T20:00")))
    now = utc("2027-07-01T14:00:30")
    await replan_all(store, installed_release(), now)  # due, but not fired yet
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-01T14:00")
    await fire(store, now)
    await fire(store, utc("2027-07-01T15:00:30"))
    await fire(store, utc("2027-07-02T15:00:30"))
    assert [one.scheduled_at for one in await everything(store)][:1] == [utc("2027-07-01T14:00")]
    fired = await execute(store, select(schema.jobs.c.scheduled_at).order_by(schema.jobs.c.scheduled_at))
    skipped = await execute(store, select(schema.finished.c.scheduled_at, schema.finished.c.reason))
    assert [row.scheduled_at for row in fired] == [utc("2027-07-01T14:00")]
    assert [(row.scheduled_at, row.reason) for row in skipped] == [(utc("2027-07-02T15:00"), "overlap")]
    assert (await stored_schedule(store)).tzdata == installed_release().version


@stored
async def test_a_planner_with_new_data_needs_no_leader(store: Store, old: Release) -> None:
    """After an outage across the instant and a start with new data, the planner acts first."""
    week = {"overlap": Overlap.ALLOW, "catch_up": CatchUp.ALL, "catch_up_window": 7 * 86_400.0}
    await put(store, schedule_by(old, at=utc("2027-06-30T20:00"), **week))
    await fire(store, utc("2027-07-03T20:00"))
    made = sorted(one.scheduled_at for one in await everything(store))
    assert made == [utc(f"2027-07-0{day}") for day in ("1T14:00", "2T15:00", "3T15:00")]
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-04T15:00")


@stored
async def test_an_instant_moved_into_the_past_follows_the_misfire_policy(store: Store, newer: Release) -> None:
    """By the new rules 09:00 was an hour before the stored instant: it is missed and caught up."""
    now = utc("2027-07-01T14:20")
    await put(store, schedule_by(installed_release(), at=utc("2027-06-30T20:00")))
    await replan_all(store, newer, now)
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-01T14:00")
    assert await everything(store) == []  # the change itself fires nothing
    await fire(store, now)
    await fire(store, utc("2027-07-01T15:30"))
    assert [one.scheduled_at for one in await everything(store)] == [utc("2027-07-01T14:00")]


@stored
async def test_an_occurrence_never_moves_to_the_instant_of_a_fired_one(store: Store, newer: Release) -> None:
    """09:00 fired; by the new rules 10:00 was that instant. It keeps its stored instant and fires once."""
    twice = schedule_by(installed_release(), Cron("0 9,10 * * *"), at=utc("2027-06-30T20:00"), overlap=Overlap.ALLOW)
    await put(store, twice)
    await fire(store, utc("2027-07-01T15:00"))
    await replan_all(store, newer, utc("2027-07-01T15:30"))
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-01T16:00")
    await fire(store, utc("2027-07-01T16:00"))
    assert [one.scheduled_at for one in await everything(store)] == [
        utc("2027-07-01T15:00"), utc("2027-07-01T16:00"),
    ]  # fmt: skip


@stored
async def test_a_node_with_older_tzdata_fires_newer_instants_and_moves_none(
    store: Store, newer: Release, old: Release
) -> None:
    await put(store, schedule_by(newer, at=utc("2027-06-30T20:00"), overlap=Overlap.ALLOW))
    at = utc("2027-07-01T14:00")
    for older in (old, installed_release()):
        await replan_all(store, older, utc("2027-06-30T21:00"))
        assert (await stored_schedule(store)).next_fire_at == at
    await fire(store, at)  # by the installed data 09:00 is at 15:00 UTC and is not fired again
    await fire(store, at + HOUR)
    assert [one.scheduled_at for one in await everything(store)] == [at]
    found = await stored_schedule(store)
    assert (found.next_fire_at, found.tzdata) == (utc("2027-07-02T15:00"), installed_release().version)
    await replan_all(store, newer, at + HOUR)
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-02T14:00")


@stored
async def test_rows_without_a_tzdata_release_are_computed_once(store: Store, old: Release) -> None:
    july = utc("2027-06-30T20:00")
    await put(store, schedule_by(old, at=july))
    await execute(store, update(schema.schedules).values(tzdata=None, utc_offset=None))
    await replan_all(store, installed_release(), july)
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-01T15:00")
    assert await moved(store) == [(MEXICO, CDT, CST, 1, 1, 0)]


@stored
async def test_paused_schedules_move_and_errored_ones_do_not_stop_the_others(store: Store, old: Release) -> None:
    july = utc("2027-06-30T20:00")
    for name, enabled in (("a", False), ("b", True), ("c", True)):
        await put(store, schedule_by(old, at=july, name=name, enabled=enabled))
    broken = update(schema.schedules).where(schema.schedules.c.name == "b").values(recurrence="{}")
    await execute(store, broken)
    await replan_all(store, installed_release(), july)
    rows = await execute(store, select(schema.schedules).order_by(schema.schedules.c.name))
    assert [(row.next_fire_at, row.tzdata) for row in rows] == [
        (utc("2027-07-01T15:00"), installed_release().version),
        (utc("2027-07-01T14:00"), "2020a"),
        (utc("2027-07-01T15:00"), installed_release().version),
    ]


@stored
async def test_jobs_at_local_times_move_and_jobs_at_instants_do_not(store: Store, old: Release) -> None:
    local, instant = job_at_nine(old, expires_at=utc("2027-07-01T14:10")), job(run_at=utc("2027-07-01T14:00"))
    winter = job_at_nine(old, "2027-12-01")
    await create(store, local)
    await create(store, instant, winter, bulk=True)
    await replan_all(store, installed_release())
    found = await get(store, local.id)
    assert found.run_at == found.scheduled_at == utc("2027-07-01T15:00")
    assert (found.expires_at, found.local_time) == (utc("2027-07-01T15:10"), "2027-07-01T09:00:00")
    assert (await get(store, instant.id)).run_at == utc("2027-07-01T14:00")
    assert (await get(store, winter.id)).run_at == utc("2027-12-01T15:00")
    assert await moved(store) == [(MEXICO, CST, CST, 1, 0, 0), (MEXICO, CDT, CST, 1, 0, 1)]
    await replan_all(store, installed_release())
    assert len(await moved(store)) == 2
    (claimed,) = [one for one in await claim(store, utc("2027-07-01T15:00")) if one.id == local.id]
    await end(store, ending(claimed))
    assert (await get(store, local.id)).local_time == "2027-07-01T09:00:00"


@stored
async def test_due_running_and_retrying_jobs_do_not_move(store: Store, old: Release) -> None:
    now = utc("2027-07-01T14:00")
    due = job_at_nine(old)
    await create(store, due)
    running = await started(store, now, **_fields(job_at_nine(old)))
    failed = await started(store, now, **_fields(job_at_nine(old)))
    later = now + 3 * HOUR
    await store.run(
        complete.schedule_retries, [Completion(failed.id, failed.number, JobState.PENDING, now, run_at=later)]
    )
    await replan_all(store, installed_release(), now)
    assert [(await get(store, id_)).run_at for id_ in (due.id, running.id, failed.id)] == [now, now, later]
    assert await moved(store) == []


def _fields(made: NewJob) -> dict[str, Any]:
    return {name: getattr(made, name) for name in ("run_at", "scheduled_at", "timezone", "local_time", "tzdata")}


@stored
async def test_a_rescheduled_occurrence_keeps_its_key(store: Store, old: Release) -> None:
    made = schedule_by(old)
    await put(store, made)
    moved_job = job_at_nine(old, schedule_id=made.id, revision=1, scheduled_at=after(hours=3))
    await create(store, moved_job)
    await replan_all(store, installed_release())
    found = await get(store, moved_job.id)
    assert (found.run_at, found.scheduled_at) == (utc("2027-07-01T15:00"), after(hours=3))


@pytest.fixture
def crash() -> Iterator[Any]:
    """Return a function that sets the fault point at which an operation fails."""

    class Crashed(Exception):
        pass

    def at(point: str) -> type[Exception]:
        def probe(name: str) -> None:
            if name == point:
                raise Crashed(point)

        transaction.probe = probe
        return Crashed

    yield at
    transaction.probe = None


@stored
async def test_a_crash_during_a_replan_loses_nothing_and_counts_nothing_twice(
    store: Store, old: Release, crash: Any
) -> None:
    july = utc("2027-06-30T20:00")
    for n in range(5):
        await put(store, schedule_by(old, at=july, name=f"s{n}"))
        await create(store, job_at_nine(old))
    points = [f"replan_schedules.{n}" for n in ("1", "2", "3", "4", "commit", "done")]
    points += [f"replan_jobs.{n}" for n in ("1", "2", "3", "4", "commit", "done")]
    crashes = 0
    for point in points:
        crashed = crash(point)
        try:
            await replan_all(store, installed_release(), july, most=2)
        except crashed:
            crashes += 1
    assert crashes >= 8
    transaction.probe = None
    await replan_all(store, installed_release(), july, most=2)
    rows = await execute(store, select(schema.schedules.c.next_fire_at))
    assert {row.next_fire_at for row in rows} == {one.run_at for one in await everything(store)} == {
        utc("2027-07-01T15:00")
    }  # fmt: skip
    assert await moved(store) == [(MEXICO, CDT, CST, 10, 5, 5)]


@stored
async def test_a_concurrent_planner_and_replan_decide_each_occurrence_once(store: Store, old: Release) -> None:
    """The clock of the leader lags: occurrences that the planner fires now are in its future."""
    due = utc("2027-07-01T14:00")
    for n in range(60):
        await put(store, schedule_by(old, at=utc("2027-06-30T20:00"), name=f"s{n}", overlap=Overlap.ALLOW))
    early = due - timedelta(seconds=1)
    fires = [fire(store, due, most=5) for _ in range(12)]
    await asyncio.gather(replan_all(store, installed_release(), early, most=7), *fires)
    await fire(store, due)
    await fire(store, due + HOUR)
    made = await everything(store)
    assert len(made) == len({one.schedule_id for one in made}) == 60
    assert {one.scheduled_at for one in made} <= {due, due + HOUR}


@stored
async def test_a_replan_runs_in_batches(store: Store, old: Release) -> None:
    july = utc("2027-06-30T20:00")
    for n in range(5):
        await put(store, schedule_by(old, at=july, name=f"s{n}"))
    await create(store, *[job_at_nine(old) for _ in range(5)], bulk=True)
    assert await replan_all(store, installed_release(), july, most=2) == 3 + 3
    (change,) = [
        one for one in await store.run(tzdata_replan.list_changes, installed_release().version) if one.has_effect
    ]
    assert change.since == utc("2027-07-01T14:00")
    words = "5 schedules and 5 jobs in America/Mexico_City move by one hour"
    assert change.describe() == f"{words} (from 2027-07-01, UTC-05:00 becomes UTC-06:00)"


@pytest.mark.parametrize(
    "spec", [NINE, Cron("0 9-17 * * *"), Cron("30 2 * * *"), pytest.param(Cron("0 * * * *"), marks=pytest.mark.slow)]
)
@stored
async def test_an_audit_accounts_for_occurrences_moved_by_new_tzdata(
    store: Store, old: Release, monkeypatch: pytest.MonkeyPatch, spec: Spec
) -> None:
    """The tzdata arrived late: until July jobs ran at the instants of the earlier release."""
    began, july, end = utc("2027-03-25T20:00"), utc("2027-07-01T20:10"), utc("2027-07-09T20:00")
    made = schedule_by(old, spec, began, overlap=Overlap.ALLOW)
    await put(store, replace(made, created_at=began))
    at = began

    async def until(stop: datetime) -> datetime:
        nonlocal at
        while (at := (await fire(store, at)).next_fire_at or stop) < stop:
            pass
        return at

    with monkeypatch.context() as before:
        real = recurrence_column.recurrence_from_json
        before.setattr(schedule_rows, "recurrence_from_json", lambda text: with_release(real(text), old))
        await until(july)
    await replan_all(store, installed_release(), july)
    await until(end)
    found = await run_audit(store.run_autocommit, began, end, end + timedelta(hours=1))
    assert [(one.finding.value, one.at) for one in found.differences] == []
    hourly = spec == Cron("0 * * * *")
    assert (found.counts.moved > 0) is (not hourly)
    gone = utc("2027-06-10T14:00") if spec != Cron("30 2 * * *") else utc("2027-06-10T07:30")
    await execute(store, delete(schema.jobs).where(schema.jobs.c.scheduled_at == gone))
    found = await run_audit(store.run_autocommit, began, end, end + timedelta(hours=1))
    assert [one.finding.value for one in found.differences] == ["missing"]


@pytest.mark.parametrize("spec", [NINE, Cron("0 9-17/4 * * *"), Cron("30 2 * * *")])
@pytest.mark.parametrize("pause", [False, True], ids=["outage", "pause"])
@stored
async def test_an_audit_accounts_for_occurrences_due_when_new_tzdata_arrived(
    store: Store, old: Release, spec: Spec, pause: bool
) -> None:
    """The nodes were down or the schedule was paused across the instant: the planner saw the new data first."""
    began, up, end = utc("2027-06-28T20:00"), utc("2027-07-01T14:20"), utc("2027-07-05T20:00")
    made = schedule_by(old, spec, began, overlap=Overlap.ALLOW, catch_up=CatchUp.ALL, catch_up_window=7 * 86_400.0)
    made = replace(made, created_at=began)
    await put(store, made)
    if pause:
        await store.run(actions.pause_schedule, "default", made.id, None, build_job, began)
        await store.run(actions.resume_schedule, "default", made.id, False, build_job, up)
    at = up
    while (at := (await fire(store, at)).next_fire_at or end) < end:
        pass
    await replan_all(store, installed_release(), end)
    found = await run_audit(store.run_autocommit, began, end, end + timedelta(hours=1))
    assert [(one.finding.value, one.at) for one in found.differences] == []
    assert found.counts.moved > 0


@stored
async def test_a_pause_before_the_instant_does_not_prevent_the_replan(store: Store, newer: Release) -> None:
    """By the new data 09:00 is an hour earlier: a schedule paused and resumed before the replan fires then."""
    made = schedule_by(installed_release(), at=(began := utc("2027-06-30T20:00")))
    await put(store, made)
    old = await stored_schedule(store)
    await execute(store, update(schema.schedules).values(tzdata="2020a", utc_offset=CST))
    await store.run(actions.pause_schedule, "default", made.id, None, build_job, began)
    await store.run(actions.resume_schedule, "default", made.id, False, build_job, began)
    found = await stored_schedule(store)
    assert (found.tzdata, found.utc_offset, found.next_fire_at) == ("2020a", CST, old.next_fire_at)
    await replan_all(store, newer, began)
    assert (await stored_schedule(store)).next_fire_at == utc("2027-07-01T14:00")
