"""The shift reminders from outside: shifts are written to PostgreSQL, and pushes arrive."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers import Postgres
from timebell.store.open import upgrade
from timebell.triggers.sql_table import SqlTable

EXAMPLE = Path(__file__).parents[2] / "examples" / "shift_reminders"


@pytest.fixture
def pushes() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A URL that takes pushes, and what came there. The first is refused, so that it has to be sent again."""
    came: list[dict[str, Any]] = []
    refused: list[str] = []

    class Sink(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            refuse = not refused
            (refused if refuse else came).append(body["notification_id"] if refuse else body)
            self.send_response(503 if refuse else 204)
            self.end_headers()

        def log_message(self, *said: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Sink) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", came
        server.shutdown()
        thread.join()


def soon(**spans: float) -> datetime:
    return datetime.now(UTC) + timedelta(**spans)


async def until(holds: Callable[[], bool], within: float = 120.0) -> None:
    async with asyncio.timeout(within):
        while not holds():
            await asyncio.sleep(0.05)


def test_the_sql_is_what_install_writes() -> None:
    """S4-F7: reviewed SQL that PostgreSQL takes."""
    options = {"url": "postgresql://host/name", "query": "SELECT 1", "table": "duty_schedules", "changes": "notify"}
    assert (EXAMPLE / "install.sql").read_text() == SqlTable({**options, "channel": "shifts"}).install()


def test_people_are_reminded_unless_they_have_checked_in(
    postgres: Postgres, tmp_path: Path, pushes: tuple[str, list[dict[str, Any]]]
) -> None:
    """S4-01, S4-06, S4-08, S4-09, S4-56 to S4-58, S4-66 to S4-69; S4-F2: the first send is refused, and sent again."""
    url = postgres.create_database()
    sink, came = pushes
    environment = {
        **os.environ, "SHIFTS_DATABASE_URL": url, "TIMEBELL_DATABASE_URL": url, "SEND_PUSH_URL": sink,
        "TIMEBELL_SCHEDULER_HEARTBEAT": "0.2",
    }  # fmt: skip
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "timebell.cli.main", "run", str(EXAMPLE / "app.py"), "--roles", "planner,worker"]

    async def body() -> None:
        await upgrade(url)
        shifts = await asyncpg.connect(url)
        for file in ("schema.sql", "install.sql"):
            await shifts.execute((EXAMPLE / file).read_text())

        async def add(start: datetime, *people: str) -> int:
            found: int = await shifts.fetchval(
                "INSERT INTO duty_schedules (title, assigned_user_id, participants, start_at, end_at)"
                " VALUES ('Night', $1, $2, $3, $4) RETURNING id",
                people[0], list(people[1:]), start, start + timedelta(hours=8),
            )  # fmt: skip
            return found

        quarter = timedelta(minutes=15)
        there = await add(soon(days=1), "eve")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
        try:

            async def planned(shift: int, count: int) -> None:
                """Until so many jobs of a shift are pending."""
                query = "SELECT count(*) FROM timebell_jobs WHERE state = 'pending' AND payload::json->>'itemId' = $1"
                async with asyncio.timeout(120):
                    while await shifts.fetchval(query, str(shift)) != count:
                        await asyncio.sleep(0.05)

            await planned(there, 2)
            both = await add(soon(seconds=6) + quarter, "ana", "bo")
            await planned(both, 4)
            insert = "INSERT INTO attendance_logs (schedule_id, user_id, type) VALUES ($1, $2, 'check_in')"
            await shifts.execute(insert, both, "ana")
            moved = await add(soon(hours=2), "cy")
            gone = await add(soon(seconds=6) + quarter, "dan")
            await planned(gone, 2)
            await shifts.execute("UPDATE duty_schedules SET status = 'cancelled' WHERE id = $1", gone)
            start = soon(seconds=1.5) + quarter
            await shifts.execute("UPDATE duty_schedules SET start_at = $2 WHERE id = $1", moved, start)
            await until(lambda: len(came) == 2)
            await planned(gone, 0)
            query = "SELECT owner_id, reason FROM timebell_finished WHERE state = 'skipped'"
            async with asyncio.timeout(120):
                while not (told := await shifts.fetch(query)):
                    await asyncio.sleep(0.05)
            assert [tuple(row) for row in told] == [("ana", "condition")]
        finally:
            await shifts.close()
            process.terminate()
            process.wait(120)
        assert sorted(push["user_id"] for push in came) == ["bo", "cy"]
        for push in came:
            at = datetime.fromisoformat(push["data"]["scheduledAt"])
            assert at < datetime.now(UTC) < at + quarter  # before the shift, not at it
            assert push["notification_id"].startswith(f"shift-{push['data']['scheduleId']}-{push['user_id']}-start_15-")

    try:
        asyncio.run(body())
    except BaseException:
        print((tmp_path / "log").read_text()[-4000:])
        raise
    finally:
        log.close()
        postgres.drop_database(url)
