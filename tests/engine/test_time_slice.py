"""A batch of handlers that block the event loop: completions are written and other tasks run meanwhile."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from timebell import Arrived, JobSpec, Timebell
from timebell.engine.time_slice import MAX_COMPLETION_DELAY_SECONDS
from timebell.errors import StoreError
from timebell.model.job import Completion, JobState
from timebell.sim.loop import VirtualLoop

from .world import World, engine, jobs, virtual

COUNT = 40
BLOCKED_SECONDS = 0.01
PATHS = pytest.mark.parametrize("full_path", [False, True], ids=["fast path", "full path"])


def block(seconds: float) -> None:
    """Let virtual time pass within one step of a task, like a blocking call."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.virtual_time += seconds


def on_blocking(app: Timebell, full_path: bool) -> dict[str, float]:
    """Register a handler that blocks; return the times at which jobs ended, by id."""
    ended: dict[str, float] = {}

    @app.on("blocking")
    async def handle(event: Arrived) -> None:
        block(BLOCKED_SECONDS)
        ended[event.job_id] = asyncio.get_running_loop().time()

    if full_path:

        @app.middleware
        async def pass_on(event: Arrived, call_next: Any) -> Any:
            return await call_next(event)

    return ended


@PATHS
@virtual
async def test_a_completion_is_written_soon_after_its_handler_ended(world: World, full_path: bool) -> None:
    app = world.app()
    ended, written = on_blocking(app, full_path), {}
    made = await app.schedule_many([JobSpec(topic="blocking") for _ in range(COUNT)])
    async with engine(app) as service:
        write = service.completer.write

        async def observe(batch: list[Completion]) -> list[Completion]:
            written.update({completion.id: asyncio.get_running_loop().time() for completion in batch})
            return await write(batch)

        service.completer.write = observe  # type: ignore[method-assign]
        await world.advance(seconds=5)
    assert ended.keys() == written.keys() == {job.id for job in made}
    assert max(written[id_] - ended[id_] for id_ in ended) <= MAX_COMPLETION_DELAY_SECONDS


@PATHS
@virtual
async def test_handlers_of_at_most_two_slices_are_unwritten_on_a_slow_database(world: World, full_path: bool) -> None:
    app, unwritten, written = world.app(), [], []
    ended = on_blocking(app, full_path)
    await app.schedule_many([JobSpec(topic="blocking") for _ in range(COUNT)])
    async with engine(app) as service:
        write = service.completer.write

        async def observe(batch: list[Completion]) -> list[Completion]:
            await asyncio.sleep(1)
            unwritten.append(len(ended) - len(written))
            written.extend(batch)
            return await write(batch)

        service.completer.write = observe  # type: ignore[method-assign]
        await world.advance(seconds=COUNT)
    assert len(written) == COUNT
    assert max(unwritten) * BLOCKED_SECONDS <= 2 * (MAX_COMPLETION_DELAY_SECONDS + BLOCKED_SECONDS)


@PATHS
@virtual
async def test_other_handlers_run_while_a_batch_blocks(world: World, full_path: bool) -> None:
    app, turns = world.app(), []
    ended = on_blocking(app, full_path)
    started = asyncio.Event()

    @app.on("other")
    async def take_turns(_: Arrived) -> None:
        started.set()
        while len(ended) < COUNT:
            turns.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.001)

    async with engine(app):
        await app.schedule_at("other")
        await started.wait()
        await app.schedule_many([JobSpec(topic="blocking") for _ in range(COUNT)])
        await world.advance(seconds=5)
    assert len(ended) == COUNT
    longest = max((later - earlier for earlier, later in pairwise(turns)), default=0.0)
    assert BLOCKED_SECONDS <= longest <= MAX_COMPLETION_DELAY_SECONDS + BLOCKED_SECONDS


@PATHS
@virtual
async def test_claimed_jobs_run_while_the_store_is_unreachable(world: World, full_path: bool) -> None:
    app = world.app()
    ended = on_blocking(app, full_path)
    await app.schedule_many([JobSpec(topic="blocking") for _ in range(COUNT)])
    async with engine(app) as service:
        write = service.completer.write

        async def fail(_: list[Completion]) -> list[Completion]:
            raise StoreError("The store is unreachable.")

        service.completer.write = fail  # type: ignore[method-assign]
        await world.advance(seconds=2)
        assert len(ended) == COUNT
        service.completer.write = write  # type: ignore[method-assign]
        await world.advance(seconds=5)
    assert [(job.state, job.attempt) for job in await jobs(app)] == [(JobState.COMPLETED, 1)] * COUNT


@virtual
async def test_short_handlers_are_written_in_one_batch(world: World) -> None:
    app, batches = world.app(), []

    @app.on("short")
    async def handle(_: Arrived) -> None: ...

    await app.schedule_many([JobSpec(topic="short") for _ in range(200)])
    async with engine(app) as service:
        write = service.completer.write

        async def observe(batch: list[Completion]) -> list[Completion]:
            batches.append(len(batch))
            return await write(batch)

        service.completer.write = observe  # type: ignore[method-assign]
        await world.advance(seconds=1)
    assert [size for size in batches if size] == [200]
