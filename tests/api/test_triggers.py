"""Triggers and sources over HTTP, with an engine, on both stores."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from timebell import Arrived
from timebell.recurrence.instants import format_instant

from .web import is_problem, wait_until

Make = Callable[..., Any]
SHIFT = {"source": "shifts", "column": "start_at", "topic": "shift.remind"}


async def test_an_item_is_received_moved_and_fires(make: Make) -> None:
    """The item arrives by webhook, without polling."""
    async with make(timezone="UTC") as web:
        received: list[Arrived] = []

        @web.app.on("shift.remind")
        async def remind(event: Arrived) -> None:
            received.append(event)

        created = await web.post("/sources", {"name": "shifts"})
        assert created.status_code == 201
        hook = created.json()["hook"].removeprefix("/api/v1")
        created = await web.post("/triggers", {"name": "start", **SHIFT, "offsets": ["0"], "payload": {"say": "now"}})
        assert created.status_code == 201, created.text
        assert created.json()["scan"]["state"] == "running"
        update = {"key": "7", "version": 1, "fields": {"start_at": "2040-01-01T00:00:00Z"}}
        assert (await web.post(hook, update)).json() == {
            "changed": 1, "unchanged": 0, "stale": 0, "created": 1, "cancelled": 0, "late": 0, "unreadable": 0,
        }  # fmt: skip
        soon = web.app.clock.now() + timedelta(seconds=0.3)
        update = {"items": [{"key": "7", "version": 2, "fields": {"start_at": soon.isoformat()}}]}
        assert (await web.post(hook, update)).json()["cancelled"] == 1
        async with web.app.running(heartbeat=0.1):
            await wait_until(lambda: bool(received))
        (event,) = received
        assert event.payload["itemId"] == "7"
        assert event.payload["action"] == {"say": "now"}
        assert event.payload["scheduledAt"] == format_instant(event.scheduled_at)
        assert event.scheduled_at == soon
        (item,) = (await web.get("/sources/shifts/items")).json()["items"]
        assert (item["key"], item["version"]) == ("7", 2)


async def test_a_trigger_is_returned_as_created_and_replaced_by_put(make: Make) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/sources", {"name": "shifts"})
        fields = {
            **SHIFT, "offsets": ["-15m", "+1d"], "timezone": "Asia/Seoul", "recipients": "users", "graceSeconds": 60,
            "condition": [{"field": "status", "op": "eq", "value": "active"}], "maxRetries": 2, "queue": "narrow",
        }  # fmt: skip
        created = (await web.post("/triggers", {"name": "start", **fields})).json()
        fetched = await web.get("/triggers/start")
        assert fetched.headers["etag"] == '"1"'
        assert {**fetched.json(), "scan": created["scan"]} == created
        assert {name: created[name] for name in fields if name != "maxRetries"} == {
            name: value for name, value in fields.items() if name != "maxRetries"
        }
        assert created["retry"]["attempts"] == 3
        is_problem(await web.post("/triggers", {"name": "start", **fields}), 409, "TRIGGER_EXISTS")
        is_problem(await web.ask("PUT", "/triggers/start", fields), 428, "REVISION_MISSING")
        same = (await web.ask("PUT", "/triggers/start", fields, if_match='"1"')).json()
        assert (same["revision"], same["scan"]) == (1, None)
        moved = await web.ask("PUT", "/triggers/start", {**fields, "offsets": ["0"]}, if_match='W/"1"')
        other = moved.json()
        assert moved.headers["etag"] == '"2"'
        stale = await web.ask("PUT", "/triggers/start", fields, if_match='"1"')
        is_problem(stale, 412, "REVISION_STALE")
        assert (await web.get("/triggers/start")).json()["offsets"] == ["0"]
        again = await web.ask("PUT", "/triggers/start", {**fields, "offsets": ["0"]}, if_match="*")
        assert again.json()["revision"] == 2
        assert (other["revision"], other["offsets"], other["scan"]["kind"]) == (2, ["0"], "scan")
        paused = (await web.post("/triggers/start/pause", {"reason": "holiday"})).json()
        assert (paused["enabled"], paused["pauseReason"]) == (False, "holiday")
        assert (await web.post("/triggers/start/resume")).json()["enabled"]
        is_problem(await web.ask("DELETE", "/sources/shifts"), 409, "SOURCE_IN_USE")
        assert (await web.ask("DELETE", "/triggers/start")).status_code == 202
        is_problem(await web.get("/triggers/start"), 404, "TRIGGER_NOT_FOUND")
        assert (await web.ask("DELETE", "/sources/shifts")).status_code == 200


async def test_zone_and_edge_of_each_row_apply(make: Make) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/sources", {"name": "shifts"})
        fields = {**SHIFT, "column": "during", "zoneColumn": "tz", "edge": "end", "offsets": ["-1d@09:00"]}
        created = (await web.post("/triggers", {"name": "end", **fields})).json()
        assert (created["zoneColumn"], created["edge"], created["timezone"]) == ("tz", "end", None)
        rows = [
            {"during": "2040-03-01/2040-03-12", "tz": "America/New_York"},  # the night before the clocks change
            {"during": {"from": "2040-03-01", "to": "2040-03-11"}, "tz": "Asia/Seoul"},
            {"during": "2040-03-01/2040-03-12", "tz": "Mars/Base"},
            {"during": "2040-03-01/", "tz": "UTC"},
        ]
        shown = (await web.post("/triggers/end/preview", {"rows": rows})).json()["rows"]
        assert [(row["timezone"], [each["at"] for each in row["firings"]]) for row in shown] == [
            ("America/New_York", ["2040-03-11T13:00:00Z"]), ("Asia/Seoul", ["2040-03-10T00:00:00Z"]),
            ("UTC", []), ("UTC", []),
        ]  # fmt: skip
        assert [row["problem"] for row in shown] == [None, None, "tz: 'Mars/Base' is not a time zone", None]
        items = [{"key": str(number), "fields": row} for number, row in enumerate(rows)]
        posted = (await web.post("/sources/shifts/items", {"items": items})).json()
        assert (posted["created"], posted["unreadable"]) == (2, 1)
        jobs = (await web.get("/jobs", status="pending")).json()["items"]
        assert {(job["payload"]["itemId"], job["runAt"], job["timezone"]) for job in jobs} == {
            ("0", "2040-03-11T13:00:00Z", "America/New_York"), ("1", "2040-03-10T00:00:00Z", "Asia/Seoul"),
        }  # fmt: skip
        (bad,) = (await web.get("/triggers/end/not-fired")).json()["items"]
        assert (bad["item"], bad["reason"], bad["detail"]) == ("2", "unreadable", "tz: 'Mars/Base' is not a time zone")
        corrected = {"key": "2", "fields": {**rows[2], "tz": "UTC"}}
        assert (await web.post("/sources/shifts/items", {"items": [corrected]})).json()["created"] == 1
        assert (await web.get("/triggers/end/not-fired")).json()["items"] == []
        for wrong, code in (({"edge": "middle"}, "INVALID_FIELDS"), ({"zoneColumn": None}, "TIMEZONE_MISSING")):
            is_problem(await web.post("/triggers", {"name": "x", **fields, **wrong}), 422, code)


async def test_a_password_in_the_url_of_a_source_is_refused(make: Make) -> None:
    async with make(timezone="UTC") as web:
        for url in ("postgresql://me:hunter2@localhost/theirs", "postgresql://localhost/theirs?password=hunter2"):
            options = {"url": url, "table": "shifts"}
            answer = await web.ask("PUT", "/sources/duty", {"kind": "sql", "options": options})
            refused = is_problem(answer, 422, "INVALID_SOURCE_OPTIONS")
            assert "secret" in refused["fix"]
            assert "hunter2" not in str(refused)


async def test_a_token_in_a_source_is_masked(make: Make) -> None:
    async with make(timezone="UTC") as web:
        board = {"token": {"secret": "board"}, "boardId": "77", "signingSecret": {"secret": "app"}}
        for name in ("token", "signingSecret"):
            options = {**board, name: "hunter2"}
            answer = await web.post("/sources", {"name": "board", "kind": "monday", "options": options})
            refused = is_problem(answer, 422, "INVALID_SOURCE_OPTIONS")
            assert '{"secret": ' in refused["fix"]
            await web.app.triggers.put_source("board", "monday", options)  # allowed in Python
            fetched = (await web.get("/sources/board")).json()["options"]
            assert fetched == {**board, name: "***"}
            assert "hunter2" not in (await web.get("/sources")).text


async def test_replacing_a_source_requires_its_etag(make: Make) -> None:
    async with make(timezone="UTC") as web:
        table = {"kind": "sql", "options": {"url": "sqlite:///theirs.db", "table": "shifts"}}
        created = await web.ask("PUT", "/sources/duty", table)
        assert created.status_code == 200, created.text
        first = created.headers["etag"]
        is_problem(await web.ask("PUT", "/sources/duty", table), 428, "REVISION_MISSING")
        assert (await web.get("/sources/duty")).headers["etag"] == first
        assert (await web.ask("PUT", "/sources/duty", table, if_match=first)).headers["etag"] == first
        other = {**table, "options": {**table["options"], "table": "rota"}}
        second = (await web.ask("PUT", "/sources/duty", other, if_match=first)).headers["etag"]
        assert second != first
        is_problem(await web.ask("PUT", "/sources/duty", table, if_match=first), 412, "REVISION_STALE")
        assert (await web.get("/sources/duty")).json()["options"]["table"] == "rota"


async def test_jobs_and_schedules_have_conditions(make: Make) -> None:
    async with make(timezone="UTC") as web:
        pro = [{"field": "plan", "op": "eq", "value": "pro"}]
        fields = {"topic": "mail.send", "payload": {"plan": "free"}, "condition": pro}
        web.app.on("mail.send")(lambda event: None)
        job = await web.post("/jobs", fields)
        assert job.json()["condition"] == pro
        created = await web.post("/schedules", {**fields, "name": "daily", "cronExpression": "0 9 * * *"})
        assert (created.json()["condition"], created.json()["unless"]) == (pro, None)
        path = f"/schedules/{created.json()['id']}"
        patched = await web.ask("PATCH", path, {"condition": {"plan": "free"}}, if_match='"1"')
        assert patched.json()["condition"] == [{"field": "plan", "op": "eq", "value": "free"}]
        assert (await web.ask("PATCH", path, {"condition": None}, if_match='"2"')).json()["condition"] == []
        is_problem(await web.post("/jobs", {**fields, "condition": [{"field": "a"}]}), 422, "INVALID_FIELDS")
        is_problem(await web.post("/jobs", {**fields, "condition": {"a": 1}, "unless": "x"}), 422, "INVALID_FIELDS")
        nowhere = {**fields, "unless": {"source": "nowhere", "query": "SELECT 1"}}
        is_problem(await web.post("/jobs", nowhere), 404, "SOURCE_NOT_FOUND")
        async with web.app.running(heartbeat=0.1):
            fetched = {}

            async def is_skipped() -> bool:
                fetched.update((await web.get(f"/jobs/{job.json()['id']}")).json())
                return fetched["status"] == "skipped"

            await wait_until(is_skipped)
        assert (fetched["reason"], fetched["attemptsMade"]) == ("condition", 0)
        assert fetched["result"]["condition"]["inputs"] == {"plan": "free"}


async def test_only_the_platform_sets_unless_queries(make: Make) -> None:
    async with make(timezone="UTC", open_here=False) as web:
        admin = await web.key("admin", "acme")
        asks = {"topic": "t", "unless": {"source": "duty", "query": "SELECT 1"}}
        is_problem(await web.post("/jobs", asks, key=admin), 403, "ROLE_TOO_LOW")
        named = {**asks, "name": "s", "cronExpression": "0 9 * * *"}
        is_problem(await web.post("/schedules", named, key=admin), 403, "ROLE_TOO_LOW")
        is_problem(await web.ask("PUT", "/schedules/by-name/s", named, key=admin), 403, "ROLE_TOO_LOW")
        line = json.dumps({**asks, "runAt": "2040-01-01T00:00:00Z"}).encode()
        imported = await web.ask("POST", "/jobs/bulk", line, content_type="application/x-ndjson", key=admin)
        assert imported.json()["errors"][0]["code"] == "INVALID_CONDITION", imported.text


async def test_invalid_triggers_and_items_are_refused(make: Make) -> None:
    async with make(timezone="UTC") as web:
        is_problem(await web.post("/triggers", {"name": "x", **SHIFT}), 404, "SOURCE_NOT_FOUND")
        await web.post("/sources", {"name": "shifts"})
        for more, status, code in (
            ({"offsets": ["soon"]}, 422, "INVALID_OFFSET"), ({"offsets": []}, 422, "INVALID_FIELDS"),
            ({"condition": [{"field": "a", "op": "like", "value": 1}]}, 422, "INVALID_CONDITION"),
            ({"target": "nowhere"}, 404, "TARGET_NOT_FOUND"), ({"offset": "0"}, 422, "UNKNOWN_FIELD"),
        ):  # fmt: skip
            is_problem(await web.post("/triggers", {"name": "x", **SHIFT, **more}), status, code)
        for items, code in (
            ([], "INVALID_ITEM"), ([{"key": "1"}], "INVALID_ITEM"),
            ([{"key": "1", "fields": {}, "version": "soon"}], "INVALID_VERSION"),
            ([{"key": "1", "fields": {}, "version": "9" * 5000}], "INVALID_VERSION"),
        ):  # fmt: skip
            is_problem(await web.post("/sources/shifts/items", {"items": items}), 422, code)
        is_problem(await web.post("/hooks/nowhere", {"items": [{"key": "1", "fields": {}}]}), 404, "SOURCE_NOT_FOUND")


async def test_only_the_platform_sets_the_database_of_a_source(make: Make) -> None:
    async with make(timezone="UTC", open_here=False) as web:
        admin, platform = await web.key("admin", "acme"), await web.key("platform", None)
        theirs = {"kind": "sql", "options": {"url": "sqlite:///theirs.db", "table": "shifts"}}
        is_problem(await web.post("/sources", {"name": "shifts", **theirs}, key=admin), 403, "ROLE_TOO_LOW")
        is_problem(await web.ask("PUT", "/sources/shifts", theirs, key=admin), 403, "ROLE_TOO_LOW")
        created = await web.post("/sources", {"name": "shifts", **theirs}, key=platform, timebell_tenant="acme")
        assert created.status_code == 201, created.text
        unless = {"name": "start", **SHIFT, "unless": "SELECT 1"}
        is_problem(await web.post("/triggers", unless, key=admin), 403, "ROLE_TOO_LOW")
        assert (await web.post("/triggers", {"name": "start", **SHIFT}, key=admin)).status_code == 201
        await web.post("/sources", {"name": "pushed"}, key=admin)
        fields = {"name": "other", **SHIFT, "source": "pushed", "unless": "SELECT 1"}
        is_problem(await web.post("/triggers", fields, key=platform, timebell_tenant="acme"), 422, "INVALID_CONDITION")


async def test_names_that_the_database_does_not_have_are_refused(make: Make, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
        theirs.execute("CREATE TABLE shifts (id integer primary key, start_at text, person text)")
    table = {"url": f"sqlite:///{tmp_path}/theirs.db", "table": "shifts"}
    async with make(timezone="UTC") as web:
        wrong = {"name": "duty", "kind": "sql", "options": {**table, "table": "shift"}}
        for dry_run in (True, False):
            answer = await web.post("/sources", {**wrong, "dryRun": dry_run})
            assert is_problem(answer, 422, "INVALID_SOURCE_OPTIONS")["fix"] == "Did you mean shifts?"
        put = await web.ask("PUT", "/sources/duty", {"kind": "sql", "options": {**table, "key": "idd"}})
        assert is_problem(put, 422, "INVALID_SOURCE_OPTIONS")["fix"] == "Did you mean id?"
        assert (await web.get("/sources")).json()["items"] == []
        assert (await web.post("/sources", {**wrong, "options": table})).status_code == 201
        duty = {**SHIFT, "source": "duty"}
        answer = await web.post("/triggers", {"name": "start", **duty, "column": "startAt"})
        assert is_problem(answer, 422, "UNKNOWN_COLUMN")["fix"] == "Did you mean start_at?"
        answer = await web.ask("PUT", "/triggers/start", {**duty, "unless": "SELECT 1 FROM shift"})
        is_problem(answer, 422, "INVALID_CONDITION")
        short = {**duty, "graceSeconds": 3}
        is_problem(await web.post("/triggers", {"name": "start", **short}), 422, "GRACE_TOO_SHORT")
        assert (await web.post("/triggers", {"name": "start", **duty})).status_code == 201
        tag = (await web.get("/sources/duty")).headers["etag"]
        seldom = {"kind": "sql", "options": {**table, "everySeconds": 900}}
        is_problem(await web.ask("PUT", "/sources/duty", seldom, if_match=tag), 422, "GRACE_TOO_SHORT")


async def test_a_slow_database_of_a_source_does_not_delay_other_changes(make: Make) -> None:
    """The check of a source does not hold the transaction of the request."""
    connected = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        try:
            await reader.read()  # and never answer
        finally:
            writer.close()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    options = {"url": f"postgresql://127.0.0.1:{silent.sockets[0].getsockname()[1]}/x", "table": "shifts"}
    async with make(timezone="UTC") as web:
        created = asyncio.create_task(web.post("/sources", {"name": "slow", "kind": "sql", "options": options}))
        await connected.wait()
        assert (await web.post("/sources", {"name": "other"})).status_code == 201
        assert not created.done()
        assert (await created).status_code == 201
    silent.close()


async def test_secrets_and_targets_in_use_cannot_be_deleted(make: Make) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/secrets", {"name": "token_1", "value": "x"})
        board = {"kind": "monday", "options": {"token": {"secret": "token_1"}, "boardId": "77"}}
        assert (await web.post("/sources", {"name": "board", **board})).status_code == 201
        is_problem(await web.ask("DELETE", "/secrets/token_1"), 409, "SECRET_IN_USE")
        hook = {"kind": "http", "options": {"url": "https://example.com/hook"}}
        for name in ("my_hook", "myxhook"):
            await web.post("/targets", {"name": name, **hook})
        fields = {**SHIFT, "source": "board", "target": "my_hook"}
        assert (await web.post("/triggers", {"name": "due", **fields})).json()["target"] == {"name": "my_hook"}
        is_problem(await web.ask("DELETE", "/targets/my_hook"), 409, "TARGET_IN_USE")
        assert (await web.ask("DELETE", "/targets/myxhook")).status_code == 200
        await web.ask("DELETE", "/triggers/due")
        assert (await web.ask("DELETE", "/targets/my_hook")).status_code == 200
        await web.ask("DELETE", "/sources/board")
        assert (await web.ask("DELETE", "/secrets/token_1")).status_code == 200


async def test_monthly_usage_of_a_tenant_is_returned(make: Make) -> None:
    async with make(timezone="UTC", open_here=False) as web:
        platform = await web.key("platform", None)
        created = await web.post("/tenants", {"id": "acme", "limits": {"jobsPerMonth": 25}, "timezone": "Asia/Seoul"},
                              key=platform)  # fmt: skip
        assert created.json()["timezone"] == "Asia/Seoul"
        month = (await web.get("/tenants/acme/usage", key=platform)).json()["month"]
        assert (month["used"], month["limit"], month["timezone"], month["exhaustedAt"]) == (0, 25, "Asia/Seoul", None)
        is_problem(
            await web.ask("PATCH", "/tenants/acme", {"timezone": "Mars/Base"}, key=platform), 422, "INVALID_TIMEZONE"
        )
        assert json.loads(created.text)["limits"]["jobsPerMonth"] == 25
