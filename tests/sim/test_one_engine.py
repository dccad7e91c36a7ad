"""N24: what a preview shows, what a simulation fires and what the live loop fires is the same, over a year of jumps."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest

from timebell import Arrived, Cron, Dates, Every, Timebell
from timebell.clock import VirtualClock
from timebell.recurrence import Recurrence, Spec
from timebell.recurrence.door import next_fires
from timebell.sim.loop import run_virtual
from timebell.sim.world import World

START = datetime(2027, 1, 1, tzinfo=UTC)
END = START + timedelta(days=366)
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
    "dates": (Dates([datetime(2027, 3, 14, 2, 30), datetime(2027, 11, 7, 1, 30)]), "America/New_York"),
}
Fired = dict[str, list[datetime]]


async def _define(app: Timebell) -> tuple[dict[str, Recurrence], Fired]:
    """The schedules, each with a topic of its own, and what will have fired of each."""
    fired: Fired = defaultdict(list)

    @app.on("*", handles=True)
    async def note(event: Arrived) -> None:
        assert event.late_by == timedelta(0)
        assert event.upcoming[:1] == upcoming(made[event.topic], event.scheduled_at)
        fired[event.topic].append(event.scheduled_at)

    made = {
        name: (await app.schedule_repeat(name, spec, timezone=zone)).recurrence for name, (spec, zone) in SPECS.items()
    }
    return made, fired


def upcoming(recurrence: Recurrence, at: datetime) -> list[datetime]:
    following = recurrence.next(at)
    return [] if following is None else [following]


@pytest.fixture(scope="module")
def simulated() -> tuple[dict[str, Recurrence], Fired]:
    with World(start=START) as world:
        made, fired = world.run(_define(world.new_app()))
        world.run(world.until(END))
        return made, fired


@pytest.mark.parametrize("name", SPECS)
def test_n24_preview_and_simulation_agree(name: str, simulated: tuple[dict[str, Recurrence], Fired]) -> None:
    recurrences, fired = simulated
    recurrence, seen = recurrences[name], fired[name]
    assert seen, "it fired at all"
    assert seen == list(recurrence.between(START + timedelta(microseconds=1), END + timedelta(microseconds=1)))
    assert len(seen) == recurrence.count(START + timedelta(microseconds=1), END + timedelta(microseconds=1))
    chain, at = [], START
    for _ in seen:
        (at,) = upcoming(recurrence, at)
        chain.append(at)
    assert seen == chain
    shown = next_fires(recurrence, START, len(seen))
    assert [datetime.fromisoformat(str(one["utc"])) for one in shown] == seen
    back, at = [], END + timedelta(microseconds=1)
    for _ in seen:
        before = recurrence.previous(at)
        assert before is not None
        at = before
        back.append(at)
    assert back[::-1] == seen


def test_n24_the_live_loop_and_the_simulation_agree(
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
