"""The FastAPI application under gunicorn with four workers: each occurrence once, API and dashboard under a prefix."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import httpx2

from tests.servers import free_port
from timebell import Timebell

from .processes import EXAMPLES, done, going, until

FOLDER = EXAMPLES / "fastapi_app"
SECRET = "a secret key of the tests, long enough"
FIRED = re.compile(r"heartbeat (\S+) in (\d+)")


def test_four_workers_fire_each_occurrence_once(postgres_url: str, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "gunicorn"
    variables = {"TIMEBELL_DATABASE_URL": postgres_url, "TIMEBELL_SECRET_KEY": SECRET}
    cli = ("-m", "timebell.cli.main")
    key = done(*cli, "key", "create", "ops", "--role", "admin", folder=tmp_path, **variables).split()[-1]
    web = going(
        log, "-m", "gunicorn", "--workers", "4", "--worker-class", "asgi", "--bind", f"127.0.0.1:{port}",
        "--no-control-socket", "app:web", folder=FOLDER, **variables,
    )  # fmt: skip
    with web, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        asking = {"authorization": f"Bearer {key}"}

        def alive() -> set[str]:
            try:
                answer = client.get("/bell/api/v1/nodes", headers=asking)
            except httpx2.TransportError:
                return set()
            return {node["id"] for node in answer.json()["items"] if node["alive"]} if answer.is_success else set()

        def fired() -> list[tuple[datetime, str]]:
            return [(datetime.fromisoformat(at), by) for at, by in FIRED.findall(log.read_text())]

        until(lambda: len(alive()) == 4)
        seen = len(fired())
        until(lambda: len(fired()) >= seen + 6)
        made = [client.post("/orders/7").json()["job"] if one == 0 else client.post("/orders/7") for one in range(2)]
        until(lambda: client.get(f"/bell/api/v1/jobs/{made[0]}", headers=asking).json()["status"] == "completed")
        assert client.get("/bell/api/v1/nodes").json()["code"] == "UNAUTHORIZED"
        page = client.get("/bell/ui/")
        assert (page.status_code, page.headers["location"]) == (303, "/bell/ui/sign-in?next=%2Fui%2F")
    at = [instant for instant, _ in fired()]
    assert [instant for instant, count in Counter(at).items() if count > 1] == []
    second = timedelta(seconds=1)
    assert sorted(at) == [min(at) + second * each for each in range(len(at))]
    assert log.read_text().count("order 7") == 1
    bell = Timebell(postgres_url)
    try:
        audit = bell.sync.audit(min(at), max(at))
        assert audit.differences == []
    finally:
        bell.sync.close()
