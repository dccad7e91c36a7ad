"""Fixed delay: the next run is planned from the end or the start of the previous one, whatever its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from timebell import Arrived, Cancel, Cron, Every, Retry, Snooze, Timebell
from timebell.errors import InvalidInput
from timebell.ids import new_id
from timebell.model.planned_job import build_job
from timebell.model.routes import ALL_ROUTES
from timebell.store.jobs import claim as statements
from timebell.store.schedules import schedules

from .world import QUIET, START, Log, World, after, engine, jobs, offset, outcomes, raises, virtual

MINUTE_AFTER = Every("PT1M", since="last_end")
FROM_START = Every("PT1M", since="last_start")


def sleeps(*spans: float) -> Callable[[Arrived], Any]:
    """Return a handler action whose successive calls take these seconds, and later calls none."""
    left = list(spans)

    async def act(_: Arrived) -> None:
        await asyncio.sleep(left.pop(0) if left else 0)

    return act


def fails(event: Arrived) -> Any:
    return raises(ValueError())(event)


async def cursor(app: Timebell, name: str = "s") -> float | None:
    """Return the schedule's next instant in seconds after START."""
    at = (await app.schedules.get(name=name)).next_fire_at
    return None if at is None else offset(at)


async def listening(
    world: World, spec: Any = MINUTE_AFTER, act: Callable[[Arrived], Any] | None = None, **options: Any
) -> tuple[Timebell, Log]:
    """Return an app with one schedule `s` and the log of its handler."""
    app, log = world.app(), Log(act)
    app.on("t")(log)
    await app.schedule_repeat("t", spec, name="s", **options)
    return app, log


@virtual
async def test_the_next_run_starts_the_delay_after_the_previous_end(world: World) -> None:
    app, log = await listening(world, act=sleeps(5, 100, 0.25))
    async with engine(app, **QUIET):
        await world.until(after(seconds=400))
    assert log.fired == log.scheduled == [60, 125, 285, 345.25]
    assert {state for _, state, _ in await outcomes(app)} == {"completed"}


@virtual
async def test_since_last_start_keeps_its_pace_and_follows_a_long_run_immediately(world: World) -> None:
    app, log = await listening(world, FROM_START, sleeps(5, 100, 60, 59))
    async with engine(app, **QUIET):
        await world.until(after(seconds=401))
    assert log.fired == log.scheduled == [60, 120, 220, 280, 340, 400]


@virtual
async def test_the_first_run_starts_at_a_future_anchor(world: World) -> None:
    later = Every("PT1M", after(seconds=10), since="last_end")
    passed = Every("PT1M", after(hours=-3), since="last_end")
    app, log = await listening(world, later, sleeps(5))
    await app.schedule_repeat("t", passed, name="passed", payload="passed")
    async with engine(app, **QUIET):
        await world.until(after(seconds=76))
    assert list(zip(log.fired, log.payloads, strict=True)) == [(10, None), (60, "passed"), (75, None)]


@virtual
async def test_no_next_instant_is_known_during_a_run(world: World) -> None:
    app, log = await listening(world, act=sleeps(1000))
    assert await cursor(app) == 60
    async with engine(app, **QUIET):
        await world.until(after(seconds=500))
        assert await cursor(app) is None
        await world.until(after(seconds=1061))
        assert await cursor(app) == 1120
    assert (log.fired, await outcomes(app)) == ([60], [(60, "completed", None)])
    assert log.events[0].upcoming == []


@virtual
async def test_a_retry_does_not_end_the_run(world: World) -> None:
    def act(event: Arrived) -> Any:
        return fails(event) if event.attempt < 3 else None

    app, log = await listening(world, act=act, retry=Retry(attempts=3, backoff="fixed", delay=100, jitter=0))
    async with engine(app, **QUIET):
        await world.until(after(seconds=321))
    assert log.fired == [60, 160, 260, 320]
    assert len({event.occurrence_key for event in log.events}) == 2


@virtual
async def test_since_last_start_counts_from_the_last_attempt(world: World) -> None:
    def act(event: Arrived) -> Any:
        return fails(event) if event.attempt == 1 else asyncio.sleep(20)

    app, log = await listening(world, FROM_START, act, retry=Retry(attempts=2, backoff="fixed", delay=100, jitter=0))
    async with engine(app, **QUIET):
        await world.until(after(seconds=221))
    assert log.fired == [60, 160, 220]


@pytest.mark.parametrize(
    ("act", "state"),
    [(fails, "failed"), (raises(Cancel("enough")), "cancelled"), (None, "completed")],
    ids=["failed", "cancelled", "completed"],
)
@virtual
async def test_the_next_run_follows_any_outcome(world: World, act: Any, state: str) -> None:
    app, log = await listening(world, act=act, retry=Retry(attempts=1))
    async with engine(app, **QUIET):
        await world.until(after(seconds=181))
    assert log.fired == [60, 120, 180]
    assert [found for _, found, _ in await outcomes(app)] == [state] * 3


@virtual
async def test_a_snooze_does_not_end_the_run(world: World) -> None:
    def act(event: Arrived) -> Any:
        if event.attempt == 1:
            raise Snooze(200)

    app, log = await listening(world, act=act)
    async with engine(app, **QUIET):
        await world.until(after(seconds=321))
    assert log.fired == [60, 260, 320]


@virtual
async def test_an_outage_costs_one_late_run(world: World) -> None:
    app, log = await listening(world)
    await world.until(after(hours=30))
    async with engine(app, **QUIET):
        await world.advance(seconds=61)
    assert log.scheduled == [60, 108_060]
    assert log.fired == [108_000, 108_060]
    assert await outcomes(app) == [(60, "completed", None), (108_060, "completed", None)]


@virtual
async def test_an_expired_run_counts_as_an_end(world: World) -> None:
    app, log = await listening(world, expires_after=30)
    await world.until(after(hours=1))
    async with engine(app, **QUIET):
        await world.advance(seconds=61)
    assert log.fired == [3660]
    assert (await outcomes(app))[0] == (60, "skipped", "expired")


@virtual
async def test_cancelling_a_pending_run_schedules_the_next_one(world: World) -> None:
    app, log = await listening(world, queue="slow")
    await app.pause_queue("slow")
    async with engine(app, **QUIET):
        await world.until(after(seconds=90))
        (waiting,) = await jobs(app, status="pending")
        assert (await app.cancel(waiting.id)).outcome == "prevented"
        assert await cursor(app) == 150
        await app.resume_queue("slow")
        await world.until(after(seconds=151))
    assert log.fired == [150]


@virtual
async def test_cancel_all_of_a_schedule_does_not_stop_it(world: World) -> None:
    app, log = await listening(world, queue="slow")
    await app.pause_queue("slow")
    async with engine(app, **QUIET):
        await world.until(after(seconds=90))
        swept = await app.cancel_all(schedule_id=(await app.schedules.get(name="s")).id)
        assert swept.prevented == 1
        await app.resume_queue("slow")
        await world.until(after(seconds=151))
    assert log.fired == [150]


@virtual
async def test_rescheduling_a_pending_run_delays_the_next_one(world: World) -> None:
    app, log = await listening(world, queue="slow")
    await app.pause_queue("slow")
    async with engine(app, **QUIET):
        await world.until(after(seconds=90))
        (waiting,) = await jobs(app, status="pending")
        await app.reschedule(waiting.id, after(seconds=300))
        await app.resume_queue("slow")
        await world.until(after(seconds=361))
    assert log.fired == [300, 360]


@virtual
async def test_a_manually_retried_run_is_not_overlapped(world: World) -> None:
    def act(event: Arrived) -> Any:
        return fails(event) if event.fired_at < after(seconds=70) else asyncio.sleep(80)

    app, log = await listening(world, act=act, retry=Retry(attempts=1))
    async with engine(app, **QUIET):
        await world.until(after(seconds=100))
        (dead,) = await jobs(app, status="failed")
        await app.retry(dead.id)
        await world.until(after(seconds=341))
    assert log.fired == [60, 100, 240]
    assert await outcomes(app) == [(60, "completed", None), (120, "skipped", "overlap"), (240, "completed", None)]
    assert await cursor(app) == 380


@virtual
async def test_a_manual_retry_between_two_runs_moves_neither(world: World) -> None:
    app, log = await listening(world, act=lambda event: fails(event) if event.attempt == 1 else None, retry=Retry(1))
    async with engine(app, **QUIET):
        await world.until(after(seconds=70))
        (dead,) = await jobs(app, status="failed")
        await app.retry(dead.id)
        await world.until(after(seconds=121))
    assert log.fired == [60, 70, 120]


@virtual
async def test_the_delay_counts_from_the_end_of_a_run_cancelled_in_flight(world: World) -> None:
    app, log = await listening(world, act=lambda event: asyncio.sleep(50) if event.attempt == 1 else None)
    async with engine(app, **QUIET):
        await world.until(after(seconds=70))
        (running,) = await jobs(app, status="running")
        assert (await app.cancel(running.id)).outcome == "in_flight"
        assert await cursor(app) is None
        await world.until(after(seconds=171))
    assert log.fired == [60, 170]


@virtual
async def test_the_run_of_a_dead_node_is_reclaimed_and_its_end_counts(world: World) -> None:
    app, log = await listening(world)
    await world.until(after(seconds=61))
    await app.store.run(schedules.fire_due_schedules, build_job, world.clock.now(), 10)
    lane = statements.QueueLane("default", 0, None, None, has_limits=False)
    (ghost,) = await app.store.run(statements.claim_batch, lane, ALL_ROUTES, new_id(START), 1, world.clock.now())
    await world.until(after(seconds=300))
    assert await cursor(app) is None
    async with engine(app):
        await world.until(after(seconds=361))
    assert [(event.job_id, event.attempt) for event in log.events] == [(ghost.id, 2), (log.events[1].job_id, 1)]
    assert log.fired == [300, 360]


@virtual
async def test_a_stopping_node_returns_its_run_and_none_is_lost(world: World) -> None:
    app, log = await listening(world, act=sleeps(10_000))
    async with engine(app, drain=5.0, **QUIET):
        await world.until(after(seconds=100))
    assert await cursor(app) is None
    await world.until(after(seconds=500))
    again, second = world.app(), Log()
    again.on("t")(second)
    async with engine(again, **QUIET):
        await world.until(after(seconds=561))
    assert (log.fired, second.fired) == ([60], [500, 560])


@virtual
async def test_jitter_delays_the_start_and_not_the_instant(world: World) -> None:
    app, log = await listening(world, jitter=30)
    async with engine(app, **QUIET):
        await world.until(after(seconds=200))
    assert log.scheduled[0] == 60 < log.fired[0] < 90
    assert log.scheduled[1] - log.fired[0] == pytest.approx(60)
    assert log.fired[1] > log.scheduled[1]


# Edits.


@pytest.mark.parametrize(
    ("spec", "fired"),
    [
        (Every("PT2M", since="last_end"), [60, 280]),
        (Every("PT2M", since="last_start"), [60, 180, 300]),
        (Cron("*/5 * * * *"), [60, 300]),
    ],
    ids=["last_end", "last_start", "cron"],
)
@virtual
async def test_an_edit_during_a_run_applies_from_its_end(world: World, spec: Any, fired: list[float]) -> None:
    app, log = await listening(world, act=sleeps(100))
    async with engine(app, **QUIET):
        await world.until(after(seconds=90))
        edited = await app.schedule_repeat("t", spec, name="s", replace=True)
        assert edited.next_fire_at == (after(minutes=5) if isinstance(spec, Cron) else None)
        await world.until(after(seconds=301))
    assert log.fired == fired


@virtual
async def test_an_edit_during_a_run_turns_a_grid_into_a_fixed_delay(world: World) -> None:
    app, log = await listening(world, Cron("* * * * *"), sleeps(100))
    async with engine(app, **QUIET):
        await world.until(after(seconds=90))
        await app.schedule_repeat("t", MINUTE_AFTER, name="s", replace=True)
        await world.until(after(seconds=281))
    assert log.fired == [60, 220, 280]


@pytest.mark.parametrize(
    ("at", "spec", "next_at"),
    [
        (100, Every("PT90S", since="last_end"), 150),  # the delay continues, longer
        (100, Every("PT50S", since="last_end"), 110),  # or shorter
        (100, Every("PT20S", since="last_end"), 120),  # but an edit fires nothing by itself
        (100, Every("PT10M", since="last_end"), 660),
        (100, Every("PT10M", after(seconds=130), since="last_end"), 130),
        (30, Every("PT20S", since="last_end"), 50),  # before the first run: from the edit, as the anchor is past
        (30, Every("PT50S", since="last_end"), 50),
        (100, Cron("* * * * *"), 120),
    ],
)
@virtual
async def test_an_edit_between_two_runs(world: World, at: float, spec: Any, next_at: float) -> None:
    app, log = await listening(world)
    async with engine(app, **QUIET):
        await world.until(after(seconds=at))
        edited = await app.schedule_repeat("t", spec, name="s", replace=True)
        assert edited.next_fire_at == after(seconds=next_at)
        await world.until(after(seconds=next_at, milliseconds=1))
    assert log.fired == ([60, next_at] if at > 60 else [next_at])


@virtual
async def test_edits_of_other_fields_leave_the_delay_unchanged(world: World) -> None:
    app, log = await listening(world)
    async with engine(app, **QUIET):
        for number in range(1, 6):
            await world.until(after(seconds=60 + number * 10))
            await app.schedule_repeat("t", MINUTE_AFTER, name="s", payload=number, replace=True)
        await world.until(after(seconds=121))
    assert list(zip(log.fired, log.payloads, strict=True)) == [(60, None), (120, 5)]


@virtual
async def test_a_grid_edited_between_runs_starts_its_delay_at_the_edit(world: World) -> None:
    app, log = await listening(world, Cron("* * * * *"))
    async with engine(app, **QUIET):
        await world.until(after(seconds=70))
        await app.schedule_repeat("t", MINUTE_AFTER, name="s", replace=True)
        await world.until(after(seconds=191))
    assert log.fired == [60, 130, 190]


@virtual
async def test_parallel_runs_at_the_time_of_an_edit_do_not_stop_the_schedule(world: World) -> None:
    app, log = await listening(world, Cron("* * * * *"), sleeps(500, 150), overlap="allow")
    async with engine(app, **QUIET):
        await world.until(after(seconds=130))
        await app.schedule_repeat("t", Every("PT100S", since="last_end"), name="s", replace=True)
        await world.until(after(seconds=651))
    assert log.fired == [60, 120, 630]
    skipped = [row for row in await outcomes(app) if row[1] == "skipped"]
    assert skipped == [(at, "skipped", "overlap") for at in (230, 330, 430, 530)]


@virtual
async def test_a_catch_up_chain_finishes_before_the_delay_begins(world: World) -> None:
    app, log = await listening(world, Cron("* * * * *"), lambda _: asyncio.sleep(10), catch_up="all", missed_after=5)
    await world.until(after(seconds=190))
    async with engine(app, **QUIET):
        await world.advance(seconds=5)
        await app.schedule_repeat("t", MINUTE_AFTER, name="s", replace=True)
        await world.advance(seconds=120)
    assert log.fired == [190, 200, 210, 280]


# Pause, trigger, backfill, revert.


@pytest.mark.parametrize(
    ("catch_up", "fired", "skipped"), [(False, [60, 360], [(120, "skipped", "paused")]), (True, [60, 300, 360], [])]
)
@virtual
async def test_a_pause_between_two_runs(
    world: World, catch_up: bool, fired: list[float], skipped: list[tuple[float, str, str]]
) -> None:
    app, log = await listening(world)
    id_ = (await app.schedules.get(name="s")).id
    async with engine(app, **QUIET):
        await world.until(after(seconds=70))
        await app.schedules.pause(id_)
        await world.until(after(seconds=300))
        await app.schedules.resume(id_, catch_up=catch_up)
        await world.until(after(seconds=361))
    assert log.fired == fired
    assert [row for row in await outcomes(app) if row[1] == "skipped"] == skipped


@pytest.mark.parametrize(("resumed", "fired"), [(120, [60, 220]), (170, [60, 220]), (300, [60, 360])])
@virtual
async def test_a_pause_during_a_run(world: World, resumed: float, fired: list[float]) -> None:
    app, log = await listening(world, act=sleeps(100))
    id_ = (await app.schedules.get(name="s")).id
    async with engine(app, **QUIET):
        await world.until(after(seconds=80))
        await app.schedules.pause(id_)
        await world.until(after(seconds=resumed))
        await app.schedules.resume(id_)
        await world.until(after(seconds=fired[-1] + 1))
    assert log.fired == fired


@virtual
async def test_a_schedule_created_disabled_starts_when_it_is_resumed(world: World) -> None:
    app, log = await listening(world, enabled=False)
    async with engine(app, **QUIET):
        await world.until(after(seconds=100))
        await app.schedules.resume((await app.schedules.get(name="s")).id)
        await world.until(after(seconds=161))
    assert log.fired == [160]


@virtual
async def test_a_triggered_run_moves_nothing_and_is_not_overlapped(world: World) -> None:
    app, log = await listening(world, act=sleeps(0, 10, 0, 100))
    id_ = (await app.schedules.get(name="s")).id
    async with engine(app, **QUIET):
        await world.until(after(seconds=70))
        await app.schedules.trigger(id_)
        await world.until(after(seconds=150))
        await app.schedules.trigger(id_)
        await world.until(after(seconds=311))
    assert log.fired == [60, 70, 120, 150, 310]
    assert [row for row in await outcomes(app) if row[1] == "skipped"] == [(180, "skipped", "overlap")]


@virtual
async def test_a_fixed_delay_has_nothing_to_backfill(world: World) -> None:
    app, _ = await listening(world)
    id_ = (await app.schedules.get(name="s")).id
    await app.schedules.pause(id_)
    await world.until(after(hours=1))
    await app.schedules.resume(id_)
    found = await app.schedules.backfill(id_, after(hours=-9), after(hours=1))
    assert (found.instants, found.already_run, await outcomes(app)) == ([], 0, [(60, "skipped", "paused")])


@virtual
async def test_a_revert_keeps_the_delay(world: World) -> None:
    app, log = await listening(world)
    async with engine(app, **QUIET):
        await world.until(after(seconds=70))
        edited = await app.schedule_repeat("t", Every("PT5M", since="last_start"), name="s", replace=True)
        assert edited.next_fire_at == after(seconds=360)
        await app.schedules.revert(edited.id, 1)
        await world.until(after(seconds=121))
    assert log.fired == [60, 120]


# Bounds, code, refusals.


@virtual
async def test_start_and_end_bound_a_fixed_delay(world: World) -> None:
    app, log = await listening(world, start=after(seconds=200), end=after(seconds=330), act=sleeps(5))
    async with engine(app, **QUIET):
        await world.until(after(seconds=1000))
    assert log.fired == [200, 265, 325]
    assert await cursor(app) is None


@virtual
async def test_a_fixed_delay_defined_in_code(world: World) -> None:
    app, log = world.app(), Log(sleeps(30))
    app.schedule("s", every=MINUTE_AFTER)(log)
    async with engine(app, **QUIET):
        await world.until(after(seconds=151))
    again, second = world.app(), Log()
    again.schedule("s", every=Every("PT1M", since="last_end"))(second)
    async with engine(again, **QUIET):
        await world.until(after(seconds=211))
    assert (log.fired, second.fired) == ([60, 150], [210])


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("INVALID_OVERLAP", {"overlap": "allow"}),
        ("INVALID_CATCH_UP", {"catch_up": "all"}),
        ("INVALID_CATCH_UP", {"catch_up": "skip"}),
        ("INVALID_RECURRENCE", {"max_runs": 3}),
        ("NEVER_FIRES", {"end": after(seconds=60)}),
    ],
)
@virtual
async def test_options_that_contradict_a_fixed_delay_are_refused(
    world: World, code: str, options: dict[str, Any]
) -> None:
    app = world.app()
    with pytest.raises(InvalidInput) as refused:
        await app.schedule_repeat("t", MINUTE_AFTER, **options)
    assert refused.value.code == code
    assert refused.value.fix
    assert (await app.schedules.list(None, 10, None)).items == []
