"""Conditions of schedules and jobs: evaluated before each delivery, on the job's data or by a database query."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from timebell import Arrived, Cron, JobSpec, Timebell
from timebell.errors import InvalidInput, NotFound
from timebell.store.tenancy import monthly_quota, tenants

from .world import QUIET, START, Log, World, after, engine, jobs, offset, outcomes, virtual

PRO = [{"field": "plan", "op": "eq", "value": "pro"}]


@virtual
async def test_jobs_are_skipped_when_their_condition_does_not_hold(world: World) -> None:
    app = world.app()
    log = app.on("mail.send")(Log())

    @app.schedule("coded", cron="0 13 * * *", topic="mail.send", payload={"plan": "free"}, condition={"plan": "pro"})
    async def coded(_: Arrived) -> None: ...

    async with engine(app, **QUIET):
        for plan in ("pro", "free"):
            await app.schedule_repeat("mail.send", Cron("0 13 * * *"), name=plan, payload={"plan": plan}, condition=PRO)
            made = await app.schedule_at("mail.send", after(hours=2), payload={"plan": plan}, condition=PRO)
            assert (made.condition, made.unless) == (PRO, None)
        await app.schedule_many([
            JobSpec(topic="mail.send", run_at=after(hours=3), payload={"plan": plan}, condition=PRO)
            for plan in ("free", "pro", "free")
        ])  # fmt: skip
        await world.advance(hours=4)
    assert [event.payload["plan"] for event in log.events] == ["pro"] * 3
    done = await jobs(app)
    skipped = [job for job in done if job.state == "skipped"]
    assert {job.reason for job in skipped} == {"condition"}
    assert sorted(offset(job.scheduled_at) for job in skipped) == [3600, 3600, 7200, 10800, 10800]
    for job in skipped:
        assert job.result["condition"] == {"holds": False, "failed": PRO[0], "inputs": {"plan": "free"}}
        assert job.attempts_used == 0
    ran = [job for job in done if job.state == "completed"]
    assert [job.attempts[0]["condition"]["inputs"] for job in ran] == [{"plan": "pro"}] * 3


@virtual
async def test_a_skip_does_not_use_the_monthly_quota_and_explains_its_inputs(world: World) -> None:
    app = world.app()
    log = app.on("mail.send")(Log())
    await app.open()
    await app.store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 2}, world.clock.now())
    async with engine(app, **QUIET):
        made = await app.schedule_repeat(
            "mail.send", Cron("0 * * * *"), payload={"plan": "free", "age": 17}, metadata={"source": "crm"},
            condition=[{"field": "metadata.source", "op": "in", "value": ["crm"]},
                       {"field": "payload.age", "op": "ge", "value": 18}],
        )  # fmt: skip
        await world.advance(hours=5, minutes=1)
        used = await app.store.run(monthly_quota.get_monthly_usage, "default", world.clock.now())
        assert (log.events, used.used) == ([], 0)
        for _ in range(3):
            await app.schedule_at("mail.send", payload={"plan": "pro"}, condition=PRO)
        await world.advance(minutes=1)
        used = await app.store.run(monthly_quota.get_monthly_usage, "default", world.clock.now())
    assert (len(log.events), used.used) == (2, 2)
    explanation = await app.why(made.id, after(hours=1))
    assert explanation.outcome == "condition"
    assert "payload.age ge 18 did not hold: the value was 17" in " ".join(explanation.sentences)
    assert [end for end in await outcomes(app) if end[2] == "quota"] == [(18060, "skipped", "quota")]


@virtual
async def test_reschedule_and_trigger_keep_the_condition_but_a_manual_retry_ignores_it(world: World) -> None:
    app = world.app()
    log = app.on("mail.send")(Log(lambda _: 1 / 0))
    async with engine(app, **QUIET):
        job = await app.schedule_at("mail.send", after(hours=1), payload={"plan": "free"}, condition=PRO)
        moved = await app.reschedule(job.id, after(hours=2))
        made = await app.schedule_repeat("mail.send", Cron("0 0 1 1 *"), payload={"plan": "free"}, condition=PRO)
        by_hand = await app.schedules.trigger(made.id)
        failing = await app.schedule_at(
            "mail.send", payload={"plan": "pro"}, condition={"payload.plan": "pro"}, retry={"attempts": 1}
        )
        await world.advance(hours=3)
        assert len(log.events) == 1
        await app.retry(failing.id)
        await world.advance(hours=1)
    ended = {job.id: (job.state, job.reason) for job in await jobs(app)}
    assert ended[moved.id] == ended[by_hand.id] == ("skipped", "condition")
    assert len(log.events) == 2


@virtual
async def test_an_edit_of_the_condition_applies_to_later_occurrences(world: World) -> None:
    app = world.app()
    log = Log()
    app.on("mail.send")(log)
    async with engine(app, **QUIET):
        common: dict[str, Any] = {"name": "m", "payload": {"plan": "free"}}
        first = await app.schedule_repeat("mail.send", Cron("0 * * * *"), **common)
        await world.advance(hours=1, minutes=30)
        second = await app.schedule_repeat("mail.send", Cron("0 * * * *"), replace=True, condition=PRO, **common)
        assert (first.revision, second.revision) == (1, 2)
        await world.advance(hours=1)
    assert log.scheduled == [3600]
    assert (await outcomes(app))[:2] == [(3600, "completed", None), (7200, "skipped", "condition")]


@virtual
async def test_an_invalid_condition_is_refused_before_anything_is_written(world: World) -> None:
    app = world.app()
    await app.triggers.put_source("hooked")
    for options, code in (
        ({"condition": 5}, "INVALID_CONDITION"), ({"condition": [{"field": "a", "op": "like"}]}, "INVALID_CONDITION"),
        ({"unless": "SELECT 1"}, "INVALID_CONDITION"), ({"unless": {"source": "hooked"}}, "INVALID_CONDITION"),
        ({"unless": {"source": "hooked", "query": ""}}, "INVALID_CONDITION"),
        ({"unless": {"source": "hooked", "query": "SELECT 1"}}, "INVALID_CONDITION"),
        ({"unless": {"source": "nowhere", "query": "SELECT 1"}}, "SOURCE_NOT_FOUND"),
    ):  # fmt: skip
        with pytest.raises((InvalidInput, NotFound)) as refused:
            await app.schedule_at("t", START + timedelta(hours=1), **options)
        assert refused.value.code == code
        with pytest.raises((InvalidInput, NotFound)) as refused:
            await app.schedule_many([JobSpec(topic="t"), JobSpec(topic="t", **options)])
        assert refused.value.code == code
        with pytest.raises((InvalidInput, NotFound)) as refused:
            await app.schedule_repeat("t", Cron("0 * * * *"), **options)
        assert refused.value.code == code
    assert await jobs(app) == []


def test_a_query_runs_before_each_delivery_and_the_job_waits_while_it_fails(tmp_path: Path) -> None:
    asyncio.run(_queries(tmp_path))


async def _queries(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"

    def write(query: str, *values: Any) -> None:
        with closing(sqlite3.connect(theirs)) as connection:
            connection.execute(query, values)
            connection.commit()

    write("CREATE TABLE check_ins (shift integer, person text)")
    unless = {"source": "duty", "query": "SELECT 1 FROM check_ins WHERE shift = :shift AND person = :owner_id"}
    app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")

    async def fail(event: Arrived) -> None:
        if event.payload["shift"] == 3:
            write("INSERT INTO check_ins VALUES (3, 'ana')")
            raise RuntimeError("no network")

    log = app.on("shift.remind", retry={"attempts": 3, "delay": 0.1, "jitter": 0})(Log(fail))
    await app.triggers.put_source("duty", "sql", {"url": f"sqlite:///{theirs}", "table": "check_ins", "key": "shift"})
    write("INSERT INTO check_ins VALUES (1, 'ana')")
    write("INSERT INTO check_ins VALUES (2, 'bo')")
    try:
        async with app.running(poll=0.2):
            made = [
                await app.schedule_at("shift.remind", payload={"shift": shift}, owner_id="ana", unless=unless)
                for shift in (1, 2, 3)
            ]
            done = [await _ended(app, job.id) for job in made]
            assert [(job.state, job.reason) for job in done] == [
                ("skipped", "condition"), ("completed", None), ("cancelled", "condition")
            ]  # fmt: skip
            assert done[0].result["condition"]["unless"] == {
                "found": True,
                "parameters": {"shift": 1, "owner_id": "ana"},
            }
            assert [event.payload["shift"] for event in log.events] in ([2, 3], [3, 2])
            moved = theirs.rename(tmp_path / "away.db")
            waits = await app.schedule_at("shift.remind", payload={"shift": 4}, owner_id="ana", unless=unless)
            async with asyncio.timeout(40):
                while not (seen := await app.get(waits.id)).attempts:
                    await asyncio.sleep(0.05)
            assert (seen.attempts[0]["code"], seen.attempts_used) == ("SOURCE_FAILED", 0)
            moved.rename(theirs)
            assert (await _ended(app, waits.id)).state == "completed"
            await app.pause_queue("default")  # it is due while the source is missing
            lost = await app.schedule_at("shift.remind", payload={"shift": 5}, unless=unless)
            await app.triggers.delete_source("duty")
            await app.resume_queue("default")
            ended = await _ended(app, lost.id)  # the query can never succeed, so waiting is useless
            assert (ended.state, ended.error_code) == ("failed", "SOURCE_NOT_FOUND")
    finally:
        await app.close()


async def _ended(app: Timebell, id_: str) -> Any:
    async with asyncio.timeout(40):
        while (job := await app.get(id_)).state in ("pending", "running"):
            await asyncio.sleep(0.02)
    return job


def test_an_invalid_query_of_one_job_does_not_delay_others(tmp_path: Path) -> None:
    asyncio.run(_too_much(tmp_path))


async def _too_much(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE check_ins (shift integer)")
    unless = {"source": "duty", "query": "SELECT 1 FROM check_ins WHERE shift = :shift"}
    app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
    app.on("shift.remind")(Log())
    await app.triggers.put_source("duty", "sql", {"url": f"sqlite:///{theirs}", "table": "check_ins", "key": "shift"})
    try:
        # An integer too large for SQLite: its driver raises a built-in Python exception.
        odd, plain = await app.schedule_many([
            JobSpec(topic="shift.remind", payload={"shift": shift}, unless=unless) for shift in (2**63, 1)
        ])  # fmt: skip
        async with app.running(poll=0.2):
            done = await _ended(app, plain.id)
            assert (done.state, [line.get("code") for line in done.attempts]) == ("completed", [None])
            async with asyncio.timeout(20):
                while not (seen := await app.get(odd.id)).attempts:
                    await asyncio.sleep(0.02)
        assert (seen.state, seen.attempts[0]["code"]) == ("pending", "SOURCE_FAILED")
    finally:
        await app.close()
