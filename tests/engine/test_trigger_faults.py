"""What goes wrong around triggers: changes that come a thousand times in any order, outages, plans that are full."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import pytest

from timebell import Arrived, Timebell
from timebell.store.tenancy import monthly_quota, tenants

from .test_triggers import item, shifts
from .world import QUIET, Log, World, after, engine, jobs, outcomes, virtual


def shuffled(changes: list[Any]) -> list[Any]:
    """In an order that is the same each time, and not this one."""
    return [one for _, one in sorted(enumerate(changes), key=lambda pair: sha256(str(pair[0]).encode()).digest())]


@virtual
async def test_changes_repeated_and_reordered_a_thousand_times_come_to_the_newest(world: World) -> None:
    """S3-F2: late and repeated webhooks never overwrite newer values. Some come while jobs fire."""
    app = world.app()
    log = app.on("shift.remind")(Log())
    newest = {"1": 20, "2": 20, "3": 20}
    changes = [
        item(key, version, after(hours=1) if version == 20 else after(minutes=version * 2))
        for key in newest for version in range(1, 21) for _ in range(17)
    ]  # fmt: skip
    changes[1::60] = [{**one, "version": 19, "fields": {"start_at": None}} for one in changes[1::60]]
    assert len(changes) >= 1000
    await app.open()
    async with engine(app, **QUIET):
        await shifts(app)
        came = Counter[str]()
        for start, change in enumerate(shuffled(changes)):
            done = await app.triggers.put_items("shifts", [change])
            came.update({name: getattr(done, name) for name in ("changed", "same", "stale")})
            if start in (5, 400):
                await world.advance(minutes=3)
        assert came.total() == len(changes)
        assert came["changed"] <= 3 * 20
        pending = await app.list(status="pending")
        assert {(job.payload["itemId"], job.run_at) for job in pending} == {(key, after(hours=1)) for key in newest}
        await world.advance(hours=2)
        await app.triggers.put_items(
            "shifts", [item(key, 3, after(hours=2, minutes=6)) for key in newest]
        )  # much later
        await world.advance(hours=2)
    last = [event for event in log.events if event.scheduled_at == after(hours=1)]
    assert sorted(event.payload["itemId"] for event in last) == sorted(newest)
    fired = Counter((event.payload["itemId"], event.scheduled_at) for event in log.events)
    assert set(fired.values()) == {1}, "an instant fired twice"


@virtual
async def test_what_fell_into_an_outage_is_delivered_after_it_once(world: World) -> None:
    """S4-F6: there is no window that a reminder can fall out of. S4-F1: 15 minutes before are 15 minutes before."""
    app = world.app()
    log = app.on("shift.remind")(Log())
    async with engine(app, **QUIET):
        await shifts(app, offsets=["-15m"])
        await app.triggers.put_items("shifts", [item("1", 1, after(hours=1)), item("2", 1, after(hours=3))])
        await world.advance(minutes=30)
    await world.advance(minutes=30)  # nobody is there at 45 min, nor for 15 minutes after that
    async with engine(app, **QUIET):
        await world.advance(hours=3)
    assert log.scheduled == [2700, 9900]
    assert log.fired[1] == 9900
    assert 3600 <= log.fired[0] < 3660
    assert await outcomes(app) == [(2700, "completed", None), (9900, "completed", None)]


@virtual
async def test_each_trigger_has_a_condition_of_its_own(world: World) -> None:
    """S4-F7: the end reminder does not ask whether somebody checked in, but whether they checked out; S4-38: or
    nothing. S4-F3: asked when it fires, not when it was planned."""
    app = world.app()
    log = app.on("*", handles=True)(Log())
    async with engine(app, **QUIET):
        await app.triggers.put_source("shifts")
        for name, column, condition in (
            ("start", "start_at", {"check_in": None}), ("end", "end_at", {"check_out": None}), ("log", "end_at", None),
        ):  # fmt: skip
            await app.triggers.put(name, "shifts", column, f"shift.{name}", condition=condition)
        fields = {"start_at": after(hours=1).isoformat(), "end_at": after(hours=9).isoformat()}
        await app.triggers.put_items("shifts", [{"key": key, "version": 1, "fields": fields} for key in ("1", "2")])
        await world.advance(minutes=50)
        in_ = {**fields, "check_in": "12:50"}
        await app.triggers.put_items("shifts", [{"key": "1", "version": 2, "fields": in_}])
        await world.advance(hours=8)
        out = {**fields, "check_in": "13:10", "check_out": "20:50"}
        await app.triggers.put_items("shifts", [{"key": "2", "version": 2, "fields": out}])
        await world.advance(hours=1)
    told = sorted((event.topic, event.payload["itemId"]) for event in log.events)
    assert told == [("shift.end", "1"), ("shift.log", "1"), ("shift.log", "2"), ("shift.start", "2")]
    assert {job.reason for job in await jobs(app) if job.state == "skipped"} == {"condition"}


@pytest.mark.slow
def test_a_thousand_on_two_nodes_against_a_month_of_five_hundred_are_five_hundred(postgres_url: str) -> None:
    """S3-F5: the month is reserved at fire time, so that no two nodes overshoot it; S3-38 to S3-45."""
    heard: list[str] = []

    async def body() -> None:
        apps = [Timebell(postgres_url, timezone="UTC") for _ in range(2)]
        for app in apps:

            @app.on("shift.remind")
            async def remind(event: Arrived) -> None:
                heard.append(event.payload["itemId"])

        app, other = apps
        await app.open()
        await app.store.run(tenants.put, "default", {"jobs_per_month": 500}, app.clock.now())
        await app.triggers.put_source("shifts")
        await app.triggers.put("start", "shifts", "start_at", "shift.remind")
        at = datetime.now(UTC) + timedelta(seconds=5)
        await app.triggers.put_items("shifts", [item(str(number), 1, at) for number in range(1000)])
        try:
            async with app.running(), other.running(), asyncio.timeout(90):
                while await app.list(status=["pending", "running"], limit=1):
                    await asyncio.sleep(0.1)
            assert len(heard) == len(set(heard)) == 500
            skipped = [job async for job in _all(app, "skipped")]
            assert len(skipped) == 500
            assert {(job.reason, job.error, job.tries) for job in skipped} == {
                ("quota", "Monthly limit reached (500/500)", 0)
            }
            assert (await app.store.run(monthly_quota.of, "default", app.clock.now())).used == 500
        finally:
            for one in apps:
                await one.close()

    asyncio.run(body())


async def _all(app: Timebell, status: str) -> Any:
    cursor = None
    while True:
        page = await app.list(status=status, limit=500, cursor=cursor)
        for job in page:
            yield job
        if (cursor := page.next_cursor) is None:
            return
