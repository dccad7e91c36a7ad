"""Triggers and sources over HTTP, with an engine, on both stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from timebell import Arrived
from timebell.recurrence.instants import format_instant

from .test_reports import until
from .web import is_problem

Make = Callable[..., Any]
SHIFT = {"source": "shifts", "column": "start_at", "topic": "shift.remind"}


async def test_a_row_is_told_moved_and_fires(make: Make) -> None:
    async with make(timezone="UTC") as web:
        heard: list[Arrived] = []

        @web.app.on("shift.remind")
        async def remind(event: Arrived) -> None:
            heard.append(event)

        made = await web.post("/sources", {"name": "shifts"})
        assert made.status_code == 201
        hook = made.json()["hook"].removeprefix("/api/v1")
        made = await web.post("/triggers", {"name": "start", **SHIFT, "offsets": ["0"], "payload": {"say": "now"}})
        assert made.status_code == 201, made.text
        assert made.json()["scan"]["state"] == "running"
        said = {"key": "7", "version": 1, "fields": {"start_at": "2040-01-01T00:00:00Z"}}
        assert (await web.post(hook, said)).json() == {
            "changed": 1, "same": 0, "stale": 0, "made": 1, "cancelled": 0, "late": 0, "unreadable": 0,
        }  # fmt: skip
        soon = web.app.clock.now() + timedelta(seconds=0.3)
        said = {"items": [{"key": "7", "version": 2, "fields": {"start_at": soon.isoformat()}}]}
        assert (await web.post(hook, said)).json()["cancelled"] == 1
        async with web.app.running(heartbeat=0.1):
            await until(lambda: bool(heard))
        (event,) = heard
        assert event.payload["itemId"] == "7"
        assert event.payload["action"] == {"say": "now"}
        assert event.payload["scheduledAt"] == format_instant(event.scheduled_at)
        assert event.scheduled_at == soon
        (item,) = (await web.get("/sources/shifts/items")).json()["items"]
        assert (item["key"], item["version"]) == ("7", 2)


async def test_a_trigger_is_shown_as_it_was_made_and_changed_by_putting_it(make: Make) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/sources", {"name": "shifts"})
        given = {
            **SHIFT, "offsets": ["-15m", "+1d"], "timezone": "Asia/Seoul", "recipients": "users", "graceSeconds": 60,
            "condition": [{"field": "status", "op": "eq", "value": "active"}], "maxRetries": 2, "queue": "narrow",
        }  # fmt: skip
        made = (await web.post("/triggers", {"name": "start", **given})).json()
        shown = await web.get("/triggers/start")
        assert shown.headers["etag"] == '"1"'
        assert {**shown.json(), "scan": made["scan"]} == made
        assert {name: made[name] for name in given if name != "maxRetries"} == {
            name: value for name, value in given.items() if name != "maxRetries"
        }
        assert made["retry"]["attempts"] == 3
        is_problem(await web.post("/triggers", {"name": "start", **given}), 409, "TRIGGER_EXISTS")
        same = (await web.ask("PUT", "/triggers/start", given)).json()
        assert (same["revision"], same["scan"]) == (1, None)
        other = (await web.ask("PUT", "/triggers/start", {**given, "offsets": ["0"]})).json()
        assert (other["revision"], other["offsets"], other["scan"]["kind"]) == (2, ["0"], "scan")
        paused = (await web.post("/triggers/start/pause", {"reason": "holiday"})).json()
        assert (paused["enabled"], paused["pauseReason"]) == (False, "holiday")
        assert (await web.post("/triggers/start/resume")).json()["enabled"]
        is_problem(await web.ask("DELETE", "/sources/shifts"), 409, "SOURCE_IN_USE")
        assert (await web.ask("DELETE", "/triggers/start")).status_code == 202
        is_problem(await web.get("/triggers/start"), 404, "TRIGGER_NOT_FOUND")
        assert (await web.ask("DELETE", "/sources/shifts")).status_code == 200


async def test_what_does_not_fit_is_refused(make: Make) -> None:
    async with make(timezone="UTC") as web:
        is_problem(await web.post("/triggers", {"name": "x", **SHIFT}), 404, "SOURCE_NOT_FOUND")
        await web.post("/sources", {"name": "shifts"})
        for more, status, code in (
            ({"offsets": ["soon"]}, 422, "INVALID_OFFSET"), ({"offsets": []}, 422, "FIELDS_INVALID"),
            ({"condition": [{"field": "a", "op": "like", "value": 1}]}, 422, "INVALID_CONDITION"),
            ({"target": "nowhere"}, 404, "TARGET_NOT_FOUND"), ({"offset": "0"}, 422, "UNKNOWN_FIELD"),
        ):  # fmt: skip
            is_problem(await web.post("/triggers", {"name": "x", **SHIFT, **more}), status, code)
        for items, code in (
            ([], "INVALID_ITEM"), ([{"key": "1"}], "INVALID_ITEM"),
            ([{"key": "1", "fields": {}, "version": "soon"}], "INVALID_VERSION"),
        ):  # fmt: skip
            is_problem(await web.post("/sources/shifts/items", {"items": items}), 422, code)
        is_problem(await web.post("/hooks/nowhere", {"items": [{"key": "1", "fields": {}}]}), 404, "SOURCE_NOT_FOUND")


async def test_only_the_platform_says_which_database_is_read(make: Make) -> None:
    async with make(timezone="UTC", open_here=False) as web:
        admin, platform = await web.key("admin", "acme"), await web.key("platform", None)
        theirs = {"kind": "sql", "options": {"url": "sqlite:///theirs.db", "table": "shifts"}}
        is_problem(await web.post("/sources", {"name": "shifts", **theirs}, key=admin), 403, "ROLE_TOO_LOW")
        is_problem(await web.ask("PUT", "/sources/shifts", theirs, key=admin), 403, "ROLE_TOO_LOW")
        made = await web.post("/sources", {"name": "shifts", **theirs}, key=platform, timebell_tenant="acme")
        assert made.status_code == 201, made.text
        unless = {"name": "start", **SHIFT, "unless": "SELECT 1"}
        is_problem(await web.post("/triggers", unless, key=admin), 403, "ROLE_TOO_LOW")
        assert (await web.post("/triggers", {"name": "start", **SHIFT}, key=admin)).status_code == 201
        await web.post("/sources", {"name": "told"}, key=admin)
        given = {"name": "other", **SHIFT, "source": "told", "unless": "SELECT 1"}
        is_problem(await web.post("/triggers", given, key=platform, timebell_tenant="acme"), 422, "INVALID_CONDITION")


async def test_what_triggers_and_sources_need_is_not_taken_away(make: Make) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/secrets", {"name": "token_1", "value": "x"})
        board = {"kind": "monday", "options": {"token": {"secret": "token_1"}, "boardId": "77"}}
        assert (await web.post("/sources", {"name": "board", **board})).status_code == 201
        is_problem(await web.ask("DELETE", "/secrets/token_1"), 409, "SECRET_IN_USE")
        hook = {"kind": "http", "options": {"url": "https://example.com/hook"}}
        for name in ("my_hook", "myxhook"):
            await web.post("/targets", {"name": name, **hook})
        given = {**SHIFT, "source": "board", "target": "my_hook"}
        assert (await web.post("/triggers", {"name": "due", **given})).json()["target"] == {"name": "my_hook"}
        is_problem(await web.ask("DELETE", "/targets/my_hook"), 409, "TARGET_IN_USE")
        assert (await web.ask("DELETE", "/targets/myxhook")).status_code == 200
        await web.ask("DELETE", "/triggers/due")
        assert (await web.ask("DELETE", "/targets/my_hook")).status_code == 200
        await web.ask("DELETE", "/sources/board")
        assert (await web.ask("DELETE", "/secrets/token_1")).status_code == 200


async def test_a_tenants_month_is_told(make: Make) -> None:
    async with make(timezone="UTC", open_here=False) as web:
        platform = await web.key("platform", None)
        made = await web.post("/tenants", {"id": "acme", "limits": {"jobsPerMonth": 25}, "timezone": "Asia/Seoul"},
                              key=platform)  # fmt: skip
        assert made.json()["timezone"] == "Asia/Seoul"
        month = (await web.get("/tenants/acme/usage", key=platform)).json()["month"]
        assert (month["used"], month["limit"], month["timezone"], month["runsOutAt"]) == (0, 25, "Asia/Seoul", None)
        is_problem(
            await web.ask("PATCH", "/tenants/acme", {"timezone": "Mars/Base"}, key=platform), 422, "INVALID_TIMEZONE"
        )
        assert json.loads(made.text)["limits"]["jobsPerMonth"] == 25
