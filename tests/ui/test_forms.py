"""Forms that make triggers and campaigns, what they show before, and what a page does with an answer that is none."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest

from timebell.dashboard.trigger_form import conditions_of
from timebell.errors import StoreError

from .browsing import Browser

Make = Callable[..., Any]


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))


async def _source(browser: Browser) -> None:
    await browser.web.post("/api/v1/sources", {"name": "shifts"})
    rows = [
        {"start": "2040-01-01T09:00:00", "who": ["ana", "bob"], "state": "active"},
        {"start": "2040-01-01T08:00:00", "who": "eve", "state": "off"},
        {"start": "2001-01-01T08:00:00", "who": "old", "state": "active"},
        {"start": None, "who": "dan", "state": "active"},
        {"start": "soon", "who": "kim", "state": "active"},
    ]
    items = [{"key": f"row-{n}", "version": 1, "fields": fields} for n, fields in enumerate(rows)]
    assert (await browser.web.post("/api/v1/sources/shifts/items", {"items": items})).status_code == 200


TRIGGER = {
    "name": "shift-soon", "source": "shifts", "column": "start", "offsets": "-15m, +1d", "timezone": "Asia/Seoul",
    "recipients": "who", "condition": "state eq active", "topic": "shift.soon", "payload": '{"say": "hello"}',
    "graceSeconds": "60",
}  # fmt: skip


async def test_a_trigger_is_made_in_a_form_that_shows_what_it_would_fire(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        form = "/ui/new/trigger"
        assert "No source yet" in (await browser.look(form)).text
        await _source(browser)
        assert f'href="{form}"' in (await browser.look("/ui/triggers")).text
        shown = plain((await browser.client.get(f"{form}/preview", params=TRIGGER)).text)
        assert "15 min before and 1 day after start , for each in who , if state is active" in shown
        assert "Sun 01 Jan 2040, 08:45:00 KST row-0, for ana" in shown
        assert "Mon 02 Jan 2040, 09:00:00 KST row-0, for bob" in shown
        said = "Of 5 items, 1 past already, 1 without a date, 1 left out by the conditions, 1 cannot be read"
        assert said in shown
        for wrong, word in (
            ({"offsets": "-1y"}, "offset is '-1y'"), ({"condition": "state like x"}, "no comparison 'like'"),
            ({"timezone": "Mars/Base"}, "Mars/Base"), ({"payload": "{"}, "JSON"), ({"graceSeconds": "long"}, "number"),
            ({"column": ""}, "column"),
        ):  # fmt: skip
            refused = await browser.press(form, form, **{**TRIGGER, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
            assert 'value="shift-soon"' in refused.text  # nothing typed is lost
        made = await browser.press(form, form, **TRIGGER)
        assert made.headers["location"] == "/ui/triggers/shift-soon?did=watching"
        one = (await browser.web.get("/api/v1/triggers/shift-soon")).json()
        assert (one["offsets"], one["graceSeconds"], one["payload"]) == (["-15m", "+1d"], 60, {"say": "hello"})
        assert one["condition"] == [{"field": "state", "op": "eq", "value": "active"}]
        again = await browser.press(form, form, **TRIGGER)
        assert again.status_code == 409


def test_conditions_are_lines() -> None:
    text = 'a eq 1\nb in ["x", "y"]\n\nc not_empty\nd ne two words'
    found = [(one["field"], one["op"], one.get("value")) for one in conditions_of(text)]
    assert found == [("a", "eq", 1), ("b", "in", ["x", "y"]), ("c", "not_empty", None), ("d", "ne", "two words")]


CAMPAIGN = {
    "title": "Hello", "body": "You", "when": "local", "at": "2040-01-01T09:00", "timezone": "Asia/Seoul",
    "name": "new year", "chunkSize": "2", "chunkDelayMs": "1000", "quietStart": "21:00", "quietEnd": "10:00",
    "quietThen": "skip", "canarySize": "1", "canaryRate": "10", "data": '{"screen": "today"}', "approveAbove": "3",
}  # fmt: skip


async def test_a_campaign_is_made_in_a_form_that_shows_who_gets_it_when(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        form = "/ui/new/campaign"
        await browser.app.devices.register_many([
            {"token": f"phone-of-somebody-{n:04}", "timezone": ("Asia/Seoul", "Europe/Paris")[n % 2]} for n in range(6)
        ])  # fmt: skip
        assert "Nothing says when it is sent" in (await browser.look(form)).text
        preview = f"{form}/preview"
        awake = {**CAMPAIGN, "quietStart": "", "quietEnd": ""}
        shown = plain((await browser.client.get(preview, params=awake)).text)
        assert "6 devices" in shown
        assert re.search(r"Asia/Seoul Sun 01 Jan 2040, 09:00 KST Sun 01 Jan 2040, 09:00 KST 3", shown), shown
        assert "Europe/Paris Sun 01 Jan 2040, 09:00 CET" in shown
        assert '"screen": "today"' in shown
        left = plain((await browser.client.get(preview, params=CAMPAIGN)).text)
        assert "3 in Europe/Paris are left out : it would wake them" in left
        often = {**awake, "when": "cron", "at": "0 9 * * 1-5"}
        assert plain((await browser.client.get(preview, params=often)).text).count("09:00:00 KST") == 6
        now = plain((await browser.client.get(preview, params={**awake, "when": "now", "at": ""})).text)
        assert "It begins as soon as it is made" in now
        for wrong, word in (
            ({"at": ""}, "when it is sent"), ({"filters": '{"colour": "red"}'}, "colour"), ({"data": "["}, "JSON"),
            ({"marketing": "1"}, "consent"), ({"chunkSize": "501"}, "chunkSize"), ({"when": "then"}, "when it is sent"),
        ):  # fmt: skip
            refused = await browser.press(form, form, **{**CAMPAIGN, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
            assert 'value="new year"' in refused.text
        made = await browser.press(form, form, **CAMPAIGN)
        page = made.headers["location"].split("?")[0]
        one = (await browser.web.get(page.replace("/ui", "/api/v1"))).json()
        assert (one["localTime"], one["timezone"], one["chunkDelayMs"]) == ("2040-01-01T09:00:00", "Asia/Seoul", 1000)
        assert (one["canary"], one["approveAbove"]) == ({"size": 1, "maxErrorRate": 0.1}, 3)
        again = await browser.press(form, form, **{**often, "name": "weekdays"})
        assert again.headers["location"].startswith("/ui/schedules/")


@pytest.mark.parametrize("form", ["/ui/new/trigger", "/ui/new/campaign", "/ui/schedules/new/test"])
async def test_who_may_only_look_makes_nothing(make_light: Make, form: str) -> None:
    async with make_light(open_here=True) as browser:
        await _source(browser)
        await browser.user("olga", "operator")
        await browser.sign_in("olga")
        for page in ("/ui/triggers", "/ui/campaigns"):
            assert "/ui/new/" not in (await browser.look(page)).text
        token = re.search(r'name="_token" value="(\w+)"', (await browser.look("/ui/")).text)
        assert token is not None
        given = (
            {"kind": "cron", "when": "0 9 * * *"} if "schedules" in form else TRIGGER if "trigger" in form else CAMPAIGN
        )
        sent = await browser.send(form, {"_token": token[1], "topic": "tea.ready", **given})
        assert sent.status_code == 403, plain(sent.text)
        assert "ROLE_TOO_LOW" in sent.text
        for what in ("triggers", "campaigns", "jobs"):
            assert (await browser.web.get(f"/api/v1/{what}")).json()["items"] == []


async def test_what_is_in_the_form_of_a_schedule_is_fired_once(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        form = "/ui/schedules/new"
        given = {"kind": "cron", "when": "0 9 * * *", "timezone": "UTC", "topic": "tea.ready", "payload": '{"to": 1}'}
        fired = await browser.press(form, f"{form}/test", **given, maxRetries="2")
        assert fired.status_code == 303, plain(fired.text)
        page = fired.headers["location"].split("?")[0]
        job = (await browser.web.get(page.replace("/ui", "/api/v1"))).json()
        assert (job["topic"], job["payload"], job["scheduleId"]) == ("tea.ready", {"to": 1}, None)
        assert job["retry"]["attempts"] == 3
        assert "No schedule was made" in (await browser.look(fired.headers["location"])).text
        assert (await browser.web.get("/api/v1/schedules")).json()["items"] == []
        wrong = await browser.press(form, f"{form}/test", **{**given, "topic": ""})
        assert wrong.status_code == 422


async def test_an_error_goes_into_a_page_as_a_part_of_it(make_light: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_light(open_here=True) as browser:
        assert (await browser.look("/ui/campaigns")).status_code == 200

        async def fail(*_: object, **__: object) -> None:
            raise StoreError("gone")

        monkeypatch.setattr(browser.app.store, "run", fail)
        part = await browser.look("/ui/campaigns", hx_request="true")
        assert part.status_code == 503
        assert 'role="alert"' in part.text
        assert "<html" not in part.text
        assert "<nav" not in part.text


async def test_a_part_of_a_page_asked_for_without_a_session_reloads_the_page(make_light: Make) -> None:
    async with make_light() as browser:
        answer = await browser.look("/ui/runs", hx_request="true")
        assert (answer.status_code, answer.headers["hx-refresh"]) == (401, "true")
