"""Upcoming jobs found by a scan are claimed at their instants without another scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

import pytest

from timebell import Arrived, Timebell
from timebell.store import transaction
from timebell.store.jobs import claim, queues

from .world import World, after, engine, virtual


@pytest.fixture
def statements() -> Iterator[Counter[str]]:
    """Count the executions of each operation during the test."""
    counted: Counter[str] = Counter()

    def count(point: str) -> None:
        name, _, at = point.rpartition(".")
        counted[name] += at == "1"

    transaction.probe = count
    yield counted
    transaction.probe = None


def _listening(app: Timebell) -> list[tuple[datetime, datetime]]:
    starts: list[tuple[datetime, datetime]] = []

    @app.on("t")
    async def run(event: Arrived) -> None:
        starts.append((event.scheduled_at, event.fired_at))

    return starts


@virtual
async def test_a_dense_stretch_takes_few_scans_and_one_claim_per_job(world: World, statements: Counter[str]) -> None:
    app = world.app()
    starts = _listening(app)
    due = [after(seconds=10, milliseconds=7 * n) for n in range(100)]
    for at in due:
        await app.schedule_at("t", at)
    async with engine(app, poll=3600.0, heartbeat=3600.0, lease=10_800.0):
        await world.advance(seconds=9)
        statements.clear()
        await world.advance(seconds=2)
    assert starts == [(at, at) for at in due]
    assert statements[claim.claim_batch.__name__] >= 90
    assert statements[claim.scan_lanes.__name__] <= 10


@virtual
async def test_an_upcoming_job_does_not_start_in_a_paused_queue(world: World) -> None:
    app = world.app()
    starts = _listening(app)
    await app.schedule_at("t", after(seconds=10))
    async with engine(app, poll=3600.0, heartbeat=3600.0, lease=10_800.0) as service:
        await world.advance(seconds=5)
        await app.store.run(queues.pause, "default", None)  # like another process, without a notification
        await world.advance(seconds=10)
        assert starts == []
        await app.store.run(queues.resume, "default")
        service.node.wakeups.worker.wake()
        await world.advance(seconds=1)
    assert [at for at, _ in starts] == [after(seconds=10)]


@virtual
async def test_an_earlier_job_created_later_starts_first(world: World) -> None:
    app = world.app()
    starts = _listening(app)
    await app.schedule_at("t", after(seconds=10))
    async with engine(app, poll=3600.0, heartbeat=3600.0, lease=10_800.0):
        await world.advance(seconds=5)
        await app.schedule_at("t", after(seconds=7))
        await world.advance(seconds=10)
    assert starts == [(at, at) for at in (after(seconds=7), after(seconds=10))]


@virtual
async def test_a_cancelled_upcoming_job_does_not_delay_the_next_one(world: World) -> None:
    app = world.app()
    starts = _listening(app)
    first, second = [await app.schedule_at("t", after(seconds=10, milliseconds=n)) for n in (0, 20)]
    async with engine(app, poll=3600.0, heartbeat=3600.0, lease=10_800.0):
        await world.advance(seconds=5)
        await app.cancel(first.id)
        await world.advance(seconds=10)
    assert starts == [(second.scheduled_at, second.scheduled_at)]
