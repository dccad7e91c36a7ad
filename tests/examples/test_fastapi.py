"""The FastAPI application under gunicorn with four workers: each occurrence once, API and dashboard under a prefix."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import httpx2
import pytest

from tests.api.web import SECRET, Web
from tests.servers import free_port
from timebell import Timebell

from .processes import EXAMPLES, running_program, wait_until

FOLDER = EXAMPLES / "fastapi_app"
FIRED = re.compile(r"heartbeat (\S+) in \d+, attempt 1(?!\d)")  # another worker may write directly after it


async def create_key(url: str) -> str:
    """Create an API key and return its text."""
    bell = Timebell(url)
    bell.settings = replace(bell.settings, secret_key=SECRET)
    try:
        return await Web(bell, None, None).key("platform", None)
    finally:
        await bell.close()


@pytest.mark.slow
def test_four_workers_fire_each_occurrence_once(postgres_url: str, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "gunicorn"
    variables = {"TIMEBELL_DATABASE_URL": postgres_url, "TIMEBELL_SECRET_KEY": SECRET}
    key = asyncio.run(create_key(postgres_url))
    web = running_program(
        log, "-m", "gunicorn", "--workers", "4", "--preload", "--worker-class", "asgi", "--bind", f"127.0.0.1:{port}",
        "--no-control-socket", "app:web", folder=FOLDER, **variables,
    )  # fmt: skip
    with web, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        headers_with_key = {"authorization": f"Bearer {key}"}

        def alive() -> set[str]:
            try:
                answer = client.get("/bell/api/v1/nodes", headers=headers_with_key)
            except httpx2.TransportError:
                return set()
            return {node["id"] for node in answer.json()["items"] if node["alive"]} if answer.is_success else set()

        def fired() -> list[datetime]:
            return sorted(map(datetime.fromisoformat, FIRED.findall(log.read_text())))

        def all_fired() -> bool:
            at = fired()
            return at == [at[0] + timedelta(seconds=each) for each in range(len(at))]

        wait_until(lambda: len(alive()) == 4)
        seen = len(fired())
        wait_until(lambda: len(fired()) >= seen + 6)
        wait_until(all_fired)
        job_id = client.post("/orders/7").json()["job"]
        wait_until(
            lambda: client.get(f"/bell/api/v1/jobs/{job_id}", headers=headers_with_key).json()["status"] == "completed"
        )
        assert client.get("/bell/api/v1/nodes").json()["code"] == "UNAUTHORIZED"
        page = client.get("/bell/ui/")
        assert (page.status_code, page.headers["location"]) == (303, "/bell/ui/sign-in?next=%2Fui%2F")
    at = fired()
    assert [instant for instant, count in Counter(at).items() if count > 1] == []
    assert log.read_text().count("order 7, attempt 1") == 1
    bell = Timebell(postgres_url)
    try:
        audit = bell.sync.audit(at[0], at[-1])
        assert audit.differences == []
    finally:
        bell.sync.close()
