"""A feature outside the product: its client, route, page and metric."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import httpx2

from tests.servers import free_port

from .processes import EXAMPLES, running_program, wait_until


def test_reminders_are_created_listed_and_delivered(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    command = ("-m", "timebell.cli.main", "dev", "reminders.py", "--port", str(port), "--no-reload")
    variables = {"TIMEBELL_DATABASE_URL": f"sqlite:///{tmp_path}/timebell.db"}
    with (
        running_program(log, *command, folder=EXAMPLES / "feature", **variables),
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        wait_until(lambda: "Ready in" in log.read_text())
        body = {"text": "tea", "at": datetime.now(UTC).isoformat()}
        assert client.post("/api/v1/reminders", json=body).status_code == 201
        page = client.get("/ui/reminders")
        assert page.is_success
        assert "tea" in page.text
        assert 'href="/ui/reminders" aria-current="page"' in page.text
        assert 'reminders_created_total{channel="any"} 1.0' in client.get("/metrics").text
        wait_until(lambda: "Reminder: tea" in log.read_text())
