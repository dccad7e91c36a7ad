"""The headline of the overview: the worst problem first, and "on time" only if jobs start on time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import insert, update

from tests.api.web import NIGHTLY
from timebell.dashboard import overview_data
from timebell.ids import new_id
from timebell.model.payload import encode
from timebell.model.routes import Routes
from timebell.store import schema
from timebell.store.cluster import nodes
from timebell.store.cluster.rewinds import Rewind, record_rewind

from .browser import Browser
from .test_job_pages import finished_job, insert_finished, plain_text

Serve = Callable[..., Any]
SECOND = timedelta(seconds=1)


@asynccontextmanager
async def healthy(serve: Serve, monkeypatch: Any) -> AsyncIterator[tuple[Browser, datetime]]:
    """Serve a tenant with one live node that leads, and without cached figures."""
    monkeypatch.setattr(overview_data, "TILES_TTL_SECONDS", 0.0)
    monkeypatch.setattr(overview_data, "FULL_RELOAD_INTERVAL_SECONDS", 0.0)
    async with serve(allow_local=True) as browser:
        await browser.app.open()
        now = browser.app.clock.now()
        routes = Routes(exact=frozenset({"order.reminder"}))
        node = nodes.Node(new_id(now), "n1", "1", "2026a", routes, 1, now, now + timedelta(minutes=10))
        await browser.app.store.run(nodes.announce, node)
        lease = await browser.app.store.run(nodes.get_lease)
        await browser.app.store.run(nodes.acquire_lease, node.id, lease, now)
        yield browser, now


async def headline(browser: Browser) -> tuple[str, str]:
    """Return the style and the text of the headline."""
    html = (await browser.get("/ui/")).text
    match = re.search(r'class="headline (\w+)".*?<h1 id="headline">(.*?)</h1>', html, re.DOTALL)
    assert match is not None, plain_text(html)
    return match[1], plain_text(match[2]).strip()


async def test_late_starts_are_not_on_time(serve: Serve, monkeypatch: Any) -> None:
    async with healthy(serve, monkeypatch) as (browser, now):
        assert await headline(browser) == ("wait", "Ready: nothing is scheduled yet")
        await insert_finished(browser, finished_job(now - 60 * SECOND, "completed"))
        assert await headline(browser) == ("ok", "Running on time")
        due = now - 200 * SECOND
        await insert_finished(browser, finished_job(now - 100 * SECOND, "completed", run_at=due, topic="late"))
        assert await headline(browser) == ("bad", "Starting late: 1 job in 100 by 1 min 40 s or more")


async def test_the_next_run_is_that_of_any_schedule_or_pending_job(serve: Serve, monkeypatch: Any) -> None:
    async with healthy(serve, monkeypatch) as (browser, _):

        async def next_run() -> datetime:
            match = re.search(r'next run <time[^>]* datetime="([^"]+)"', (await browser.get("/ui/")).text)
            assert match is not None
            return datetime.fromisoformat(match[1])

        monkeypatch.setattr(overview_data, "UPCOMING_TTL_SECONDS", 0.0)
        for n in range(overview_data.MAX_TIMELINES + 1):  # the chart has no place for the one that runs often
            rare = {**NIGHTLY, "name": f"rare-{n}", "cronExpression": f"{n} 0 * * *", "timezone": "UTC"}
            assert (await browser.web.post("/api/v1/schedules", rare)).status_code == 201
        frequent = {**NIGHTLY, "name": "frequent", "cronExpression": "*/20 * * * *", "timezone": "UTC"}
        assert (await browser.web.post("/api/v1/schedules", frequent)).status_code == 201
        assert await next_run() - browser.app.clock.now() <= 1200 * SECOND
        due = browser.app.clock.now() + 30 * SECOND
        job = {"topic": "order.reminder", "runAt": due.isoformat(), "timezone": "UTC"}
        assert (await browser.web.post("/api/v1/jobs", job)).status_code == 201
        assert await next_run() <= due


async def test_the_lag_of_a_retried_job_is_that_of_its_first_start(serve: Serve, monkeypatch: Any) -> None:
    async with healthy(serve, monkeypatch) as (browser, now):
        due, start = now - 300 * SECOND, now - 295 * SECOND
        errors = [{"attempt": 1, "due": due.isoformat(), "startedAt": start.isoformat(), "endedAt": start.isoformat(),
                   "code": "E", "error": "E: no"}]  # fmt: skip
        row = finished_job(now - 10 * SECOND, "completed", run_at=now - 10 * SECOND, attempt=2, errors=encode(errors))
        await insert_finished(browser, row)
        assert await headline(browser) == ("retry", "Starting late: 1 job in 100 by 5 s or more")
        listed = (await browser.get("/ui/jobs?q=lag:>4s")).text
        assert row["id"] in listed
        assert row["id"] not in (await browser.get("/ui/jobs?q=lag:>6s")).text
        assert "5,000 ms" in plain_text(listed)


async def test_problems_are_sorted_worst_first(serve: Serve, monkeypatch: Any) -> None:
    async with healthy(serve, monkeypatch) as (browser, now):

        def change(statement: Any) -> Any:
            return browser.app.store.run(lambda tx: tx.execute(statement))

        await insert_finished(browser, finished_job(now - 60 * SECOND))
        assert await headline(browser) == ("bad", "1 job of erp.sync failed")
        ids = {}
        for name in ("reports", "finished"):
            ids[name] = (await browser.web.post("/api/v1/schedules", {**NIGHTLY, "name": name})).json()["id"]
        s = schema.schedules
        await change(update(s).where(s.c.id == ids["finished"]).values(next_fire_at=None))
        skipped = finished_job(now, "skipped", reason="missed", schedule_id=ids["reports"], started_at=None)
        await insert_finished(browser, skipped)
        assert await headline(browser) == ("missed", "reports missed 1 run, and 2 more items need attention")
        page = plain_text((await browser.get("/ui/")).text)
        assert "finished never ran and has no next run" in page
        columns = {"topic": "order.remind", "run_at": now - 900 * SECOND, "state": "pending", "hold": None}
        waiting = finished_job(now - 900 * SECOND, **columns)
        live = {name: value for name, value in waiting.items() if name in schema.jobs.c} | {"route": "order.remind"}
        await change(insert(schema.jobs).values(**live | {"attempts_used": 1, "started_at": None}))
        style, text = await headline(browser)
        assert (style, text[:19]) == ("bad", "1 job due for up to")
        assert "1 of them for a retry" in plain_text((await browser.get("/ui/")).text)
        await change(update(schema.jobs).values(hold="unhandled"))
        style, text = await headline(browser)
        assert text == "No node handles order.remind: 1 job waiting, and 3 more items need attention"
        page = plain_text((await browser.get("/ui/")).text)
        assert "A node handles order.reminder: is one of the two misspelled?" in page
        await change(update(s).where(s.c.id == ids["reports"]).values(next_fire_at=now - 900 * SECOND))
        assert (await headline(browser))[1].startswith("reports is overdue, and 4 more")
        await change(update(schema.nodes).values(seen_at=now - 900 * SECOND))
        assert (await headline(browser))[1].startswith("No node is running: the last heartbeat is from")


async def test_lost_writes_are_shown_on_the_overview_and_with_the_nodes(serve: Serve, monkeypatch: Any) -> None:
    async with healthy(serve, monkeypatch) as (browser, now):
        counts = {"jobs": 3, "results": 1, "cancels": 0, "schedules": 0}
        lost = Rewind(new_id(now), "n1", now, now - 9 * SECOND, now, counts, {"jobs": [new_id(now)]})
        await browser.app.store.run(record_rewind, lost)
        assert await headline(browser) == ("bad", "The database lost 4 acknowledged writes")
        assert "The database lost 3 created jobs, 1 job result" in plain_text((await browser.get("/ui/")).text)
        page = plain_text((await browser.get("/ui/nodes")).text)
        assert "by n1" in page
        assert f"{lost.examples['jobs'][0][:8]} …" in page
