"""Real changes of zone data: processes with their own `tzdata` package, in sequence and in parallel."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.process import ROOT, Process
from tests.zone_data import MEXICO, SUMMER_TIME, package
from timebell import Cron, Timebell
from timebell.alarm import Alarm
from timebell.recurrence import tzdata_version

TIMEOUT_SECONDS = 180.0
STEP = timedelta(seconds=0.25)
APP = 'from timebell import Timebell\napp = Timebell()\n\n@app.on("t")\nasync def t(event): ...\n'


@pytest.fixture(scope="module")
def summer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fictitious release in which Mexico has daylight saving time again, from the first Sunday of April."""
    return package(tmp_path_factory.mktemp("summer"), "2099z", {MEXICO: SUMMER_TIME})


class NodeRun:
    """Return what a node on virtual time fired, and its log."""

    def __init__(self, url: str, start: str, until: str, data: Path | None = None, **plan: str) -> None:
        path = os.pathsep.join(str(one) for one in (data, ROOT / "src", ROOT) if one is not None)
        done = subprocess.run(
            [
                sys.executable, "-m", "tests.engine.tzdata_node", url, f"{start}+00:00", f"{until}+00:00",
                json.dumps(plan),
            ],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        output = json.loads(done.stdout)
        self.tzdata, self.log = output["tzdata"], done.stderr
        self.fired = [(payload, scheduled[5:16], fired[5:16]) for payload, scheduled, fired in output["fired"]]

    def at(self, payload: str) -> list[str]:
        """Return the nominal instants of one schedule: month, day, time in UTC."""
        return [scheduled for what, scheduled, _ in self.fired if what == payload]


def test_each_local_time_fires_once_across_an_upgrade_and_a_downgrade(sqlite_url: str, summer: Path) -> None:
    old = NodeRun(sqlite_url, "2027-03-31T12:00", "2027-04-02T20:00", nine="0 9 * * *", hourly="0 */12 * * *")
    assert (old.tzdata, old.at("nine")) == (tzdata_version(), ["03-31T15:00", "04-01T15:00", "04-02T15:00"])

    new = NodeRun(sqlite_url, "2027-04-02T20:00", "2027-04-08T20:00", summer)
    assert new.tzdata == "2099z"
    assert new.at("nine") == ["04-03T15:00", *(f"04-0{day}T14:00" for day in range(4, 9))]
    assert (new.at("nine local"), new.at("nine instant")) == (["04-06T17:00"], ["04-06T18:00"])
    moved = "2 jobs in America/Mexico_City moved by one hour (from 2027-04-06, UTC-06:00 becomes UTC-05:00)"
    assert f"zone data 2099z: {moved}" in new.log
    assert all(scheduled == fired for _, scheduled, fired in new.fired)

    again = NodeRun(sqlite_url, "2027-04-08T20:00", "2027-04-11T20:00")
    assert again.tzdata == tzdata_version()
    assert again.at("nine") == ["04-09T14:00", "04-10T15:00", "04-11T15:00"]  # the first as it was stored


def test_an_outage_across_the_change_catches_up_once(sqlite_url: str, summer: Path) -> None:
    """The node is down from before nine by the old rules until after nine by both, and starts with the new rules."""
    NodeRun(sqlite_url, "2027-04-05T16:00", "2027-04-05T17:00", nine="0 9 * * *")
    new = NodeRun(sqlite_url, "2027-04-06T14:20", "2027-04-07T20:00", summer)
    assert new.at("nine") == ["04-06T14:00", "04-07T14:00"]
    assert [fired for what, _, fired in new.fired if what == "nine"] == ["04-06T14:20", "04-07T14:00"]


def test_jobs_due_under_the_old_rules_stay_due(sqlite_url: str, summer: Path) -> None:
    """Nine by the old rules passes while no node runs; by the new rules it is an hour earlier."""
    NodeRun(sqlite_url, "2027-04-05T16:00", "2027-04-05T17:00", nine="0 9 * * *")
    new = NodeRun(sqlite_url, "2027-04-06T15:20", "2027-04-07T20:00", summer)
    assert new.at("nine") == ["04-06T15:00", "04-07T14:00"]


@pytest.fixture
def node(tmp_path: Path, store_url: str, summer: Path) -> Iterator[Process]:
    """Run `timebell run` with the fictitious release, next to the running node."""
    (tmp_path / "service.py").write_text(APP)
    path = os.pathsep.join(map(str, (summer, ROOT / "src")))
    environment = {"PYTHONPATH": path, "TIMEBELL_DATABASE_URL": store_url, "TIMEBELL_NODE_NAME": "newest"}
    started = Process(tmp_path, ["run", "service.py", "--roles", "planner,worker"], environment)
    yield started
    started.kill()


def test_a_newer_node_replans_stored_instants_and_an_older_one_leaves_them(
    store_url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    july = f"{datetime.now(UTC).year + 1}-07-01T"

    async def body() -> None:
        app = Timebell(store_url, timezone=MEXICO)
        app.on("t")(_nothing)
        made = await app.schedule_repeat("t", Cron("0 9 1 7 *"), name="yearly")
        local = await app.schedule_at("t", f"{july}09:00")
        instant = await app.schedule_at("t", f"{july}15:00Z")
        assert {at.hour for at in (made.next_fire_at, local.run_at, instant.run_at) if at} == {15}
        alarm = Alarm(app.clock)
        node: Process = request.getfixturevalue("node")

        async def moved() -> bool:
            found = await app.schedules.get(made.id)
            return found.tzdata == "2099z" and (await app.get(local.id)).run_at.hour == 14

        while not await moved():
            await alarm.wait(app.clock.now() + STEP)
        assert (await app.schedules.get(made.id)).next_fire_at.hour == 14
        assert (await app.get(local.id)).local_time == f"{july}09:00:00"
        assert (await app.get(instant.id)).run_at == instant.run_at
        node.wait_for("1 schedule and 1 job in America/Mexico_City moved by one hour", err=True)

        if store_url.startswith("postgres"):  # a file of SQLite has one engine at a time
            with caplog.at_level(logging.WARNING):
                async with app.running(name="older"):
                    await alarm.wait(app.clock.now() + 4 * STEP)
            assert "but newest has 2099z: upgrade the tzdata package of this node" in caplog.text
            assert await moved()
        alarm.close()
        await app.close()

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_SECONDS))


async def _nothing(_: Any) -> None:
    """Do nothing."""
