"""Handlers that finish in their first step share a task, without any visible effect on each other."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import wrapt
from pydantic import BaseModel, field_validator

from timebell import Arrived, Cancel, JobSpec, Snooze
from timebell.engine.running_attempt import AttemptEvent
from timebell.model.job import JobState

from .world import World, engine, jobs, virtual

COUNT = 6


@virtual
async def test_a_waiting_handler_does_not_delay_the_next_ones(world: World) -> None:
    app, calls = world.app(), []

    @app.on("a")
    async def handle(event: Arrived[int]) -> int:
        calls.append(f"in {event.payload}")
        if event.payload % 2:
            await asyncio.sleep(10)
        calls.append(f"out {event.payload}")
        return event.payload

    made = await app.schedule_many([JobSpec(topic="a", payload=number) for number in range(COUNT)])
    async with engine(app) as service:
        await world.advance(seconds=1)
        assert sorted(calls) == sorted([f"in {n}" for n in range(COUNT)] + [f"out {n}" for n in range(0, COUNT, 2)])
        assert len(service.node.running_attempts) == len(service.worker.tasks) == COUNT // 2
        await world.advance(seconds=10)
        assert (len(calls), service.node.running_attempts, service.worker.tasks) == (2 * COUNT, {}, set())
        assert service.worker.pools[0].free_slots == service.node.options.slots
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
@pytest.mark.parametrize("seconds", [(5, 2, 8), (2, 5, 8), (8, 5, 2)])
async def test_each_attempt_times_out_at_its_own_deadline(world: World, seconds: tuple[int, ...]) -> None:
    app, ended = world.app(), {}

    @app.on("a")
    async def handle(event: Arrived[int]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended[event.payload] = app.clock.now() - begin

    begin = app.clock.now()
    specs = [JobSpec(topic="a", payload=each, timeout=each, retry={"attempts": 1}) for each in (*seconds, *seconds)]
    made = await app.schedule_many(specs)
    async with engine(app):
        await world.advance(seconds=10)
    assert {each: round(at.total_seconds()) for each, at in ended.items()} == {each: each for each in seconds}
    assert {(await app.get(job.id)).attempts[0]["code"] for job in made} == {"TIMEOUT"}


@virtual
async def test_a_handler_that_ends_normally_despite_its_timeout_completes_its_job(world: World) -> None:
    app = world.app()

    @app.on("a", timeout=5.0)
    async def handle(_: Arrived) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "partial"
        return "whole"

    made = await app.schedule_many([JobSpec(topic="a") for _ in range(3)])
    async with engine(app):
        await world.advance(seconds=6)
    assert [(await app.get(job.id)).result for job in made] == ["partial"] * 3


@virtual
async def test_context_variables_do_not_leak_into_the_next_handler(world: World) -> None:
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
async def test_a_handler_that_cancels_its_task_cancels_no_other_attempt(world: World) -> None:
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
    assert [job.attempts_used for job in await jobs(app)] == [1] * COUNT


@virtual
@pytest.mark.parametrize("again", [False, True])
async def test_an_exception_in_the_first_step_affects_one_attempt(world: World, again: bool) -> None:
    app, raised = world.app(), [ValueError("no"), Snooze(60), Cancel("enough"), SystemExit(3), asyncio.CancelledError()]

    @app.on("a")
    async def handle(event: Arrived[int]) -> Any:
        if event.payload < len(raised):
            raise raised[event.payload]
        return event.payload

    made = await app.schedule_many([JobSpec(topic="a", payload=number) for number in (*range(COUNT), COUNT)])
    async with engine(app) as service:
        if again:  # these handlers do not share a task
            for held in service.node.handlers.handlers_for("a"):
                service.node.handlers.fast_path_handler(held.pattern).finishes_immediately = False  # type: ignore[union-attr]
        await world.advance(seconds=1)
        found = [await app.get(job.id) for job in made]
        assert service.node.running_attempts == {}
    assert [job.attempts[-1]["code"] if job.attempts else str(job.state) for job in found] == [
        "ValueError", "POSTPONED", "cancelled", "SystemExit", "CancelledError", "completed", "completed",
    ]  # fmt: skip
    assert [job.attempts_used for job in found] == [1, 0, 1, 1, 1, 1, 1]


@virtual
async def test_stopping_a_finished_attempt_leaves_the_next_user_of_its_task_running(world: World) -> None:
    app = world.app()

    @app.on("a")
    async def handle(event: Arrived[int]) -> None:
        if event.payload:
            await asyncio.sleep(10)

    await app.schedule_many([JobSpec(topic="a", payload=number) for number in (0, 1)])
    async with engine(app) as service:
        service.completer.write, write = _never, service.completer.write  # type: ignore[method-assign, assignment]
        await world.advance(seconds=1)
        ended, waits = sorted(service.node.running_attempts.values(), key=lambda held: held.attempt.payload)
        assert (ended.task, waits.task is None) == (None, False)
        ended.interrupt(AttemptEvent.LOSE_LEASE)
        service.completer.write = write  # type: ignore[method-assign]
        await world.advance(seconds=20)
    assert [job.state for job in await jobs(app)] == [JobState.COMPLETED] * 2


async def _never(batch: list[Any]) -> list[Any]:
    return batch


@virtual
async def test_a_handler_that_returns_a_future_is_awaited_once(world: World) -> None:
    app, seen = world.app(), []

    @wrapt.decorator
    def in_a_task(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> asyncio.Future[str]:
        return asyncio.ensure_future(wrapped(*args, **kwargs))

    @app.on("a")
    @in_a_task
    async def handle(event: Arrived) -> str:
        seen.append(event.attempt)
        return "done"

    made = await app.schedule_at("a")
    async with engine(app):
        await world.advance(seconds=1)
        job = await app.get(made.id)
    assert (job.state, job.result, seen) == (JobState.COMPLETED, "done", [1])


class Odd(BaseModel):
    """A payload whose validation raises an unexpected exception."""

    n: Decimal

    @field_validator("n")
    @classmethod
    def validate_n(cls, n: Decimal) -> Decimal:
        return {Decimal(1): n}[n]


@pytest.mark.parametrize(
    ("payload", "metadata", "state", "code"),
    [
        ({"n": 1}, {"payload_version": "two"}, JobState.FAILED, "INVALID_VERSION"),
        ({"n": 7}, {}, JobState.PENDING, "TARGET_ERROR"),
        ({"n": 1}, {"payload_version": 1}, JobState.COMPLETED, None),
    ],
)
@virtual
async def test_an_event_that_cannot_be_created_fails_the_attempt_before_its_lease_expires(
    world: World, payload: Any, metadata: dict[str, Any], state: JobState, code: str | None
) -> None:
    made = await world.app().schedule_at("a", payload=payload, metadata=metadata)
    app = world.app()

    @app.on("a")
    async def handle(_: Arrived[Odd]) -> None: ...

    async with engine(app):
        await world.advance(seconds=1)
        job = await app.get(made.id)
    error_code = job.error_code if job.error_code else next((one["code"] for one in job.attempts), None)
    assert (job.state, error_code) == (state, code)


@virtual
async def test_cancelling_the_task_of_another_attempt_ends_and_retries_that_attempt(world: World) -> None:
    app, seen = world.app(), []

    @app.on("a")
    async def handle(event: Arrived[int]) -> None:
        if event.payload == 0:  # a custom timeout that is still pending when the handler has finished
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(5, task.cancel)
        elif event.attempt == 1:
            await asyncio.sleep(10)
        seen.append((event.payload, event.attempt))

    made = await app.schedule_many([JobSpec(topic="a", payload=number, retry={"attempts": 2}) for number in range(2)])
    async with engine(app) as service:
        await world.advance(seconds=12)
        jobs_now = [await app.get(job.id) for job in made]
        assert service.node.running_attempts == {}
    assert [job.state for job in jobs_now] == [JobState.COMPLETED] * 2
    assert [one["code"] for one in jobs_now[1].attempts][:1] == ["CancelledError"]
    assert seen == [(0, 1), (1, 2)]
