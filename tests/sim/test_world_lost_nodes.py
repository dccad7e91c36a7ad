"""Frozen and disconnected nodes, and connections that break at a fault point."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any

import pytest

from timebell import Arrived, Timebell
from timebell.errors import StoreUnreachable
from timebell.model.job import JobState
from timebell.sim.world import World
from timebell.store.jobs import complete

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
Calls = list[tuple[str | None, int, str]]


def working(world: World, takes: float) -> tuple[Timebell, Calls]:
    app, calls = world.new_app(), Calls()

    @app.on("work", timeout=600)
    async def work(event: Arrived) -> None:
        calls.append((world.current_node_name(), event.attempt, "started"))
        await asyncio.sleep(takes)
        calls.append((world.current_node_name(), event.attempt, "done"))

    return app, calls


def test_a_frozen_node_does_nothing_and_another_takes_over() -> None:
    with World(start=START, nodes=2) as world:
        app, calls = working(world, 5)
        world.run(app.schedule_at("work"))
        world.run(world.advance(seconds=1))
        ((frozen, _, _),) = calls
        assert frozen is not None
        world.freeze(frozen, 60)
        world.run(world.advance(seconds=50))
        (other,) = set(world.nodes) - {frozen}
        assert calls[1:] == [(other, 2, "started"), (other, 2, "done")]
        world.run(world.advance(seconds=60))
        assert [(run.state, run.attempt) for run in world.history()] == [(JobState.COMPLETED, 2)]


@pytest.mark.parametrize("frozen_for", [15.5, 16.5, 17.5, 18.5, 19.5])
def test_a_node_that_returns_too_late_does_not_renew_its_leases(frozen_for: float) -> None:
    with World(start=START, nodes=2) as world:
        app, started = world.new_app(), []

        @app.on("work", timeout=600)
        async def work(event: Arrived) -> None:
            started.append((world.current_node_name(), event.attempt))
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(5)  # like the cleanup of a transaction with a lost connection

        world.run(app.schedule_at("work", START + timedelta(seconds=1)))  # the other's next heartbeat finds it running
        world.run(world.advance(seconds=2))
        ((frozen, _),) = started
        assert frozen is not None
        world.freeze(frozen, frozen_for)
        world.run(world.advance(seconds=21))
        assert [attempt for _, attempt in started] == [1, 2]


def test_a_node_frozen_between_claim_and_delivery_delivers_nothing() -> None:
    with World(start=START, nodes=2) as world:
        app, calls = working(world, 5)
        world.freeze(None, 60, at="claim_batch.done")
        world.run(app.schedule_at("work"))
        world.run(world.advance(seconds=120))
        assert [(attempt, what) for _, attempt, what in calls] == [(2, "started"), (2, "done")]


def test_a_disconnected_node_stops_its_attempts_when_their_lease_expires() -> None:
    with World(start=START, nodes=2) as world:
        app, calls = working(world, 100)
        world.run(app.schedule_at("work"))
        world.run(world.advance(seconds=1))
        ((cut, _, _),) = calls
        assert cut is not None
        world.cut(cut, 200)
        world.run(world.advance(seconds=190))
        assert (cut, 1, "done") not in calls
        assert [attempt for _, attempt, what in calls if what == "done"] == [2]


def test_a_lease_counts_from_the_request_that_renews_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes see a renewal before its owner if the reply is slow."""
    with World(start=START, nodes=2) as world:
        app, renewed_at, ended_at, replies = world.new_app(), list[datetime](), list[datetime](), list[float]()
        owners: list[str | None] = []

        @app.on("work", timeout=600)
        async def work(event: Arrived) -> None:
            owners.append(world.current_node_name())
            try:
                await asyncio.sleep(100)
            finally:
                ended_at.append(world.now)

        renew = complete.renew_leases

        @wraps(renew)
        def renew_and_reply_slowly(*args: Any, **more: Any) -> Any:
            renewed_at.append(world.now)
            replies.append(10.0)
            return renew(*args, **more)

        monkeypatch.setattr(complete, "renew_leases", renew_and_reply_slowly)
        world.keep_heartbeats = True
        world.delay_requests(lambda: replies.pop() if replies else 0.0)
        world.run(app.schedule_at("work"))
        while not renewed_at:
            world.run(world.advance(seconds=1))
            assert world.now < START + timedelta(minutes=1)
        world.run(world.advance(seconds=10))
        world.cut(str(owners[0]), 600)
        world.run(world.advance(seconds=30))
        assert len(owners) == 2
        lease, heartbeat = timedelta(seconds=15), timedelta(seconds=5)
        assert ended_at[0] <= renewed_at[0] + lease + heartbeat


@pytest.mark.parametrize("point", ["complete_jobs.1", "complete_jobs.commit", "complete_jobs.done", "claim_batch.done"])
def test_a_node_continues_after_a_lost_response(point: str) -> None:
    with World(start=START, nodes=2) as world:
        app, calls = working(world, 1)
        world.disconnect(at=point)
        world.run(app.schedule_at("work"))
        world.run(world.advance(seconds=60))
        assert [what for *_, what in calls] == ["started", "done"]
        assert [run.state for run in world.history()] == [JobState.COMPLETED]


def test_a_client_that_repeats_a_request_after_a_lost_response_gets_the_same_job() -> None:
    with World(start=START) as world:
        app, calls = working(world, 1)

        def request() -> str:
            later = START + timedelta(minutes=1)
            creation = app.schedule_at("work", later, client_request_id="once", on_conflict="keep")
            return world.run(creation).id

        world.disconnect("client", at="create.done")
        with pytest.raises(StoreUnreachable):
            request()
        assert request() == request()
        world.run(world.advance(minutes=2))
        assert len(calls) == 2


def test_nodes_join_and_leave() -> None:
    with World(start=START, nodes=2) as world:
        app, calls = working(world, 5)
        world.run(world.start())
        world.run(world.add_node("node-3"))
        world.run(world.drain_node("node-1"))
        world.run(world.drain_node("node-2"))
        assert world.nodes == ["node-3"]
        world.run(app.schedule_at("work"))
        world.run(world.advance(seconds=10))
        assert calls == [("node-3", 1, "started"), ("node-3", 1, "done")]
