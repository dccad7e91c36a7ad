"""Precise triggers from outside: dates are set on a board, and notifications arrive there at that second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.servers import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "precise_triggers"
DAY = timedelta(days=1)
TOKEN_SECONDS = "15"  # lifetime of a token; it is renewed in the last fifth


def call(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, head, method=method), timeout=20) as answer:
        return json.load(answer)


def wait_until(probe: Callable[[], Any], within: float = 180.0) -> Any:
    end = time.monotonic() + within
    while True:
        try:
            if found := probe():
                return found
        except (urllib.error.URLError, ConnectionError):
            pass  # the server has not started yet
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_board_dates_fire_move_and_clear_and_a_deleted_board_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    ours = f"http://127.0.0.1:{port}"
    monday = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "monday.py"), "--lasts", TOKEN_SECONDS], stdout=subprocess.PIPE, text=True
    )
    assert monday.stdout is not None
    theirs = monday.stdout.readline().strip()
    environment = {
        **os.environ, "TIMEBELL_SECRET_KEY": "a secret key of the tests, long enough", "MONDAY_URL": theirs,
        "MONDAY_LASTS": TOKEN_SECONDS, "TIMEBELL_URL": ours, "TIMEBELL_SCHEDULER_HEARTBEAT": "0.2",
        "TIMEBELL_DATABASE_URL": f"sqlite:///{tmp_path}/ours.db",
    }  # fmt: skip
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "timebell.cli.main", "dev", str(EXAMPLE / "app.py"), "--port", str(port),
               "--no-reload"]  # fmt: skip
    app = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    tasks = f"{ours}/api/v1/sources/tasks"

    def set_date(item: int, at: datetime | None) -> None:
        date = {} if at is None else {"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}"}
        call("PUT", f"{theirs}/items/{item}", date)

    def in_seconds(seconds: float = 3.0) -> datetime:
        return (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)

    def jobs(state: str) -> list[Any]:
        return call("GET", f"{ours}/api/v1/jobs?status={state}&limit=500")["items"]  # type: ignore[no-any-return]

    def notified_items() -> list[str]:
        return sorted(one["target"] for one in call("GET", f"{theirs}/notifications")["sent"])

    try:
        wait_until(lambda: len(call("GET", f"{theirs}/notifications")["hooks"]) == 6)
        wait_until(lambda: call("GET", tasks)["syncedAt"])
        for item in (1, 2, 3):
            set_date(item, datetime.now(UTC) + DAY)
        wait_until(lambda: len(jobs("pending")) == 3)
        at = in_seconds()
        set_date(1, at)  # moved
        set_date(2, None)  # cleared
        wait_until(lambda: notified_items() == ["1"])
        late = (datetime.now(UTC) - at).total_seconds()
        assert 0 <= late < 120
        call("DELETE", f"{theirs}/items/3")
        wait_until(lambda: jobs("pending") == [])
        # While the board is deleted, due jobs are skipped; the trigger resumes when the board is restored.
        set_date(4, in_seconds(8.0))
        wait_until(lambda: len(jobs("pending")) == 1)
        call("DELETE", f"{theirs}/board")
        (skipped,) = wait_until(lambda: jobs("skipped"))
        assert (skipped["reason"], skipped["errorMessage"]) == ("orphaned", "Board orphaned (404)")
        assert call("GET", f"{ours}/api/v1/triggers/due")["state"] == "orphaned"
        call("PUT", f"{theirs}/board")
        set_date(5, in_seconds())
        wait_until(lambda: notified_items() == ["1", "5"])
        wait_until(lambda: call("GET", f"{ours}/api/v1/triggers/due")["state"] == "ready")
        # Tokens have expired and been renewed in the meantime, and no request was refused.
        wait_until(lambda: call("GET", f"{ours}/api/v1/connections/monday")["version"] > 1)
        assert call("GET", f"{theirs}/notifications")["refused"] == 0
    except BaseException:
        print((tmp_path / "log").read_text()[-6000:])
        raise
    finally:
        app.terminate()
        app.wait(120)
        monday.terminate()
        monday.wait(60)
        monday.stdout.close()
        log.close()
