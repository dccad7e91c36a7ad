"""Changes of jobs through the app: reschedule, cancel_all, retry, erase, pause_all."""

from __future__ import annotations

from datetime import datetime

import pytest

from timebell import Cron, JobSpec, Retry, Timebell
from timebell.errors import Conflict, InThePast, InvalidInput, NotFound

from .world import Log, World, after, engine, outcomes, raises, virtual


def listening(world: World, log: Log | None = None) -> tuple[Timebell, Log]:
    app, log = world.app(timezone="Asia/Seoul"), log or Log()
    app.on("t")(log)
    return app, log


@virtual
async def test_a_moved_job_runs_once_at_its_new_time(world: World) -> None:
    app, log = listening(world)
    old = await app.schedule_at("t", after(seconds=30), payload=1)
    new = await app.reschedule(old.id, after(seconds=90))
    async with engine(app):
        await world.advance(minutes=3)
    assert (log.fired, log.payloads) == ([90], [1])
    assert (new.id != old.id, new.replaces, new.payload) == (True, old.id, 1)
    assert (await app.get(old.id)).replaced_by == new.id
    assert (await app.cancel(old.id)).outcome == "prevented"


@virtual
async def test_a_local_time_is_resolved_in_the_time_zone_of_the_job(world: World) -> None:
    app, _ = listening(world)
    old = await app.schedule_at("t", datetime(2027, 3, 20, 9), timezone="America/New_York")
    new = await app.reschedule(old.id, datetime(2027, 3, 21, 9))
    assert (new.run_at.hour, new.timezone) == (13, "America/New_York")
    moved = await app.reschedule(new.id, datetime(2027, 3, 21, 9), timezone="Europe/Paris")
    assert (moved.run_at.hour, moved.timezone) == (8, "Europe/Paris")
    assert moved.local_time == "2027-03-21T09:00:00"


@virtual
async def test_a_refused_reschedule_states_the_reason(world: World) -> None:
    app, _ = listening(world)
    job = await app.schedule_at("t", after(hours=1))
    with pytest.raises(InThePast):
        await app.reschedule(job.id, after(hours=-1))
    assert (await app.get(job.id)).state == "pending"
    with pytest.raises(NotFound):
        await app.reschedule("018f0000-0000-7000-8000-000000000000", after(hours=1))
    await app.cancel(job.id)
    with pytest.raises(Conflict) as over:
        await app.reschedule(job.id, after(hours=2))
    assert over.value.code == "JOB_FINISHED"


@virtual
async def test_cancel_all_requires_and_applies_a_filter(world: World) -> None:
    app, log = listening(world)
    await app.schedule_many([JobSpec(topic="t", run_at=after(minutes=1), owner_id=who) for who in ("a", "a", "b")])
    await app.schedule_at("t", after(minutes=1), owner_id="a", tenant_id="acme")
    with pytest.raises(InvalidInput) as missing:
        await app.cancel_all()
    assert missing.value.code == "FILTER_MISSING"
    swept = await app.cancel_all(owner_id="a")
    assert (swept.prevented, swept.in_flight) == (2, 0)
    assert (await app.cancel_all(owner_id="a")).prevented == 0
    async with engine(app):
        await world.advance(minutes=2)
    assert len(log.events) == 2


@virtual
async def test_a_dead_letter_is_retried_on_request(world: World) -> None:
    broken = True
    app, _ = listening(world, Log(lambda event: raises(ValueError())(event) if broken else "fixed"))
    job = await app.schedule_at("t", retry=Retry(attempts=2, delay=1, jitter=0))
    async with engine(app):
        await world.advance(seconds=10)
        assert (await app.get(job.id)).state == "failed"
        broken = False
        await app.retry(job.id)
        await world.advance(seconds=10)
        done = await app.get(job.id)
        assert (done.state, done.result, done.attempt) == ("completed", "fixed", 3)
        with pytest.raises(Conflict) as conflict:
            await app.retry(job.id)
    assert conflict.value.code == "JOB_NOT_FAILED"


@virtual
async def test_nothing_fires_while_everything_is_paused(world: World) -> None:
    app, log = listening(world)
    await app.schedule_repeat("t", Cron("*/10 * * * *"), timezone="UTC")
    await app.schedule_at("t", after(minutes=5))
    await app.schedule_at("t", after(minutes=5), queue="q")
    async with engine(app, poll=60.0, heartbeat=60.0, lease=180.0):
        await app.pause_all("a bad release")
        await world.until(after(minutes=35))
        assert log.events == []
        await app.resume_all()
        await world.until(after(minutes=41))
    assert log.fired == [2100, 2100, 2100, 2400]
    skipped = [(at / 60, reason) for at, state, reason in await outcomes(app) if state == "skipped"]
    assert skipped == [(10, "coalesced"), (20, "coalesced")]


@virtual
async def test_erase_removes_the_data_of_an_owner(world: World) -> None:
    app, log = listening(world)
    job = await app.schedule_at("t", after(minutes=1), owner_id="ana", payload={"name": "Ana"})
    erased = await app.erase("ana")
    assert (erased.prevented, erased.in_flight, erased.finished, erased.schedules) == (1, 0, 1, 0)
    async with engine(app):
        await world.advance(minutes=2)
    assert log.events == []
    left = await app.get(job.id)
    assert (left.state, left.payload, left.owner_id) == ("cancelled", None, None)
