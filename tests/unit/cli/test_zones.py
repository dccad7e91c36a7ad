"""`timebell db zones`: occurrences that new zone data would move, and the finding of `doctor`."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.zone_data import MEXICO, SUMMER_TIME, release
from timebell import Cron, Every, JobSpec, Timebell
from timebell.clock import system_now
from timebell.model.routes import Routes
from timebell.recurrence import tzdata_version, zone
from timebell.store.cluster import nodes
from timebell.store.schema import jobs, schedules

from .conftest import Cli

CST, CDT = -21_600, -18_000


@pytest.fixture
def summer(tmp_path: Path) -> Path:
    """A release in which Mexico has summer time."""
    release(tmp_path / "next" / "tzdata" / "zoneinfo", "2099z", {MEXICO: SUMMER_TIME})
    return tmp_path / "next"


def create_schedules(url: str) -> int:
    """Create two schedules and a job that new rules move, and as many that they do not.

    Return the number of days in the coming year that summer time would affect.
    """
    now = system_now()
    july = datetime(now.year + 1, 7, 1, 9)

    async def body() -> None:
        app = Timebell(url, timezone=MEXICO)
        await app.schedule_repeat("t", Cron("0 9 * * *"), name="nine")
        await app.schedule_repeat("t", Cron("0 18 * * *"), name="six", enabled=False)
        await app.schedule_repeat("t", Every("PT1H"), name="hourly")
        await app.schedule_repeat("t", Cron("0 9 * * *"), name="seoul", timezone="Asia/Seoul")
        await app.schedule_many([JobSpec(topic="t", run_at=july), JobSpec(topic="t", run_at=july.replace(tzinfo=UTC))])
        await app.close()

    asyncio.run(body())
    days = [now + timedelta(days=n, minutes=1) for n in range(365)]
    return sum(4 <= day.month <= 10 for day in days)


def execute(url: str, *statements: Any) -> None:
    async def body() -> None:
        app = Timebell(url)
        await app.open()
        for statement in statements:
            await app.store.run(lambda tx, one=statement: one(tx) if callable(one) else tx.execute(one))
        await app.close()

    asyncio.run(body())


def test_another_release_is_compared_over_the_coming_year(store_url: str, summer: Path, cli: Cli) -> None:
    summers = create_schedules(store_url)
    at = ("db", "zones", "--database", store_url)
    done = cli(*at, "--against", summer, "-o", "json")
    assert done.code == 7
    (found,) = json.loads(done.out)
    assert abs(found.pop("occurrences") - 2 * summers) <= 14  # summer time begins and ends on a Sunday
    since = found.pop("since")
    assert since[4:7] in ("-04", f"-{system_now():%m}")
    assert found == {
        "timezone": MEXICO, "offset_before": CST, "offset_after": CDT, "schedules": 2, "jobs": 1,
    }  # fmt: skip
    shown = cli(*at, "--against", summer / "tzdata")
    assert "occurrences of 2 schedules and 1 job in America/Mexico_City move by one hour (from 20" in shown.out
    assert "UTC-06:00 becomes UTC-05:00)" in shown.out
    assert f"From zone data {tzdata_version()} to zone data 2099z: 4 schedules and 1 job at a local time" in shown.err


def test_comparison_with_an_earlier_release_swaps_the_offsets(sqlite_url: str, tmp_path: Path, cli: Cli) -> None:
    create_schedules(sqlite_url)
    release(tmp_path, "2020a", {MEXICO: SUMMER_TIME, "Asia/Seoul": "KST-9"})
    done = cli("db", "zones", "--database", sqlite_url, "--against", tmp_path, "-o", "json")
    assert [(one["offset_before"], one["offset_after"]) for one in json.loads(done.out)] == [(CDT, CST)]


def test_without_a_release_the_stored_instants_are_compared(store_url: str, cli: Cli) -> None:
    create_schedules(store_url)
    at = ("db", "zones", "--database", store_url)
    calm = cli(*at)
    assert (calm.code, calm.out) == (0, "")
    assert "nothing moves" in calm.err

    tomorrow = (system_now() + timedelta(days=1)).replace(hour=14, minute=0, second=0, microsecond=0)
    nine = update(schedules).where(schedules.c.name == "nine")
    july = datetime(system_now().year + 1, 7, 1, 14, tzinfo=UTC)
    local = update(jobs).where(jobs.c.local_time.is_not(None))
    execute(
        store_url,
        nine.values(next_fire_at=tomorrow, tzdata="2020a", utc_offset=CDT),
        local.values(run_at=july, tzdata="2020a"),
    )
    done = cli(*at, "-o", "json")
    assert done.code == 7
    (found,) = json.loads(done.out)
    assert (found["schedules"], found["jobs"], found["offset_before"], found["offset_after"]) == (1, 1, CDT, CST)
    assert cli(*at, "-o", "json").out == done.out  # the command writes nothing


def test_comparison_without_zone_data_or_schema_is_refused(sqlite_url: str, tmp_path: Path, cli: Cli) -> None:
    done = cli("db", "zones", "--database", sqlite_url, "--against", tmp_path)
    assert (done.code, "ZONE_DATA_NOT_FOUND" in done.err) == (2, True)
    done = cli("db", "zones", "--database", f"sqlite:///{tmp_path}/none.db")
    assert (done.code, "DATABASE_NOT_UPGRADED" in done.err) == (1, True)
    assert not (tmp_path / "none.db").exists()


def test_doctor_warns_when_nodes_have_different_zone_data(store_url: str, cli: Cli) -> None:
    def announce(name: str, tzdata: str, ago: timedelta) -> Any:
        at = system_now() - ago
        id_ = f"00000000-0000-7000-8000-00000000000{len(name)}"
        return lambda tx: nodes.announce(tx, nodes.Node(id_, name, "0.1", tzdata, Routes(), 0, at, at))

    def zone_data() -> dict[str, str]:
        found = json.loads(cli("doctor", "--database", store_url, "-o", "json").out)
        return {check["name"]: check for check in found}["zone data"]

    execute(store_url, announce("gone", "2019c", timedelta(hours=1)), announce("n1", tzdata_version(), timedelta(0)))
    assert zone_data()["verdict"] == "ok"
    execute(store_url, announce("old", "2020a", timedelta(0)))
    check = zone_data()
    assert check["verdict"] == "warn"
    assert check["detail"] == f"{tzdata_version()} here; old has 2020a"
    assert zone(MEXICO).release.version == tzdata_version()
