"""Pruning of old jobs: only by the leader, and without delaying a heartbeat."""

from __future__ import annotations

from itertools import pairwise

import pytest

from timebell.engine.leader import leader
from timebell.ids import new_id
from timebell.store.cluster import nodes

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


@virtual
async def test_a_node_whose_lease_was_taken_prunes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease can be taken between its renewal and a chore, so each chore checks the fence in its transaction."""
    monkeypatch.setattr(leader, "CLEANUP_INTERVAL_SECONDS", 60.0)
    app = world.app()
    app.on("a")(Log())
    await app.schedule_at("a")
    async with engine(app, retention=60.0, heartbeat=5.0, lease=15.0):
        await world.advance(seconds=6)
        lease, now = await app.store.run(nodes.get_lease), app.clock.now()
        assert await app.store.run(nodes.acquire_lease, new_id(now), lease, now)
        with monkeypatch.context() as patch:
            patch.setattr(nodes, "renew_lease", lambda *_: True)
            await world.advance(minutes=5)
        assert len(await jobs(app)) == 1
        await world.advance(minutes=5)
        assert await jobs(app) == []
