"""When a slice ends, and what runs before the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from timebell.engine.time_slice import MAX_COMPLETION_DELAY_SECONDS, TimeSlice
from timebell.sim.loop import VirtualLoop, run_virtual


class Scene:
    """A time slice, and in order what happened: `write` for each wait for completions."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop, self.happened = loop, list[str]()
        self.slice = TimeSlice(loop.time, self._wait_for_write)

    async def _wait_for_write(self) -> None:
        self.happened.append("write")

    def block_until(self, end: float) -> None:
        """Let time pass like a handler that blocks the event loop."""
        self.loop.virtual_time = end


def virtual(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def body() -> None:
        await test(Scene())

    return lambda: run_virtual(body())


@virtual
async def test_an_attempt_waits_once_the_slice_is_over(scene: Scene) -> None:
    end = scene.slice.ends_at
    assert end == scene.loop.time() + MAX_COMPLETION_DELAY_SECONDS
    scene.block_until(end - 0.001)
    await scene.slice.wait()
    assert scene.happened == []
    scene.block_until(end)
    await scene.slice.wait()
    assert scene.happened == ["write"]
    assert scene.slice.ends_at == end + MAX_COMPLETION_DELAY_SECONDS


@pytest.mark.parametrize(("used", "writes"), [(0.5, 0), (1.0, 1)])
def test_a_slice_ends_with_the_iteration_unless_its_time_is_over(used: float, writes: int) -> None:
    async def test() -> None:
        scene = Scene()
        scene.block_until(scene.slice.ends_at - (1 - used) * MAX_COMPLETION_DELAY_SECONDS)
        await asyncio.sleep(0)
        await scene.slice.wait()
        assert scene.happened == ["write"] * writes
        assert scene.slice.ends_at == scene.loop.time() + MAX_COMPLETION_DELAY_SECONDS

    run_virtual(test())


@virtual
async def test_a_task_whose_timer_is_due_runs_before_completions_are_awaited(scene: Scene) -> None:
    due = scene.loop.create_future()

    async def other() -> None:
        await due
        scene.happened.append("other")

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    end = scene.slice.ends_at
    scene.loop.call_at(end - 0.001, due.set_result, None)
    scene.block_until(end)
    await scene.slice.wait()
    assert scene.happened == ["other", "write"]
    assert scene.loop.time() == end
    await task


@virtual
async def test_attempts_that_wait_together_continue_after_one_write(scene: Scene) -> None:
    scene.block_until(scene.slice.ends_at)
    await asyncio.gather(*(scene.slice.wait() for _ in range(3)))
    assert scene.happened == ["write"]
