"""The probes and the pages tell the truth in an outage; distances and lags in words."""

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
from timebell.dashboard import rendering, site
from timebell.formatting import local, milliseconds, relative


@asynccontextmanager
async def served(app: Timebell) -> AsyncIterator[httpx2.AsyncClient]:
    web = server.Site(app, [health.router(app), site.routes], open_here=True)
    transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        yield client


async def _outage(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    app = Timebell(url)
    seen = {}
    async with asyncio.timeout(180), served(app) as client:

        async def note(name: str) -> None:
            for path in ("/ui/", "/readyz", "/livez"):
                answer = await client.get(path)
                seen[f"{name} {path}"] = (answer.status_code, answer.text)

        await note("before")
        async with app.running():
            await note("running")
            answer = await client.get("/readyz?verbose")
            seen["verbose"] = (answer.status_code, answer.text)

            async def gone(*_: object, **__: object) -> None:
                raise errors.StoreUnreachable("The database postgresql://me@secret-host/db does not answer.")

            with monkeypatch.context() as patched:
                patched.setattr(app.store, "run", gone)
                await note("unreachable")
            async with asyncio.timeout(60):
                await app.store.run(lambda tx: tx.execute(text("UPDATE timebell_version SET version_num = '0000'")))
            await note("outdated")
        await note("after")
    await app.close()
    return seen


def test_probes_and_pages_tell_the_truth_in_an_outage(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asyncio.run(_outage(store_url, monkeypatch))
    assert all(answer[0] == 200 for name, answer in seen.items() if name.endswith("/livez"))
    for state, code in (
        ("before", "ENGINE_NOT_RUNNING"), ("unreachable", "DATABASE_UNREACHABLE"),
        ("outdated", "DATABASE_NOT_UPGRADED"), ("after", "ENGINE_NOT_RUNNING"),
    ):  # fmt: skip
        status_code, body = seen[f"{state} /readyz"]
        assert status_code == 503
        assert f'"code":"{code}"' in body
        assert "secret-host" not in body
    assert seen["running /readyz"] == (200, '{"status":"ready"}')
    assert seen["before /ui/"][0] == 200
    assert "No node leads" in seen["before /ui/"][1]
    assert "Nothing is planned" in seen["running /ui/"][1]
    status_code, body = seen["unreachable /ui/"]
    assert status_code == 503
    assert 'role="alert"' in body
    assert "The database does not answer" in body
    assert "secret-host" not in body
    for fact in ("databaseTime", "clockOffsetSeconds", "tzdata", "node", "version", "largestLagSeconds", "healing"):
        assert f'"{fact}"' in seen["verbose"][1]
    assert '"healing":{"scanned":0,"healed":0,"skipped":0}' in seen["verbose"][1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "now"), (0.4, "now"), (1, "in 1 s"), (-61, "1 min 1 s ago"), (3600, "in 1 h"), (3605, "in 1 h"),
     (7260, "in 2 h 1 min"), (90_000, "in 1 d 1 h"), (-86_400 * 400, "400 d ago")],
)  # fmt: skip
def test_distances_in_words(seconds: float, words: str) -> None:
    assert relative(timedelta(seconds=seconds)) == words


def test_lags_and_local_times() -> None:
    assert milliseconds(timedelta(microseconds=840)) == "0.8 ms"
    assert milliseconds(timedelta(seconds=12.3456)) == "12,346 ms"
    at = datetime(2027, 1, 1, tzinfo=UTC)
    assert local(at, "Asia/Seoul").hour == 9
    assert local(at, "Zone/That-Was-Dropped") == at  # the page must not break on one row


def test_templates_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process finds what the one before has compiled; where nothing can be written, it compiles again."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first, second, third = (rendering.templates.__wrapped__() for _ in range(3))
    for one, folder in ((first, tmp_path), (second, tmp_path), (third, tmp_path / "none")):
        one.bytecode_cache.directory = str(folder)
    first.get_template("frame.html")
    third.get_template("frame.html")
    monkeypatch.setattr(type(first), "_generate", None)  # what compiles
    second.get_template("frame.html")
