"""Attempt records: the original due time, each wait with its reason, and the lag of the first start."""

from __future__ import annotations

import dataclasses
import logging
import re
from datetime import timedelta

import pytest

from timebell import Arrived, Retry, Snooze
from timebell.api.job_fields import render_job
from timebell.dashboard.job_timeline import timeline_steps
from timebell.model.attempts import MAX_RECORDED_ATTEMPTS, MAX_TRACEBACK_LENGTH

from .world import Log, World, after, engine, virtual


@virtual
async def test_a_retried_job_keeps_its_due_time_and_lag(world: World) -> None:
    app = world.app()

    def fail(event: Arrived) -> None:
        if event.attempt < 4:
            raise ConnectionError("away")

    app.on("a", retry=Retry(attempts=2, backoff="fixed", delay=600, jitter=0))(Log(fail))
    job = await app.schedule_at("a", after(seconds=30))
    await world.advance(seconds=74)
    async with engine(app):
        await world.advance(seconds=1)
        waiting = await app.get(job.id)
        assert waiting.run_at > after(seconds=600)
        assert (waiting.due_at, waiting.first_started_at) == (after(seconds=30), after(seconds=74))
        assert waiting.lag == timedelta(seconds=44)
        await world.advance(minutes=11)
        failed = await app.get(job.id)
        assert failed.lag == timedelta(seconds=44)
        await app._jobs.retry(job.id, actor="olga")
        await world.advance(minutes=11)
        done = await app.get(job.id)
        await app.schedule_at("a", after(hours=1))  # a later job without records
    assert (done.state, done.lag) == ("completed", timedelta(seconds=44))
    assert render_job(done)["lagMs"] == 44_000
    steps = [(step["title"], step["detail"]) for step in timeline_steps(render_job(done), {}, after(hours=1))]
    assert [title for title, _ in steps] == [
        "Created", "Due", "Attempt 1 started", "Attempt 1 failed", "Waits 10 min", "Attempt 2 started",
        "Attempt 2 failed", "Retried by olga", "Attempt 3 started", "Attempt 3 failed", "Waits 10 min",
        "Attempt 4 started", "Completed",
    ]  # fmt: skip
    assert steps[2][1].endswith("44.0 s after the due time")
    assert steps[3][1].startswith("ConnectionError: away")  # the class is not repeated


@virtual
async def test_tracebacks_are_bounded_and_masked(world: World) -> None:
    app = world.app()
    app.settings = dataclasses.replace(app.settings, api_key="a-very-secret-key")

    def fail(_: Arrived) -> None:
        try:
            raise KeyError("a-very-secret-key")
        except KeyError as error:
            raise RuntimeError("postgresql://me:hunter22@db/x " + "x" * 20_000) from error

    app.on("a", retry=Retry(attempts=1))(Log(fail))
    job = await app.schedule_at("a")
    async with engine(app):
        await world.advance(seconds=1)
    (record,) = (await app.get(job.id)).attempts
    traceback = record["traceback"]
    assert traceback.startswith("Traceback (most recent call last):")
    assert "in fail" in traceback
    assert "direct cause" in traceback
    assert len(traceback) <= MAX_TRACEBACK_LENGTH
    for secret in ("a-very-secret-key", "hunter22"):
        assert secret not in str(record)
    assert "targets/handler.py" not in traceback


@virtual
async def test_a_traceback_begins_in_the_handler_and_its_error_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = world.app()

    @app.on("a", retry=Retry(attempts=2, backoff="fixed", delay=10, jitter=0))
    async def fail(_: Arrived) -> None:
        raise ConnectionError("away")

    job = await app.schedule_at("a")
    with caplog.at_level(logging.INFO, "timebell.runner"):
        async with engine(app):
            await world.advance(seconds=60)
    records = (await app.get(job.id)).attempts
    assert [record["attemptsAllowed"] for record in records] == [2, 2]
    assert re.match(r"Traceback .*\n  File .*test_attempt_records.py", records[0]["traceback"])
    dead = next(line for line in caplog.messages if " failed permanently: " in line)
    assert dead.count("ConnectionError") == 1
    steps = timeline_steps(render_job(await app.get(job.id)), {}, after(hours=1))
    assert [step["detail"] for step in steps if step["title"] == "Waits 10 s"] == ["retry after attempt 1 of 2"]


@virtual
async def test_a_snoozed_job_records_its_waits_and_keeps_its_first_record(world: World) -> None:
    app = world.app()

    def snooze(event: Arrived) -> None:
        if event.attempt < 30:
            raise Snooze(60)

    app.on("a")(Log(snooze))
    job = await app.schedule_at("a", after(seconds=5))
    async with engine(app):
        await world.advance(minutes=40)
    done = await app.get(job.id)
    assert (done.due_at, done.lag) == (after(seconds=5), timedelta())
    assert len(done.attempts) == MAX_RECORDED_ATTEMPTS
    assert done.attempts[0]["attempt"] == 1
    assert done.attempts[-1]["code"] == "POSTPONED"
    titles = [step["title"] for step in timeline_steps(render_job(done), {}, after(hours=1))]
    assert "Attempt 29 postponed" in titles
    assert any(title.endswith("attempts not recorded") for title in titles)
