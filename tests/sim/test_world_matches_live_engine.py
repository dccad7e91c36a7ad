"""Preview, simulation and live engine agree on every instant over a year with clock changes."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import httpx2
import pytest

from timebell import Arrived, Calendar, Cron, Dates, Every, Hours, RRule, Timebell
from timebell.api import server, v1
from timebell.clock import VirtualClock
from timebell.engine.leader.continuous_audit import AuditResult
from timebell.model.job import Job
from timebell.recurrence import Recurrence, Spec
from timebell.recurrence.instants import format_instant
from timebell.recurrence.preview import next_fires
from timebell.sim.loop import run_virtual
from timebell.sim.world import World

START = datetime(2027, 1, 1, tzinfo=UTC)
END = START + timedelta(days=366)
TICK = timedelta(microseconds=1)
SPECS: dict[str, tuple[Spec, str]] = {
    "gap": (Cron("30 2 * * *"), "America/New_York"),
    "gap-shift": (Cron("15 2 * * 0", gap="shift"), "Europe/Berlin"),
    "gap-skip": (Cron("15 2 * * 0", gap="skip"), "Europe/Berlin"),
    "fold-both": (Cron("30 1 * * 0", fold="both"), "Europe/London"),
    "fold-last": (Cron("30 1 * * 0", fold="last"), "America/Chicago"),
    "half-hours": (Cron("*/30 0-3 * 3,4,10,11 0"), "Australia/Lord_Howe"),
    "weekdays": (Cron("0 9 * * 1-5"), "Asia/Seoul"),
    "last": (Cron("0 0 31 * *"), "America/Sao_Paulo"),
    "days": (Every("P1D", anchor=datetime(2027, 1, 1, 2, 30)), "Europe/Paris"),
    "months": (Every("P1M", anchor=datetime(2027, 1, 31, 2, 15)), "America/New_York"),
    "hours": (Every("PT36H", anchor=START), "Europe/Berlin"),
    "both": (Cron("0 1 * * 0") | Every("P1D", anchor=datetime(2027, 1, 1, 2, 15)), "Europe/London"),
    "except": (Cron("30 2 * * *") - Cron("30 2 * * 1"), "America/New_York"),
    "within": (Cron("*/30 * 14 3 *") & Hours("01:15", "03:45"), "America/Chicago"),
    "rolled": (Cron("30 2 1,14,28 * *").on(Calendar(holidays=["2027-03-15"]), "next"), "America/New_York"),
    "off": (Cron("30 2 * 3,10 *").on(Calendar()), "Europe/Berlin"),
    "rule": (
        RRule("FREQ=MONTHLY;BYDAY=2SU;BYHOUR=2;BYMINUTE=30", dtstart=datetime(2027, 1, 10, 2, 30)),
        "America/New_York",
    ),
    "days-of-a-rule": (RRule("FREQ=DAILY;INTERVAL=3", dtstart=datetime(2027, 1, 1, 1, 30)), "Europe/London"),
    "dates": (Dates([datetime(2027, 3, 14, 2, 30), datetime(2027, 11, 7, 1, 30)]), "America/New_York"),
}
# Bounds of some schedules.
OPTIONS: dict[str, dict[str, Any]] = {
    "half-hours": {"start": datetime(2027, 3, 28, tzinfo=UTC), "end": datetime(2027, 10, 10, tzinfo=UTC)},
    "gap": {"max_runs": 80},
    "days": {"max_runs": 300, "start": datetime(2027, 2, 1, tzinfo=UTC)},
}
Fired = dict[str, list[datetime]]


async def _define(app: Timebell) -> tuple[dict[str, Recurrence], Fired]:
    """Create the schedules, each with its own topic; return their recurrences and the lists of fired instants."""
    fired: Fired = defaultdict(list)

    @app.on("*", handles=True)
    async def note(event: Arrived) -> None:
        assert event.late_by == timedelta(0)
        assert event.upcoming[:1] == upcoming(made[event.topic], event.scheduled_at)
        fired[event.topic].append(event.scheduled_at)

    made: dict[str, Recurrence] = {}
    for name, (spec, zone) in SPECS.items():
        schedule = await app.schedule_repeat(name, spec, timezone=zone, **OPTIONS.get(name, {}))
        if name in ("gap-shift", "rolled", "within"):
            first, second = islice(schedule.recurrence.between(START + TICK, END), 2)
            await app.schedules.skip(schedule.id, first)
            schedule = await app.schedules.move(schedule.id, second, second + timedelta(hours=1, minutes=1))
        made[name] = schedule.recurrence.effective()
    await app.schedules.pause((await app.schedule_repeat("paused", Cron("0 0 * * *"), timezone="UTC")).id)
    upcoming_instants.clear()
    cursor = None
    while True:  # all occurrences of the year, before they fire
        page = await app.schedules.upcoming(START, END + TICK, cursor=cursor)
        for one in page:
            upcoming_instants[one.topic].append(one.at)
        if (cursor := page.next_cursor) is None:
            return made, fired


upcoming_instants: Fired = defaultdict(list)
"""Instants that `app.schedules.upcoming` returned in advance."""


def upcoming(recurrence: Recurrence, at: datetime) -> list[datetime]:
    following = recurrence.next(at)
    return [] if following is None else [following]


forecast: dict[datetime, int] = {}
"""Counts per minute of the first weeks that `GET /forecast` returned in advance."""
audited: list[AuditResult] = []
WEEKS = 13  # across the clock changes of spring


async def _forecast(app: Timebell) -> None:
    site = server.HttpApp(app, [v1.build_routes(app.features)], allow_local=True)
    transport = httpx2.ASGITransport(app=site, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700/api/v1") as web:
        for week in range(WEEKS):
            since = START + TICK + timedelta(weeks=week)
            params = {"from": format_instant(since), "to": format_instant(since + timedelta(weeks=1))}
            answer = (await web.get("/forecast", params=params)).json()
            assert answer["complete"], answer
            for minute in answer["minutes"]:
                forecast[datetime.fromisoformat(minute["at"])] = minute["schedules"]


async def _until(world: World, app: Timebell) -> None:
    """Run the year in steps of 20 days, and audit each step while its jobs are retained."""
    at = START
    while at < END:
        at, since = min(END, at + timedelta(days=20)), at
        await world.until(at + timedelta(minutes=2) if at < END else END)
        audited.append(await app.audit(since, at))


@pytest.fixture(scope="module")
def simulated() -> tuple[dict[str, Recurrence], Fired]:
    with World(start=START) as world:
        app = world.new_app()
        made, fired = world.run(_define(app))
        world.run(_forecast(app))
        world.run(_until(world, app))
        return made, fired


def test_the_forecast_agrees_with_the_simulation(simulated: tuple[dict[str, Recurrence], Fired]) -> None:
    seen: Counter[datetime] = Counter()
    for instants in simulated[1].values():
        seen.update(at.replace(second=0) for at in instants if at < START + TICK + timedelta(weeks=WEEKS))
    assert forecast == seen


def test_the_audit_agrees_with_the_simulation(simulated: tuple[dict[str, Recurrence], Fired]) -> None:
    assert [one.differences for one in audited] == [[]] * len(audited)
    last = audited[-1].end
    assert sum(one.counts.fired for one in audited) == sum(at < last for seen in simulated[1].values() for at in seen)


def test_a_paused_schedule_has_no_upcoming_occurrences(simulated: tuple[dict[str, Recurrence], Fired]) -> None:
    assert set(upcoming_instants) == set(simulated[1]) == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_preview_and_simulation_agree(name: str, simulated: tuple[dict[str, Recurrence], Fired]) -> None:
    recurrences, fired = simulated
    recurrence, seen = recurrences[name], fired[name]
    assert seen, "it fired at all"
    assert seen == list(recurrence.between(START + TICK, END + TICK))
    assert len(seen) == recurrence.count(START + TICK, END + TICK)
    assert seen == upcoming_instants[name]
    chain, at = [], START
    for _ in seen:
        (at,) = upcoming(recurrence, at)
        chain.append(at)
    assert seen == chain
    shown = next_fires(recurrence, START, len(seen))
    assert [datetime.fromisoformat(str(one["utc"])) for one in shown] == seen
    back, at = [], END + TICK
    for _ in seen:
        before = recurrence.previous(at)
        assert before is not None
        at = before
        back.append(at)
    assert back[::-1] == seen


def test_the_live_engine_and_the_simulation_agree(
    sqlite_url: str, simulated: tuple[dict[str, Recurrence], Fired]
) -> None:
    async def live() -> Fired:
        app = Timebell(sqlite_url, timezone="UTC", clock=VirtualClock(START))
        _, fired = await _define(app)
        async with app.running(poll=86_400.0, heartbeat=86_400.0, lease=300_000.0):
            await asyncio.sleep((END - START).total_seconds() + 1)
        await app.close()
        return fired

    assert run_virtual(live()) == simulated[1]


async def _jobs(app: Timebell, schedule_id: str) -> AsyncIterator[Job]:
    cursor = None
    while True:
        page = await app.list(schedule_id=schedule_id, limit=500, cursor=cursor)
        for job in page:
            yield job
        if (cursor := page.next_cursor) is None:
            return


def test_the_engine_in_real_time_fires_the_same_instants(sqlite_url: str) -> None:
    """Every second, and several times a second, for three seconds of real time."""

    async def live() -> None:
        app = Timebell(sqlite_url, timezone="Europe/Paris")
        fired: Fired = defaultdict(list)
        over = asyncio.Event()

        @app.on("*", handles=True)
        async def note(event: Arrived) -> None:
            assert event.late_by >= timedelta(0)
            fired[event.topic].append(event.scheduled_at)
            if len(fired["cron"]) >= 3 and len(fired["odd"]) >= 2:
                over.set()

        begin = app.clock.now()
        quarters = Dates([begin + timedelta(seconds=n / 4) for n in range(1, 100)])
        specs = {"cron": Cron("* * * * * *"), "quarters": quarters, "odd": Every("PT1.1S")}
        made = {name: (await app.schedule_repeat(name, spec, overlap="allow")) for name, spec in specs.items()}
        page = await app.schedules.upcoming(begin, begin + timedelta(seconds=60))
        async with app.running():
            await asyncio.wait_for(over.wait(), 90)
        for name, one in made.items():
            rows = [job async for job in _jobs(app, one.id)]  # jobs due at the very end may not have started
            seen = sorted(job.scheduled_at for job in rows)
            assert len(seen) == len(set(seen)) >= 2
            assert set(fired[name]) <= set(seen)
            assert len(fired[name]) == len(set(fired[name])) == sum(job.attempt > 0 for job in rows)
            first = one.next_fire_at
            assert first is not None
            assert seen == list(one.recurrence.between(first, seen[-1] + TICK)), name
            to_come = [each.at for each in page if each.topic == name]
            assert [at for at in seen if at in to_come] == [at for at in to_come if at <= seen[-1]]
        await app.close()

    asyncio.run(live())
