"""Ctrl-C ends a long command with a summary: how far it came, and whether repeating it is safe."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from timebell.cli.remote import REQUEST_TIMEOUT_SECONDS

from .conftest import Start
from .process import until


@pytest.fixture
def slow_server() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server that answers the first requests and then no more: its address, and the requests so far."""
    requests: list[str] = []
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            requests.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = self.find_response()
            if body is None:
                stop.wait()
                return
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer  # noqa: N815 - names of the base class

        def find_response(self) -> dict[str, Any] | None:
            progress = {"done": 7, "total": 40, "failed": 0}
            operation = {"id": "0199", "kind": "retry", "state": "running", "spec": {}, "progress": progress}
            counts = {"schedules": 2, "expected": 5}
            audit = {"counts": counts, "skipped": {}, "found": {}, "differences": [], "more": False, "lostWrites": []}
            first = len([each for each in requests if each.startswith(requests[-1].partition("?")[0])]) == 1
            path = self.path.removeprefix("/api/v1").partition("?")[0]
            if path == "/dead-letters/retry":
                return {"count": 40} if first else operation
            if path.startswith("/operations/"):
                return operation
            if path == "/audit" and first:
                return audit
            if path in ("/schedules", "/targets"):
                return {"items": [], "nextCursor": None}
            if path == "/schedules/preview":
                return {"schedule": {}}
            if path == "/schedules/by-name/one" or (path == "/devices/bulk" and first):
                return {"progress": {"done": 5000, "skipped": 0}, "errors": []}
            return None

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server_thread = threading.Thread(target=server.serve_forever, daemon=True)
    server_thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    stop.set()
    server.shutdown()
    server_thread.join()
    server.server_close()


SCHEDULES = "\n---\n".join(f"name: {name}\ncronExpression: 0 9 * * *\ntopic: t" for name in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("args", "wait_for", "summary"),
    [
        (["dead", "retry", "--yes"], "GET /api/v1/operations/", "continues on the server (retry running: 7 of 40)"),
        (["audit", "--from", "72h"], "GET /api/v1/audit?#2", "An audit changes nothing. Run the command again."),
        (["apply", "-f", "s.yaml"], "PUT /api/v1/schedules/by-name/two", "1 of 3 changes were made. Run the command"),
        (["device", "import", "d.ndjson"], "POST /api/v1/devices/bulk#2", "5,000 new, 0 known, 0 refused. Import the"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_ctrl_c_is_summarized(
    slow_server: tuple[str, list[str]], start: Start, tmp_path: Path, args: list[str], wait_for: str, summary: str
) -> None:
    url, requests = slow_server
    (tmp_path / "s.yaml").write_text(SCHEDULES)
    (tmp_path / "d.ndjson").write_text("".join(f'{{"token": "t{n}"}}\n' for n in range(12_000)))
    process = start(*args, TIMEBELL_URL=url)
    path, _, number = wait_for.partition("#")
    until(
        lambda: True if sum(each.startswith(path) for each in requests) >= int(number or 1) else None,
        lambda: f"{requests} {process.err.read_text()}",
    )
    interrupted_at = time.monotonic()
    assert process.end(signal.SIGINT) == 130
    assert time.monotonic() - interrupted_at < REQUEST_TIMEOUT_SECONDS - 5, "it waited for the response"
    message = process.err.read_text()
    assert "Interrupted. " in message
    assert summary in message
    assert "Traceback" not in message


def test_ctrl_c_during_an_import_reports_the_jobs_that_are_stored(start: Start, tmp_path: Path) -> None:
    line = '{"topic": "a", "runAt": "2040-01-01T00:00:00Z", "payload": %d}\n'
    (tmp_path / "jobs.ndjson").write_text("".join(line % n for n in range(400_000)))
    assert start("db", "upgrade").wait() == 0
    process = start("job", "import", "jobs.ndjson")
    database = tmp_path / "timebell.db"
    size = database.stat().st_size
    wal = tmp_path / "timebell.db-wal"
    until(
        lambda: True if wal.exists() and wal.stat().st_size > 1_000_000 else None,
        lambda: f"{size} {process.err.read_text()}",
    )
    assert process.end(signal.SIGINT) == 130
    message = process.err.read_text()
    assert "jobs created" in message
    assert "Import the file again: existing jobs are not created twice." in message
