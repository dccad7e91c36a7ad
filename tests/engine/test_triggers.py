"""Triggers end to end: firings follow the current fields of the items."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from timebell import Timebell
from timebell.errors import Conflict, InvalidInput, NotFound

from .world import QUIET, Log, World, after, engine, jobs, offset, outcomes, virtual


def item(key: str, version: int, at: datetime | None, **fields: Any) -> dict[str, Any]:
    return {"key": key, "version": version, "fields": {"start_at": at and at.isoformat(), **fields}}


async def shifts(app: Timebell, **options: Any) -> None:
    await app.triggers.put_source("shifts")
    await app.triggers.put("reminder", "shifts", "start_at", "shift.remind", **options)


@virtual
async def test_a_reminder_fires_at_the_instant_of_its_column_and_follows_edits(world: World) -> None:
    """The offset is subtracted: 15 minutes before the shift, not at its start."""
    app = world.app()
    log = app.on("shift.remind")(Log())
    async with engine(app, **QUIET):
        await shifts(app, offsets=["-15m", "0"], payload={"say": "soon"})
        await app.triggers.put_items("shifts", [item("1", 1, after(hours=1)), item("2", 1, after(hours=1))])
        await app.triggers.put_items("shifts", [item("1", 2, after(hours=2))])
        await world.advance(hours=3)
    fired = [(event.payload["itemId"], event.payload["offset"], offset(event.fired_at)) for event in log.events]
    assert sorted(fired) == [("1", "-15m", 6300), ("1", "0", 7200), ("2", "-15m", 2700), ("2", "0", 3600)]
    assert log.events[0].payload["action"] == {"say": "soon"}


@virtual
async def test_a_condition_is_evaluated_at_firing_and_a_skip_records_its_inputs(world: World) -> None:
    """A check-in during the 15 minutes prevents the reminder."""
    app = world.app()
    log = app.on("shift.remind")(Log())
    async with engine(app, **QUIET):
        await shifts(app, condition={"checked_in": False})
        await app.triggers.put_items(
            "shifts", [item(key, 1, after(hours=1), checked_in=False) for key in ("ana", "bo")]
        )
        await world.advance(minutes=59)
        await app.triggers.put_items("shifts", [item("bo", 2, after(hours=1), checked_in=True)])
        await world.advance(hours=1)
    assert [event.payload["itemId"] for event in log.events] == ["ana"]
    done = {job.payload["itemId"]: job for job in await jobs(app)}
    assert (done["bo"].state, done["bo"].reason) == ("skipped", "condition")
    assert done["bo"].result["condition"]["inputs"] == {"checked_in": True}
    assert done["ana"].attempts[0]["condition"]["holds"]


@virtual
async def test_a_failed_delivery_is_retried_unless_the_condition_no_longer_holds(world: World) -> None:
    """The condition is evaluated again before the retry."""
    app = world.app()

    async def fail(event: Any) -> None:
        await app.triggers.put_items("shifts", [item("1", 2, after(hours=1), checked_in=True)])
        raise RuntimeError("no network")

    log = app.on("shift.remind")(Log(fail))
    async with engine(app, **QUIET):
        await shifts(app, condition={"checked_in": False})
        await app.triggers.put_items("shifts", [item("1", 1, after(hours=1), checked_in=False)])
        await world.advance(hours=2)
    assert len(log.events) == 1
    assert await outcomes(app) == [(3600, "cancelled", "condition")]


@virtual
async def test_a_trigger_created_later_fires_for_existing_items(world: World) -> None:
    app = world.app()
    log = app.on("shift.remind")(Log())
    async with engine(app, **QUIET):
        await app.triggers.put_source("shifts")
        await app.triggers.put_items("shifts", [item(str(n), 1, after(hours=1)) for n in range(700)])
        _, begun = await app.triggers.put("reminder", "shifts", "start_at", "shift.remind")
        assert begun is not None
        await world.advance(hours=2)
    assert len({event.payload["itemId"] for event in log.events}) == len(log.events) == 700


@virtual
async def test_a_paused_trigger_skips_and_a_deleted_one_cancels(world: World) -> None:
    app = world.app()
    log = Log()
    app.on("shift.remind")(log)
    async with engine(app, **QUIET):
        await shifts(app)
        await app.triggers.put_items("shifts", [item(str(n), 1, after(hours=n)) for n in (1, 2, 3)])
        assert not (await app.triggers.pause("reminder", "holiday")).enabled
        await world.advance(hours=1, minutes=30)
        assert (await app.triggers.resume("reminder")).enabled
        await world.advance(hours=1)
        await app.triggers.delete("reminder")
        await world.advance(hours=1)
    assert log.fired == [7200]
    assert await outcomes(app) == [
        (3600, "skipped", "paused"), (7200, "completed", None), (10800, "cancelled", "withdrawn")
    ]  # fmt: skip


@virtual
async def test_a_monthly_quota_of_five_hundred_holds_for_a_thousand_simultaneous_firings(world: World) -> None:
    """The quota is reserved at fire time."""
    from timebell.store.tenancy import monthly_quota, tenants

    app = world.app()
    log = app.on("shift.remind")(Log())
    await app.open()
    await app.store.run(tenants.upsert_tenant, "default", {"jobs_per_month": 500}, world.clock.now())
    async with engine(app, **QUIET):
        await shifts(app)
        await app.triggers.put_items("shifts", [item(str(n), 1, after(hours=1)) for n in range(1000)])
        await world.advance(hours=2)
        used = await app.store.run(monthly_quota.get_monthly_usage, "default", world.clock.now())
    assert len(log.events) == used.used == 500
    skipped = [job for job in await jobs(app) if job.state == "skipped"]
    assert len(skipped) == 500
    assert {(job.reason, job.error) for job in skipped} == {("quota", "Monthly limit reached (500/500)")}
    assert used.exhausted_at is not None


@virtual
async def test_a_long_key_and_recipient_fit_beside_an_accepted_payload(world: World) -> None:
    app = world.app()
    log = app.on("shift.remind")(Log())
    async with engine(app, **QUIET):
        await shifts(app, payload="x" * 65_200, recipients="who")
        await app.triggers.put_items("shifts", [item("k" * 200, 1, after(hours=1), who="w" * 200)])
        await world.advance(hours=2)
    assert [len(event.payload["itemId"]) for event in log.events] == [200]


@virtual
async def test_invalid_input_is_refused_before_anything_is_written(world: World) -> None:
    app = world.app()
    await shifts(app)
    for wrong, code in (
        ({"key": "1"}, "INVALID_ITEM"), ({"key": "", "fields": {}}, "INVALID_KEY"), (5, "INVALID_ITEM"),
        ({"key": "1", "version": -1, "fields": {}}, "INVALID_VERSION"),
        ({"key": "1", "fields": {"a": 1}, "deleted": True}, "INVALID_ITEM"),
        ({"key": "1", "fields": {}, "x": 1}, "INVALID_ITEM"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as refused:
            await app.triggers.put_items("shifts", [item("0", 1, after(hours=1)), wrong])  # type: ignore[list-item]
        assert refused.value.code == code
    assert await jobs(app) == []
    for options, error in (
        ({"offsets": ["soon"]}, "INVALID_OFFSET"), ({"timezone": "Mars/Base"}, "INVALID_TIMEZONE"),
        ({"condition": 5}, "INVALID_CONDITION"), ({"grace": -1}, "INVALID_DURATION"),
        ({"offset": ["0"]}, "UNKNOWN_OPTION"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as refused:
            await app.triggers.put("other", "shifts", "start_at", "t", **options)
        assert refused.value.code == error
    with pytest.raises(InvalidInput) as refused:
        await app.triggers.put_source("odd", "carrier-pigeon")
    assert refused.value.code == "UNKNOWN_SOURCE_KIND"
    with pytest.raises(NotFound):
        await app.triggers.put("other", "nowhere", "start_at", "t")
    with pytest.raises(NotFound):
        await app.triggers.put("other", "shifts", "start_at", "t", target="nowhere")
    with pytest.raises(Conflict):
        await app.triggers.put("reminder", "shifts", "start_at", "t", replace=False)
    with pytest.raises(Conflict):
        await app.triggers.delete_source("shifts")
    assert [one.name for one in await app.triggers.list()] == ["reminder"]
