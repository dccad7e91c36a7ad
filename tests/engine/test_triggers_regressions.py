"""Known faults of reminder products built on item webhooks, one test each, end to end and on virtual time.

The missing board is tested in test_monday.py, and a thousand webhooks in tests/api/test_inbound_webhooks_monday.py.
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
async def test_an_item_that_fired_fires_again_after_its_date_changes(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        await app.triggers.put_items("board", [item("1", 1, after(hours=1))])
        await world.advance(hours=2)
        await app.triggers.put_items("board", [item("1", 2, after(hours=3))])  # like a webhook
        await world.advance(hours=2)
        await app.triggers.put_items("board", [item("1", 3, after(hours=5))])
        await app.triggers.scan("due")  # and like a scan
        await world.advance(hours=2)
    assert [offset(event.fired_at) for event in log.events] == [3600, 3 * 3600, 5 * 3600]


@virtual
async def test_an_older_version_never_overwrites_a_newer_one(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        for version in (1, 3, 2, 3, 1):
            await app.triggers.put_items("board", [item("1", version, after(hours=version))])
        await world.advance(hours=4)
    assert [offset(event.fired_at) for event in log.events] == [3 * 3600]


@virtual
async def test_pending_firings_survive_a_restart(world: World) -> None:
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
async def test_a_webhook_that_arrives_40_seconds_late_still_fires(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        await world.advance(minutes=10)
        late = await app.triggers.put_items("board", [item("1", 1, after(minutes=10, seconds=-40))])
        old = await app.triggers.put_items("board", [item("2", 1, after(minutes=1))])
        assert (late.created, old.created, old.late) == (1, 0, 1)
        await world.advance(seconds=5)
    assert [event.payload["itemId"] for event in log.events] == ["1"]


@virtual
async def test_a_monthly_limit_holds_for_simultaneous_firings(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    await app.open()
    await app.store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 25}, world.clock.now())
    async with engine(app, **QUIET):
        await board(app)
        await app.triggers.put_items("board", [item(str(key), 1, after(hours=1)) for key in range(100)])
        await world.advance(hours=2)
    assert len(log.events) == 25
    skipped = [job for job in await jobs(app) if job.state == "skipped"]
    assert {job.error for job in skipped} == {"Monthly limit reached (25/25)"}
    assert len(skipped) == 75


@virtual
async def test_changes_during_a_scan_are_neither_missed_nor_planned_twice(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await app.triggers.put_source("board")
        await app.triggers.put_items("board", [item(str(key), 1, after(hours=1)) for key in range(1200)])
        await app.triggers.put("due", "board", "due", "item.due")
        # The scan has just started: these items are edited, added and cleared meanwhile.
        edited = [item(str(key), 2, after(hours=2)) for key in range(0, 1200, 100)]
        await app.triggers.put_items("board", [*edited, item("new", 1, after(hours=2)), item("1", 2, None)])
        await world.advance(hours=3)
    fired = {event.payload["itemId"]: offset(event.fired_at) for event in log.events}
    assert len(log.events) == len(fired) == 1200
    assert {key for key, at in fired.items() if at == 7200} == {*(str(key) for key in range(0, 1200, 100)), "new"}
    assert "1" not in fired


@virtual
async def test_a_cancel_racing_a_firing_has_one_winner(world: World) -> None:
    app = world.app()
    started, may_finish = asyncio.Event(), asyncio.Event()

    @app.on("item.due")
    async def due(event: Arrived) -> None:
        started.set()
        await may_finish.wait()

    async with engine(app, **QUIET):
        await board(app)
        await app.triggers.put_items("board", [item("1", 1, after(hours=1))])
        await world.advance(hours=1, seconds=1)
        assert started.is_set()
        # The job has started: the edit creates the new one without an error, and the old one finishes.
        moved = await app.triggers.put_items("board", [item("1", 2, after(hours=2))])
        assert (moved.created, moved.cancelled) == (1, 0)
        may_finish.set()
        await world.advance(hours=2)
        # The job has not started: the edit wins, and nothing is delivered.
        await app.triggers.put_items("board", [item("1", 3, after(hours=5))])
        cleared = await app.triggers.put_items("board", [item("1", 4, None)])
        assert (cleared.created, cleared.cancelled) == (0, 1)
        await world.advance(hours=5)
    assert sorted(await outcomes(app)) == [
        (3600, "completed", None), (7200, "completed", None), (5 * 3600, "cancelled", "withdrawn"),
    ]  # fmt: skip


@virtual
async def test_an_instant_that_was_moved_away_and_back_fires_once(world: World) -> None:
    """Also if another instant fired in between, and if the column was empty."""
    app = world.app()
    log = app.on("item.due")(Log())
    first, second = after(minutes=1), after(minutes=2)
    async with engine(app, **QUIET):
        await board(app)
        for version, at in enumerate((first, second, first, None, first, second), 1):
            await app.triggers.put_items("board", [item("1", version, at)])
            if version < 3:
                await world.until(at)  # type: ignore[arg-type]
                await world.advance(seconds=1)
        await world.advance(minutes=10)
    assert [offset(event.scheduled_at) for event in log.events] == [60, 120]


@virtual
async def test_an_item_that_does_not_fire_leaves_a_record_with_the_reason(world: World) -> None:
    app = world.app()
    async with engine(app, **QUIET):
        await board(app, recipients="who", offsets=["0", "-1h"])
        rows = [
            {"key": "late", "fields": {"due": after(seconds=-400).isoformat(), "who": "ana"}},
            {"key": "past", "fields": {"due": after(days=-3).isoformat(), "who": "ana"}},
            {"key": "unreadable", "fields": {"due": "20260-05-01", "who": "ana"}},
            {"key": "people", "fields": {"due": after(hours=9).isoformat(), "who": {"id": 1}}},
            {"key": "empty", "fields": {"due": None}},
        ]
        await app.triggers.put_items("board", rows)

        async def records() -> dict[str, set[tuple[str, str]]]:
            found: dict[str, set[tuple[str, str]]] = {}
            for record in await app.triggers.list_not_fired("due"):
                found.setdefault(record.item, set()).add((record.reason, record.detail))
            return found

        assert await records() == {
            "late": {("late", "2027-03-01T11:53:20Z"), ("late", "2027-03-01T10:53:20Z")},
            "past": {("past", "2027-02-26T12:00:00Z"), ("past", "2027-02-26T11:00:00Z")},
            "unreadable": {("unreadable", "due: '20260-05-01'")},
            "people": {("unreadable", "who: {'id': 1}")},
        }
        fixed = [{"key": row["key"], "fields": {"due": after(hours=9).isoformat(), "who": "ana"}} for row in rows]
        await app.triggers.put_items("board", fixed)
        assert await records() == {}
        assert len(await app.list(status="pending")) == 10


@virtual
async def test_an_item_shows_its_history_and_can_be_fired_and_skipped(world: World) -> None:
    app = world.app()
    log = app.on("item.due")(Log())
    async with engine(app, **QUIET):
        await board(app)
        for version, hours in enumerate((1, 2, 3), 1):
            await app.triggers.put_items("board", [item("1", version, after(hours=hours))])
        state = await app.triggers.get_item("due", "1")
        assert [(job.state, job.reason, offset(job.scheduled_at)) for job in state.jobs] == [
            ("pending", None, 10800), ("cancelled", "rescheduled", 7200), ("cancelled", "rescheduled", 3600),
        ]  # fmt: skip
        fired = await app.triggers.fire("due", "1")
        await world.advance(seconds=1)
        assert [event.job_id for event in log.events] == [job.id for job in fired]
        assert log.events[0].payload["itemId"] == "1"
        (skipped,) = await app.triggers.skip("due", "1")
        assert offset(skipped.at) == 10800  # type: ignore[arg-type]
        await app.triggers.put_items("board", [item("1", 4, after(hours=3))])  # the same instant stays skipped
        await world.advance(hours=4)
        assert len(log.events) == 1
        (record,) = await app.triggers.list_not_fired("due")
        assert (record.item, record.reason) == ("1", "skipped")
        await app.triggers.put_items("board", [item("1", 5, after(hours=5))])
        await world.advance(hours=2)
    assert len(log.events) == 2
    assert list(await app.triggers.list_not_fired("due")) == []
