"""A world for the engine's tests: one SQLite file, a virtual clock, and helpers that read the outcomes."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell import Arrived, Timebell
from timebell.clock import VirtualClock
from timebell.engine.service import Service
from timebell.model.job import Job
from timebell.sim.loop import run_virtual

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
QUIET = {"poll": 3600.0, "heartbeat": 3600.0, "lease": 10_800.0}  # rare polls and heartbeats, for many virtual hours
QUIET_FOR_DAYS = {name: 24 * seconds for name, seconds in QUIET.items()}


def after(**spans: float) -> datetime:
    """Return START plus the arguments of a timedelta."""
    return START + timedelta(**spans)


def offset(at: datetime) -> float:
    """Return seconds after START."""
    return (at - START).total_seconds()


class World:
    """One database file and one clock; any number of apps, one engine at a time."""

    def __init__(self, url: str, start: datetime) -> None:
        self.url = url
        self.clock = VirtualClock(start)
        self._apps: list[Timebell] = []

    def app(self, **options: Any) -> Timebell:
        """Return a new app, like a starting process."""
        made = Timebell(self.url, clock=self.clock, **{"timezone": "UTC", **options})
        self._apps.append(made)
        return made

    async def advance(self, **spans: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(timedelta(**spans).total_seconds())

    async def until(self, instant: datetime) -> None:
        """Let virtual time pass until an instant."""
        await asyncio.sleep((instant - self.clock.now()).total_seconds())

    async def close(self) -> None:
        for app in self._apps:
            await app.close()


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test of (world, ...) on virtual time over a fresh SQLite file."""

    def run(sqlite_url: str, **fixtures: Any) -> None:
        async def body() -> None:
            world = World(sqlite_url, START)
            try:
                await test(world, **fixtures)
            finally:
                await world.close()

        run_virtual(body())

    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]
    _, *others = inspect.signature(test).parameters.values()
    first = inspect.Parameter("sqlite_url", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
    return run


class Log:
    """A handler that records its events and then calls `act`."""

    def __init__(self, act: Callable[[Arrived], Any] | None = None) -> None:
        self.events: list[Arrived] = []
        self.act = act

    async def __call__(self, event: Arrived) -> Any:
        self.events.append(event)
        if self.act is None:
            return None
        done = self.act(event)
        return await done if inspect.isawaitable(done) else done

    @property
    def fired(self) -> list[float]:
        """Start times of the attempts in seconds after START."""
        return [offset(event.fired_at) for event in self.events]

    @property
    def scheduled(self) -> list[float]:
        """Nominal instants in seconds after START."""
        return [offset(event.scheduled_at) for event in self.events]

    @property
    def payloads(self) -> list[Any]:
        return [event.payload for event in self.events]


def engine(app: Timebell, **options: Any) -> AbstractAsyncContextManager[Service]:
    """Run the app's engine for the duration of the block."""
    return app.running(**options)


async def jobs(app: Timebell, **filters: Any) -> list[Job]:
    """Return all jobs, oldest occurrence first."""
    found: list[Job] = []
    cursor = None
    while True:
        page = await app.list(limit=500, cursor=cursor, **filters)
        found += page
        if (cursor := page.next_cursor) is None:
            return sorted(found, key=lambda job: (job.scheduled_at, job.id))


async def outcomes(app: Timebell, **filters: Any) -> list[tuple[float, str, str | None]]:
    """Return (nominal seconds after START, state, reason) of every job."""
    return [(offset(job.scheduled_at), job.state.value, job.reason) for job in await jobs(app, **filters)]


def raises(error: BaseException) -> Callable[[Arrived], Any]:
    """Return a handler action that raises an exception."""

    def act(_: Arrived) -> Any:
        raise error

    return act
