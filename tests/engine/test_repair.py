"""A running engine repairs damaged rows and reports how many, without missing or duplicating an occurrence."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from typing import Any

import pytest

from timebell import Arrived, Every, Timebell
from timebell.model.repair_report import RepairReport

from .world import Log, World, after, engine, jobs, virtual

pytestmark = pytest.mark.heartbeats


def damage(world: World, statement: str, *values: Any) -> None:
    """Execute a statement directly on the file."""
    with sqlite3.connect(world.url.removeprefix("sqlite:///")) as driver:
        driver.execute(statement, values)
    driver.close()


async def slow(event: Arrived) -> None:
    await asyncio.sleep(100)


@virtual
async def test_a_schedule_without_next_instant_is_repaired_within_a_minute(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    schedule = await app.schedule_repeat("a", Every("PT1M"), name="minutely", catch_up="all")
    with caplog.at_level(logging.INFO, "timebell.repair"):
        async with engine(app) as service:
            await world.advance(minutes=3, seconds=30)
            damage(world, "UPDATE timebell_schedules SET next_fire_at = NULL")
            await world.advance(minutes=5)
            assert service.repair_report.repairs["schedule"] == 1
    assert log.scheduled == [60.0 * n for n in range(1, 9)]
    assert "schedule 1" in caplog.text
    assert schedule.id in caplog.text


@virtual
async def test_a_next_instant_in_the_far_future_is_corrected(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_repeat("a", Every("PT1M"), catch_up="all")
    async with engine(app) as service:
        await world.advance(minutes=1, seconds=30)
        damage(world, "UPDATE timebell_schedules SET next_fire_at = next_fire_at + 86400000000 * 365")
        await world.advance(minutes=4)
        assert service.repair_report.repaired == 1
    assert log.scheduled == [60.0 * n for n in range(1, 6)]


@virtual
async def test_a_serial_schedule_continues_after_its_running_job_was_lost(world: World) -> None:
    app, log = world.app(), Log(slow)
    app.on("a")(log)
    await app.schedule_repeat("a", Every("PT1M"), overlap="queue", max_runs=3)
    async with engine(app) as service:
        await world.advance(minutes=1, seconds=1)
        (first,) = [job for job in await jobs(app) if job.state == "running"]
        await world.advance(minutes=1.1)
        # The row disappears without a completion, so nothing releases the next job.
        damage(world, "DELETE FROM timebell_jobs WHERE id = ?", first.id)
        await world.advance(minutes=8)
        assert service.repair_report.repairs["turn"] == 1
    assert log.scheduled == [60, 120, 180]
    assert [job.state for job in await jobs(app)] == ["completed", "completed"]


@virtual
async def test_a_hold_without_a_reason_is_released(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    job = await app.schedule_at("a")
    damage(world, "UPDATE timebell_jobs SET hold = 'overlap'")
    async with engine(app) as service:
        await world.advance(seconds=10)
        assert service.repair_report.repairs["hold"] == 1
    assert [event.job_id for event in log.events] == [job.id]


@virtual
async def test_a_job_held_as_unhandled_is_released_when_a_node_handles_it(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    async with engine(app) as service:
        await world.advance(seconds=1)
        await app.schedule_at("a", after(seconds=20))
        damage(world, "UPDATE timebell_jobs SET hold = 'unhandled'")
        await world.advance(seconds=60)
        assert service.repair_report.repairs["unhandled"] == 1
    assert log.fired == [20]


@virtual
async def test_an_attempt_of_an_unknown_node_is_reclaimed(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    async with engine(app) as service:
        await app.schedule_at("a", after(hours=1))
        running = "state = 'running', attempt = 1, node_id = 'gone', run_at = created_at, scheduled_at = created_at"
        damage(world, f"UPDATE timebell_jobs SET {running}")
        await world.advance(seconds=30)
        assert service.repair_report.repairs["lease"] == 1
        assert service.repair_report.skip_reasons["leased"] > 0  # until the lease was observed long enough
    assert [event.attempt for event in log.events] == [2]


@virtual
async def test_a_node_and_a_leader_continue_after_their_rows_were_deleted(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_repeat("a", Every("PT10S"))
    async with engine(app):
        await world.advance(seconds=11)
        damage(world, "DELETE FROM timebell_nodes")
        damage(world, "DELETE FROM timebell_leases")
        await world.advance(seconds=30)
        unhandled = await app.schedule_at("deaf")
        await world.advance(seconds=10)
        assert (await app.get(unhandled.id)).hold == "unhandled"  # so a leader is active
    assert log.scheduled == [10, 20, 30, 40, 50]


@virtual
async def test_repair_scans_everything_immediately_and_reports(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    for number in range(3):
        await app.schedule_repeat("a", Every("PT1H"), name=f"s{number}")
    await app.schedule_at("a", after(hours=2))
    found = await app.repair()
    assert found == RepairReport(skip_reasons={"sound": 3})
    assert str(found) == "3 scanned, 0 repaired, 3 skipped (sound 3)"
    damage(world, "UPDATE timebell_schedules SET next_fire_at = NULL WHERE name <> 's1'")
    damage(world, "UPDATE timebell_jobs SET hold = 'stopping'")
    found = await app.repair()
    assert (found.scanned, found.repaired, found.skipped) == (4, 3, 1)
    async with engine(app, heartbeat=3600, lease=10_800) as service:
        await world.advance(minutes=1)
        damage(world, "UPDATE timebell_schedules SET next_fire_at = NULL")
        before = service.repair_report
        found = await app.repair()
        assert found.repairs["schedule"] == 3
        assert service.repair_report.repaired == before.repaired + 3
        await world.advance(hours=1.5)
    assert sorted(log.scheduled) == [3600, 3600, 3600]


def test_repair_is_available_through_sync(sqlite_url: str) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    app.sync.schedule_repeat("a", Every("PT1H"))
    assert app.sync.repair().skip_reasons["sound"] == 1
    app.sync.close()
