"""Two releases on one database: the schema is upgraded under load while old and new nodes fire."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from tests.unit.cli.process import ROOT
from timebell import JobSpec, Timebell
from timebell.clock import system_now
from timebell.errors import SchemaOutdated
from timebell.features import FEATURES
from timebell.store import open as opening
from timebell.store.version import HEAD

NEXT, AFTER = "9001", "9002"
WAITS = {
    "postgresql": "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database"
    " WHERE NOT granted AND relation IS NOT NULL AND d.datname = current_database()",
    "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE state = 'Waiting for table metadata lock'"
    " AND db = DATABASE()",
}
READ = "SELECT count(*) FROM timebell_jobs"
DRIVERS = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql"}
EXPAND = f'''
import sqlalchemy as sa
from alembic import op
revision, down_revision = "{NEXT}", "{HEAD}"

def upgrade():
    for table in ("timebell_jobs", "timebell_finished", "timebell_schedules", "timebell_queues", "timebell_nodes"):
        op.add_column(table, sa.Column("news", sa.String(20)))
    op.add_column("timebell_jobs", sa.Column("counted", sa.Integer(), nullable=False, server_default="0"))
    op.create_index("timebell_jobs_news", "timebell_jobs", ["news"])
    op.create_table("timebell_news", sa.Column("id", sa.Integer(), primary_key=True))
'''
CONTRACT = f'''
from alembic import op
revision, down_revision = "{AFTER}", "{NEXT}"

def upgrade():
    op.drop_column("timebell_jobs", "news")
'''


class Releases:
    """This release and later ones, as processes on one database."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.effects = folder, url, folder / "effects"
        self.effects.touch()
        shutil.copytree(opening.MIGRATIONS, folder / NEXT)
        (folder / NEXT / "versions" / f"{NEXT}_news.py").write_text(EXPAND)
        shutil.copytree(folder / NEXT, folder / AFTER)
        (folder / AFTER / "versions" / f"{AFTER}_no_news.py").write_text(CONTRACT)
        self._nodes: list[subprocess.Popen[bytes]] = []

    def _start(self, release: str, what: str) -> subprocess.Popen[bytes]:
        since = {NEXT: HEAD, AFTER: NEXT}.get(release, "-")
        command = [sys.executable, "-m", "tests.faults.upgraded", str(self.folder / release), release, since, self.url]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*command, what], cwd=ROOT, stderr=log, stdout=log,
                                    env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""})  # fmt: skip

    def node(self, release: str) -> subprocess.Popen[bytes]:
        """Start a node and wait until it is ready."""
        before = self.ready(release)
        node = self._start(release, str(self.effects))
        self._nodes.append(node)
        self.until(lambda: self.ready(release) > before)
        return node

    def migrate(self, release: str) -> int:
        return self._start(release, "migrate").wait(300)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.effects.read_text().splitlines() if line.endswith("}")]

    def ready(self, release: str) -> int:
        return sum(1 for line in self.lines() if "ready" in line and line["release"] == release)

    def fired(self, release: str | None = None) -> Counter[str]:
        return Counter(line["key"] for line in self.lines() if "key" in line and release in (None, line["release"]))

    def until(self, look: Callable[[], object]) -> None:
        deadline = time.monotonic() + 180
        while not look():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def close(self) -> None:
        for node in self._nodes:
            node.kill()
            node.wait()


@pytest.fixture
def releases(tmp_path: Path, nodes_url: str) -> Iterator[Releases]:
    made = Releases(tmp_path, nodes_url)
    yield made
    made.close()


def make(url: str, count: int, seconds: float) -> None:
    """Create jobs due one after another over some seconds from now, like a program of the old release."""

    async def body() -> None:
        app = Timebell(url, timezone="UTC")
        await app.open()
        start = system_now()
        await app.schedule_many([
            JobSpec(topic="work", run_at=start + timedelta(seconds=seconds * n / count)) for n in range(count)
        ])  # fmt: skip
        await app.close()

    asyncio.run(body())


def test_old_and_new_nodes_fire_together_during_a_schema_upgrade(releases: Releases) -> None:
    url = releases.url
    old = releases.node("-")
    asyncio.run(_every_second(url))
    make(url, 300, 4.0)
    releases.until(lambda: releases.fired("-"))
    assert releases.migrate(NEXT) == 0  # under load
    make(url, 100, 1.0)  # a program of the old release continues
    releases.node(NEXT)
    old.kill()  # and an old node is restarted, as by a service manager
    make(url, 50, 0.5)
    releases.until(lambda: releases.fired(NEXT))
    releases.node("-")
    make(url, 200, 2.0)
    jobs = 650
    releases.until(lambda: len(releases.fired()) == jobs)
    assert asyncio.run(_one_shots(url)) == {"completed": jobs}
    again = {key for key, times in releases.fired().items() if times > 1}
    struck = {line["key"] for line in releases.lines() if "key" in line and line["pid"] == old.pid}
    assert again <= struck, "more than what ran on the node that was killed was tried again"
    log = (releases.folder / "log").read_text()
    assert "Traceback" not in log, log


async def _every_second(url: str) -> None:
    from timebell import Every

    app = Timebell(url, timezone="UTC")
    await app.schedule_repeat("tick", Every("PT1S"), name="tick", on_unhandled="complete")
    await app.close()


async def _one_shots(url: str) -> dict[str, int]:
    """Wait until no job of the topic is live; return the number of jobs by state."""
    app = Timebell(url, timezone="UTC")
    async with asyncio.timeout(180):
        while (await app.list(topic="work", status=["pending", "running"], limit=1)).items:
            await asyncio.sleep(0.1)
    counted: Counter[str] = Counter()
    cursor = None
    while True:
        page = await app.list(topic="work", limit=500, cursor=cursor)
        counted.update(job.state.value for job in page)
        if (cursor := page.next_cursor) is None:
            await app.close()
            return dict(counted)


def test_a_breaking_migration_refuses_older_releases(releases: Releases) -> None:
    assert releases.migrate(NEXT) == 0
    unchanged = asyncio.run(opening.upgrade(releases.url, FEATURES))
    assert unchanged == (NEXT, NEXT), "an older release leaves newer tables alone"
    assert releases.migrate(AFTER) == 0
    with pytest.raises(SchemaOutdated, match="newer release") as refused:
        make(releases.url, 1, 1)
    assert refused.value.fix == "Upgrade this program."
    with pytest.raises(SchemaOutdated):
        asyncio.run(opening.upgrade(releases.url, FEATURES))
    assert releases.migrate(NEXT) == 0  # old nodes still work on the new tables


def test_a_migration_waits_for_a_long_transaction_without_blocking_others(releases: Releases) -> None:
    kind = releases.url.partition(":")[0]
    place = make_url(releases.url).set(drivername=DRIVERS[kind])
    holding = create_engine(place, poolclass=NullPool)
    other = create_engine(place, poolclass=NullPool, isolation_level="AUTOCOMMIT")

    def ask(connection: Connection, statement: str) -> int:
        return int(connection.execute(text(statement)).scalar_one())

    async def body() -> None:
        with holding.connect() as held, other.connect() as beside:
            ask(held, READ)
            migrating = asyncio.create_task(asyncio.to_thread(releases.migrate, NEXT))
            async with asyncio.timeout(180):
                while not ask(beside, WAITS[kind]):
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(60):  # a reader does not wait as long as the migration
                await asyncio.to_thread(ask, beside, READ)
            assert not migrating.done()
            held.rollback()
            assert await migrating == 0

    asyncio.run(body())
