"""The status page and the probes, over HTTP, with a real engine behind them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import text

import timebell.dashboard
from timebell import Arrived, Retry, Timebell, errors
from timebell.api import health, server
from timebell.clock import wall
from timebell.dashboard import status
from timebell.dashboard.words import local, milliseconds, relative

EVIL = "<script>alert('x')</script>&\""


class Page(HTMLParser):
    """What a page is made of: tags with attributes, and the text of table cells by row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[dict[str, str]] = []
        self._cell: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "tr":
            self.rows.append({})
        elif tag == "td":
            self._cell = given.get("data-label")

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self.rows[-1][self._cell] = f"{self.rows[-1].get(self._cell, '')} {data.strip()}".strip()


@asynccontextmanager
async def served(app: Timebell) -> AsyncIterator[httpx2.AsyncClient]:
    web = server.Site(app, [health.router(app), status.router(app)])
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=web), base_url="http://timebell.test") as client:
        yield client


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await look():
            await asyncio.sleep(0.01)


async def _ended(app: Timebell, *ids: str) -> bool:
    jobs = [await app.get(id_) for id_ in ids]
    return all(job.finished_at is not None for job in jobs)


def _app(url: str) -> Timebell:
    app = Timebell(url)

    @app.on("tea.ready")
    async def ready(event: Arrived) -> None: ...

    @app.on("evil.one", retry=Retry(attempts=1))
    async def evil(event: Arrived) -> None:
        raise ValueError(EVIL)

    @app.schedule(EVIL, cron="0 9 * * *", timezone="Asia/Seoul", topic="digest.send")
    async def digest(event: Arrived) -> None: ...

    return app


async def rendered(url: str) -> tuple[httpx2.Response, httpx2.Response]:
    """The page and its style, after two jobs ended and while one and a schedule wait."""
    app = _app(url)
    async with asyncio.timeout(60), app.running(), served(app) as client:
        done = [await app.schedule_at(topic, timezone="Europe/Paris") for topic in ("tea.ready", "evil.one")]
        await app.schedule_at("tea.ready", wall() + timedelta(hours=2), timezone="America/New_York")
        await until(lambda: _ended(app, *(job.id for job in done)))
        answers = await client.get("/"), await client.get("/ui/timebell.css")
        assert (await client.get("/ui/")).status_code == 200
    await app.close()
    return answers


def test_what_is_next_and_what_just_ran(store_url: str) -> None:
    answer, _ = asyncio.run(rendered(store_url))
    assert answer.status_code == 200
    page = Page(answer.text)
    coming = [row for row in page.rows if "Kind" in row]
    assert [row["Kind"] for row in coming] in (["job", "schedule"], ["schedule", "job"])
    job = next(row for row in coming if row["Kind"] == "job")
    assert job["When"] in ("in 2 h", "in 1 h 59 min")
    assert "America/New_York" in job["Local time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", job["UTC"])
    schedule = next(row for row in coming if row["Kind"] == "schedule")
    assert "09:00:00 KST Asia/Seoul" in schedule["Local time"]
    assert "T00:00:00Z" in schedule["UTC"]
    ran = {row["What"]: row for row in page.rows if "State" in row}
    assert ran["tea.ready"]["State"] == "✓ completed"
    assert ran["evil.one"]["State"] == "✗ failed"
    assert all(re.fullmatch(r"[\d.,]+ ms", row["Lag"]) for row in ran.values())
    assert ran["evil.one"]["Attempt"] == "1"
    assert EVIL in ran["evil.one"]["Error"]
    for word in ("Pending", "Running", "Held", "Largest lag", "Clock offset"):
        assert word in answer.text


def test_values_are_escaped_and_nothing_runs_or_comes_from_elsewhere(sqlite_url: str) -> None:
    answer, style = asyncio.run(rendered(sqlite_url))
    page = Page(answer.text)
    assert EVIL not in answer.text
    assert not [tag for tag, _ in page.tags if tag in ("script", "style", "iframe", "form")]
    assert not [name for _, given in page.tags for name in given if name.startswith("on") or name == "style"]
    links = [str(value) for _, given in page.tags for name, value in given.items() if name in ("href", "src")]
    assert all(link.startswith(("/", "data:,")) and not link.startswith("//") for link in links)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert style.headers["content-type"].startswith("text/css")
    assert "http" not in style.text
    assert "@import" not in style.text


def test_the_page_is_well_made(sqlite_url: str) -> None:
    answer, _ = asyncio.run(rendered(sqlite_url))
    page = Page(answer.text)
    named = dict(page.tags)
    assert named["html"]["lang"] == "en"
    metas = [given for tag, given in page.tags if tag == "meta"]
    assert {"http-equiv": "refresh", "content": "2"} in metas
    assert any(given.get("name") == "viewport" for given in metas)
    assert all(given.get("scope") == "col" for tag, given in page.tags if tag == "th")
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2")] == ["h1", "h2", "h2"]
    assert {"header", "main", "footer", "title"} <= set(named)


async def _outage(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    app = _app(url)
    seen = {}
    async with asyncio.timeout(60), served(app) as client:

        async def note(name: str) -> None:
            for path in ("/", "/readyz", "/livez"):
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
            async with asyncio.timeout(20):
                await app.store.run(lambda tx: tx.execute(text("UPDATE timebell_version SET version_num = '0000'")))
            await note("outdated")
        await note("after")
    await app.close()
    return seen


def test_probes_and_page_tell_the_truth_in_an_outage(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert seen["running /"][0] == 200
    for state in ("before", "unreachable", "after"):
        assert seen[f"{state} /"][0] == 503
        assert 'role="alert"' in seen[f"{state} /"][1]
    for fact in ("databaseTime", "clockOffsetSeconds", "tzdata", "node", "version", "largestLagSeconds", "healing"):
        assert f'"{fact}"' in seen["verbose"][1]
    assert '"healing":{"scanned":0,"healed":0,"skipped":0}' in seen["verbose"][1]


def test_errors_are_problems(sqlite_url: str) -> None:
    async def ask() -> None:
        async with served(Timebell(sqlite_url)) as client:
            for method, path, code in (("GET", "/nope", 404), ("POST", "/", 405), ("GET", "/ui/../secret", 404)):
                answer = await client.request(method, path)
                assert answer.status_code == code
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] in ("NOT_FOUND", "METHOD_NOT_ALLOWED")

    asyncio.run(ask())


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


def _colours(css: str) -> list[dict[str, str]]:
    return [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", block)) for block in re.findall(r":root {(.*?)}", css, re.S)
    ]


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_text_can_be_read_in_light_and_dark() -> None:
    css = (Path(timebell.dashboard.__file__).parent / "static" / "timebell.css").read_text()
    themes = _colours(css)
    assert len(themes) == 2
    for theme in themes:
        pairs = [(name, "panel") for name in ("text", "soft", "link", "brass", "bad")]
        pairs += [(name, "bg") for name in ("text", "soft", "link")]
        pairs += [(name, f"{name}-bg") for name in ("ok", "bad", "warn", "quiet")]
        for front, back in pairs:
            bright, dark = sorted((_luminance(theme[front]), _luminance(theme[back])), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (front, back)  # WCAG 2.2 AA


def test_a_fault_of_ours_is_a_problem_without_a_trace(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret words")

    monkeypatch.setattr(status, "_facts", broken)
    app = Timebell(sqlite_url)
    transport = httpx2.ASGITransport(app=server.Site(app, [status.router(app)]), raise_app_exceptions=False)

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://timebell.test") as client:
            return await client.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["code"]) == (500, "INTERNAL_ERROR")
    assert "secret words" not in answer.text
    assert "content-security-policy" in answer.headers
