"""The pages of campaigns and triggers: what their forms do, and what a board that wants another token looks like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.test_monday import Monday
from tests.engine.test_monday import monday as monday  # a fixture
from timebell.testing.fcm import FakeFcm

from .stock import app_of, until

Make = Callable[..., Any]
CAMPAIGN = {"title": "Hello", "body": "You", "chunkSize": 10, "name": "morning"}


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))


async def test_a_campaign_is_steered_and_says_how_far_it_is(make: Make, store_url: str, phones: FakeFcm) -> None:
    app = app_of(store_url)
    async with make(open_here=True, app=app) as browser, app.running():
        await app.devices.register_many([{"token": f"phone-of-somebody-{n:04}"} for n in range(40)])
        body = {**CAMPAIGN, "chunkDelayMs": 60_000, "approveAbove": 30}
        id_ = (await browser.web.post("/api/v1/campaigns", body)).json()["id"]
        page = f"/ui/campaigns/{id_}"

        async def says(word: str, path: str = page) -> None:
            async def look() -> bool:
                return word in plain((await browser.look(path)).text)

            await until(look)

        await says("Waits for approval")
        assert "morning is paused: approval: 40 recipients, more than 30" in plain((await browser.look("/ui/")).text)
        await browser.press(page, f"{page}/approve")
        await says("10 of 40 devices")
        shown = (await browser.look(page)).text
        assert 'hx-trigger="every 1s"' in shown or "Live updates off" in shown
        assert "held to 10 a minute: 10 every 60 s" in shown

        async def three_to_do() -> bool:  # the map may be a second old
            return (await browser.look(page)).text.count('class="c-skip" x=') == 3

        await until(three_to_do)
        assert len((await browser.look(page, hx_request="true")).text) < 8000  # its progress alone
        assert "morning" in (await browser.look("/ui/search?q=morn")).text
        assert '<b class="n">1</b>' in (await browser.look("/ui/")).text
        await browser.press(page, f"{page}/pause", reason="wrong text")
        await says("Paused: wrong text")
        await browser.press(page, f"{page}/resume")
        await says("20 of 40 devices")  # who resumes need not wait for the pause between chunks
        assert "20 of 40 devices do not get it" in plain((await browser.look(f"{page}/stop")).text)
        await browser.press(f"{page}/stop", f"{page}/stop", reason="enough")
        await says("Stopped: enough")
        accepted = (await browser.look(f"{page}/people?state=accepted")).text
        left = (await browser.look(f"{page}/people?state=left")).text
        assert accepted.count("Accepted</span>") == 20
        assert left.count('<td class="mono">') == 20
        tested = await browser.press(page, f"{page}/test", devices="phone-of-somebody-0001", kind="tokens")
        assert tested.headers["location"].startswith("/ui/jobs/")
        await browser.press(page, f"{page}/retry")
        await says("Sending")
        assert (await browser.press(page, f"{page}/pause")).status_code == 303


async def test_a_trigger_is_paused_scanned_and_asks_for_another_token(
    make_light: Make, sqlite_url: str, phones: FakeFcm, monday: Monday
) -> None:
    app = app_of(sqlite_url)
    async with make_light(open_here=True, app=app) as browser, app.running(heartbeat=0.1):
        web = browser.web
        await web.post("/api/v1/secrets", {"name": "board-token", "value": "an old one"})
        options = {"token": {"secret": "board-token"}, "boardId": "77", "url": monday.url}
        made = await web.post("/api/v1/sources", {"name": "board", "kind": "monday", "options": options})
        assert made.status_code == 201, made.text
        trigger = {"name": "due", "source": "board", "column": "due", "topic": "tea.ready", "timezone": "UTC"}
        assert (await web.post("/api/v1/triggers", trigger)).status_code == 201

        async def says(word: str, path: str) -> None:
            async def look() -> bool:
                return word in plain((await browser.look(path)).text)

            await until(look)

        page = "/ui/triggers/due"
        await says("Sign in again: the source does not take its token any more.", page)
        shown = plain((await browser.look(page)).text)
        assert "timebell secret set board-token stores another token" in shown
        assert "an old one" not in shown
        assert "1 trigger is not in step" in plain((await browser.look("/ui/triggers")).text)
        await says("The source board wants you to sign in again", "/ui/")
        await browser.press(page, f"{page}/pause", reason="holiday")
        await says("Paused: holiday", page)
        await browser.press(page, f"{page}/resume")
        begun = await browser.press(page, f"{page}/scan")
        assert begun.headers["location"] == f"{page}?did=scanning"
        await says("Scan: due", page)
        assert "due" in (await browser.look("/ui/search?q=du", hx_request="true")).text


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_who_may_not_has_no_button(make_light: Make, sqlite_url: str, phones: FakeFcm, role: str) -> None:
    app = app_of(sqlite_url)
    async with make_light(open_here=True, app=app) as browser, app.running():
        await app.devices.register_many([{"token": f"phone-of-somebody-{n:04}"} for n in range(3)])
        id_ = (await browser.web.post("/api/v1/campaigns", {**CAMPAIGN, "approveAbove": 1})).json()["id"]
        await browser.web.post("/api/v1/sources", {"name": "rows"})
        body = {"name": "t", "source": "rows", "column": "at", "topic": "tea.ready", "timezone": "UTC"}
        await browser.web.post("/api/v1/triggers", body)
        page = f"/ui/campaigns/{id_}"

        async def gated() -> bool:
            return "Waits for approval" in (await browser.look(page)).text

        await until(gated)
        await browser.user("vera", role)
        await browser.sign_in("vera")
        campaign, trigger = (await browser.look(page)).text, (await browser.look("/ui/triggers/t")).text
        assert f"{page}/approve" not in campaign
        assert (f"{page}/stop" in campaign) == (role == "operator")
        assert ("/ui/triggers/t/pause" in trigger) == (role == "operator")
