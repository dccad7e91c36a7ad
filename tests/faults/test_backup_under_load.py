"""A backup taken under load and restored: nothing of it is lost or runs again unasked, and the audit agrees."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.servers import Postgres
from timebell import Arrived, Every, JobSpec, Timebell
from timebell.clock import system_now

JOBS_PER_BATCH = 50
RUNS = 4 * JOBS_PER_BATCH  # before the backup, and after it
SCHEDULES = 3


def timebell(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "timebell", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


class Database:
    """A database that is backed up and restored with the commands of docs/guides/backup.md."""

    def __init__(self, url: str, file: Path, programs: Path | None) -> None:
        self.url, self.file, self._programs = url, file, programs

    @property
    def _kind(self) -> str:
        return urlsplit(self.url).scheme

    def back_up(self) -> None:
        if self._kind == "sqlite":
            done = timebell("backup", self.file, "--database", self.url)
            assert done.returncode == 0, done.stderr
        elif self._kind == "mariadb":
            with self.file.open("wb") as file:
                self._run_client("mariadb-dump", "--single-transaction", stdout=file)
        else:
            self._run("pg_dump", f"--dbname={self.url}", "--format=custom", f"--file={self.file}")

    async def restore(self) -> None:
        """Put the backup in place, and hold its jobs; wait while its nodes seem to be running."""
        if self._kind == "mariadb":
            with self.file.open("rb") as file:
                self._run_client("mariadb", stdin=file)
        elif self._kind == "postgresql":
            self._run("pg_restore", f"--dbname={self.url}", "--clean", "--if-exists", str(self.file))
        backup = [self.file] if self._kind == "sqlite" else []
        async with asyncio.timeout(120):
            while True:
                done = await asyncio.to_thread(timebell, "restore", *backup, "--yes", "--database", self.url)
                if done.returncode == 0:
                    return
                assert "NODES_STILL_RUNNING" in done.stderr, done.stderr

    def _run_client(self, program: str, *options: str, **files: Any) -> None:
        parts = urlsplit(self.url)
        connection = [f"--host={parts.hostname}", f"--port={parts.port}", f"--user={parts.username}"]
        self._run(program, "--no-defaults", *options, *connection, parts.path[1:], **files)

    def _run(self, program: str, *arguments: str, **files: Any) -> None:
        path = shutil.which(program) if self._programs is None else str(self._programs / program)
        if path is None or not Path(path).exists():
            pytest.skip(f"{program} is not installed")
        subprocess.run([path, *arguments], check=True, **files)

    def audit(self, start: datetime, end: datetime) -> list[dict[str, Any]]:
        """Return the differences that `timebell audit` finds."""
        done = timebell(
            "audit", "--from", start.isoformat(), "--to", end.isoformat(), "--database", self.url, "-o", "json"
        )
        assert done.returncode in (0, 7), done.stderr
        differences: list[dict[str, Any]] = json.loads(done.stdout)
        return differences


@pytest.fixture
def database(request: pytest.FixtureRequest, store_url: str, tmp_path: Path) -> Database:
    programs = None
    if urlsplit(store_url).scheme == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        programs = server._binaries()
    return Database(store_url, tmp_path / "backup", programs)


class Load:
    """Jobs that become due all the time, and the runs of each."""

    def __init__(self, url: str) -> None:
        self.ran: Counter[str] = Counter()
        self.acknowledged: set[str] = set()
        self.app = self._open(url)

    def _open(self, url: str) -> Timebell:
        app = Timebell(url, timezone="UTC")

        @app.on("*", handles=True)
        async def count_run(event: Arrived) -> None:
            self.ran[event.payload["name"] if event.schedule_id is None else event.occurrence_key] += 1

        return app

    async def reopen(self, url: str) -> None:
        """Use a new app, as after a restart."""
        await self.app.close()
        self.app = self._open(url)

    async def create_jobs(self) -> None:
        """Create jobs that are due soon, until cancelled."""
        while True:
            due = system_now() + timedelta(seconds=2)
            names = [f"job-{len(self.acknowledged) + number}" for number in range(JOBS_PER_BATCH)]
            jobs = [JobSpec(topic="mail", run_at=due, payload={"name": name}) for name in names]
            await self.app.schedule_many(jobs)
            self.acknowledged.update(names)
            await asyncio.sleep(0.1)

    async def wait_for_runs(self, count: int) -> None:
        async with asyncio.timeout(120):
            while len(self.ran) < count:
                await asyncio.sleep(0.05)


@pytest.mark.soak  # measures a machine without other work
async def test_a_backup_under_load_is_complete_and_repeats_nothing_unasked(database: Database) -> None:
    load = Load(database.url)
    began = system_now()
    every_second = Every(timedelta(seconds=1))
    schedules = [
        await load.app.schedule_repeat("report", every_second, name=f"report-{number}", catch_up="all")
        for number in range(SCHEDULES)
    ]
    async with load.app.running() as service:
        creating = asyncio.create_task(load.create_jobs())
        await load.wait_for_runs(RUNS)
        backed_up = set(load.acknowledged)
        await asyncio.to_thread(database.back_up)
        await load.wait_for_runs(len(load.ran) + RUNS)
        creating.cancel()
        await asyncio.wait([creating])
        await service.wait_until_idle()
    assert max(load.ran.values()) == 1

    await load.reopen(database.url)
    await database.restore()
    ran_before = set(load.ran)
    async with load.app.running() as service:
        for schedule in schedules:
            await load.app.schedules.pause(schedule.id)
        await service.wait_until_idle()
        assert all(load.ran[key] == 1 for key in ran_before), "ran again unasked"
        released = await load.app.schedules.release()
        assert released >= RUNS
        await service.wait_until_idle()
        ended = system_now()
    await load.app.close()
    assert load.ran.total() - len(ran_before) >= released
    assert max(load.ran.values()) == 2
    assert backed_up <= set(load.ran)
    assert database.audit(began, ended) == []
