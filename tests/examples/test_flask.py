"""The Flask application: a view makes a job, `flask timebell run` runs it in the application's context."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from .processes import EXAMPLES, going, until

FOLDER = EXAMPLES / "flask_app"


def test_a_view_makes_a_job_that_runs_in_the_applications_context(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", sqlite_url)
    example = runpy.run_path(str(FOLDER / "app.py"))
    client = example["create_app"]().test_client()
    command = ("-m", "flask", "--app", "app", "timebell", "run", "--roles", "planner,worker")
    try:
        with going(tmp_path / "engine", *command, folder=FOLDER):
            job = client.post("/orders/7").get_json()["job"]
            until(lambda: client.get(f"/jobs/{job}").get_json()["state"] == "completed")
        assert client.get(f"/jobs/{job}").get_json()["result"] == "Tea and cups: order 7 waits for you."
    finally:
        example["bell"].sync.close()
