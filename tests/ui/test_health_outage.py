"""Health probes and pages during an outage; formatting of times; the template cache."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import text

from timebell import Timebell, errors
from timebell.api import health, server
from timebell.dashboard import overview_data, rendering, site
from timebell.features import FEATURES
from timebell.formatting import format_milliseconds, format_relative, to_local


@asynccontextmanager
async def serve(app: Timebell) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve probes and pages of an app; yield a client."""
    web = server.HttpApp(app, [health.router(app), site.build_routes(app.features)], allow_local=True)
    transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        yield client


async def _responses_in_outage(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    """Return status and body by "<state> <path>", before, during and after an outage."""
    app = Timebell(url)
    responses = {}
    async with asyncio.timeout(180), serve(app) as client:

        async def record(state: str) -> None:
            for path in ("/ui/", "/ui/nodes", "/readyz", "/livez"):
                answer = await client.get(path)
                responses[f"{state} {path}"] = (answer.status_code, answer.text)

        await record("before")
        async with app.running():
            await record("running")
            answer = await client.get("/readyz?verbose")
            responses["verbose"] = (answer.status_code, answer.text)

            async def unreachable(*_: object, **__: object) -> None:
                raise errors.StoreUnreachable("The database postgresql://me@secret-host/db does not answer.")

            with monkeypatch.context() as patched:
                patched.setattr(app.store, "run", unreachable)
                patched.setattr(overview_data, "TILES_TTL_SECONDS", 0.0)
                await record("unreachable")
            async with asyncio.timeout(60):
                await app.store.run(lambda tx: tx.execute(text("UPDATE timebell_version SET version_num = '0000'")))
            await record("outdated")
        await record("after")
    await app.close()
    return responses


def test_probes_and_pages_report_an_outage(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = asyncio.run(_responses_in_outage(store_url, monkeypatch))
    assert all(answer[0] == 200 for name, answer in responses.items() if name.endswith("/livez"))
    for state, code in (
        ("before", "ENGINE_NOT_RUNNING"), ("unreachable", "DATABASE_UNREACHABLE"),
        ("outdated", "DATABASE_NOT_UPGRADED"), ("after", "ENGINE_NOT_RUNNING"),
    ):  # fmt: skip
        status_code, body = responses[f"{state} /readyz"]
        assert status_code == 503
        assert f'"code":"{code}"' in body
        assert "secret-host" not in body
    assert responses["running /readyz"] == (200, '{"status":"ready"}')
    assert responses["before /ui/"][0] == 200
    assert "No node is running" in responses["before /ui/"][1]
    assert "No schedule runs in the next 24 hours" in responses["running /ui/"][1]
    status_code, body = responses["unreachable /ui/"]
    assert status_code == 200
    assert "The database does not answer: figures are from" in body  # the last known figures stay
    assert "secret-host" not in body
    status_code, body = responses["unreachable /ui/nodes"]
    assert status_code == 503
    assert 'role="alert"' in body
    assert "The database does not answer" in body
    assert "secret-host" not in body
    for fact in ("databaseTime", "clockOffsetSeconds", "tzdata", "node", "version", "largestLagSeconds", "repair"):
        assert f'"{fact}"' in responses["verbose"][1]
    assert '"repair":{"scanned":0,"healed":0,"skipped":0}' in responses["verbose"][1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "now"), (0.4, "now"), (1, "in 1 s"), (-61, "1 min 1 s ago"), (3600, "in 1 h"), (3605, "in 1 h"),
     (7260, "in 2 h 1 min"), (90_000, "in 1 d 1 h"), (-86_400 * 400, "400 d ago")],
)  # fmt: skip
def test_relative_times_are_formatted(seconds: float, words: str) -> None:
    assert format_relative(timedelta(seconds=seconds)) == words


def test_lags_and_local_times_are_formatted() -> None:
    assert format_milliseconds(timedelta(microseconds=840)) == "0.8 ms"
    assert format_milliseconds(timedelta(seconds=12.3456)) == "12,346 ms"
    at = datetime(2027, 1, 1, tzinfo=UTC)
    assert to_local(at, "Asia/Seoul").hour == 9
    assert to_local(at, "Zone/That-Was-Dropped") == at  # one bad row must not break the page


def test_templates_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later processes reuse the compiled templates; without a writable folder they compile again."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first, second, third = (rendering.template_environment.__wrapped__(FEATURES) for _ in range(3))
    for environment, folder in ((first, tmp_path), (second, tmp_path), (third, tmp_path / "none")):
        environment.bytecode_cache.directory = str(folder)
    first.get_template("frame.html")
    third.get_template("frame.html")
    monkeypatch.setattr(type(first), "_generate", None)  # the compiler
    second.get_template("frame.html")
