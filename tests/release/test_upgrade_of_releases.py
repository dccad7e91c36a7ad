"""Databases of earlier releases are upgraded and go on working.

`python -m scripts.release_database VERSION` stores one for each release, beginning with the first. The database of this
source tree is always tested, so that the test itself is.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from scripts import release_database
from timebell.model.job import JobState

RELEASES = sorted(release_database.FOLDER.glob("*.sql"))


@pytest.fixture(params=[*RELEASES, None], ids=lambda file: "this source tree" if file is None else file.stem)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database that a release has written."""
    file: Path | None = request.param
    url = f"sqlite:///{tmp_path / 'upgraded.db'}"
    if file is None:
        asyncio.run(release_database.fill(f"sqlite:///{tmp_path / 'old.db'}"))
        text = release_database.dump(tmp_path / "old.db")
    else:
        text = file.read_text()
    with sqlite3.connect(tmp_path / "upgraded.db") as connection:
        connection.executescript(text)
    return url


def test_an_upgraded_database_keeps_its_jobs_and_runs_them(database: str) -> None:
    async def main() -> None:
        app = release_database.new_app(database)
        await app.upgrade()
        jobs = {job.payload: job for job in await app.list(topic="upgrade.work") if job.schedule_id is None}
        assert {payload: job.state for payload, job in jobs.items()} == {
            "well": JobState.COMPLETED, "fail": JobState.FAILED, "later": JobState.PENDING,
        }  # fmt: skip
        assert jobs["well"].result == "done well"
        assert "as requested" in str(jobs["fail"].error)
        (schedule,) = [each for each in (await app.schedules.list()).items if each.name == "hourly"]
        async with app.running() as service:
            retried = await app.retry(jobs["fail"].id)
            moved = await app.reschedule(jobs["later"].id, app.clock.now())
            manual = await app.schedules.trigger(schedule.id)
            await service.wait_until_idle()
        assert (await app.get(retried.id)).attempt == 2
        assert (await app.get(moved.id)).result == "done later"
        assert (await app.get(manual.id)).result == "done hourly"
        await app.close()

    asyncio.run(main())


def test_a_stored_database_does_not_name_the_machine(tmp_path: Path) -> None:
    asyncio.run(release_database.fill(f"sqlite:///{tmp_path / 'release.db'}"))
    with sqlite3.connect(tmp_path / "release.db") as connection:
        assert connection.execute("SELECT DISTINCT node FROM timebell_leaderships").fetchall() == [("release",)]
    text = release_database.dump(tmp_path / "release.db")
    assert str(release_database.ROOT) not in text
    assert "scripts/release_database.py" in text  # in a traceback
