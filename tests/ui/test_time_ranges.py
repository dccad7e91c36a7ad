"""Periods of lists and charts, and the order of lists: part of the URL, in the zone of the user."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.api.web import NIGHTLY
from timebell_fcm_emulator import FakeFcm

from .test_job_pages import finished_job, insert_finished, plain_text

Serve = Callable[..., Any]
HOUR = timedelta(hours=1)
ROW = re.compile(r'data-row.*?href="/ui/jobs/([0-9a-f-]+)"', re.DOTALL)
NAME = re.compile(r'data-row.*?class="main"[^>]*>(.*?)<', re.DOTALL)


async def test_a_local_time_is_in_the_zone_of_the_url(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        noon = datetime(2026, 11, 20, 12, tzinfo=UTC)
        before, after = finished_job(noon - HOUR), finished_job(noon + HOUR)
        await insert_finished(browser, before, after)
        seoul = "/ui/jobs?from=2026-11-20T21:00&zone=Asia/Seoul"  # noon in UTC
        page = (await browser.get(seoul)).text
        assert ROW.findall(page) == [after["id"]]
        assert 'value="2026-11-20T21:00"' in page
        assert "Fri 20 Nov, 21:00 KST – now" in plain_text(page)
        assert ROW.findall((await browser.get("/ui/jobs?to=2026-11-20T12:00")).text) == [before["id"]]
        browser.client.cookies.set("timebell-timezone", "Asia/Seoul", path="/ui")
        assert 'name="zone" value="Asia/Seoul"' in (await browser.get("/ui/jobs")).text
        for wrong, code in (("from=soon", "INVALID_INSTANT"), ("from=1h&to=2h", "INVALID_RANGE"),
                            ("from=2026-11-20T21:00&zone=Mars", "INVALID_TIMEZONE")):  # fmt: skip
            answer = await browser.get(f"/ui/jobs?{wrong}")
            assert (answer.status_code, code in answer.text) == (422, True), wrong


async def test_a_period_applies_to_tabs_pages_actions_and_exports(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        now = browser.app.clock.now()
        recent = [finished_job(now - n * timedelta(minutes=1)) for n in range(1, 56)]
        await insert_finished(browser, *recent, finished_job(now - 30 * HOUR))
        page = (await browser.get("/ui/jobs?q=status:failed&from=24h")).text
        assert "/ui/jobs?q=status%3Acompleted&amp;from=24h" in page
        assert re.search(r'q=status%3Afailed&amp;from=24h" aria-current="true">Failed', page)
        assert re.search(r'"/ui/jobs\?q=status%3Afailed&amp;from=24h&amp;cursor=', page)
        assert 'name="from" value="24h"' in page  # of the filter and of the selected jobs
        export = await browser.get("/ui/jobs/export?q=status:failed&from=24h&format=jsonl")
        assert export.text.count("\n") == 55
        fields = {"from": (now - HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")}
        confirmation = await browser.submit("/ui/dead-letters?from=1h", "/ui/dead-letters/retry", **fields)
        assert "Retry 55 jobs?" in plain_text(confirmation.text)
        assert "56 jobs used up" in plain_text((await browser.get("/ui/dead-letters")).text)
        assert "55 jobs used up" in plain_text((await browser.get("/ui/dead-letters?from=1h")).text)


async def test_failed_jobs_are_listed_by_failure(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        now = browser.app.clock.now()
        old = finished_job(now - 100 * HOUR, finished_at=now)  # created long before it failed
        recent = finished_job(now - HOUR)
        await insert_finished(browser, old, recent)
        assert ROW.findall((await browser.get("/ui/jobs?q=status:failed")).text) == [old["id"], recent["id"]]
        by_creation = await browser.get("/ui/jobs?q=status:failed&sort=created")
        assert ROW.findall(by_creation.text) == [recent["id"], old["id"]]


async def test_pending_jobs_are_listed_by_due_time(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        now = browser.app.clock.now()
        ids = {}
        for hours, queue in ((2, "mail"), (1, "mail"), (3, "default")):
            body = {"topic": "x", "queue": queue, "runAt": (now + hours * HOUR).isoformat()}
            ids[hours] = (await browser.web.post("/api/v1/jobs", body)).json()["id"]
        page = (await browser.get("/ui/jobs?q=status:pending")).text
        assert ROW.findall(page) == [ids[1], ids[2], ids[3]]
        assert "Pending jobs, next due first, without held ones." in plain_text(page)
        assert ROW.findall((await browser.get("/ui/jobs?q=status:pending+queue:mail")).text) == [ids[1], ids[2]]
        by_creation = await browser.get("/ui/jobs?q=status:pending&sort=created")
        assert ROW.findall(by_creation.text) == [ids[3], ids[1], ids[2]]
        for refused in ("", "&status=failed", "&status=pending&topic=x", "&status=pending&from=2026-01-01T00:00:00Z"):
            answer = await browser.web.get(f"/api/v1/jobs?sort=runAt{refused}")
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_SORT"), refused


async def test_campaigns_and_items_of_triggers_have_a_period(serve_sqlite: Serve, phones: FakeFcm) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        now = browser.app.clock.now()
        for name, hours in (("soon", 1), ("later", 48)):
            body = {"name": name, "title": "Hi", "sendAt": (now + hours * HOUR).isoformat(), "timezone": "UTC"}
            answer = await browser.web.post("/api/v1/campaigns", body)
            assert answer.status_code == 201, answer.text
        end = (now + 24 * HOUR).strftime("%Y-%m-%dT%H:%M")
        page = (await browser.get(f"/ui/campaigns?to={end}&zone=UTC")).text
        assert NAME.findall(page) == ["soon"]
        assert f"state=paused&amp;to={end.replace(':', '%3A')}" in page
        empty = (await browser.get("/ui/campaigns?state=paused&from=1h")).text
        assert "No paused campaigns in this period" in plain_text(empty)
        assert (await browser.get("/ui/campaigns?from=soon")).status_code == 422

        await browser.web.post("/api/v1/sources", {"name": "shifts"})
        body = {"name": "shift", "source": "shifts", "column": "at", "offsets": ["-15m"], "topic": "shift.soon"}
        assert (await browser.web.post("/api/v1/triggers", body)).status_code == 201
        items = [{"key": "s-1", "version": 1, "fields": {"at": (now - 100 * HOUR).isoformat()}}]
        await browser.web.post("/api/v1/sources/shifts/items", {"items": items})
        for period, is_shown in (("", True), ("?from=1h", True), ("?to=2020-01-01T00:00", False)):
            page = plain_text((await browser.get(f"/ui/triggers/shift{period}")).text)
            assert ("s-1" in page, "Not fired" in page) == (is_shown, is_shown), period
        assert "No items updated in this period." in page
        assert (await browser.get("/ui/triggers/shift?from=soon")).status_code == 422


async def test_runs_of_a_schedule_are_limited_to_a_period(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        schedule_id = (await browser.web.post("/api/v1/schedules", NIGHTLY)).json()["id"]
        now = browser.app.clock.now()
        fields = {"schedule_id": schedule_id, "kind": "planned"}
        recent, old = finished_job(now - HOUR, **fields), finished_job(now - 30 * HOUR, **fields)
        await insert_finished(browser, recent, old)
        url = f"/ui/schedules/{schedule_id}"
        assert set(ROW.findall((await browser.get(url)).text)) == {recent["id"], old["id"]}
        assert ROW.findall((await browser.get(f"{url}?from=24h")).text) == [recent["id"]]
        assert "No runs in this period" in (await browser.get(f"{url}?to=2020-01-01T00:00")).text


async def test_schedules_are_sorted_and_counted(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        month = (browser.app.clock.now().month + 1) % 12 + 1  # begins in more than a day, whenever the test runs
        times = {"delta": f"0 6 1 {month} *", "alpha": "* * * * *", "charlie": "0 0 * * *", "bravo": f"0 0 1 {month} *"}
        for name, cron in times.items():
            body = {**NIGHTLY, "name": name, "cronExpression": cron, "jobType": f"topic.of-{name}"}
            assert (await browser.web.post("/api/v1/schedules", body)).status_code == 201
        await browser.web.post(
            "/api/v1/schedules", {**NIGHTLY, "name": "echo", "cronExpression": times["delta"], "enabled": False}
        )

        async def names(query: str) -> list[str]:
            return NAME.findall((await browser.get(f"/ui/schedules?{query}")).text)

        assert await names("") == ["alpha", "bravo", "charlie", "delta", "echo"]
        assert await names("sort=-name") == ["echo", "delta", "charlie", "bravo", "alpha"]
        assert (await names("sort=nextFireAt"))[:2] == ["alpha", "charlie"]
        assert await names("q=of-bravo") == ["bravo"]
        page = plain_text((await browser.get("/ui/schedules?sort=-name")).text)
        assert "All 5 Active 4 Paused 1" in page
        for sort in ("name", "-name", "nextFireAt", "-nextFireAt", "createdAt", "-createdAt"):
            seen, cursor = [], ""
            while cursor is not None:
                answer = (await browser.web.get(f"/api/v1/schedules?limit=2&sort={sort}{cursor}")).json()
                seen += [item["name"] for item in answer["items"]]
                cursor = answer["nextCursor"] and f"&cursor={answer['nextCursor']}"
            assert sorted(seen) == ["alpha", "bravo", "charlie", "delta", "echo"], sort
        assert (await browser.web.get("/api/v1/schedules?sort=topic")).status_code == 422


async def test_bars_of_the_chart_open_the_jobs_of_their_span(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        now = browser.app.clock.now()
        failed = finished_job(now - timedelta(minutes=30), run_at=now - timedelta(minutes=31))
        await insert_finished(browser, failed, finished_job(now - 20 * HOUR, "completed"))
        page = (await browser.get("/ui/runs?from=1h")).text
        (bar,) = re.findall(r'<a href="(/ui/jobs[^"]*)" aria-label="[^"]*: 0 completed, 1 failed, 0 missed"', page)
        assert ROW.findall((await browser.get(bar.replace("&amp;", "&"))).text) == [failed["id"]]
        assert "p99 60.0 s" in page
        for period, count in (("24h", 2), ("48h", 2), ("7d", 2)):
            page = (await browser.get(f"/ui/runs?from={period}")).text
            assert len(re.findall(r'aria-label="[^"]* missed"', page)) == count, period
        assert "aria-label" in (await browser.get("/ui/runs")).text
        assert (await browser.get("/ui/runs?from=never")).status_code == 422


async def test_an_occurrence_is_explained_by_its_local_time(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        body = {**NIGHTLY, "timezone": "Asia/Seoul", "cronExpression": "0 9 * * *"}
        schedule_id = (await browser.web.post("/api/v1/schedules", body)).json()["id"]
        answer = await browser.get(f"/ui/schedules/{schedule_id}/why?at=2040-01-02T09:00")
        assert answer.status_code == 200
        assert 'value="2040-01-02T09:00:00"' in answer.text
        assert (await browser.get(f"/ui/schedules/{schedule_id}/why?at=tomorrow")).status_code == 422
