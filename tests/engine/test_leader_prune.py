"""Pruning many finished jobs does not delay a heartbeat."""

from __future__ import annotations

from itertools import pairwise

import pytest

from timebell.engine.leader import leader

from .world import Log, World, engine, jobs, virtual


@virtual
async def test_each_heartbeat_prunes_a_batch_of_old_jobs_until_none_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "PRUNE_BATCH_SIZE", 3)
    monkeypatch.setattr(leader, "PRUNE_BUDGET_SECONDS", 0.0)
    app = world.app()
    app.on("a")(Log())
    for _ in range(10):
        await app.schedule_at("a")
    async with engine(app):
        await world.advance(seconds=1)
    await world.advance(minutes=2)
    left = [len(await jobs(app))]
    async with engine(app, retention=60.0, heartbeat=5.0):
        for _ in range(20):
            await world.advance(seconds=5)
            left.append(len(await jobs(app)))
    assert left[0] == 10
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) < 10
