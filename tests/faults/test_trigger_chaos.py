"""A trigger on a large table while rows change, people check in, a node is killed and the database restarts.

Each row is judged by its own history (`trigger_history.py`): no firing is lost, doubled, early, sent after a check-in,
or for a time that the row no longer has.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.faults.trigger_history import CheckIn, Fired, Place, RowHistory, RowState, judge
from tests.servers import Postgres
from timebell import Timebell
from timebell.features import FEATURES
from timebell.features.triggers.sources.sql_table import SqlTable
from timebell.store.open import upgrade

OFFSETS = {"-3s": timedelta(seconds=-3), "0": timedelta(0)}
UNLESS = "SELECT 1 FROM check_ins WHERE shift_id = :id AND user_id = :recipient"
FAR = timedelta(days=30)
ROWS_OF_A_KIND = 20
SPREAD_SECONDS = 90.0  # the dues of the watched rows
KILL_AFTER_SECONDS, RESTART_AFTER_SECONDS = 30.0, 60.0
APP = """
import json, os
from timebell import Arrived, Timebell

app = Timebell(timezone="UTC")

@app.on("shift.due")
async def due(event: Arrived) -> None:
    run = {"row": event.payload["itemId"], "user": event.payload["recipient"], "due": event.scheduled_at.isoformat(),
           "at": app.clock.now().isoformat(), "job": event.job_id, "attempt": event.attempt, "pid": os.getpid()}
    with open(os.environ["FIRED"], "a") as fired:
        fired.write(json.dumps(run) + "\\n")
"""

Write = Callable[[], Awaitable[None]]


class Table:
    """The watched table, with the history of the rows that the test writes."""

    def __init__(self, pool: asyncpg.Pool[Any]) -> None:
        self._pool = pool
        self._locks = defaultdict[int, asyncio.Lock](asyncio.Lock)  # the writes of a row keep their order
        self.rows: dict[str, RowHistory] = {}

    async def put(self, row: int, start: datetime | None, *users: str, active: bool = True) -> None:
        """Write a row; without `start`, delete it."""
        async with self._locks[row]:
            sent = datetime.now(UTC)
            if start is None:
                await self._execute("DELETE FROM shifts WHERE id = $1", row)
            else:
                await self._execute(
                    "INSERT INTO shifts VALUES ($1, $2, $3, $4) ON CONFLICT (id)"
                    " DO UPDATE SET start_at = excluded.start_at, users = excluded.users, active = excluded.active",
                    row, start, list(users), active,
                )  # fmt: skip
            history = self.rows.setdefault(str(row), RowHistory())
            history.states.append(RowState(sent, datetime.now(UTC), start, users, active))

    async def check_in(self, row: int, user: str) -> None:
        sent = datetime.now(UTC)
        await self._execute("INSERT INTO check_ins VALUES ($1, $2) ON CONFLICT DO NOTHING", row, user)
        self.rows[str(row)].check_ins.append(CheckIn(sent, datetime.now(UTC), user))

    async def _execute(self, statement: str, *values: Any) -> None:
        """Execute a statement, again if the database restarts; all statements can be repeated."""
        while True:
            try:
                await self._pool.execute(statement, *values, timeout=20)
                return
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await asyncio.sleep(0.1)


def plan_writes(table: Table, first_row: int, begin: datetime) -> list[tuple[datetime, Write]]:
    """Return the writes of all rows with their times: for each kind of change, rows that are due at random times."""
    rng, writes, row = random.Random(7), list[tuple[datetime, Write]](), first_row

    def at(seconds: float, write: Callable[..., Awaitable[None]], *values: Any, **options: Any) -> None:
        row_of_write = row

        async def run() -> None:
            await write(row_of_write, *values, **options)

        writes.append((start + timedelta(seconds=seconds), run))

    for number in range(ROWS_OF_A_KIND * 12):
        start = begin + timedelta(seconds=15 + SPREAD_SECONDS * rng.random())
        early, later, far, row = -60.0, start + timedelta(seconds=15), start + FAR, row + 1
        just = -3 - rng.uniform(0.5, 4)  # shortly before the first offset
        match number % 12:
            case 0:  # nothing changes
                at(early, table.put, start, "ana", "bo")
            case 1:  # inserted shortly before
                at(just - 1, table.put, start, "ana")
            case 2:  # postponed
                at(early, table.put, start, "ana")
                at(just, table.put, later, "ana")
            case 3:  # brought forward
                at(early, table.put, far, "ana")
                at(just - 1, table.put, start, "ana")
            case 4:  # moved away
                at(early, table.put, start, "ana")
                at(just, table.put, far, "ana")
            case 5:  # moved away and back
                at(early, table.put, start, "ana")
                at(just - 2, table.put, far, "ana")
                at(just, table.put, start, "ana")
            case 6:  # moved away after it fired, and back
                at(early, table.put, start, "ana")
                at(1.5, table.put, far, "ana")
                at(3, table.put, start, "ana")
            case 7:  # deleted
                at(early, table.put, start, "ana")
                at(just, table.put, None)
            case 8:  # called off
                at(early, table.put, start, "ana")
                at(just, table.put, start, "ana", active=False)
            case 9:  # called off, and on again
                at(early, table.put, start, "ana", active=False)
                at(just - 1, table.put, start, "ana")
            case 10:  # one of two checks in
                at(early, table.put, start, "ana", "bo")
                at(just, table.check_in, "ana")
            case 11:  # checks in between the two offsets
                at(early, table.put, start, "ana")
                at(-1.5, table.check_in, "ana")
    return sorted(writes, key=lambda write: write[0])


class Nodes:
    """Two nodes; one that has ended is started again, as by a supervisor."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._environment = {
            **os.environ, "TIMEBELL_DATABASE_URL": url, "FIRED": str(folder / "fired"),
        }  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []
        self.killed: list[int] = []

    def keep_running(self) -> None:
        """Start the nodes that do not run."""
        self.processes = [node for node in self.processes if node.poll() is None]
        command = [sys.executable, "-m", "timebell.cli.main", "run", "app.py", "--roles", "planner,worker"]
        while len(self.processes) < 2:
            with (self._folder / "log").open("a") as log:
                self.processes.append(
                    subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log)
                )

    def kill(self) -> None:
        """Kill the oldest node, which leads unless it lost its lease."""
        self.killed.append(self.processes[0].pid)
        self.processes[0].send_signal(signal.SIGKILL)
        self.processes[0].wait(30)

    def stop(self) -> None:
        for node in self.processes:
            node.kill()
            node.wait(30)


@pytest.mark.soak
@pytest.mark.parametrize("rows", [5_000, 200_000])
def test_each_row_fires_as_its_history_asks(tmp_path: Path, rows: int) -> None:
    with closing(Postgres()) as server:
        nodes = Nodes(tmp_path, server.url)
        try:
            asyncio.run(asyncio.wait_for(_run(tmp_path, server, nodes, rows), 1800))
        except BaseException:
            print((tmp_path / "log").read_text()[-6000:])
            raise
        finally:
            nodes.stop()


async def _run(folder: Path, server: Postgres, nodes: Nodes, rows: int) -> None:
    (folder / "app.py").write_text(APP)
    (folder / "fired").touch()
    await upgrade(server.url, FEATURES)
    pool = await asyncpg.create_pool(server.url, min_size=1, max_size=8)
    options = {"url": server.url, "table": "shifts", "changes": "outbox", "everySeconds": 2, "sweepEverySeconds": 60}
    await pool.execute(
        "CREATE TABLE shifts (id integer PRIMARY KEY, start_at timestamptz, users text[], active boolean);"
        "CREATE TABLE check_ins (shift_id integer, user_id text, PRIMARY KEY (shift_id, user_id))"
    )
    await pool.execute(
        "INSERT INTO shifts SELECT n, $2, ARRAY['someone'], true FROM generate_series(1, $1::int) n",
        rows, datetime.now(UTC) + FAR,
    )  # fmt: skip
    await pool.execute(SqlTable(options).install_sql())
    app = Timebell(server.url, timezone="UTC")
    await app.triggers.put_source("shifts", "sql", options)
    await app.triggers.put(
        "due", "shifts", "start_at", "shift.due", offsets=list(OFFSETS), recipients="users", unless=UNLESS,
        condition={"active": True},
    )  # fmt: skip
    nodes.keep_running()
    while (await app.triggers.get_source("shifts")).synced_at is None:
        await asyncio.sleep(0.2)
    await app.close()

    table, begin = Table(pool), datetime.now(UTC) + timedelta(seconds=2)
    faults: list[tuple[datetime, Write]] = [
        (begin + timedelta(seconds=KILL_AFTER_SECONDS), lambda: asyncio.to_thread(nodes.kill)),
        (begin + timedelta(seconds=RESTART_AFTER_SECONDS), lambda: asyncio.to_thread(_restart, server)),
    ]
    supervisor = asyncio.create_task(_supervise(nodes))
    writes = [_run_at(*write) for write in (*plan_writes(table, rows, begin), *faults)]
    await asyncio.gather(*writes)
    due_until = datetime.now(UTC) + timedelta(seconds=20)  # the last postponed rows

    def judged() -> Any:
        return judge(table.rows, list(OFFSETS.values()), _read_fired(folder), end=due_until, killed=nodes.killed)

    async def all_fired() -> None:
        while judged().lost or datetime.now(UTC) < due_until + timedelta(seconds=10):
            await asyncio.sleep(1)

    with suppress(TimeoutError):  # the lost ones are reported below
        await asyncio.wait_for(all_fired(), 300)
    supervisor.cancel()
    pool.terminate()
    result, lags = judged(), sorted((run.at - run.place.due).total_seconds() for run in _read_fired(folder))
    print(
        f"{rows:,} rows: {len(result.expected)} expected, {len(result.silent)} silent, {len(result.ambiguous)}"
        f" ambiguous; {len(lags)} fired, lag p50 {lags[len(lags) // 2]:.2f} s, p99 {lags[int(len(lags) * 0.99)]:.2f} s"
    )
    assert result.violations() == {}
    assert len(result.expected) > 150
    assert len(result.silent) > 60


async def _run_at(at: datetime, write: Write) -> None:
    await asyncio.sleep(max(0.0, (at - datetime.now(UTC)).total_seconds()))
    await write()


async def _supervise(nodes: Nodes) -> None:
    while True:
        await asyncio.to_thread(nodes.keep_running)
        await asyncio.sleep(1)


def _restart(server: Postgres) -> None:
    server.stop()
    server.start()


def _read_fired(folder: Path) -> list[Fired]:
    runs = [json.loads(line) for line in (folder / "fired").read_text().splitlines()]
    return [
        Fired(
            Place(run["row"], run["user"], datetime.fromisoformat(run["due"])), datetime.fromisoformat(run["at"]),
            run["job"], run["attempt"], run["pid"],
        )
        for run in runs
    ]  # fmt: skip
