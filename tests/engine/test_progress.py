"""Progress that handlers report: stored at most once per second, visible while they run, kept in the attempt record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event

from timebell import Arrived, Retry
from timebell.errors import InvalidInput
from timebell.model.job import Job
from timebell.testing.kit import Kit


def _get(timebell: Kit, job: Job) -> Job:
    return timebell.run(timebell.app.get(job.id))


@contextmanager
def _progress_updates() -> Iterator[list[int]]:
    """Collect the number of rows of each statement that stores progress."""
    updates: list[int] = []

    def count(_conn: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, executemany: bool) -> None:
        if statement.startswith("UPDATE timebell_jobs SET progress"):
            updates.append(len(parameters) if executemany else 1)

    event.listen(Engine, "before_cursor_execute", count)
    try:
        yield updates
    finally:
        event.remove(Engine, "before_cursor_execute", count)


def test_progress_is_visible_while_an_async_handler_runs(timebell: Kit) -> None:
    @timebell.app.on("work")
    async def work(event: Arrived) -> None:
        for page in range(1, 5):
            event.progress(page / 4, f"page {page}")
            await asyncio.sleep(10)

    job = timebell.run(timebell.app.schedule_in("work", 1))
    assert _get(timebell, job).progress is None
    timebell.advance(seconds=15)
    progress = _get(timebell, job).progress
    assert progress is not None
    assert (progress.fraction, progress.text) == (0.5, "page 2")
    assert progress.at.isoformat() == "2027-01-01T00:00:11+00:00"
    timebell.advance(seconds=60)
    ended = _get(timebell, job)
    assert ended.state == "completed"
    assert ended.progress is not None
    assert (ended.progress.fraction, ended.progress.text) == (1.0, "page 4")
    assert ended.attempts[-1]["reportedProgress"]["text"] == "page 4"


def test_progress_of_a_plain_handler_and_of_a_fast_one_is_kept(timebell: Kit) -> None:
    @timebell.app.on("plain")
    def plain(event: Arrived) -> None:
        event.progress(text="in a thread")

    @timebell.app.on("fast")
    async def fast(event: Arrived) -> None:
        event.progress(0.1)
        event.progress(1)

    for topic, expected in (("plain", (None, "in a thread")), ("fast", (1.0, None))):
        job = timebell.run(timebell.app.schedule_in(topic, 1))
        timebell.advance(seconds=5)
        progress = _get(timebell, job).progress
        assert progress is not None
        assert (progress.fraction, progress.text) == expected


def test_progress_in_a_transactional_handler_is_kept(timebell: Kit) -> None:
    @timebell.app.on("work")
    async def work(event: Arrived) -> None:
        event.progress(0.2, "before")
        async with event.transaction():
            event.progress(0.9, "inside")
        event.progress(1, "too late")

    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(seconds=5)
    ended = _get(timebell, job)
    assert (ended.state, ended.progress and ended.progress.text) == ("completed", "inside")


def test_each_attempt_has_its_own_progress(timebell: Kit) -> None:
    @timebell.app.on("work", retry=Retry(attempts=2, delay=60), timeout=7200)
    async def work(event: Arrived) -> None:
        if event.attempt == 1:
            event.progress(0.7, "first")
            await asyncio.sleep(5)
            raise ConnectionError
        await asyncio.sleep(3600)

    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(seconds=10)
    waiting = _get(timebell, job)
    assert (waiting.state, waiting.progress and waiting.progress.text) == ("pending", "first")
    timebell.advance(seconds=120)
    running = _get(timebell, job)
    assert (running.state, running.attempt, running.progress) == ("running", 2, None)
    assert running.attempts[0]["reportedProgress"]["fraction"] == 0.7


def test_many_reports_cost_one_write_per_second_for_all_attempts(timebell: Kit) -> None:
    @timebell.app.on("work")
    async def work(event: Arrived) -> None:
        for step in range(1000):
            event.progress(step / 1000)
            await asyncio.sleep(0.01)

    jobs = [timebell.run(timebell.app.schedule_in("work", 1)) for _ in range(5)]
    with _progress_updates() as updates:
        timebell.advance(seconds=30)
    assert {_get(timebell, job).state for job in jobs} == {"completed"}
    assert 9 <= len(updates) <= 11
    assert max(updates) == 5


def test_jobs_without_progress_and_jobs_that_end_at_once_write_nothing(timebell: Kit) -> None:
    @timebell.app.on("silent")
    async def silent(event: Arrived) -> None:
        await asyncio.sleep(30)

    @timebell.app.on("short")
    async def short(event: Arrived) -> None:
        event.progress(1)

    silent_job = timebell.run(timebell.app.schedule_in("silent", 1))
    timebell.run(timebell.app.schedule_in("short", 1))
    with _progress_updates() as updates:
        timebell.advance(seconds=60)
    assert updates == []
    assert _get(timebell, silent_job).attempts == []


@pytest.mark.parametrize(
    "arguments", [(), (1.1,), (-0.1,), (float("nan"),), (True,), ("40%",), (0.5, 3), (0.5, "x" * 201)]
)
def test_invalid_progress_is_refused_with_a_code(timebell: Kit, arguments: tuple[Any, ...]) -> None:
    codes = []

    @timebell.app.on("work")
    async def work(event: Arrived) -> None:
        with pytest.raises(InvalidInput) as caught:
            event.progress(*arguments)
        codes.append(caught.value.code)

    timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(seconds=5)
    assert codes == ["INVALID_PROGRESS"]
