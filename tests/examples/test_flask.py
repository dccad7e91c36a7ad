"""The Flask application: a view creates a job, `flask timebell run` runs it in the application context."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from .processes import EXAMPLES, running_program, wait_until

FOLDER = EXAMPLES / "flask_app"


def test_view_creates_a_job_that_runs_in_the_application_context(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", sqlite_url)
    example = runpy.run_path(str(FOLDER / "app.py"))
    client = example["create_app"]().test_client()
    command = ("-m", "flask", "--app", "app", "timebell", "run", "--roles", "planner,worker")
    try:
        with running_program(tmp_path / "engine", *command, folder=FOLDER):
            job = client.post("/orders/7").get_json()["job"]
            wait_until(lambda: client.get(f"/jobs/{job}").get_json()["state"] == "completed")
        assert client.get(f"/jobs/{job}").get_json()["result"] == "Tea and cups: order 7 waits for you."
    finally:
        example["bell"].sync.close()
