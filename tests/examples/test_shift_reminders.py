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
from timebell.features import FEATURES
from timebell.features.triggers.sources.sql_table import SqlTable
from timebell.store.open import upgrade

EXAMPLE = Path(__file__).parents[2] / "examples" / "shift_reminders"


@pytest.fixture
def pushes() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A URL that receives pushes, and the pushes it received. The first is refused and must be sent again."""
    received: list[dict[str, Any]] = []
    refused: list[str] = []

    class Sink(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            refuse = not refused
            (refused if refuse else received).append(body["notification_id"] if refuse else body)
            self.send_response(503 if refuse else 204)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Sink) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", received
        server.shutdown()
        thread.join()


def in_future(**spans: float) -> datetime:
    return datetime.now(UTC) + timedelta(**spans)


async def wait_until(condition: Callable[[], bool], within: float = 120.0) -> None:
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.05)


def test_install_sql_matches_the_generated_sql() -> None:
    options = {"url": "postgresql://host/name", "query": "SELECT 1", "table": "duty_schedules", "changes": "outbox"}
    assert (EXAMPLE / "install.sql").read_text() == SqlTable({**options, "channel": "shifts"}).install_sql()


def test_reminders_go_to_everyone_who_has_not_checked_in(
    postgres: Postgres, tmp_path: Path, pushes: tuple[str, list[dict[str, Any]]]
) -> None:
    """The first push is refused and sent again."""
    url = postgres.create_database()
    sink, received = pushes
    environment = {
        **os.environ, "SHIFTS_DATABASE_URL": url, "TIMEBELL_DATABASE_URL": url, "SEND_PUSH_URL": sink,
        "TIMEBELL_SCHEDULER_HEARTBEAT": "0.2",
    }  # fmt: skip
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "timebell.cli.main", "run", str(EXAMPLE / "app.py"), "--roles", "planner,worker"]

    async def body() -> None:
        await upgrade(url, FEATURES)
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
        first_shift = await add(in_future(days=1), "eve")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
        try:

            async def planned(shift: int, count: int) -> None:
                """Wait for `count` pending jobs of a shift."""
                query = "SELECT count(*) FROM timebell_jobs WHERE state = 'pending' AND payload::json->>'itemId' = $1"
                async with asyncio.timeout(120):
                    while await shifts.fetchval(query, str(shift)) != count:
                        await asyncio.sleep(0.05)

            await planned(first_shift, 2)
            both = await add(in_future(seconds=6) + quarter, "ana", "bo")
            await planned(both, 4)
            insert = "INSERT INTO attendance_logs (schedule_id, user_id, type) VALUES ($1, $2, 'check_in')"
            await shifts.execute(insert, both, "ana")
            moved = await add(in_future(hours=2), "cy")
            cancelled = await add(in_future(seconds=6) + quarter, "dan")
            await planned(cancelled, 2)
            await shifts.execute("UPDATE duty_schedules SET status = 'cancelled' WHERE id = $1", cancelled)
            start = in_future(seconds=1.5) + quarter
            await shifts.execute("UPDATE duty_schedules SET start_at = $2 WHERE id = $1", moved, start)
            await wait_until(lambda: len(received) == 2)
            await planned(cancelled, 0)
            query = "SELECT owner_id, reason FROM timebell_finished WHERE state = 'skipped'"
            async with asyncio.timeout(120):
                while not (skipped := await shifts.fetch(query)):
                    await asyncio.sleep(0.05)
            assert [tuple(row) for row in skipped] == [("ana", "condition")]
        finally:
            await shifts.close()
            process.terminate()
            process.wait(120)
        assert sorted(push["user_id"] for push in received) == ["bo", "cy"]
        for push in received:
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
