"""Where a whole look at the lanes takes long, nobody waits for it, and what only it sees still starts."""

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

TAKES = 0.1  # seconds of a whole look
WITHIN = (1 + queue_scanner.REST + 1) * TAKES  # for the one that has begun, its rest, and the next


class Looks:
    """The whole looks of an app's engine: each takes a while, or the database is gone when it ends."""

    def __init__(self, app: Timebell, world: World) -> None:
        self.ended: list[datetime] = []
        self.takes = TAKES
        self.fails = False
        self._hot, self._world = app.store.hot, world
        app.store.hot = self._delayed  # type: ignore[method-assign,assignment]

    async def _delayed(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = await self._hot(operation, *args, **kwargs)
        if operation is claim.seen and len(args) == 2:
            await self._world.advance(seconds=self.takes)
            self.ended.append(self._world.clock.now())
            if self.fails:
                raise StoreUnreachable("sqlite:///gone.db", "It went away.")
        return found


@asynccontextmanager
async def _slow(world: World) -> AsyncIterator[tuple[Timebell, Log, Looks]]:
    """An engine whose whole looks take long, five seconds after its first job ran."""
    app, log = world.app(), Log()
    app.on("t")(log)
    await app.schedule_at("t", after())
    looks = Looks(app, world)
    async with engine(app, heartbeat=3600.0, lease=10_800.0, poll=3600.0):
        await world.advance(seconds=5)
        yield app, log, looks


@virtual
async def test_what_is_made_for_now_starts_without_a_whole_look(world: World) -> None:
    async with _slow(world) as (app, log, looks):
        del looks.ended[:]
        for _ in range(20):
            await app.schedule_at("t", world.clock.now())
            await world.advance(seconds=0.01)
            assert log.events[-1].fired_at - log.events[-1].scheduled_at < timedelta(seconds=0.01)
    assert len(log.events) == 21
    assert len(looks.ended) <= 2


@virtual
async def test_what_has_waited_for_another_starts_soon_as_well(world: World) -> None:
    app = world.app()
    log = Log(lambda _: world.advance(seconds=10))
    app.on("t")(log)
    app.queue("q", concurrency_per_group=1)
    for _ in range(3):
        await app.schedule_at("t", queue="q", group="g")
    Looks(app, world)
    async with engine(app, heartbeat=3600.0, lease=10_800.0, poll=3600.0):
        await world.advance(seconds=25)
    first, second, third = log.fired
    assert 10 <= second - first <= 10 + WITHIN
    assert 10 <= third - second <= 10 + WITHIN


@virtual
async def test_a_lane_that_nothing_was_in_starts_soon_as_well(world: World) -> None:
    async with _slow(world) as (app, log, _):
        for lane in ({"queue": "beside"}, {"priority": 3}, {"priority": -3}):
            await world.advance(seconds=5)
            await app.schedule_at("t", world.clock.now(), **lane)
            await world.advance(seconds=WITHIN)
            assert log.fired[-1] - log.scheduled[-1] <= WITHIN
    assert len(log.events) == 4


@virtual
async def test_whole_looks_rest_and_end_where_nobody_looks(world: World) -> None:
    app = world.app()
    log = Log()
    app.on("t")(log)
    for n in range(1000):
        await app.schedule_at("t", after(milliseconds=10 * n))
    looks = Looks(app, world)
    async with engine(app, heartbeat=3600.0, lease=10_800.0, poll=0.01):
        await world.advance(seconds=10)
        assert len(log.events) == 1000
        assert 8 <= len(looks.ended) <= 10 / ((1 + queue_scanner.REST) * TAKES) + 2


@virtual
async def test_a_whole_look_that_failed_is_made_again(world: World) -> None:
    async with _slow(world) as (app, log, looks):
        looks.fails = True
        await app.schedule_at("t", world.clock.now(), queue="beside")
        await world.advance(seconds=5)
        assert len(log.events) == 1
        looks.fails = False
        await world.advance(seconds=2)
        assert len(log.events) == 2


@virtual
async def test_after_a_look_that_an_outage_held_up_the_next_is_soon(world: World) -> None:
    async with _slow(world) as (app, log, looks):
        looks.takes = 10.0
        await app.schedule_at("t", world.clock.now(), queue="held up")
        await world.advance(seconds=11)
        looks.takes = TAKES
        await app.schedule_at("t", world.clock.now(), queue="beside")
        await world.advance(seconds=2)
        assert len(log.events) == 3


@virtual
async def test_looks_are_whole_again_once_they_are_quick(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _slow(world) as (app, log, looks):
        monkeypatch.setattr(queue_scanner, "SLOW", 2 * TAKES)
        await app.schedule_at("t", world.clock.now())
        await world.advance(seconds=WITHIN)
        del looks.ended[:]
        await app.schedule_at("t", world.clock.now())
        await world.advance(seconds=2 * TAKES)
        assert len(looks.ended) == 1
        assert len(log.events) == 3
