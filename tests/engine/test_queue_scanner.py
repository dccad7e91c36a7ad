"""Slow full scans of the lanes: no job waits for them, and jobs that only a full scan finds still start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from timebell import Timebell
from timebell.engine import queue_scanner
from timebell.errors import StoreUnreachable
from timebell.store.jobs import claim

from .world import Log, World, after, engine, virtual

TAKES = 0.1  # seconds of a full scan
WITHIN = (1 + queue_scanner.SCAN_PAUSE_FACTOR + 1) * TAKES  # the running scan, its pause, and the next scan


class FullScans:
    """Delay or fail the full scans of an app's engine, and record when they end."""

    def __init__(self, app: Timebell, world: World) -> None:
        self.ended: list[datetime] = []
        self.takes = TAKES
        self.fails = False
        self._run_autocommit, self._world = app.store.run_autocommit, world
        app.store.run_autocommit = self._delayed  # type: ignore[method-assign,assignment]

    async def _delayed(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = await self._run_autocommit(operation, *args, **kwargs)
        if operation is claim.scan_lanes and len(args) == 2:
            await self._world.advance(seconds=self.takes)
            self.ended.append(self._world.clock.now())
            if self.fails:
                raise StoreUnreachable("The database is gone.")
        return found


@asynccontextmanager
async def _slow(world: World) -> AsyncIterator[tuple[Timebell, Log, FullScans]]:
    """Run an engine with slow full scans; yield five seconds after its first job."""
    app, log = world.app(), Log()
    app.on("t")(log)
    await app.schedule_at("t", after())
    scans = FullScans(app, world)
    async with engine(app, heartbeat=3600.0, lease=10_800.0, poll=3600.0):
        await world.advance(seconds=5)
        yield app, log, scans


@virtual
async def test_an_immediate_job_starts_without_a_full_scan(world: World) -> None:
    async with _slow(world) as (app, log, scans):
        del scans.ended[:]
        for _ in range(20):
            await app.schedule_at("t", world.clock.now())
            await world.advance(seconds=0.01)
            assert log.events[-1].fired_at - log.events[-1].scheduled_at < timedelta(seconds=0.01)
    assert len(log.events) == 21
    assert len(scans.ended) <= 2


@virtual
async def test_a_job_released_by_its_group_starts_soon(world: World) -> None:
    app = world.app()
    log = Log(lambda _: world.advance(seconds=10))
    app.on("t")(log)
    app.queue("q", concurrency_per_group=1)
    for _ in range(3):
        await app.schedule_at("t", queue="q", group="g")
    FullScans(app, world)
    async with engine(app, heartbeat=3600.0, lease=10_800.0, poll=3600.0):
        await world.advance(seconds=25)
    first, second, third = log.fired
    assert 10 <= second - first <= 10 + WITHIN
    assert 10 <= third - second <= 10 + WITHIN


@virtual
async def test_a_job_in_an_empty_lane_starts_soon(world: World) -> None:
    async with _slow(world) as (app, log, _):
        for lane in ({"queue": "beside"}, {"priority": 3}, {"priority": -3}):
            await world.advance(seconds=5)
            await app.schedule_at("t", world.clock.now(), **lane)
            await world.advance(seconds=WITHIN)
            assert log.fired[-1] - log.scheduled[-1] <= WITHIN
    assert len(log.events) == 4


@virtual
async def test_full_scans_pause_and_stop_when_they_are_not_needed(world: World) -> None:
    app = world.app()
    log = Log()
    app.on("t")(log)
    for n in range(1000):
        await app.schedule_at("t", after(milliseconds=10 * n))
    scans = FullScans(app, world)
    async with engine(app, heartbeat=3600.0, lease=10_800.0, poll=0.01):
        await world.advance(seconds=10)
        assert len(log.events) == 1000
        assert 8 <= len(scans.ended) <= 10 / ((1 + queue_scanner.SCAN_PAUSE_FACTOR) * TAKES) + 2


@virtual
async def test_a_failed_full_scan_is_repeated(world: World) -> None:
    async with _slow(world) as (app, log, scans):
        scans.fails = True
        await app.schedule_at("t", world.clock.now(), queue="beside")
        await world.advance(seconds=5)
        assert len(log.events) == 1
        scans.fails = False
        await world.advance(seconds=2)
        assert len(log.events) == 2


@virtual
async def test_a_scan_delayed_by_an_outage_does_not_delay_the_next_one(world: World) -> None:
    async with _slow(world) as (app, log, scans):
        scans.takes = 10.0
        await app.schedule_at("t", world.clock.now(), queue="held up")
        await world.advance(seconds=11)
        scans.takes = TAKES
        await app.schedule_at("t", world.clock.now(), queue="beside")
        await world.advance(seconds=2)
        assert len(log.events) == 3


@virtual
async def test_scans_are_full_again_once_they_are_fast(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _slow(world) as (app, log, scans):
        monkeypatch.setattr(queue_scanner, "SLOW_SCAN_SECONDS", 2 * TAKES)
        await app.schedule_at("t", world.clock.now())
        await world.advance(seconds=WITHIN)
        del scans.ended[:]
        await app.schedule_at("t", world.clock.now())
        await world.advance(seconds=2 * TAKES)
        assert len(scans.ended) == 1
        assert len(log.events) == 3
