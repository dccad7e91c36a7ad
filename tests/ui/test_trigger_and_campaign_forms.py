"""Forms of triggers and campaigns with their previews, and errors during fragment requests."""

from __future__ import annotations

import html
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from timebell.errors import StoreError
from timebell.features.campaigns.pages.audience_rows import describe_filters, parse_rows, split_filters
from timebell.features.triggers.pages.form import parse_conditions

from .browser import Browser

Serve = Callable[..., Any]


def plain_text(text: str) -> str:
    """Return the text of a page without tags."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))


def fields_with_problem(page: str) -> list[str]:
    """Return the names of the fields beside which a page shows a problem."""
    return re.findall(r'aria-describedby="(\w+)-problem', page)


async def _create_source(browser: Browser) -> None:
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


async def test_the_trigger_form_previews_firings_and_creates_the_trigger(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/trigger"
        assert "No source yet" in (await browser.get(form)).text
        await _create_source(browser)
        assert f'href="{form}"' in (await browser.get("/ui/triggers")).text
        shown = plain_text((await browser.client.get(f"{form}/preview", params=TRIGGER)).text)
        assert "15 min before and 1 day after start , for each in who , if state is active" in shown
        assert "Sun 01 Jan 2040, 08:45:00 KST row-0, for ana" in shown
        assert "Mon 02 Jan 2040, 09:00:00 KST row-0, for bob" in shown
        summary = "Of 5 items, 1 in the past, 1 without a date, 1 excluded by conditions, 1 unreadable"
        assert summary in shown
        for wrong, word in (
            ({"offsets": "-1y"}, "offset is '-1y'"), ({"condition": "state like x"}, "no operator 'like'"),
            ({"timezone": "Mars/Base"}, "Mars/Base"), ({"payload": "{"}, "JSON"), ({"graceSeconds": "long"}, "number"),
            ({"column": ""}, "column"),
        ):  # fmt: skip
            refused = await browser.submit(form, form, **{**TRIGGER, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
            assert fields_with_problem(refused.text) == list(wrong)
            assert 'value="shift-soon"' in refused.text  # the form keeps its input
        previewed = await browser.submit(form, form, **TRIGGER, preview="1")
        assert (previewed.status_code, 'value="shift-soon"' in previewed.text) == (200, True)
        assert (await browser.web.get("/api/v1/triggers")).json()["items"] == []
        created = await browser.submit(form, form, **TRIGGER)
        assert created.headers["location"] == "/ui/triggers/shift-soon?did=watching"
        trigger = (await browser.web.get("/api/v1/triggers/shift-soon")).json()
        assert (trigger["offsets"], trigger["graceSeconds"], trigger["payload"]) == (
            ["-15m", "+1d"],
            60,
            {"say": "hello"},
        )
        assert trigger["condition"] == [{"field": "state", "op": "eq", "value": "active"}]
        duplicate = await browser.submit(form, form, **TRIGGER)
        assert (duplicate.status_code, fields_with_problem(duplicate.text)) == (409, ["name"])


async def test_the_trigger_form_has_the_zone_and_the_edge_of_each_row(serve_sqlite: Serve, tmp_path: Path) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/trigger"
        await browser.web.post("/api/v1/sources", {"name": "shifts"})
        rows = [
            {"during": "2040-03-01/2040-03-12", "tz": "America/New_York"},
            {"during": {"start": "2040-03-01", "end": "2040-03-12"}, "tz": "Asia/Seoul"},
            {"during": "2040-03-01/2040-03-12", "tz": "Mars/Base"},
        ]
        items = [{"key": f"row-{n}", "fields": fields} for n, fields in enumerate(rows)]
        assert (await browser.web.post("/api/v1/sources/shifts/items", {"items": items})).status_code == 200
        fields = {
            "name": "shift-end", "source": "shifts", "column": "during", "topic": "shift.end", "offsets": "-1d@09:00",
            "zoneColumn": "tz", "edge": "end",
        }  # fmt: skip
        shown = plain_text((await browser.client.get(f"{form}/preview", params=fields)).text)
        assert "the end of during , local times in the zone in tz" in shown
        assert "Sun 11 Mar 2040, 09:00:00 EDT row-0" in shown
        assert "Sun 11 Mar 2040, 09:00:00 KST row-1" in shown
        assert "1 unreadable" in shown
        without_zone = plain_text(
            (await browser.client.get(f"{form}/preview", params={**fields, "zoneColumn": ""})).text
        )
        assert "the trigger has no time zone" in without_zone
        with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
            theirs.execute("CREATE TABLE shifts (id integer primary key, during text)")
        table = {"kind": "sql", "options": {"url": f"sqlite:///{tmp_path}/theirs.db", "table": "shifts"}}
        assert (await browser.web.post("/api/v1/sources", {"name": "table", **table})).status_code == 201
        refused = await browser.submit(form, form, **{**fields, "source": "table", "column": "durin"})
        assert refused.status_code == 422
        assert "Did you mean during?" in plain_text(refused.text)
        created = await browser.submit(form, form, **fields)
        assert created.status_code == 303, plain_text(created.text)
        trigger = (await browser.web.get("/api/v1/triggers/shift-end")).json()
        assert (trigger["zoneColumn"], trigger["edge"]) == ("tz", "end")
        shown = plain_text((await browser.get("/ui/triggers/shift-end")).text)
        assert "the end of during , local times in the zone in tz" in shown


async def test_the_source_form_shows_the_calls_a_day_and_creates_the_source(
    serve_sqlite: Serve, tmp_path: Path
) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/source"
        assert f'href="{form}"' in (await browser.get("/ui/new/trigger")).text
        board = {
            "name": "board", "kind": "monday", "tokenSecret": "monday", "boardId": "7", "columns": "date4, person",
            "dailyCalls": "1000",
        }  # fmt: skip
        await browser.app.secrets.put("monday", "a token")
        shown = plain_text((await browser.client.get(f"{form}/preview", params=board)).text)
        assert "500 of 1,000 for each 500 items" in shown
        assert "Without webhooks" in shown
        created = await browser.submit(form, form, **board)
        assert created.headers["location"].startswith("/ui/new/trigger?source=board"), plain_text(created.text)
        source = (await browser.web.get("/api/v1/sources/board")).json()
        assert source["options"] == {
            "token": {"secret": "monday"}, "boardId": "7", "columns": ["date4", "person"], "dailyCalls": 1000,
        }  # fmt: skip
        second = {**board, "name": "second", "webhooks": "https://bell.example.com"}
        shown = plain_text((await browser.client.get(f"{form}/preview", params=second)).text)
        assert "250 of 1,000 for each 500 items" in shown
        assert "2 share the calls of this account" in shown
        assert "Without webhooks" not in shown
        with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
            theirs.execute("CREATE TABLE shifts (id integer primary key, start_at text)")
        table = {"name": "table", "kind": "sql", "url": f"sqlite:///{tmp_path}/theirs.db", "table": "shift"}
        shown = plain_text((await browser.client.get(f"{form}/preview", params=table)).text)
        assert "All rows every 5 s" in shown
        for wrong, word in (({}, "Did you mean shifts?"), ({"everySeconds": "x"}, "number"), ({"kind": "x"}, "kind")):
            refused = await browser.submit(form, form, **{**table, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in plain_text(refused.text), word
        previewed = await browser.submit(form, form, **{**table, "table": "shifts", "preview": "1"})
        assert (previewed.status_code, "All rows every 5 s" in plain_text(previewed.text)) == (200, True)
        created = await browser.submit(form, form, **{**table, "table": "shifts"})
        assert created.status_code == 303, plain_text(created.text)


def test_conditions_are_parsed_from_lines() -> None:
    text = 'a eq 1\nb in ["x", "y"]\n\nc not_empty\nd ne two words'
    parsed = [(each["field"], each["op"], each.get("value")) for each in parse_conditions(text)]
    assert parsed == [("a", "eq", 1), ("b", "in", ["x", "y"]), ("c", "not_empty", None), ("d", "ne", "two words")]


CAMPAIGN = {
    "title": "Hello", "body": "You", "when": "local", "at": "2040-01-01T09:00", "timezone": "Asia/Seoul",
    "name": "new year", "chunkSize": "2", "chunkDelayMs": "1000", "quietStart": "21:00", "quietEnd": "10:00",
    "quietThen": "skip", "canarySize": "1", "canaryRate": "10", "data": '{"screen": "today"}', "approveAbove": "3",
}  # fmt: skip


async def test_the_campaign_form_previews_the_timetable_and_creates_the_campaign(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/campaign"
        await browser.app.devices.register_many([
            {"token": f"token-of-a-phone-{n:04}", "timezone": ("Asia/Seoul", "Europe/Paris")[n % 2]} for n in range(6)
        ])  # fmt: skip
        empty = (await browser.get(form)).text
        assert "has no send time" not in empty  # nothing was entered yet
        assert form_values(empty)["pushOnOff"] == "1"  # unless the user says otherwise
        preview = f"{form}/preview"
        without_quiet_hours = {**CAMPAIGN, "quietStart": "", "quietEnd": ""}
        shown = plain_text((await browser.client.get(preview, params=without_quiet_hours)).text)
        assert "6 devices" in shown
        assert re.search(r"Asia/Seoul Sun 01 Jan 2040, 09:00 KST Sun 01 Jan 2040, 09:00 KST 3", shown), shown
        assert "Europe/Paris Sun 01 Jan 2040, 09:00 CET" in shown
        assert '"screen": "today"' in shown
        excluded = plain_text((await browser.client.get(preview, params=CAMPAIGN)).text)
        assert "3 in Europe/Paris excluded : in quiet hours" in excluded
        recurring = {**without_quiet_hours, "when": "cron", "cron": "0 9 * * 1-5"}
        assert plain_text((await browser.client.get(preview, params=recurring)).text).count("09:00:00 KST") == 6
        immediate = plain_text(
            (await browser.client.get(preview, params={**without_quiet_hours, "when": "now", "at": ""})).text
        )
        assert "Sending starts immediately" in immediate
        for wrong, word in (
            ({"at": ""}, "no send time"), ({"data": "["}, "JSON"),
            ({"filters": "[1]", "pushOnOff": "1"}, "filters"), ({"chunkSize": "501"}, "chunkSize"),
            ({"at": "2001-01-01T09:00"}, "The send time is in the past"),
            ({"quietEnd": ""}, "The quiet hours have only one time"), ({"expiresAt": "soon"}, "which is not a time"),
            ({"timezone": "", "expiresAt": "2040-01-01T09:00"}, "without a time zone"),
            ({"title": "", "body": "", "data": ""}, "title, body and data are empty"),
            ({"body": "x" * 5000}, "the limit for a token is 4,096"), ({"image": "http://x"}, "image"),
            ({"canarySize": "0"}, "size is 0"), ({"value1": "", "field1": "platform"}, "Condition 1 has no value"),
            ({"language1": "", "title1": "x"}, "Language 1 is incomplete"), ({"imageB": "http://x"}, "image"),
            ({"titleB": "", "shareB": "30"}, "Variant B has no texts"),
            ({"canarySize": ""}, "The canary has no devices"),
            ({"actionTitle2": "", "action2": "open"}, "Button 2 is incomplete"),
        ):  # fmt: skip
            refused = await browser.submit(form, form, **{**CAMPAIGN, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
            assert fields_with_problem(refused.text) == list(wrong)[:1]
            assert 'value="new year"' in refused.text
        for wrong, word in (
            ({"filters": '{"colour": "red"}'}, "colour"), ({"when": "then"}, "no send time"),
        ):  # fmt: skip
            refused = await browser.submit(form, form, **{**CAMPAIGN, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
            assert 'value="new year"' in refused.text
        created = await browser.submit(form, form, **CAMPAIGN)
        page = created.headers["location"].split("?")[0]
        campaign = (await browser.web.get(page.replace("/ui", "/api/v1"))).json()
        sent = (campaign["localTime"], campaign["timezone"], campaign["chunkDelayMs"])
        assert sent == ("2040-01-01T09:00:00", "Asia/Seoul", 1000)
        assert (campaign["canary"], campaign["approveAbove"]) == ({"size": 1, "maxErrorRate": 0.1}, 3)
        scheduled = await browser.submit(form, form, **{**recurring, "name": "weekdays"})
        assert scheduled.headers["location"].startswith("/ui/schedules/")


RICH_CAMPAIGN = {
    **CAMPAIGN, "title": "Hi {{attributes.name|there}}", "body": "Ring", "image": "https://example.com/a.png",
    "link": "https://example.com/", "sound": "default", "badge": "3", "priority": "high", "channel": "news",
    "actionTitle1": "Open", "action1": "open", "analyticsLabel": "spring", "android": '{"direct_boot_ok": true}',
    "language1": "ko", "title1": "안녕 {{attributes.name|여러분}}", "body1": "",
}  # fmt: skip


async def test_the_campaign_form_has_all_fields_of_a_message_and_previews_it_for_recipients(
    serve_sqlite: Serve,
) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/campaign"
        await browser.app.devices.register_many([
            {"token": "token-of-a-phone-1", "user_id": "ann", "attributes": {"name": "Ann"}},
            {"token": "token-of-a-phone-2", "user_id": "min", "language": "ko", "attributes": {"name": "민"}},
            {"token": "token-of-a-phone-3", "user_id": "bob"},
        ])  # fmt: skip
        shown = plain_text((await browser.client.get(f"{form}/preview", params=RICH_CAMPAIGN)).text)
        assert "Hi Ann Ring" in shown
        assert "안녕 민 Ring" in shown
        assert "Hi there Ring" in shown
        one = {**RICH_CAMPAIGN, "previewUser": "min"}
        shown = plain_text((await browser.client.get(f"{form}/preview", params=one)).text)
        assert "Hi Ann" not in shown
        assert "안녕 민 Ring with the image https://example.com/a.png to min, ko" in shown
        assert '"token-of-a-phone-2"' in shown
        unknown = await browser.client.get(f"{form}/preview", params={**RICH_CAMPAIGN, "previewUser": "eve"})
        assert "eve" in unknown.text
        assert "has the attribute" not in shown
        typing_error = {**RICH_CAMPAIGN, "body": "{{attributes.nmae|you}}"}
        shown = plain_text((await browser.client.get(f"{form}/preview", params=typing_error)).text)
        assert "newest devices has the attribute nmae" in shown
        assert "Did you mean attributes.name" in shown
        another = (await browser.client.get(form, params={**RICH_CAMPAIGN, "languages": "2"})).text
        assert 'name="language2"' in another
        assert 'value="안녕 {{attributes.name|여러분}}"' in another
        for wrong, word in (
            ({"image": "http://x"}, "image"), ({"badge": "many"}, "number"), ({"apns": '{"x": 1}'}, "apns"),
            ({"language1": ""}, "Language 1 is incomplete"), ({"title": "Hi {{name}}"}, "placeholder"),
            ({"action1": ""}, "action"), ({"language2": "ko", "title2": "x"}, "twice"),
        ):  # fmt: skip
            refused = await browser.submit(form, form, **{**RICH_CAMPAIGN, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
        created = await browser.submit(form, form, **RICH_CAMPAIGN)
        page = created.headers["location"].split("?")[0]
        campaign = (await browser.web.get(page.replace("/ui", "/api/v1"))).json()
        assert campaign["translations"] == {"ko": {"title": "안녕 {{attributes.name|여러분}}"}}
        assert campaign["actions"] == [{"action": "open", "title": "Open"}]
        assert (campaign["badge"], campaign["android"]) == (3, {"direct_boot_ok": True})
        shown = plain_text((await browser.get(page)).text)
        assert "https://example.com/a.png" in shown
        assert "In ko 안녕 {{attributes.name|여러분}}" in shown


AUDIENCE_ROWS = (
    ("platform", "is", "ios, android", {"platform": ["ios", "android"]}),
    ("language", "not", "ko", {"not": {"language": "ko"}}),
    ("age", "min", "18", {"ageMin": 18}),
    ("age", "is", "30", {"ageMin": 30, "ageMax": 30}),
    ("lastSeen", "max", "30", {"seenWithinDays": 30}),
    ("attributes.tier", "is", "gold", {"attributes": {"tier": "gold"}}),
    ("attributes.points:number", "max", "9.5", {"attributes": {"points": {"max": 9.5}}}),
    ("attributes.points:number", "not", "1, 2", {"not": {"attributes": {"points": [1, 2]}}}),
    ("attributes.vip:boolean", "is", "yes", {"attributes": {"vip": True}}),
)


def test_rows_of_the_audience_are_filters_and_back() -> None:
    form, filters = {}, []
    for n, (name, operator, value, expected) in enumerate(AUDIENCE_ROWS, 1):
        form |= {f"field{n}": name, f"op{n}": operator, f"value{n}": value}
        filters.append(expected)
    assert parse_rows(form) == filters
    nested = {"any": [{"platform": "ios"}, {"gender": "F"}]}
    assert describe_filters({"pushOnOff": True, "all": [*filters, {"segment": "Staff"}, nested]}) == [
        "Platform is ios, android", "Language is not ko", "Age at least 18", "Age is 30",
        "Last seen, days ago at most 30", "tier is gold", "points at most 9.5", "points is not 1, 2", "vip is yes",
        "in segment Staff", "accepts push messages", '{"any": [{"platform": "ios"}, {"gender": "F"}]}',
    ]  # fmt: skip
    assert split_filters({"all": [*filters, nested], "ageMax": 9}) == ({"ageMax": 9, "all": [nested]}, form)


def test_filters_of_more_conditions_than_rows_lose_none() -> None:
    conditions = [{"topic": f"topic-{n}"} for n in range(60)]
    rest, form = split_filters({"all": conditions})
    assert [*parse_rows(form), *rest["all"]] == conditions
    assert len(describe_filters({"all": conditions})) == 60


async def test_the_audience_of_a_campaign_is_built_from_rows(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/campaign"
        await browser.app.devices.register_many(
            {"token": f"token-of-a-phone-{n}", "platform": ("ios", "web")[n % 2], "attributes": {"points": n}}
            for n in range(10)
        )
        page = (await browser.client.get(form, params={**CAMPAIGN, "conditions": "1"})).text
        assert re.search(r'<option value="attributes.points:number">\s*points', page)
        rows = {
            "field1": "platform", "op1": "is", "value1": "ios", "field2": "attributes.points:number", "op2": "min",
            "value2": "4", "quietStart": "", "quietEnd": "",
        }  # fmt: skip
        shown = (await browser.client.get(f"{form}/preview", params={**CAMPAIGN, **rows})).text
        assert "3 devices" in plain_text(shown)
        for button in ("conditions", "languages", "preview"):
            answer = await browser.submit(form, form, **{**CAMPAIGN, **rows, button: "3"})
            assert (answer.status_code, form_values(answer.text)["value2"]) == (200, "4")
        assert (await browser.web.get("/api/v1/campaigns")).json()["items"] == []
        for wrong, word in (
            ({"value1": ""}, "Condition 1 has no value"), ({"op1": "min"}, "platform is not a number"),
            ({"value2": "many"}, "not a number"), ({"value1": "ipad"}, "platform is 'ipad'"),
            ({"field1": "attributes.points"}, "points is a number"),
        ):  # fmt: skip
            refused = await browser.submit(form, form, **{**CAMPAIGN, **rows, **wrong})
            assert refused.status_code in (400, 422), refused.text
            assert word in html.unescape(refused.text), word
        created = await browser.submit(form, form, **{**CAMPAIGN, **rows})
        url = created.headers["location"].split("?")[0]
        campaign = (await browser.web.get(url.replace("/ui", "/api/v1"))).json()
        assert campaign["filters"] == {"all": [{"platform": "ios"}, {"attributes": {"points": {"min": 4}}}]}
        edited = form_values((await browser.get(f"{url}/edit")).text)
        assert {name: edited[name] for name in rows} == rows
        assert edited["filters"] == ""


async def test_segments_are_created_counted_used_and_deleted(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        for n, platform in enumerate(("ios", "ios", "android")):
            await browser.web.post("/api/v1/devices", {"token": f"phone-{n:04}", "platform": platform})
        await browser.get("/ui/segments")
        assert "There is no segment" not in (await browser.get("/ui/new/segment")).text
        row = {"field1": "platform", "op1": "is", "value1": "ios"}
        answer = await browser.client.get("/ui/new/segment/count", params=row)
        assert plain_text(answer.text).strip() == "2 devices"
        answer = await browser.submit("/ui/new/segment", "/ui/new/segment", **row, name="")
        assert (answer.status_code, fields_with_problem(answer.text)) == (422, ["name"])
        answer = await browser.submit("/ui/new/segment", "/ui/new/segment", **row, name="On iOS")
        assert answer.headers["location"] == "/ui/segments?did=saved", answer.text
        answer = await browser.submit("/ui/new/segment", "/ui/new/segment", **row, name="On iOS")
        assert (answer.status_code, fields_with_problem(answer.text)) == (409, ["name"])
        assert "On iOS" in (await browser.get("/ui/segments")).text
        assert "2" in plain_text((await browser.get("/ui/segments/On%20iOS/count")).text)
        form = (await browser.get("/ui/segments/On%20iOS")).text
        assert 'value="ios"' in form and '<option value="platform" selected>' in form
        etag = re.search(r'name="etag" value="([^"]*)"', form)
        assert etag is not None
        changed = {**row, "op1": "not", "etag": html.unescape(etag[1])}
        answer = await browser.submit("/ui/segments/On%20iOS", "/ui/segments/On%20iOS", **changed)
        stale = await browser.submit("/ui/segments/On%20iOS", "/ui/segments/On%20iOS", **{**changed, "op1": "is"})
        assert (answer.status_code, stale.status_code) == (303, 412)
        stored = (await browser.web.get("/api/v1/segments/On iOS")).json()
        assert (stored["filters"], stored["count"]) == ({"all": [{"not": {"platform": "ios"}}]}, 1)
        composer = plain_text((await browser.client.get("/ui/new/campaign", params={"field1": "segment=On iOS"})).text)
        assert "In segment On iOS" in composer
        body = {"title": "Hello", "when": "at", "at": "2040-01-01T09:00", "timezone": "UTC", "field1": "segment=On iOS",
                "op1": "not", "value1": ""}  # fmt: skip
        answer = await browser.submit("/ui/new/campaign", "/ui/new/campaign", **body)
        created = await browser.web.get(f"/api/v1{answer.headers['location'].removeprefix('/ui').partition('?')[0]}")
        assert created.json()["filters"] == {"all": [{"not": {"segment": "On iOS"}}]}
        page = await browser.get(answer.headers["location"].partition("?")[0])
        assert "Audience not in segment On iOS" in plain_text(page.text)
        assert "Platform is not ios" in plain_text((await browser.get("/ui/segments")).text)
        assert "uses the segment" in (await browser.submit("/ui/segments", "/ui/segments/On%20iOS/delete")).text
        await browser.web.post(f"/api/v1/campaigns/{created.json()['id']}/stop", {})
        answer = await browser.submit("/ui/segments", "/ui/segments/On%20iOS/delete")
        assert answer.headers["location"] == "/ui/segments?did=segment-deleted"


async def test_the_campaign_form_makes_an_ab_test(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        await browser.web.post("/api/v1/devices", {"token": "phone-0001"})
        fields = {"title": "Hello", "when": "at", "at": "2040-01-01T09:00", "timezone": "UTC", "titleB": "Hi",
                  "shareB": "30", "holdOut": "10", "trackOpens": "1"}  # fmt: skip
        preview = plain_text((await browser.client.get("/ui/new/campaign/preview", params=fields)).text)
        assert "Hello Variant A to every recipient" in preview
        assert "Hi Variant B to every recipient" in preview
        answer = await browser.submit("/ui/new/campaign", "/ui/new/campaign", **fields)
        url = answer.headers["location"].split("?")[0]
        campaign = (await browser.web.get(url.replace("/ui", "/api/v1"))).json()
        assert campaign["variants"] == [{"name": "A", "share": 0.7}, {"name": "B", "share": 0.3, "title": "Hi"}]
        assert (campaign["holdOut"], campaign["trackOpens"]) == (0.1, True)
        edited = form_values((await browser.get(f"{url}/edit")).text)
        assert {name: edited[name] for name in ("titleB", "shareB", "holdOut", "trackOpens", "variants")} == {
            "titleB": "Hi", "shareB": "30", "holdOut": "10", "trackOpens": "1", "variants": "",
        }  # fmt: skip
        refused = await browser.submit("/ui/new/campaign", "/ui/new/campaign", **{**fields, "shareB": "100"})
        assert "The share of variant B is 100 %. Enter more than 0" in plain_text(refused.text)
        assert "Variant B" in plain_text((await browser.get(url)).text)
        assert "Opened" in plain_text((await browser.get(f"{url}/results")).text)


async def test_devices_are_searched_shown_and_deleted(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        assert "No devices yet" in (await browser.get("/ui/devices")).text
        for n in range(60):
            device = {
                "token": f"Phone-{n:04}-x",
                "userId": f"user {n}",
                "attributes": {"tier": "gold" if n < 3 else "no"},
            }
            await browser.web.post("/api/v1/devices", device)

        async def search(**query: str) -> list[str]:
            page = (await browser.client.get("/ui/devices", params=query)).text
            return re.findall(r'<a class="main" href="[^"]*">([^<]*)</a>', page)

        assert await search(user="user 7") == ["user 7"]
        assert await search(token="Phone-0012") == ["user 12"]
        assert len(await search(token="Phone-001")) == 10
        assert await search(token="phone-0012") == []
        assert await search(token="Phone-0012", user="user 7") == []
        assert await search(field1="attributes.tier", op1="is", value1="gold") == ["user 0", "user 1", "user 2"]
        for query, word in (({"token": "Phone"}, "minimum length is 8"), ({"field1": "platform"}, "has no value")):
            assert word in plain_text((await browser.client.get("/ui/devices", params=query)).text)
        everyone = await browser.client.get("/ui/devices", params={"token": "Phone-00"})
        url = re.search(r'href="(/ui/devices\?token=Phone-00&amp;cursor=[^"]*)"', everyone.text)
        assert url is not None, everyone.text
        assert len(re.findall('<a class="main"', (await browser.get(html.unescape(url[1]))).text)) == 10
        shown = re.search(r'href="(/ui/devices/[0-9a-f-]+)"', everyone.text)
        assert shown is not None
        page = (await browser.get(shown[1])).text
        assert "Phone-0000-x" in page and "gold" in page
        answer = await browser.submit(shown[1], f"{shown[1]}/delete")
        assert answer.headers["location"] == "/ui/devices?did=device-deleted"
        assert (await browser.get(shown[1])).status_code == 404


async def test_devices_are_imported_and_refused_lines_are_shown(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        lines = 'token,userId,visits:number,note\nphone-0001,ann,3,"two\nlines"\nphone-0002,bob,many,\n'
        page = (await browser.submit("/ui/devices", "/ui/devices", csv=lines)).text
        shown = plain_text(page)
        assert "1 new, 0 known, 1 refused Line 4: visits is 'many', not a number" in shown
        assert html.escape(lines, quote=False) in page.replace("&#34;", '"')  # what was entered is kept
        (device,) = (await browser.web.get("/api/v1/devices")).json()["items"]
        assert (device["userId"], device["attributes"]) == ("ann", {"visits": 3, "note": "two\nlines"})
        shown = plain_text((await browser.submit("/ui/devices", "/ui/devices", csv="token,langauge\na,ko\n")).text)
        assert "Did you mean language?" in shown
        shown = plain_text((await browser.submit("/ui/devices", "/ui/devices", csv="token\nphone-0002\n")).text)
        assert "1 new, 0 known, 0 refused" in shown


async def test_an_ended_campaign_is_archived_and_deleted(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        created = await browser.web.post("/api/v1/campaigns", {"title": "Hello", "sendAt": "2040-01-01T00:00:00Z"})
        url = f"/ui/campaigns/{created.json()['id']}"
        assert f"{url}/archive" not in (await browser.get(url)).text
        await browser.web.post(f"/api/v1/campaigns/{created.json()['id']}/stop", {})
        answer = await browser.submit(url, f"{url}/archive")
        assert answer.headers["location"] == f"{url}?did=archived"
        assert "Archived" in plain_text((await browser.get(url)).text)
        assert url not in (await browser.get("/ui/campaigns")).text
        assert url in (await browser.get("/ui/campaigns?state=archived")).text
        await browser.submit(url, f"{url}/unarchive")
        assert url in (await browser.get("/ui/campaigns")).text
        answer = await browser.submit(url, f"{url}/delete")
        assert answer.headers["location"] == "/ui/campaigns?did=deleted"
        assert (await browser.get(url)).status_code == 404


async def test_a_campaign_is_edited_and_copied_in_the_form(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/new/campaign"
        await browser.app.devices.register("token-of-a-phone-1", marketing_on=True)
        fields = {**RICH_CAMPAIGN, "filters": '{"platform": "ios"}', "marketing": "1", "ttl": "60",
                  "expiresAt": "2040-01-02T09:00"}  # fmt: skip
        page = (await browser.submit(form, form, **fields)).headers["location"].split("?")[0]
        api = page.replace("/ui", "/api/v1")
        before = (await browser.web.get(api)).json()
        assert before["filters"] == {"platform": "ios", "marketingOnOff": True}
        assert before["expiresAt"] == "2040-01-02T00:00:00Z"  # the time in Seoul
        assert f'href="{page}/edit"' in (await browser.get(page)).text
        shown = form_values((await browser.get(f"{page}/edit")).text)
        assert (shown["title1"], shown["when"], shown["canaryRate"]) == (fields["title1"], "local", "10")
        assert (await browser.post_form(f"{page}/edit", shown)).status_code == 303
        after = (await browser.web.get(api)).json()
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= {"revision", "updatedAt", "jobId"}  # saving the form unchanged changes nothing
        shown = form_values((await browser.get(f"{page}/edit")).text)
        assert (await browser.post_form(f"{page}/edit", {**shown, "title": "Bye", "image": ""})).status_code == 303
        edited = (await browser.web.get(api)).json()
        assert edited["title"] == "Bye"
        assert "image" not in edited
        stale = await browser.post_form(f"{page}/edit", {**shown, "title": "Late"})
        assert (stale.status_code, "Another user saved this campaign" in stale.text) == (412, True)
        assert (await browser.web.get(api)).json()["title"] == "Bye"
        copied = form_values((await browser.get(f"{form}?copy={before['id']}")).text)
        assert (copied["title"], copied["at"], copied["language1"]) == ("Bye", "", "ko")


def form_values(page: str) -> dict[str, str]:
    """Return the fields of the form on a page, as a browser would send them."""
    inside = page[page.index('id="composer"') :]
    values = dict(re.findall(r'<input(?![^>]*type="checkbox")[^>]*?\bname="(\w+)"[^>]*?\bvalue="([^"]*)"', inside))
    values |= dict(re.findall(r'<textarea[^>]*?\bname="(\w+)"[^>]*>([^<]*)</textarea>', inside))
    for name, options in re.findall(r'<select[^>]*?\bname="(\w+)"[^>]*>(.*?)</select>', inside, re.DOTALL):
        chosen = re.findall(r'value="([^"]*)" selected', options) or re.findall(r'value="([^"]*)"', options)
        values[name] = chosen[0]
    values |= dict.fromkeys(re.findall(r'name="(\w+)" value="1"\s+checked', inside), "1")
    return {name: html.unescape(value) for name, value in values.items()}


@pytest.mark.parametrize("form", ["/ui/new/trigger", "/ui/new/source", "/ui/new/campaign", "/ui/schedules/new/test"])
async def test_operators_cannot_create_anything_in_forms(serve_sqlite: Serve, form: str) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        await _create_source(browser)
        await browser.create_user("olga", "operator")
        await browser.sign_in("olga")
        for page in ("/ui/triggers", "/ui/campaigns"):
            assert "/ui/new/" not in (await browser.get(page)).text
        token = re.search(r'name="_token" value="(\w+)"', (await browser.get("/ui/")).text)
        assert token is not None
        fields = (
            {"kind": "cron", "when": "0 9 * * *"} if "schedules" in form else TRIGGER if "trigger" in form else CAMPAIGN
        )
        refused = await browser.post_form(form, {"_token": token[1], "topic": "tea.ready", **fields})
        assert refused.status_code == 403, plain_text(refused.text)
        assert "ROLE_TOO_LOW" in refused.text
        for collection in ("triggers", "campaigns", "jobs"):
            assert (await browser.web.get(f"/api/v1/{collection}")).json()["items"] == []


async def test_the_schedule_form_runs_its_job_once(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        form = "/ui/schedules/new"
        fields = {"kind": "cron", "when": "0 9 * * *", "timezone": "UTC", "topic": "tea.ready", "payload": '{"to": 1}'}
        fired = await browser.submit(form, f"{form}/test", **fields, maxRetries="2")
        assert fired.status_code == 303, plain_text(fired.text)
        page = fired.headers["location"].split("?")[0]
        job = (await browser.web.get(page.replace("/ui", "/api/v1"))).json()
        assert (job["topic"], job["payload"], job["scheduleId"]) == ("tea.ready", {"to": 1}, None)
        assert job["retry"]["attempts"] == 3
        assert "No schedule was created" in (await browser.get(fired.headers["location"])).text
        assert (await browser.web.get("/api/v1/schedules")).json()["items"] == []
        wrong = await browser.submit(form, f"{form}/test", **{**fields, "topic": ""})
        assert wrong.status_code == 422


async def test_an_error_of_a_fragment_request_is_rendered_as_a_fragment(
    serve_sqlite: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        assert (await browser.get("/ui/campaigns")).status_code == 200

        async def fail(*_: object, **__: object) -> None:
            raise StoreError("gone")

        monkeypatch.setattr(browser.app.store, "run", fail)
        fragment = await browser.get("/ui/campaigns", hx_request="true")
        assert fragment.status_code == 503
        assert 'role="alert"' in fragment.text
        assert "<html" not in fragment.text
        assert "<nav" not in fragment.text


async def test_a_fragment_request_without_a_session_reloads_the_page(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        answer = await browser.get("/ui/runs", hx_request="true")
        assert (answer.status_code, answer.headers["hx-refresh"]) == (401, "true")
