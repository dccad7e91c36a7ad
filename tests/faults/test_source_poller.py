"""A node that is killed while it scans a source: the next one continues, and each row is planned once."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

ROWS = 3000
APP = f"""
import asyncio, os
from timebell import Timebell
from timebell.features.triggers.engine.source_poller import SourcePoller

apply_page = SourcePoller._apply_page

async def once(self, *read, **options):
    if hasattr(self, "had"):
        await asyncio.Event().wait()  # holds the next page until the process is killed
    self.had = await apply_page(self, *read, **options)
    return self.had

if "HANGS" in os.environ:
    SourcePoller._apply_page = once

app = Timebell("sqlite:///ours.db", timezone="UTC")

@app.lifespan
async def source():
    await app.triggers.put_source("shifts", "sql", {{"url": "sqlite:///theirs.db", "table": "shifts"}})
    await app.triggers.put("start", "shifts", "start_at", "shift.remind")
    yield

@app.on("shift.remind")
async def remind(event): ...
# {ROWS} rows
"""


def count(folder: Path, query: str) -> int:
    try:
        with closing(sqlite3.connect(f"file:{folder}/ours.db?mode=ro", uri=True, timeout=10)) as ours:
            return int(ours.execute(query).fetchone()[0])
    except sqlite3.OperationalError:  # not created yet
        return 0


def until(holds: Callable[[], bool], within: float = 180.0) -> None:
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_source_scan_continues_and_plans_each_row_once(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
        theirs.execute("CREATE TABLE shifts (id integer primary key, start_at text)")
        theirs.executemany("INSERT INTO shifts VALUES (?, '2040-01-01T00:00:00Z')", [(n,) for n in range(ROWS)])
        theirs.commit()
    (tmp_path / "app.py").write_text(APP)
    planned = "SELECT count(*) FROM timebell_jobs WHERE kind = 'trigger'"
    environment = {
        **os.environ, "TIMEBELL_DATABASE_URL": f"sqlite:///{tmp_path}/ours.db", "TIMEBELL_SCHEDULER_LEASE": "1",
        "TIMEBELL_SCHEDULER_HEARTBEAT": "0.2",
    }  # fmt: skip
    command = [sys.executable, "-m", "timebell.cli.main", "run", "app.py", "--roles", "planner,worker"]
    subprocess.run(
        [sys.executable, "-m", "timebell.cli.main", "db", "upgrade"], env=environment, cwd=tmp_path, check=True
    )
    seen = []
    for kills in (True, True, False):
        hangs = {"HANGS": "1"} if kills else {}
        with (tmp_path / "log").open("a") as log:
            node = subprocess.Popen(command, cwd=tmp_path, env=environment | hangs, stdout=log, stderr=log)
        try:
            before = count(tmp_path, planned)
            wanted = before + 1 if kills else ROWS
            until(lambda wanted=wanted: count(tmp_path, planned) >= wanted)  # type: ignore[misc]
            seen.append(count(tmp_path, planned))
            if not kills:
                until(lambda: count(tmp_path, "SELECT count(synced_at) FROM timebell_sources") == 1)
                until(lambda: count(tmp_path, "SELECT count(finished_at) FROM timebell_operations") == 1)
        finally:
            node.send_signal(signal.SIGKILL)
            node.wait(60)
    assert 0 < seen[0] < seen[1] < seen[2], "it was not killed during the scan"
    assert count(tmp_path, planned) == ROWS
    assert count(tmp_path, "SELECT count(DISTINCT key) FROM timebell_jobs WHERE kind = 'trigger'") == ROWS
    assert count(tmp_path, "SELECT count(*) FROM timebell_finished") == 0  # no job was created and cancelled
    over = "SELECT count(*) FROM timebell_operations WHERE kind = 'scan' AND state = 'completed'"
    assert count(tmp_path, over) == 1
    assert count(tmp_path, "SELECT done FROM timebell_operations") == ROWS
    assert count(tmp_path, "SELECT skipped FROM timebell_operations") == 0
