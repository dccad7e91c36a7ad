"""The Flask application: a view creates a job, `flask timebell run` runs it in the application context."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.servers import free_port
from timebell import Timebell

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


def test_preforked_workers_of_gunicorn_create_jobs(sqlite_url: str, tmp_path: Path) -> None:
    """The application is loaded, and has used `app.sync`, before the fork."""
    (tmp_path / "loaded.py").write_text(
        "from app import bell, create_app\nweb = create_app()\nbell.sync.schedule_at('before-the-fork')\n"
    )
    port = free_port()
    command = ("-m", "gunicorn", "--workers", "3", "--preload", "--worker-class", "sync", "--bind", f"127.0.0.1:{port}",
               "--no-control-socket", "--pythonpath", str(FOLDER), "loaded:web")  # fmt: skip
    bell = Timebell(sqlite_url, timezone="UTC")
    web = running_program(tmp_path / "web", *command, folder=tmp_path, TIMEBELL_DATABASE_URL=sqlite_url)
    with (
        web,
        ThreadPoolExecutor(6) as threads,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):

        def order(number: int) -> str:
            job: str = client.post(f"/orders/{number}").json()["job"]
            return job

        def answers() -> bool:
            try:
                return client.get("/").status_code == 404
            except httpx2.TransportError:
                return False

        wait_until(answers)
        created = set(threads.map(order, range(30)))
    assert len(created) == 30
    assert {job.id for job in bell.sync.list(topic="orders.remind", limit=100)} == created
    assert len(bell.sync.list(topic="before-the-fork")) == 1
    bell.sync.close()
