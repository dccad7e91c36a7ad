"""The faults that the product for monday.com had (S3-F1 to S3-F8), each in one test, end to end and on virtual time.

S3-F6 takes a board, and is in test_monday.py; the thousand webhooks of S3-F2 are in tests/api/test_monday_hooks.py.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from timebell import Arrived, Timebell
from timebell.store.tenancy import tenants

from .world import QUIET, Log, World, after, engine, jobs, offset, outcomes, virtual


def item(key: str, version: int, at: datetime | None) -> dict[str, Any]:
    return {"key": key, "version": version, "fields": {"due": at and at.isoformat()}}


async def board(app: Timebell, **options: Any) -> None:
    await app.triggers.put_source("board")
    await app.triggers.put("due", "board", "due", "item.due", **options)


@virtual
async def test_s3_f1_an_item_that_fired_fires_again_when_it_is_dated_anew(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        await app.triggers.put_items("board", [item("1", 1, after(hours=1))])
        await world.advance(hours=2)
        await app.triggers.put_items("board", [item("1", 2, after(hours=3))])  # as a webhook does
        await world.advance(hours=2)
        await app.triggers.put_items("board", [item("1", 3, after(hours=5))])
        await app.triggers.scan("due")  # and as a scan does
        await world.advance(hours=2)
    assert [offset(event.fired_at) for event in log.events] == [3600, 3 * 3600, 5 * 3600]


@virtual
async def test_s3_f2_an_older_value_never_overwrites_a_newer_one(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        for version in (1, 3, 2, 3, 1):
            await app.triggers.put_items("board", [item("1", version, after(hours=version))])
        await world.advance(hours=4)
    assert [offset(event.fired_at) for event in log.events] == [3 * 3600]


@virtual
async def test_s3_f3_what_is_pending_is_in_the_database_and_a_restart_loses_none(world: World) -> None:
    first = world.app()
    async with engine(first, **QUIET):
        await board(first)
        await first.triggers.put_items("board", [item(str(key), 1, after(hours=1)) for key in range(100)])
    second = world.app()
    log = second.on("item.due")(Log())
    async with engine(second, **QUIET):
        await world.advance(hours=2)
    assert sorted(int(event.payload["itemId"]) for event in log.events) == list(range(100))


@virtual
async def test_s3_f4_a_webhook_that_comes_40_s_late_still_fires(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        await world.advance(minutes=10)
        late = await app.triggers.put_items("board", [item("1", 1, after(minutes=10, seconds=-40))])
        old = await app.triggers.put_items("board", [item("2", 1, after(minutes=1))])
        assert (late.made, old.made, old.late) == (1, 0, 1)
        await world.advance(seconds=5)
    assert [event.payload["itemId"] for event in log.events] == ["1"]


@virtual
async def test_s3_f5_a_limit_holds_however_many_fire_at_once(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    await app.open()
    await app.store.run(tenants.put, "default", {"jobs_per_month": 25}, world.clock.now())
    async with engine(app, **QUIET):
        await board(app)
        await app.triggers.put_items("board", [item(str(key), 1, after(hours=1)) for key in range(100)])
        await world.advance(hours=2)
    assert len(log.events) == 25
    skipped = [job for job in await jobs(app) if job.state == "skipped"]
    assert {job.error for job in skipped} == {"Monthly limit reached (25/25)"}
    assert len(skipped) == 75


@virtual
async def test_s3_f7_what_changes_during_a_scan_is_neither_missed_nor_planned_twice(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await app.triggers.put_source("board")
        await app.triggers.put_items("board", [item(str(key), 1, after(hours=1)) for key in range(1200)])
        await app.triggers.put("due", "board", "due", "item.due")
        # It has only begun: these are edited, added and cleared meanwhile.
        edited = [item(str(key), 2, after(hours=2)) for key in range(0, 1200, 100)]
        await app.triggers.put_items("board", [*edited, item("new", 1, after(hours=2)), item("1", 2, None)])
        await world.advance(hours=3)
    fired = {event.payload["itemId"]: offset(event.fired_at) for event in log.events}
    assert len(log.events) == len(fired) == 1200
    assert {key for key, at in fired.items() if at == 7200} == {*(str(key) for key in range(0, 1200, 100)), "new"}
    assert "1" not in fired


@virtual
async def test_s3_f8_a_cancel_against_a_firing_has_one_winner(world: World) -> None:
    app = world.app()
    began, goes_on = asyncio.Event(), asyncio.Event()

    @app.on("item.due")
    async def due(event: Arrived) -> None:
        began.set()
        await goes_on.wait()

    async with engine(app, **QUIET):
        await board(app)
        await app.triggers.put_items("board", [item("1", 1, after(hours=1))])
        await world.advance(hours=1, seconds=1)
        assert began.is_set()
        # It has started: the edit does not throw, makes the new one, and leaves the old one to end.
        moved = await app.triggers.put_items("board", [item("1", 2, after(hours=2))])
        assert (moved.made, moved.cancelled) == (1, 0)
        goes_on.set()
        await world.advance(hours=2)
        # It has not: the edit wins, and nothing is delivered.
        await app.triggers.put_items("board", [item("1", 3, after(hours=5))])
        cleared = await app.triggers.put_items("board", [item("1", 4, None)])
        assert (cleared.made, cleared.cancelled) == (0, 1)
        await world.advance(hours=5)
    assert sorted(await outcomes(app)) == [
        (3600, "completed", None), (7200, "completed", None), (5 * 3600, "cancelled", "withdrawn"),
    ]  # fmt: skip
