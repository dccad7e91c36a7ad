"""An exception of a target fails the attempt like any other failure; the attempt is not abandoned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from timebell.model.job import JobState
from timebell.targets.base import Delivery, Outcome

from .world import World, engine, virtual


class FaultyTarget:
    """Raises an exception, at once or after a second."""

    kind = "faulty"

    def __init__(self, error: Exception, delay_seconds: float) -> None:
        self.error, self.delay_seconds = error, delay_seconds

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        raise self.error

    async def close(self) -> None: ...


@virtual
@pytest.mark.parametrize("delay_seconds", [0.0, 1.0])
@pytest.mark.parametrize("error", [TimeoutError("no answer"), ValueError("no answer")], ids=["TimeoutError", "other"])
async def test_an_exception_of_a_target_fails_the_attempt(world: World, error: Exception, delay_seconds: float) -> None:
    app = world.app(targets=[FaultyTarget(error, delay_seconds)])
    made = await app.schedule_at("a", target={"kind": "faulty"}, timeout=5, retry={"attempts": 1})
    async with engine(app) as service:
        await world.advance(seconds=2)
        job = await app.get(made.id)
        assert service.node.running_attempts == {}
    assert (job.state, job.error_code) == (JobState.FAILED, "TARGET_ERROR")
    assert [one["code"] for one in job.attempts] == ["TARGET_ERROR"]
