"""Schedules that are due at one instant fire in batches, one transaction each."""

from __future__ import annotations

import pytest

from timebell import Cron
from timebell.engine import planner

from .world import Log, World, after, engine, virtual


@virtual
async def test_every_batch_starts_its_jobs_without_a_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PLAN_BATCH_SIZE", 2)
    app, log = world.app(), Log()
    app.on("t")(log)
    for number in range(12):
        await app.schedule_repeat("t", Cron("* * * * *"), name=f"s{number}")
    async with engine(app, slots=4) as service:
        await world.until(after(seconds=61))
        claims = service.node.counters.claim_sizes.series[()]
    assert log.fired == [60] * 12
    assert claims.total == 0
