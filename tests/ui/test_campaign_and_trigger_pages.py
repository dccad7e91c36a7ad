"""Pages of campaigns and triggers: actions, progress, permissions, and a source that rejects its token."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.test_monday import Monday
from tests.engine.test_monday import monday as monday  # a fixture
from timebell_fcm_emulator import FakeFcm

from .hostile_data import hostile_app, wait_until

Serve = Callable[..., Any]
CAMPAIGN = {"title": "Hello", "body": "You", "chunkSize": 10, "name": "morning"}


def plain_text(text: str) -> str:
    """Return the text of a page without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))


async def test_the_campaign_page_manages_a_campaign_and_shows_its_progress(
    serve: Serve, store_url: str, phones: FakeFcm
) -> None:
    app = hostile_app(store_url)
    async with serve(allow_local=True, app=app) as browser, app.running():
        await app.devices.register_many([{"token": f"token-of-a-phone-{n:04}"} for n in range(40)])
        body = {**CAMPAIGN, "chunkDelayMs": 60_000, "approveAbove": 30}
        id_ = (await browser.web.post("/api/v1/campaigns", body)).json()["id"]
        page = f"/ui/campaigns/{id_}"

        async def wait_for_text(word: str, path: str = page) -> None:
            async def text_is_shown() -> bool:
                return word in plain_text((await browser.get(path)).text)

            await wait_until(text_is_shown)

        await wait_for_text("Awaiting approval")
        assert "morning is paused: approval: 40 recipients, more than 30" in plain_text(
            (await browser.get("/ui/")).text
        )
        await browser.submit(page, f"{page}/approve")
        await wait_for_text("10 of 40 devices")
        shown = (await browser.get(page)).text
        assert 'hx-trigger="every 1s"' in shown or "Live updates off" in shown
        assert "limited to 10 a minute: 10 every 60 s" in shown

        async def three_chunks_remain() -> bool:  # the chunk map may be one second old
            return (await browser.get(page)).text.count('class="c-skip" x=') == 3

        await wait_until(three_chunks_remain)
        fragment = await browser.get(page, hx_request="true")
        assert len(fragment.text) < 8000  # only the progress
        assert "HX-Refresh" not in fragment.headers
        assert "HX-Refresh" not in (await browser.get(f"{page}?shown=Sending", hx_request="true")).headers
        assert (await browser.get(f"{page}?shown=Planned", hx_request="true")).headers["HX-Refresh"] == "true"
        assert "morning" in (await browser.get("/ui/search?q=morn")).text
        assert '<b class="n">1</b>' in (await browser.get("/ui/")).text
        await browser.submit(page, f"{page}/pause", reason="wrong text")
        await wait_for_text("Paused: wrong text")
        await browser.submit(page, f"{page}/resume")
        await wait_for_text("20 of 40 devices")  # resuming skips the delay between chunks
        assert "20 of 40 devices will not receive it" in plain_text((await browser.get(f"{page}/stop")).text)
        await browser.submit(f"{page}/stop", f"{page}/stop", reason="enough")
        await wait_for_text("Stopped: enough")
        await wait_for_text("Left out 20 devices, with 20 sent to: all 40 registered 20 not reached before the stop")
        accepted = (await browser.get(f"{page}/people?state=accepted")).text
        remaining = (await browser.get(f"{page}/people?state=remaining")).text
        assert accepted.count("Accepted</span>") == 20
        assert remaining.count('<td class="mono">') == 20
        assert (
            f'href="{page}/people/export?state=accepted&amp;format=csv"'
            in (await browser.get(f"{page}/people?state=accepted")).text
        )
        exported = await browser.get(f"{page}/people/export?state=accepted&format=csv")
        assert (exported.headers["content-type"], len(exported.text.splitlines())) == ("text/csv; charset=utf-8", 21)
        assert (await browser.get(f"/ui/campaigns/{'0' * 32}/people/export")).status_code == 404
        tested = await browser.submit(page, f"{page}/test", devices="token-of-a-phone-0001", kind="tokens")
        assert tested.headers["location"].startswith("/ui/jobs/")
        await browser.submit(page, f"{page}/retry")
        await wait_for_text("Sending")
        assert (await browser.submit(page, f"{page}/pause")).status_code == 303


async def test_a_failed_campaign_explains_its_error(serve_sqlite: Serve, sqlite_url: str, phones: FakeFcm) -> None:
    app = hostile_app(sqlite_url)
    phones.rules({"do": "SENDER_ID_MISMATCH", "match": "^other-project"})
    async with serve_sqlite(allow_local=True, app=app) as browser, app.running():
        await app.devices.register("other-project-phone-1")
        id_ = (await browser.web.post("/api/v1/campaigns", CAMPAIGN)).json()["id"]

        async def is_explained() -> bool:
            return "belong to another Firebase project" in (await browser.get(f"/ui/campaigns/{id_}")).text

        await wait_until(is_explained)


async def test_the_trigger_page_manages_a_trigger_and_reports_a_rejected_token(
    serve_sqlite: Serve, sqlite_url: str, phones: FakeFcm, monday: Monday
) -> None:
    app = hostile_app(sqlite_url)
    async with serve_sqlite(allow_local=True, app=app) as browser, app.running(heartbeat=0.1):
        web = browser.web
        await web.post("/api/v1/secrets", {"name": "board-token", "value": "old-token"})
        options = {"token": {"secret": "board-token"}, "boardId": "77", "url": monday.url}
        created = await web.post("/api/v1/sources", {"name": "board", "kind": "monday", "options": options})
        assert created.status_code == 201, created.text
        trigger = {"name": "due", "source": "board", "column": "due", "topic": "tea.ready", "timezone": "UTC"}
        assert (await web.post("/api/v1/triggers", trigger)).status_code == 201

        async def wait_for_text(word: str, path: str) -> None:
            async def text_is_shown() -> bool:
                return word in plain_text((await browser.get(path)).text)

            await wait_until(text_is_shown)

        page = "/ui/triggers/due"
        await wait_for_text("Token required: the source rejects its token.", page)
        shown = plain_text((await browser.get(page)).text)
        assert "timebell secret set board-token stores a new token" in shown
        assert "old-token" not in shown
        assert "1 of 1 trigger not up to date" in plain_text((await browser.get("/ui/triggers")).text)
        await wait_for_text("Source board needs a new token", "/ui/")
        await browser.submit(page, f"{page}/pause", reason="holiday")
        await wait_for_text("Paused: holiday", page)
        await browser.submit(page, f"{page}/resume")
        started = await browser.submit(page, f"{page}/scan")
        assert started.headers["location"] == f"{page}?did=scanning"
        await wait_for_text("Scan: due", page)
        assert "due" in (await browser.get("/ui/search?q=du", hx_request="true")).text


async def test_the_page_of_an_item_shows_its_history_and_fires_and_skips_it(
    serve_sqlite: Serve, sqlite_url: str, phones: FakeFcm
) -> None:
    app = hostile_app(sqlite_url)
    async with serve_sqlite(allow_local=True, app=app) as browser, app.running():
        await app.triggers.put_source("rows")
        await app.triggers.put("t", "rows", "at", "tea.ready", timezone="UTC")
        rows = [{"key": "a/1 <b>", "fields": {"at": "2040-01-01T09:00:00"}}, {"key": "2", "fields": {"at": "soon"}}]
        await app.triggers.put_items("rows", rows)
        shown = (await browser.get("/ui/triggers/t")).text
        assert "unreadable: at: &#39;soon&#39;" in shown
        page = "/ui/triggers/t/item?key=a%2F1%20%3Cb%3E"
        assert page in shown
        assert "planned for" in plain_text((await browser.get(page)).text)
        done = await browser.submit(page, "/ui/triggers/t/fire", item="a/1 <b>")
        assert done.headers["location"] == f"{page}&did=item-fired"
        assert [job.kind for job in await app.list(topic="tea.ready")] == ["manual", "trigger"]
        await browser.submit(page, "/ui/triggers/t/skip", item="a/1 <b>")
        shown = (await browser.get(page)).text
        assert "not fired, skipped: 2040-01-01T09:00:00Z" in plain_text(shown)
        assert "cancelled (withdrawn)" in plain_text(shown)


async def test_a_dry_run_shows_when_given_rows_would_fire(
    serve_sqlite: Serve, sqlite_url: str, phones: FakeFcm
) -> None:
    app = hostile_app(sqlite_url)
    async with serve_sqlite(allow_local=True, app=app) as browser:
        await app.triggers.put_source("rows")
        await app.triggers.put(
            "t", "rows", "at", "tea.ready", timezone="Asia/Seoul", offsets=["-3d@09:00"], recipients="who",
            condition={"on": True},
        )  # fmt: skip
        page = "/ui/triggers/t/preview"
        assert page in (await browser.get("/ui/triggers/t")).text
        assert "Row 1" not in (await browser.get(page)).text
        rows = [{"at": "2040-01-04", "who": "<b>ana</b>", "on": True}, {"at": "soon", "who": "bo"}, {"at": None}]
        answer = await browser.submit(page, page, rows=json.dumps(rows))
        shown = plain_text(answer.text)
        assert "-3d@09:00 <b>ana</b> Sun 01 Jan 2040, 09:00:00 KST" in html.unescape(shown)
        assert "at: 'soon'" in html.unescape(shown)
        assert "The condition does not hold now." in shown
        assert "No date, so nothing fires." in shown
        for wrong in ("{", "[]", "3"):
            refused = await browser.submit(page, page, rows=wrong)
            assert refused.status_code == 422, wrong
        assert (await browser.client.get("/ui/triggers/none/preview")).status_code == 404
        assert list(await app.list()) == []


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_actions_beyond_the_role_have_no_button(
    serve_sqlite: Serve, sqlite_url: str, phones: FakeFcm, role: str
) -> None:
    app = hostile_app(sqlite_url)
    async with serve_sqlite(allow_local=True, app=app) as browser, app.running():
        await app.devices.register_many([{"token": f"token-of-a-phone-{n:04}"} for n in range(3)])
        id_ = (await browser.web.post("/api/v1/campaigns", {**CAMPAIGN, "approveAbove": 1})).json()["id"]
        await browser.web.post("/api/v1/sources", {"name": "rows"})
        body = {"name": "t", "source": "rows", "column": "at", "topic": "tea.ready", "timezone": "UTC"}
        await browser.web.post("/api/v1/triggers", body)
        page = f"/ui/campaigns/{id_}"

        async def awaits_approval() -> bool:
            return "Awaiting approval" in (await browser.get(page)).text

        await wait_until(awaits_approval)
        await browser.create_user("vera", role)
        await browser.sign_in("vera")
        campaign, trigger = (await browser.get(page)).text, (await browser.get("/ui/triggers/t")).text
        assert f"{page}/approve" not in campaign
        assert (f"{page}/stop" in campaign) == (role == "operator")
        assert ("/ui/triggers/t/pause" in trigger) == (role == "operator")
