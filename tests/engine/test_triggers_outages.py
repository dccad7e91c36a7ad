"""Triggers under repeated and reordered changes, outages, and an exhausted monthly quota."""

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
    """Return the items in a shuffled, reproducible order."""
    return [one for _, one in sorted(enumerate(changes), key=lambda pair: sha256(str(pair[0]).encode()).digest())]


@virtual
async def test_repeated_and_reordered_changes_converge_to_the_newest(world: World) -> None:
    """Late and repeated webhooks never overwrite newer values. Some arrive while jobs fire."""
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
            came.update({name: getattr(done, name) for name in ("changed", "unchanged", "stale")})
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
async def test_firings_due_during_an_outage_are_delivered_once_afterwards(world: World) -> None:
    """No window exists in which a reminder can be lost, and the offset is applied before the shift."""
    app = world.app()
    log = Log()
    app.on("shift.remind")(log)
    async with engine(app, **QUIET):
        await shifts(app, offsets=["-15m"])
        await app.triggers.put_items("shifts", [item("1", 1, after(hours=1)), item("2", 1, after(hours=3))])
        await world.advance(minutes=30)
    await world.advance(minutes=30)  # no node runs at minute 45 and for 15 minutes after that
    async with engine(app, **QUIET):
        await world.advance(hours=3)
    assert log.scheduled == [2700, 9900]
    assert log.fired[1] == 9900
    assert 3600 <= log.fired[0] < 3660
    assert await outcomes(app) == [(2700, "completed", None), (9900, "completed", None)]


@virtual
async def test_each_trigger_has_its_own_condition(world: World) -> None:
    """The end reminder depends on the check-out, not on the check-in, and may have no condition. Conditions are
    evaluated at fire time, not when the job was planned."""
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
    delivered = sorted((event.topic, event.payload["itemId"]) for event in log.events)
    assert delivered == [("shift.end", "1"), ("shift.log", "1"), ("shift.log", "2"), ("shift.start", "2")]
    assert {job.reason for job in await jobs(app) if job.state == "skipped"} == {"condition"}


@pytest.mark.slow
def test_two_nodes_share_a_monthly_quota_of_five_hundred(postgres_url: str) -> None:
    """The quota is reserved at fire time, so that two nodes together do not exceed it."""
    events: list[str] = []

    async def body() -> None:
        apps = [Timebell(postgres_url, timezone="UTC") for _ in range(2)]
        for app in apps:

            @app.on("shift.remind")
            async def remind(event: Arrived) -> None:
                events.append(event.payload["itemId"])

        app, other = apps
        await app.open()
        await app.store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 500}, app.clock.now())
        await app.triggers.put_source("shifts")
        await app.triggers.put("start", "shifts", "start_at", "shift.remind")
        at = datetime.now(UTC) + timedelta(seconds=5)
        await app.triggers.put_items("shifts", [item(str(number), 1, at) for number in range(1000)])
        try:
            async with app.running(), other.running(), asyncio.timeout(90):
                while await app.list(status=["pending", "running"], limit=1):
                    await asyncio.sleep(0.1)
            assert len(events) == len(set(events)) == 500
            skipped = [job async for job in _all(app, "skipped")]
            assert len(skipped) == 500
            assert {(job.reason, job.error, job.attempts_used) for job in skipped} == {
                ("quota", "Monthly limit reached (500/500)", 0)
            }
            assert (await app.store.run(monthly_quota.get_monthly_usage, "default", app.clock.now())).used == 500
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
