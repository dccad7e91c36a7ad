"""Calls in threads: how many threads they get, what happens to those that wait, and how many are accepted."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from timebell.targets import thread_pool
from timebell.targets.arrived import Arrived, Snooze
from timebell.targets.handler import Handlers
from timebell.targets.thread_pool import NotStarted, ThreadPool

THREADS = 4
TIMEOUT_SECONDS = 20


def with_pool(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test of (pool, ...) on an event loop."""

    async def run(**fixtures: Any) -> None:
        pool = ThreadPool(THREADS, time.monotonic)
        try:
            await test(pool, **fixtures)
        finally:
            pool.shutdown()

    def run_test(**fixtures: Any) -> None:
        asyncio.run(run(**fixtures))

    _, *parameters = inspect.signature(test).parameters.values()
    run_test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_test.__name__ = test.__name__
    return run_test


class Blocked:
    """Calls that have started and wait until the test ends."""

    def __init__(self, pool: ThreadPool, count: int) -> None:
        self.end: Future[None] = Future()
        self._started = threading.Semaphore(0)
        self.futures = [pool.call(self._block) for _ in range(count)]

    def _block(self) -> None:
        self._started.release()
        self.end.result(TIMEOUT_SECONDS)

    async def wait_until_started(self) -> None:
        for _ in self.futures:
            assert await asyncio.to_thread(self._started.acquire, timeout=TIMEOUT_SECONDS)


@with_pool
async def test_blocking_calls_get_a_thread_each(pool: ThreadPool) -> None:
    barrier = threading.Barrier(THREADS, timeout=TIMEOUT_SECONDS)
    await asyncio.gather(*(pool.call(barrier.wait) for _ in range(3 * THREADS)))


@with_pool
async def test_at_most_max_threads_run_at_the_same_time(pool: ThreadPool) -> None:
    running, most = [], []

    def call() -> None:
        running.append(1)
        time.sleep(0.001)
        most.append(len(running))
        running.pop()

    await asyncio.gather(*(pool.call(call) for _ in range(20 * THREADS)))
    assert max(most) <= THREADS


@with_pool
async def test_results_and_errors_belong_to_their_calls(pool: ThreadPool) -> None:
    def call(number: int) -> Callable[[], int]:
        def divide() -> int:
            return 100 // number

        return divide

    results = await asyncio.gather(*(pool.call(call(number % 3)) for number in range(300)), return_exceptions=True)
    assert [type(result) if isinstance(result, Exception) else result for result in results] == (
        [ZeroDivisionError, 100, 50] * 100
    )


@with_pool
async def test_a_call_sees_the_context_of_its_caller_and_changes_only_a_copy(pool: ThreadPool) -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    user.set("caller")

    def call() -> str:
        seen = user.get()
        user.set("thread")
        return seen

    assert [await pool.call(call) for _ in range(3)] == ["caller"] * 3
    assert user.get() == "caller"


@with_pool
async def test_a_call_cancelled_while_it_waits_never_starts(pool: ThreadPool) -> None:
    blocked, started = Blocked(pool, THREADS), []
    await blocked.wait_until_started()
    waiting, last = pool.call(lambda: started.append("cancelled")), pool.call(lambda: started.append("last"))
    waiting.cancel()
    blocked.end.set_result(None)
    await last
    assert started == ["last"]


@with_pool
async def test_calls_that_wait_too_long_are_returned(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "MAX_QUEUE_SECONDS", 0.02)
    blocked, started = Blocked(pool, THREADS), []
    await blocked.wait_until_started()
    waiting = [pool.call(lambda: started.append(1)) for _ in range(10)]
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), TIMEOUT_SECONDS)
    assert {type(result) for result in results} == {NotStarted}
    blocked.end.set_result(None)
    await asyncio.gather(*blocked.futures)
    assert (await pool.call(lambda: "runs"), started) == ("runs", [])


@with_pool
async def test_calls_are_accepted_ahead_only_while_calls_are_short(pool: ThreadPool) -> None:
    assert pool.capacity() == THREADS
    await asyncio.gather(*(pool.call(lambda: None) for _ in range(1_000)))
    assert pool.capacity() > 2 * THREADS
    await pool.call(lambda: time.sleep(2 * thread_pool.QUEUE_AHEAD_SECONDS * THREADS))
    assert pool.capacity() == THREADS


@with_pool
async def test_a_thread_with_an_abandoned_call_accepts_none(pool: ThreadPool) -> None:
    blocked = Blocked(pool, 1)
    await blocked.wait_until_started()
    assert pool.capacity() == THREADS
    blocked.futures[0].cancel()
    assert pool.capacity() == THREADS - 1
    blocked.end.set_result(None)
    await _until(lambda: pool.capacity() >= THREADS)


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


@with_pool
async def test_a_handler_whose_lease_expired_while_it_waited_does_not_run(pool: ThreadPool) -> None:
    handlers, calls = Handlers(), []
    handlers.threads, handlers.monotonic = pool, time.monotonic
    now = datetime(2027, 3, 1, tzinfo=UTC)

    def event(lease_seconds: float) -> Arrived:
        attempt: Any = SimpleNamespace(lease_until=time.monotonic() + lease_seconds)
        return Arrived(
            topic="a", payload=None, metadata={}, timezone="UTC", scheduled_at=now, fired_at=now, late_by=timedelta(),
            job_id="1", schedule_id=None, occurrence_key="1", attempt=1, _attempt=attempt,
        )  # fmt: skip

    await handlers.call_in_thread(calls.append, valid := event(60))
    with pytest.raises(Snooze):
        await handlers.call_in_thread(calls.append, event(-1))
    assert calls == [valid]
