"""Plain handlers run in threads: claimed ahead while they are short, and returned if that was too many."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from timebell import Arrived, JobSpec, Timebell
from timebell.model.job import JobState
from timebell.targets import thread_pool

TIMEOUT_SECONDS = 30


def test_jobs_claimed_for_a_thread_that_stays_busy_become_pending_again(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_pool, "MAX_QUEUE_SECONDS", 0.1)
    monkeypatch.setenv("TIMEBELL_WORKER_THREADS", "1")
    calls: Counter[str] = Counter()
    blocked, end = threading.Event(), threading.Event()

    async def main() -> None:
        app = Timebell(sqlite_url, timezone="UTC")

        @app.on("short")
        def short(event: Arrived) -> None:
            calls[event.job_id] += 1

        @app.on("long")
        def long(_: Arrived) -> None:
            blocked.set()
            end.wait(TIMEOUT_SECONDS)

        async with app.running(), asyncio.timeout(TIMEOUT_SECONDS):
            short_jobs = await app.schedule_many([JobSpec(topic="short") for _ in range(300)])
            await _until(lambda: len(calls) == 300)
            long_job = await app.schedule_at("long")
            await _until(blocked.is_set)
            waiting = await app.schedule_many([JobSpec(topic="short")] * 9)
            for job in waiting:
                while (job := await app.get(job.id)).attempt == 0 or job.state is not JobState.PENDING:
                    await asyncio.sleep(0.01)
                assert (job.attempts_used, calls[job.id]) == (0, 0)
            end.set()
            for job in (long_job, *waiting):
                assert (await app.wait(job.id, timeout=TIMEOUT_SECONDS)).attempts_used == 1
            assert [calls[job.id] for job in (*short_jobs, *waiting)] == [1] * 309
        await app.close()

    try:
        asyncio.run(main())
    finally:
        end.set()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
