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

from tests.servers import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "precise_triggers"
DAY = timedelta(days=1)
LASTS = "15"  # seconds for a token, of which the last fifth is for its renewal


def ask(method: str, url: str, body: Any = None) -> Any:
    sent = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, sent, head, method=method), timeout=20) as answer:
        return json.load(answer)


def until(holds: Callable[[], Any], within: float = 180.0) -> Any:
    end = time.monotonic() + within
    while True:
        try:
            if found := holds():
                return found
        except (urllib.error.URLError, ConnectionError):
            pass  # it is not up yet
        assert time.monotonic() < end
        time.sleep(0.05)


def test_dates_fire_move_and_are_cleared_and_a_board_that_goes_costs_nothing(tmp_path: Path) -> None:
    port = free_port()
    ours = f"http://127.0.0.1:{port}"
    monday = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "monday.py"), "--lasts", LASTS], stdout=subprocess.PIPE, text=True
    )
    assert monday.stdout is not None
    theirs = monday.stdout.readline().strip()
    environment = {
        **os.environ, "TIMEBELL_SECRET_KEY": "a secret key of the tests, long enough", "MONDAY_URL": theirs,
        "MONDAY_LASTS": LASTS, "TIMEBELL_URL": ours, "TIMEBELL_SCHEDULER_HEARTBEAT": "0.2",
        "TIMEBELL_DATABASE_URL": f"sqlite:///{tmp_path}/ours.db",
    }  # fmt: skip
    log = (tmp_path / "log").open("w")
    command = [sys.executable, "-m", "timebell.cli.main", "dev", str(EXAMPLE / "app.py"), "--port", str(port),
               "--no-reload"]  # fmt: skip
    app = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    tasks = f"{ours}/api/v1/sources/tasks"

    def put(item: int, at: datetime | None) -> None:
        date = {} if at is None else {"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}"}
        ask("PUT", f"{theirs}/items/{item}", date)

    def soon(seconds: float = 3.0) -> datetime:
        return (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)

    def jobs(state: str) -> list[Any]:
        return ask("GET", f"{ours}/api/v1/jobs?status={state}&limit=500")["items"]  # type: ignore[no-any-return]

    def sent() -> list[str]:
        return sorted(one["target"] for one in ask("GET", f"{theirs}/notifications")["sent"])

    try:
        until(lambda: len(ask("GET", f"{theirs}/notifications")["hooks"]) == 3)
        until(lambda: ask("GET", tasks)["syncedAt"])
        for item in (1, 2, 3):
            put(item, datetime.now(UTC) + DAY)
        until(lambda: len(jobs("pending")) == 3)
        at = soon()
        put(1, at)  # it is moved
        put(2, None)  # it is cleared
        until(lambda: sent() == ["1"])
        late = (datetime.now(UTC) - at).total_seconds()
        assert 0 <= late < 120
        ask("DELETE", f"{theirs}/items/3")
        until(lambda: jobs("pending") == [])
        # The board is deleted: what comes due is skipped, and goes on when it is there again.
        put(4, soon(8.0))
        until(lambda: len(jobs("pending")) == 1)
        ask("DELETE", f"{theirs}/board")
        (skipped,) = until(lambda: jobs("skipped"))
        assert (skipped["reason"], skipped["errorMessage"]) == ("orphaned", "Board orphaned (404)")
        assert ask("GET", f"{ours}/api/v1/triggers/due")["state"] == "orphaned"
        ask("PUT", f"{theirs}/board")
        put(5, soon())
        until(lambda: sent() == ["1", "5"])
        until(lambda: ask("GET", f"{ours}/api/v1/triggers/due")["state"] == "ready")
        # Meanwhile its tokens have come to their end, and none was ever refused.
        until(lambda: ask("GET", f"{ours}/api/v1/connections/monday")["version"] > 1)
        assert ask("GET", f"{theirs}/notifications")["refused"] == 0
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
