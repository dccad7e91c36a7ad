"""Schedules that are due at one instant fire in batches, one transaction each."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from timebell import Cron
from timebell.engine import planner
from timebell.errors import StoreUnreachable
from timebell.store.schedules import schedules

from .world import Log, World, after, engine, virtual


@virtual
async def test_every_batch_starts_its_jobs_without_a_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PLAN_BATCH_SIZE", 2)
    monkeypatch.setattr(planner, "MIN_BATCH_SIZE", 1)
    app, log = world.app(), Log()
    app.on("t")(log)
    for number in range(12):
        await app.schedule_repeat("t", Cron("* * * * *"), name=f"s{number}")
    async with engine(app, slots=4) as service:
        await world.until(after(seconds=61))
        claims = service.node.counters.claim_sizes.series[()]
    assert log.fired == [60] * 12
    assert claims.total == 0


@virtual
async def test_a_failed_batch_is_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PLAN_BATCH_SIZE", 2)
    app, log = world.app(), Log()
    app.on("t")(log)
    for number in range(12):
        await app.schedule_repeat("t", Cron("* * * * *"), name=f"s{number}")
    run, calls = schedules.fire_due_schedules, count()

    def fail_once(*args: Any) -> schedules.FireResult:
        if world.clock.now() >= after(minutes=1) and next(calls) == 1:
            raise StoreUnreachable("The database is away.")
        return run(*args)

    async with engine(app) as service:
        monkeypatch.setattr(schedules, "fire_due_schedules", fail_once)
        await world.until(after(seconds=60.01))
        assert [*service.failing_services] == ["planner"]
        await world.until(after(seconds=62))
    assert sorted(log.scheduled) == [60] * 12
