"""Recurring schedules on the live engine: on time and once, across outages, edits, clock changes and clock steps."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from timebell import Arrived, Cron, Dates, Every, Retry, Timebell
from timebell.errors import Conflict, InvalidRecurrence

from .world import QUIET, QUIET_FOR_DAYS, START, Log, World, after, engine, jobs, offset, outcomes, raises, virtual

MINUTELY = Cron("* * * * *")
QUEUED: dict[str, Any] = {"overlap": "allow"}


def listening(world: World, log: Log | None = None) -> tuple[Timebell, Log]:
    app, log = world.app(), log or Log()
    app.on("t")(log)
    return app, log


def rows(*expected: tuple[float, str] | tuple[float, str, str]) -> list[tuple[float, str, str | None]]:
    """(minute, state[, reason]) as returned by `outcomes`."""
    return [(row[0] * 60, row[1], row[2] if len(row) == 3 else None) for row in expected]


@virtual
async def test_a_schedule_fires_at_each_of_its_instants_once(world: World) -> None:
    app, log = listening(world)
    made = await app.schedule_repeat("t", Cron("*/10 * * * * *"), name="s", payload={"n": 0})
    async with engine(app):
        await world.until(after(seconds=65))
    assert log.fired == log.scheduled == [10, 20, 30, 40, 50, 60]
    event = log.events[0]
    assert (event.schedule_id, event.occurrence_key) == (made.id, f"{made.id}.20270301T120010Z")
    assert (event.upcoming, event.payload) == ([after(seconds=n) for n in (20, 30, 40)], {"n": 0})


@virtual
async def test_an_interval_keeps_its_anchor_however_long_a_run_takes(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(7)))
    await app.schedule_repeat("t", Every("PT10S"))
    async with engine(app):
        await world.until(after(seconds=41))
    assert log.fired == [10, 20, 30, 40]


@virtual
async def test_a_schedule_created_while_the_engine_runs_fires_at_its_first_instant(world: World) -> None:
    app, log = listening(world)
    async with engine(app, **QUIET):
        await world.advance(seconds=15)
        await app.schedule_repeat("t", Cron("20,40 * * * * *"))
        await world.advance(seconds=30)
    assert log.fired == [20, 40]


@virtual
async def test_a_list_of_dates_fires_once_at_each(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", Dates([after(seconds=5), after(minutes=3)]))
    async with engine(app):
        await world.advance(minutes=10)
    assert log.fired == [5, 180]


@virtual
async def test_start_end_and_max_runs_bound_a_schedule(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", MINUTELY, start=after(minutes=3), end=after(minutes=6))
    async with engine(app):
        await world.advance(minutes=10)
        await app.schedule_repeat("t", MINUTELY, max_runs=2)
        await world.advance(minutes=10)
    assert log.scheduled == [180, 240, 300, 660, 720]


@virtual
async def test_a_failing_occurrence_is_retried_with_its_own_key(world: World) -> None:
    app, log = listening(world, Log(lambda event: raises(ValueError())(event) if event.attempt == 1 else "ok"))
    await app.schedule_repeat("t", MINUTELY, retry=Retry(attempts=2, delay=5, jitter=0))
    async with engine(app):
        await world.until(after(seconds=130))
    assert log.fired == [60, 65, 120, 125]
    assert len({event.occurrence_key for event in log.events}) == 2


@virtual
async def test_an_occurrence_that_expires_is_skipped_and_later_ones_run(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", Cron("0 * * * *"), expires_after=600, catch_up="all", **QUEUED)
    await world.until(after(hours=3, minutes=5))
    async with engine(app):
        await world.advance(seconds=5)
    assert await outcomes(app) == rows((60, "skipped", "expired"), (120, "skipped", "expired"), (180, "completed"))
    assert log.scheduled == [10_800]


# Overlap.


@virtual
async def test_under_skip_an_occurrence_does_not_start_while_an_earlier_one_runs(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(150)))
    await app.schedule_repeat("t", MINUTELY)
    async with engine(app):
        await world.until(after(minutes=6, seconds=30))
    assert log.scheduled == [60, 240]
    assert (await outcomes(app))[:5] == rows(
        (1, "completed"),
        (2, "skipped", "overlap"),
        (3, "skipped", "overlap"),
        (4, "completed"),
        (5, "skipped", "overlap"),
    )


@virtual
async def test_under_skip_a_waiting_retry_counts_as_live(world: World) -> None:
    app, log = listening(world, Log(lambda event: raises(ValueError())(event) if event.attempt == 1 else None))
    await app.schedule_repeat("t", MINUTELY, retry=Retry(attempts=2, backoff="fixed", delay=90, jitter=0))
    async with engine(app):
        await world.until(after(minutes=3, seconds=30))
    assert [state for _, state, _ in await outcomes(app)][:2] == ["completed", "skipped"]
    assert log.fired == [60, 150, 180]


@virtual
async def test_under_allow_occurrences_run_in_parallel(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(150)))
    await app.schedule_repeat("t", MINUTELY, **QUEUED)
    async with engine(app):
        await world.until(after(minutes=3, seconds=1))
    assert log.fired == [60, 120, 180]


@virtual
async def test_under_queue_occurrences_wait_and_run_in_order_one_at_a_time(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(90)))
    await app.schedule_repeat("t", MINUTELY, overlap="queue", max_runs=4)
    async with engine(app):
        await world.until(after(minutes=3, seconds=30))
        waiting = [job.hold for job in await jobs(app, status="pending")]
        await world.until(after(minutes=8))
    assert log.scheduled == [60, 120, 180, 240]
    assert log.fired == [60, 150, 240, 330]
    assert waiting == ["overlap"]


@virtual
async def test_under_queue_at_most_a_hundred_wait(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(110)))
    await app.schedule_repeat("t", Cron("* * * * * *"), overlap="queue", max_runs=105)
    async with engine(app):
        await world.until(after(seconds=106))
        found = await outcomes(app)
    assert [(at, reason) for at, state, reason in found if state == "skipped"] == [
        (at, "overlap") for at in (102, 103, 104, 105)
    ]
    assert log.scheduled == [1]


@virtual
async def test_under_cancel_previous_a_new_occurrence_stops_the_running_one(world: World) -> None:
    stopped_at: list[float] = []

    async def work(event: Arrived) -> None:
        try:
            await asyncio.sleep(150)
        except asyncio.CancelledError:
            stopped_at.append(offset(world.clock.now()))
            raise

    app = world.app()
    app.on("t")(work)
    await app.schedule_repeat("t", MINUTELY, overlap="cancel_previous", max_runs=3)
    async with engine(app):
        await world.until(after(minutes=7))
    assert stopped_at == [120, 180]
    assert await outcomes(app) == rows((1, "cancelled", "superseded"), (2, "cancelled", "superseded"), (3, "completed"))
    assert [offset(job.started_at) for job in await jobs(app) if job.started_at] == [60, 120, 180]


@virtual
async def test_an_attempt_that_does_not_stop_is_fenced_after_ten_seconds(world: World) -> None:
    async def stubborn(event: Arrived) -> str:
        until = world.clock.now() + timedelta(seconds=100)
        while world.clock.now() < until:
            try:
                await asyncio.sleep((until - world.clock.now()).total_seconds())
            except asyncio.CancelledError:
                continue
        return "late"

    app = world.app()
    app.on("t")(stubborn)
    await app.schedule_repeat("t", MINUTELY, overlap="cancel_previous", max_runs=2)
    async with engine(app):
        await world.until(after(minutes=5))
    first, second = await jobs(app)
    assert (first.state, first.reason, first.result) == ("cancelled", "superseded", None)
    assert first.finished_at is not None
    assert second.started_at is not None
    assert offset(first.finished_at) == offset(second.started_at) == 130
    assert (second.state, second.result) == ("completed", "late")


@virtual
async def test_an_attempt_that_finishes_despite_a_stop_request_is_completed(world: World) -> None:
    async def careful(event: Arrived) -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(4)
            return "tidied up"
        return "done"

    app = world.app()
    app.on("t")(careful)
    await app.schedule_repeat("t", MINUTELY, overlap="cancel_previous", max_runs=2)
    async with engine(app):
        await world.until(after(minutes=5))
    first, second = await jobs(app)
    assert (first.state, first.result) == ("completed", "tidied up")
    assert second.started_at is not None
    assert (offset(second.started_at), second.result) == (124, "done")


@virtual
async def test_a_waiting_retry_is_superseded_immediately(world: World) -> None:
    app, log = listening(
        world, Log(lambda event: raises(ValueError())(event) if event.scheduled_at == after(minutes=1) else 1)
    )
    again = Retry(attempts=3, backoff="fixed", delay=90, jitter=0)
    await app.schedule_repeat("t", MINUTELY, overlap="cancel_previous", max_runs=2, retry=again)
    async with engine(app):
        await world.until(after(minutes=5))
    assert await outcomes(app) == rows((1, "cancelled", "superseded"), (2, "completed"))
    assert log.fired == [60, 120]
    first, second = await jobs(app)
    assert first.replaced_by == second.id


@virtual
async def test_jitter_delays_the_start_and_not_the_occurrence_key(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", MINUTELY, jitter=30)
    async with engine(app):
        await world.until(after(minutes=4))
    assert log.scheduled == [60, 120, 180]
    assert all(nominal < at < nominal + 30 for at, nominal in zip(log.fired, log.scheduled, strict=True))
    assert len({at % 60 for at in log.fired}) == 3


@virtual
async def test_a_start_later_than_the_tolerance_is_counted(world: World) -> None:
    app, _ = listening(world)
    await app.schedule_repeat("t", MINUTELY, tolerance=200, catch_up="all", **QUEUED)
    strict = await app.schedule_repeat("t", MINUTELY, tolerance=100, catch_up="all", **QUEUED)
    await world.until(after(minutes=4, seconds=30))
    async with engine(app) as service:
        await world.advance(seconds=5)
        assert service.node.counters.tolerance_breaches == 1 + 2  # 210 s; 210 and 150 s
    assert strict.policies.tolerance == 100


@virtual
async def test_a_job_with_when_late_expire_that_waited_too_long_for_a_slot_expires(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(100)))
    await app.schedule_at("t", after(seconds=59), timeout=200)
    await app.schedule_repeat("t", MINUTELY, when_late="expire", missed_after=30, max_runs=1)
    async with engine(app, slots=1):
        await world.until(after(minutes=4))
    assert log.fired == [59]
    assert ("skipped", "expired") in {(state, reason) for _, state, reason in await outcomes(app)}


# Outages. Six hourly occurrences fall into each; the engine comes back 30 minutes after the last.

HOURLY = Cron("0 * * * *")
BACK = after(hours=6, minutes=30)


async def _after_outage(
    world: World, spec: Any = HOURLY, back: datetime = BACK, **policies: Any
) -> tuple[Timebell, Log]:
    client = world.app()
    await client.schedule_repeat("t", spec, name="s", **policies)
    await world.until(back)
    app, log = listening(world)
    async with engine(app):
        await world.advance(seconds=30)
    return app, log


@virtual
async def test_after_an_outage_the_latest_occurrence_fires_and_every_other_is_recorded(world: World) -> None:
    app, log = await _after_outage(world)
    assert log.scheduled == [6 * 3600]
    assert log.events[0].late_by >= timedelta(minutes=30)
    assert await outcomes(app) == rows(*[(60 * n, "skipped", "coalesced") for n in range(1, 6)], (360, "completed"))


@virtual
async def test_catch_up_all_runs_every_missed_occurrence_in_order(world: World) -> None:
    app, log = await _after_outage(world, catch_up="all")
    assert log.scheduled == [3600.0 * n for n in range(1, 7)]
    assert {state for _, state, _ in await outcomes(app)} == {"completed"}


@virtual
async def test_catch_up_skip_runs_none_and_records_all(world: World) -> None:
    app, log = await _after_outage(world, catch_up="skip")
    assert log.events == []
    assert await outcomes(app) == rows(*[(60 * n, "skipped", "missed") for n in range(1, 7)])


@pytest.mark.parametrize(
    ("policy", "completed"), [("latest", [6]), ("all", [5, 6]), ("skip", [])], ids=["latest", "all", "skip"]
)
@virtual
async def test_occurrences_older_than_the_window_are_missed(world: World, policy: str, completed: list[int]) -> None:
    app, log = await _after_outage(world, catch_up=policy, catch_up_window=timedelta(minutes=95))
    assert [at / 3600 for at in log.scheduled] == completed
    reasons = {at / 3600: reason for at, state, reason in await outcomes(app) if state == "skipped"}
    assert reasons == {
        n: "coalesced" if (policy, n) == ("latest", 5) else "missed" for n in range(1, 7) if n not in completed
    }


@virtual
async def test_nothing_within_the_window_means_nothing_fires(world: World) -> None:
    app, log = await _after_outage(world, catch_up="latest", catch_up_window=600)
    assert log.events == []
    assert {reason for _, _, reason in await outcomes(app)} == {"missed"}


@virtual
async def test_catch_up_all_is_limited_to_the_newest_and_the_rest_is_recorded(world: World) -> None:
    app, log = await _after_outage(world, catch_up="all", catch_up_limit=2)
    assert log.scheduled == [5 * 3600, 6 * 3600]
    assert await outcomes(app) == rows(
        *[(60 * n, "skipped", "missed") for n in range(1, 5)], (300, "completed"), (360, "completed")
    )


@virtual
async def test_a_large_backlog_becomes_a_hundred_jobs_and_one_range_row(world: World) -> None:
    app, log = await _after_outage(world, MINUTELY, catch_up="all", **QUEUED)
    assert log.scheduled == [60.0 * n for n in range(289, 391)]  # the newest hundred missed, and two that are not
    (row,) = await jobs(app, status="skipped")
    assert (offset(row.scheduled_at), row.skipped_to, row.skipped_count) == (60, after(minutes=288), 288)


@virtual
async def test_a_backlog_older_than_the_window_is_a_range_row(world: World) -> None:
    app, log = await _after_outage(world, MINUTELY, back=after(hours=30, seconds=30), catch_up_window=3600)
    assert log.scheduled == [1800 * 60]
    found = await jobs(app, status="skipped")
    assert sum(row.skipped_count for row in found) == 1799
    assert {row.reason: row.skipped_count for row in found if row.skipped_count > 1} == {"missed": 1740}


@virtual
async def test_late_by_less_than_a_minute_is_not_missed(world: World) -> None:
    app, log = await _after_outage(
        world, Cron("*/20 * * * * *"), back=after(minutes=5, seconds=1), catch_up="skip", **QUEUED
    )
    assert log.scheduled[:3] == [260, 280, 300]
    assert {reason for _, _, reason in await outcomes(app, status="skipped")} == {"missed"}


@virtual
async def test_missed_after_says_how_late_is_missed(world: World) -> None:
    app, log = await _after_outage(world, catch_up="skip", missed_after=2 * 3600, **QUEUED)
    assert log.scheduled == [5 * 3600, 6 * 3600]
    assert len(await jobs(app, status="skipped")) == 4


@virtual
async def test_caught_up_jobs_run_serially_under_skip_and_in_parallel_under_allow(world: World) -> None:
    for overlap, apart in (("skip", 10), ("allow", 0)):
        start = offset(world.clock.now())
        app = world.app()
        log = Log(lambda _: asyncio.sleep(10))
        app.on(overlap)(log)
        await app.schedule_repeat(overlap, HOURLY, overlap=overlap, catch_up="all")
        await world.advance(hours=3, minutes=30)
        back = offset(world.clock.now())
        async with engine(app):
            await world.advance(minutes=1)
        assert [round(at - back) for at in log.fired] == [
            0,
            apart,
            2 * apart,
            *([3 * apart] if len(log.fired) > 3 else []),
        ]
        assert log.scheduled == sorted(log.scheduled)
        assert log.scheduled[0] > start


@virtual
async def test_an_occurrence_due_while_the_chain_catches_up_is_skipped_for_overlap(world: World) -> None:
    client = world.app()
    await client.schedule_repeat("t", MINUTELY, catch_up="all", catch_up_limit=3)
    await world.until(after(minutes=5, seconds=55))
    app, log = listening(world, Log(lambda _: asyncio.sleep(4)))
    async with engine(app):
        await world.advance(minutes=1)
    assert log.scheduled[:4] == [120, 180, 240, 300]
    assert {at / 60: reason for at, state, reason in await outcomes(app) if state == "skipped"} == {
        1: "missed", 6: "overlap",
    }  # fmt: skip


@virtual
async def test_the_planner_resumes_where_it_stopped_after_an_outage(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", MINUTELY)
    async with engine(app):
        await world.until(after(minutes=2, seconds=30))
    await world.until(after(minutes=10, seconds=30))
    async with engine(app):
        await world.until(after(minutes=12, seconds=30))
    assert log.scheduled == [60, 120, 600, 660, 720]
    found = await jobs(app)
    assert [round(offset(job.scheduled_at) / 60) for job in found] == list(range(1, 13))


# Daylight saving.

NEW_YORK = ZoneInfo("America/New_York")


@pytest.mark.parametrize(
    ("day", "spec", "expected"),
    [
        (datetime(2027, 3, 14), "30 2 * * *", ["03-13 02:30 EST", "03-14 03:00 EDT", "03-15 02:30 EDT"]),
        (datetime(2027, 11, 7), "30 1 * * *", ["11-06 01:30 EDT", "11-07 01:30 EDT", "11-08 01:30 EST"]),
    ],
    ids=["gap", "fold"],
)
@virtual
async def test_a_local_time_in_a_gap_or_a_fold_fires_once(
    world: World, day: datetime, spec: str, expected: list[str]
) -> None:
    app, log = listening(world)
    await world.until((day - timedelta(days=1)).replace(tzinfo=NEW_YORK).astimezone(UTC))
    await app.schedule_repeat("t", Cron(spec), timezone="America/New_York")
    async with engine(app, **QUIET_FOR_DAYS):
        await world.advance(days=3)
    assert [event.fired_at.astimezone(NEW_YORK).strftime("%m-%d %H:%M %Z") for event in log.events] == expected
    assert {event.late_by for event in log.events} == {timedelta(0)}
    assert {event.timezone for event in log.events} == {"America/New_York"}


@virtual
async def test_a_half_hourly_cadence_keeps_real_time_through_both_clock_changes(world: World) -> None:
    for day in (datetime(2027, 3, 14), datetime(2027, 11, 7)):
        app = world.app()
        log = Log()
        app.on(f"t{day.month}")(log)
        await world.until(day.replace(tzinfo=NEW_YORK).astimezone(UTC) - timedelta(minutes=1))
        await app.schedule_repeat(f"t{day.month}", Cron("*/30 * * * *"), timezone="America/New_York")
        async with engine(app, **QUIET):
            await world.advance(hours=5)
        gaps = {later - earlier for earlier, later in zip(log.fired, log.fired[1:], strict=False)}
        assert (len(log.fired), gaps) == (10, {1800.0})


@virtual
async def test_a_one_time_job_at_a_missing_local_time_is_moved_and_reported(world: World) -> None:
    app, log = listening(world)
    await app.schedule_at("t", datetime(2027, 3, 14, 2, 30), timezone="America/New_York")
    await world.advance(days=12, hours=18)  # the engine only waits until the last hours
    async with engine(app, **QUIET):
        await world.advance(hours=6)
    assert [event.fired_at.astimezone(NEW_YORK).strftime("%H:%M %Z") for event in log.events] == ["03:30 EDT"]


# Schedules defined in code.


def _coded(world: World, spec: str = "* * * * *", payload: Any = None, **options: Any) -> tuple[Timebell, Log]:
    app, log = world.app(), Log()
    app.schedule("coded", cron=spec, payload=payload, **options)(log)
    return app, log


@virtual
async def test_a_schedule_in_code_is_written_at_start_and_calls_its_function(world: World) -> None:
    app, log = _coded(world, timezone="Asia/Seoul")
    async with engine(app):
        await world.until(after(seconds=130))
    assert log.scheduled == [60, 120]
    assert (log.events[0].topic, log.events[0].timezone) == ("coded", "Asia/Seoul")


@virtual
async def test_the_same_code_again_is_no_edit_and_keeps_an_interval_in_step(world: World) -> None:
    fired = []
    for _ in range(3):
        app, log = world.app(), Log()
        app.schedule("coded", every="PT1M")(log)
        async with engine(app):
            await world.advance(seconds=130)
            assert (await app.schedules.get(name="coded")).revision == 1
        fired += log.scheduled
        await app.close()
        await world.advance(seconds=7)
    assert fired == [60.0 * n for n in range(1, 7)]


@virtual
async def test_changed_code_is_an_edit_that_fires_nothing_and_repeats_nothing(world: World) -> None:
    app, log = _coded(world, payload=1)
    async with engine(app):
        await world.until(after(seconds=70))
    await app.close()
    edited, second = _coded(world, "30 * * * * *", payload=2)
    async with engine(edited):
        await world.until(after(seconds=160))
        assert (await edited.schedules.get(name="coded")).revision == 2
    assert (log.scheduled, second.scheduled, second.payloads) == ([60], [90, 150], [2, 2])


@virtual
async def test_a_changed_default_of_the_app_is_an_edit(world: World) -> None:
    """The time zone and `on_unhandled`, which the schedule does not specify itself."""
    stored = []
    for options in (
        {"timezone": "Asia/Seoul"}, {"timezone": "Europe/Paris"}, {"timezone": "Europe/Paris"},
        {"timezone": "Europe/Paris", "on_unhandled": "complete"},
    ):  # fmt: skip
        app = world.app(**options)
        app.schedule("coded", cron="0 9 * * *")(Log())
        async with engine(app):
            schedule = await app.schedules.get(name="coded")
        stored.append((schedule.timezone, schedule.action.target is not None, schedule.revision))
        await app.close()
    assert stored == [
        ("Asia/Seoul", False, 1), ("Europe/Paris", False, 2), ("Europe/Paris", False, 2), ("Europe/Paris", True, 3),
    ]  # fmt: skip


@virtual
async def test_past_occurrences_follow_the_revision_that_was_valid_at_their_time(world: World) -> None:
    app, _ = _coded(world, "0 * * * *", payload="old")
    async with engine(app):
        pass
    await app.close()
    await world.until(after(hours=3, minutes=30))
    edited, log = _coded(world, "45 * * * *", payload="new")
    async with engine(edited, **QUIET):
        await world.until(after(hours=4))
    assert list(zip(log.scheduled, log.payloads, strict=True)) == [(3 * 3600, "old"), (3.75 * 3600, "new")]
    assert (await outcomes(edited))[:2] == rows((60, "skipped", "coalesced"), (120, "skipped", "coalesced"))


@virtual
async def test_removed_code_pauses_its_schedule(world: World) -> None:
    app, _ = _coded(world)
    async with engine(app):
        pass
    await app.close()
    bare, log = world.app(), Log()
    bare.on("coded")(log)
    async with engine(bare):
        await world.until(after(seconds=70))
        (schedule,) = await bare.schedules.list()
    assert (log.scheduled, schedule.enabled, schedule.pause_reason) == ([], False, "removed from code")


@virtual
async def test_the_same_spec_again_is_no_edit_and_another_one_is_refused_or_replaces(world: World) -> None:
    app, log = listening(world)
    first = await app.schedule_repeat("t", MINUTELY, name="s")
    with pytest.raises(Conflict) as refused:
        await app.schedule_repeat("t", MINUTELY, name="s")
    assert (refused.value.code, refused.value.existing) == ("SCHEDULE_EXISTS", first.id)
    async with engine(app):
        await world.advance(seconds=25)
        again = await app.schedule_repeat("t", MINUTELY, name="s", replace=True)
        await world.advance(seconds=100)
    assert (again.id, again.revision, log.scheduled) == (first.id, 1, [60, 120])


@virtual
async def test_an_edit_takes_effect_while_the_engine_sleeps(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", Cron("0 18 * * *"), name="s")
    async with engine(app, **QUIET):
        await world.advance(seconds=10)
        await app.schedule_repeat("t", Cron("30 * * * * *"), name="s", replace=True)
        await world.advance(seconds=60)
    assert log.scheduled == [30]


# A database clock that steps.


@virtual
async def test_a_forward_clock_step_duplicates_nothing_and_records_everything(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", MINUTELY)
    late = await app.schedule_at("t", after(minutes=30), payload="one-shot")
    async with engine(app):
        await world.advance(seconds=150)
        world.clock.step(3600)
        await world.advance(seconds=151)  # past the instant that is due in minute 150
    assert len(log.scheduled) == len(set(zip(log.scheduled, map(str, log.payloads), strict=True)))
    found = [job for job in await jobs(app) if job.schedule_id is not None]
    decided = {offset(job.scheduled_at) / 60 for job in found}
    assert decided == set(range(1, 66))
    assert (await app.get(late.id)).state == "completed"


@virtual
async def test_a_backward_clock_step_duplicates_and_loses_nothing(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", MINUTELY)
    await app.schedule_at("t", after(minutes=4, seconds=30), payload="one-shot")
    async with engine(app):
        await world.advance(seconds=190)
        world.clock.step(-120)
        await world.advance(seconds=400)
    assert log.scheduled == [60, 120, 180, 240, 270, 300, 360, 420]
    assert all(event.fired_at >= event.scheduled_at for event in log.events)


@virtual
async def test_a_failure_during_a_backward_clock_step_is_retried_when_due(world: World) -> None:
    app = world.app()
    tried = []

    @app.on("t")
    async def handle(event: Arrived) -> None:
        tried.append(offset(event.fired_at))
        if event.attempt == 1:
            world.clock.step(-30)
            raise ValueError("once more")

    schedule = await app.schedule_repeat("t", MINUTELY)
    async with engine(app):
        await world.advance(seconds=100)
    assert tried[:2] == [60, 60]
    (first, *_) = reversed((await app.list(schedule_id=schedule.id)).items)
    assert (first.state, first.attempt) == ("completed", 2)
    assert first.started_at is not None
    assert first.started_at >= first.scheduled_at


@pytest.mark.parametrize("seconds", [7200, -7200], ids=["forward", "back"])
@virtual
async def test_a_clock_step_ends_no_running_attempt(world: World, seconds: float) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(40, "whole")))
    job = await app.schedule_at("t")
    async with engine(app):
        await world.advance(seconds=10)
        world.clock.step(seconds)
        await world.advance(seconds=40)
    assert (len(log.events), (await app.get(job.id)).result) == (1, "whole")


@pytest.mark.heartbeats
@virtual
async def test_jobs_of_a_dead_node_are_repaired_without_a_restart(world: World) -> None:
    """A job left running by a dead node is reclaimed because its lease is not renewed."""
    from timebell.ids import new_id
    from timebell.model.routes import ALL_ROUTES
    from timebell.store.jobs import claim as statements

    app, log = listening(world)
    job = await app.schedule_at("t", after(seconds=0.5))
    lane = statements.QueueLane("default", 0, None, None, has_limits=False)
    await app.store.run(statements.claim_batch, lane, ALL_ROUTES, new_id(START), 1, after(hours=2))
    async with engine(app):  # the start reclaims everything, so the dead attempt is inserted afterwards
        await world.advance(seconds=1)
        assert len(log.events) == 1
        ghost = await app.schedule_at("t", after(seconds=5))
        await app.store.run(statements.claim_batch, lane, ALL_ROUTES, new_id(START), 1, after(hours=2))
        await world.advance(seconds=40)
        assert (await app.get(ghost.id)).state == "completed"
    assert [event.attempt for event in log.events] == [2, 2]
    assert {event.job_id for event in log.events} == {job.id, ghost.id}


@virtual
async def test_two_schedules_of_one_topic_fire_independently(world: World) -> None:
    app, log = listening(world, Log(lambda _: asyncio.sleep(5)))
    for name in ("a", "b"):
        await app.schedule_repeat("t", MINUTELY, name=name)
    async with engine(app):
        await world.until(after(seconds=61))
    assert log.fired == [60, 60]


@virtual
async def test_an_event_carries_the_revision_that_created_its_job(world: World) -> None:
    app, log = listening(world)
    events: list[Arrived] = log.events
    await app.schedule_repeat("t", MINUTELY, name="s")
    async with engine(app):
        await world.until(after(seconds=61))
        await app.schedule_repeat("t", Cron("30 * * * * *"), name="s", replace=True)
        await world.until(after(seconds=91))
    assert [offset(event.upcoming[0]) for event in events] == [120, 150]


@virtual
async def test_the_same_interval_without_anchor_is_no_edit(world: World) -> None:
    app, log = listening(world)
    first = await app.schedule_repeat("t", Every("PT1M"), name="s")
    with pytest.raises(Conflict) as refused:
        await app.schedule_repeat("t", Every("PT1M"), name="s")
    assert (refused.value.code, refused.value.existing) == ("SCHEDULE_EXISTS", first.id)
    async with engine(app):
        await world.advance(seconds=25)
        again = await app.schedule_repeat("t", Every("PT1M"), name="s", replace=True)
        await world.advance(seconds=100)
    assert (again.id, again.revision, log.scheduled) == (first.id, 1, [60, 120])


@virtual
async def test_h_depends_on_tenant_and_name_and_survives_edits(world: World) -> None:
    app, _ = listening(world)
    spec = Cron("H H * * *")
    made = await app.schedule_repeat("t", spec, name="report")
    assert made.recurrence == spec.bind("UTC", created_at=START, key="default/report")
    assert (await app.schedules.get(made.id)).recurrence == made.recurrence
    edited = await app.schedule_repeat("t", spec, name="report", payload="other", replace=True)
    assert edited.next_fire_at == made.next_fire_at
    assert edited.revision == 2
    other = await app.schedule_repeat("t", spec, name="report", tenant_id="b")
    assert other.next_fire_at != made.next_fire_at


@virtual
async def test_past_years_are_refused_unless_allowed(world: World) -> None:
    app, _ = listening(world)
    with pytest.raises(InvalidRecurrence) as caught:
        await app.schedule_repeat("t", Cron("0 0 0 1 1 * 2020-2026"))
    assert caught.value.code == "NEVER_FIRES"
    assert "its year field is 2020-2026" in caught.value.message
    allowed = await app.schedule_repeat("t", Cron("0 0 30 2 *", allow_never=True))
    assert allowed.next_fire_at is None
    assert (await app.schedules.get(allowed.id)).recurrence == allowed.recurrence
