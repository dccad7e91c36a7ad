"""The Flask application: a view makes a job, the engine runs it in the application's context."""

from __future__ import annotations

from pathlib import Path

import httpx2

from tests.servers import free_port

from .processes import EXAMPLES, going, until

FOLDER = EXAMPLES / "flask_app"


def test_a_view_makes_a_job_that_runs_in_the_applications_context(sqlite_url: str, tmp_path: Path) -> None:
    port = free_port()
    flask = ("-m", "flask", "--app", "app")
    web = going(tmp_path / "web", *flask, "run", "--port", str(port), folder=FOLDER, TIMEBELL_DATABASE_URL=sqlite_url)
    engine = going(
        tmp_path / "engine", *flask, "timebell", "run", "--roles", "planner,worker", folder=FOLDER,
        TIMEBELL_DATABASE_URL=sqlite_url,
    )  # fmt: skip
    with web, engine, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

        def answers() -> bool:
            try:
                return client.get("/jobs/none").status_code >= 400
            except httpx2.TransportError:
                return False

        until(answers)
        job = client.post("/orders/7").json()["job"]
        until(lambda: client.get(f"/jobs/{job}").json()["state"] == "completed")
        assert client.get(f"/jobs/{job}").json()["result"] == "Tea and cups: order 7 waits for you."
