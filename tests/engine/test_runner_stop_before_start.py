"""An attempt that is stopped before its first step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from timebell import Arrived
from timebell.engine.running_attempt import AttemptEvent
from timebell.model.job import JobState

from .world import World, after, engine, virtual


@virtual
async def test_an_attempt_stopped_before_it_started_returns_its_slot(world: World) -> None:
    app, ran = world.app(), []

    @app.on("t")
    async def run(event: Arrived) -> None:
        ran.append(event.attempt)

    job = await app.schedule_at("t", after(minutes=1))
    async with engine(app, slots=1) as service:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.set_task_factory(None)
            for held in service.node.running_attempts.values():
                held.interrupt(AttemptEvent.DRAIN)

        def make(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
            if getattr(work, "__name__", "") == "_run_group":
                loop.call_soon(stop)  # before the first step of the task created here
            return asyncio.Task(work, loop=loop, **more)

        loop.set_task_factory(make)
        await world.advance(seconds=120)
        assert ran == [2]
        assert service.worker.pools[0].free_slots == 1
    ended = await app.get(job.id)
    assert (ended.state, ended.attempt) == (JobState.COMPLETED, 2)
