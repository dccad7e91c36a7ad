"""Handlers that are over with their first step share a task: nobody can tell, whatever the others do."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from timebell import Arrived, Cancel, JobSpec, Snooze
from timebell.model.job import JobState

from .world import World, engine, jobs, virtual

COUNT = 6


@virtual
async def test_those_that_wait_hold_up_nobody_behind_them(world: World) -> None:
    app, told = world.app(), []

    @app.on("a")
    async def handle(event: Arrived[int]) -> int:
        told.append(f"in {event.payload}")
        if event.payload % 2:
            await asyncio.sleep(10)
        told.append(f"out {event.payload}")
        return event.payload

    made = await app.schedule_many([JobSpec(topic="a", payload=number) for number in range(COUNT)])
    async with engine(app) as service:
        await world.advance(seconds=1)
        assert sorted(told) == sorted([f"in {n}" for n in range(COUNT)] + [f"out {n}" for n in range(0, COUNT, 2)])
        assert len(service.node.held) == len(service.worker.tasks) == COUNT // 2
        await world.advance(seconds=10)
        assert (len(told), service.node.held, service.worker.tasks) == (2 * COUNT, {}, set())
        assert service.worker.hands[0].free == service.node.options.slots
    assert [(await app.get(job.id)).result for job in made] == list(range(COUNT))


@virtual
async def test_a_timeout_counts_from_the_first_step(world: World) -> None:
    app = world.app()

    @app.on("a", timeout=5.0)
    async def handle(event: Arrived[int]) -> None:
        await asyncio.sleep(event.payload)

    made = await app.schedule_many([JobSpec(topic="a", payload=seconds) for seconds in (4, 6)])
    async with engine(app):
        await world.advance(seconds=5.5)
        first, second = [await app.get(job.id) for job in made]
    assert (first.state, second.state) == (JobState.COMPLETED, JobState.PENDING)
    assert [one["code"] for one in second.attempts] == ["TIMEOUT"]


@virtual
async def test_what_a_handler_leaves_in_the_context_is_not_seen_by_the_next(world: World) -> None:
    app, seen = world.app(), []
    user: contextvars.ContextVar[int] = contextvars.ContextVar("user")

    @app.on("a")
    async def handle(event: Arrived[int]) -> None:
        seen.append(user.get(None))
        user.set(event.payload)

    await app.schedule_many([JobSpec(topic="a", payload=number) for number in range(COUNT)])
    async with engine(app):
        await world.advance(seconds=1)
    assert seen == [None] * COUNT


@virtual
async def test_a_handler_that_cancels_its_task_takes_nobody_with_it(world: World) -> None:
    app, tasks = world.app(), set()

    @app.on("a")
    async def handle(event: Arrived[int]) -> None:
        task = asyncio.current_task()
        assert task is not None
        if event.payload == 1:
            task.cancel()
            return
        assert not task.cancelling()
        tasks.add(task)
        await asyncio.sleep(event.payload)

    await app.schedule_many([JobSpec(topic="a", payload=number) for number in range(COUNT)])
    async with engine(app):
        await world.advance(seconds=COUNT)
    assert len(tasks) == COUNT - 1
    assert [job.state for job in await jobs(app)] == [JobState.COMPLETED] * COUNT
    assert [job.tries for job in await jobs(app)] == [1] * COUNT


@virtual
@pytest.mark.parametrize("again", [False, True])
async def test_what_is_raised_at_once_is_of_one_attempt(world: World, again: bool) -> None:
    app, raised = world.app(), [ValueError("no"), Snooze(60), Cancel("enough"), SystemExit(3), asyncio.CancelledError()]

    @app.on("a")
    async def handle(event: Arrived[int]) -> Any:
        if event.payload < len(raised):
            raise raised[event.payload]
        return event.payload

    made = await app.schedule_many([JobSpec(topic="a", payload=number) for number in (*range(COUNT), COUNT)])
    async with engine(app) as service:
        if again:  # of these none shares a task
            for held in service.node.handlers.matching("a"):
                service.node.handlers.lone(held.pattern).at_once = False  # type: ignore[union-attr]
        await world.advance(seconds=1)
        found = [await app.get(job.id) for job in made]
        assert service.node.held == {}
    assert [job.attempts[-1]["code"] if job.attempts else str(job.state) for job in found] == [
        "ValueError", "pending", "cancelled", "SystemExit", "CancelledError", "completed", "completed",
    ]  # fmt: skip
    assert [job.tries for job in found] == [1, 0, 1, 1, 1, 1, 1]


@virtual
async def test_an_ended_attempt_does_not_stop_who_has_its_task_now(world: World) -> None:
    app = world.app()

    @app.on("a")
    async def handle(event: Arrived[int]) -> None:
        if event.payload:
            await asyncio.sleep(10)

    await app.schedule_many([JobSpec(topic="a", payload=number) for number in (0, 1)])
    async with engine(app) as service:
        service.completer.write, write = _never, service.completer.write  # type: ignore[method-assign, assignment]
        await world.advance(seconds=1)
        ended, waits = sorted(service.node.held.values(), key=lambda held: held.attempt.payload)
        assert (ended.task, waits.task is None) == (None, False)
        ended.stop("lost")
        service.completer.write = write  # type: ignore[method-assign]
        await world.advance(seconds=20)
    assert [job.state for job in await jobs(app)] == [JobState.COMPLETED] * 2


async def _never(batch: list[Any]) -> list[Any]:
    return batch
