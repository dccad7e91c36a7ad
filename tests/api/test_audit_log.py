"""The audit log over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.api import refusals
from timebell.clock import VirtualClock

from .web import NIGHTLY, Web, is_problem

Make = Callable[..., Any]
START = datetime(2027, 3, 1, 12, tzinfo=UTC)
HOOK = {"kind": "http", "options": {"url": "https://example.com/hook", "headers": {"Authorization": "Bearer s3cret"}}}


async def list_log(web: Web, key: str, query: str = "") -> list[dict[str, Any]]:
    """Return the records that match a query."""
    response = await web.get(f"/audit-log{query}", key=key)
    assert response.status_code == 200, response.text
    return response.json()["items"]  # type: ignore[no-any-return]


async def test_the_audit_log_is_visible_to_the_admins_of_its_tenant(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs = await web.key("admin", "ours"), await web.key("admin", "theirs")
        id_ = (await web.post("/schedules", NIGHTLY, key=ours)).json()["id"]
        middle = web.app.clock.now()
        await web.post(f"/schedules/{id_}/pause", key=ours)
        await web.post("/schedules", NIGHTLY, key=theirs)

        async def actions(query: str = "", key: str = ours) -> list[str]:
            return [one["action"] for one in await list_log(web, key, query)]

        assert await actions() == ["schedule.pause", "schedule.create"]
        assert await actions(key=theirs) == ["schedule.create"]
        at = middle.isoformat().replace("+00:00", "Z")
        assert await actions(f"?from={at}") == ["schedule.pause"]
        assert await actions(f"?to={at}") == ["schedule.create"]
        assert await actions(f"?subject={id_}&action=schedule.pause") == ["schedule.pause"]
        assert await actions("?subject=nightly&action=schedule.*") == ["schedule.pause", "schedule.create"]
        assert await actions("?action=target.*") == []
        assert await actions("?actor=unknown") == []
        first = (await web.get("/audit-log?limit=1", key=ours)).json()
        assert await actions(f"?limit=1&cursor={first['nextCursor']}") == ["schedule.create"]
        record = first["items"][0]
        assert (record["subject"], record["keyId"], record["address"]) == (id_, ours.split("_")[2], "127.0.0.1")
        assert (record["subjectName"], record["url"]) == ("nightly", f"/api/v1/schedules/{id_}")
        assert (await web.get(record["url"].removeprefix("/api/v1"), key=ours)).status_code == 200
        is_problem(await web.get("/audit-log", key=await web.key("editor", "ours")), 403, "ROLE_TOO_LOW")
        everywhere = await web.key("platform", None)
        assert await actions("?tenant=theirs", everywhere) == ["schedule.create"]
        is_problem(await web.get("/audit-log?from=yesterday", key=ours), 422, "INVALID_INSTANT")


async def test_records_contain_old_and_new_values_without_secrets(make: Make) -> None:
    async with make(open_here=False) as web:
        admin = await web.key("admin")
        created = (await web.post("/schedules", NIGHTLY, key=admin)).json()
        patch = {"timezone": "Asia/Seoul", "payload": {"mail": "ana@example.com"}}
        await web.ask("PATCH", f"/schedules/{created['id']}", patch, key=admin, if_match=created["etag"])
        await web.ask("PUT", "/targets/hook", HOOK, key=admin)
        await web.post("/secrets", {"name": "token", "value": "s3cret"}, key=admin)
        await web.post("/users", {"name": "ana", "role": "viewer", "password": "s3cret s3cret"}, key=admin)
        await web.ask("DELETE", "/targets/hook", key=admin)
        deleted, user, secret, target, edited, new = await list_log(web, admin)
        changes = {change["field"]: (change["before"], change["after"]) for change in edited["changes"]}
        assert changes["/timezone"] == ("America/New_York", "Asia/Seoul")
        assert changes["/revision"] == (1, 2)
        assert changes["/payload"] == ("(not recorded)", "(not recorded)")
        assert "/topic" not in changes
        assert {"field": "/timezone", "before": None, "after": "America/New_York"} in new["changes"]
        assert {"field": "/options/headers/Authorization", "before": None, "after": "***"} in target["changes"]
        assert {"field": "/options/url", "before": HOOK["options"]["url"], "after": None} in deleted["changes"]  # type: ignore[index]
        assert {"field": "/role", "before": None, "after": "viewer"} in user["changes"]
        assert secret["subjectName"] == "token"
        everything = (await web.get("/audit-log/export", key=admin)).text
        for value in ("s3cret", "ana@example.com", "whsec_"):
            assert value not in everything, value


async def test_an_object_has_a_history_for_every_reader(make: Make) -> None:
    async with make(open_here=False) as web:
        admin, viewer = await web.key("admin"), await web.key("viewer")
        schedule = (await web.post("/schedules", NIGHTLY, key=admin)).json()
        path = f"/schedules/{schedule['id']}"
        await web.ask("PATCH", path, {"cronExpression": "0 3 * * *"}, key=admin, if_match="*")
        await web.post(f"{path}/pause", {"reason": "quiet"}, key=await web.key("operator"))
        await web.ask("PATCH", path, {"cronExpression": "0 4 * * *"}, key=admin, if_match='"1"')  # refused
        history = (await web.get(f"{path}/history", key=viewer)).json()["items"]
        assert [entry["action"] for entry in history] == ["schedule.pause", "schedule.update", "schedule.create"]
        assert {"field": "/pauseReason", "before": None, "after": "quiet"} in history[0]["changes"]
        assert history[0]["actor"].startswith("operator-")
        assert history[0]["actorKind"] == "key"
        assert "address" not in history[0]
        first = (await web.get(f"{path}/history?limit=1", key=viewer)).json()
        rest = (await web.get(f"{path}/history?cursor={first['nextCursor']}", key=viewer)).json()["items"]
        assert first["items"] + rest == history
        revisions = (await web.get(f"{path}/revisions", key=viewer)).json()["items"]
        assert [(one["revision"], one["changedBy"][:6]) for one in revisions] == [(2, "admin-"), (1, "admin-")]
        await web.ask("DELETE", path, key=admin, if_match="*")
        assert (await web.get(f"{path}/history", key=viewer)).json()["items"][0]["action"] == "schedule.delete"
        is_problem(await web.get("/targets/none/history", key=viewer), 404, "TARGET_NOT_FOUND")


async def test_refused_requests_are_recorded(make: Make) -> None:
    async with make(open_here=False) as web:
        admin, theirs = await web.key("admin", "ours"), await web.key("viewer", "theirs")
        id_ = (await web.post("/schedules", NIGHTLY, key=admin)).json()["id"]
        narrow = await web.key("viewer", "ours", scopes=("jobs",))
        await web.get("/schedules", key=narrow)
        await web.post("/schedules", NIGHTLY, key=await web.key("viewer", "ours"))
        await web.ask("PATCH", f"/schedules/{id_}", {"description": "x"}, key=admin, if_match='"7"')
        await web.get(f"/schedules/{id_}", key=theirs)
        await web.post("/schedules", {**NIGHTLY, "cronExpression": "x"}, key=admin)  # invalid, not refused
        stale, low, scope = await list_log(web, admin, "?outcome=refused")
        assert (stale["code"], stale["action"], stale["subject"]) == ("REVISION_STALE", "schedule.update", id_)
        assert (low["code"], low["action"]) == ("ROLE_TOO_LOW", "schedule.create")
        assert (scope["code"], scope["action"], scope["actor"][:7]) == ("SCOPE_MISSING", "schedules.read", "viewer-")
        assert (scope["changes"], scope["outcome"], scope["address"]) == ([], "refused", "127.0.0.1")
        [foreign] = await list_log(web, await web.key("admin", "theirs"))
        assert (foreign["code"], foreign["subject"]) == ("SCHEDULE_NOT_FOUND", id_)


async def test_refusals_cannot_fill_the_table(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(START)
    async with make(open_here=False, clock=clock, proxies="127.0.0.1") as web:
        admin, viewer = await web.key("admin"), await web.key("viewer")
        for _ in range(50):
            await web.post("/schedules", NIGHTLY, key=viewer)
        later = clock.monotonic() + refusals.RECORD_INTERVAL_SECONDS
        monkeypatch.setattr(VirtualClock, "monotonic", lambda _: later)
        await web.post("/schedules", NIGHTLY, key=viewer)
        assert [one["suppressed"] for one in await list_log(web, admin)] == [49, 0]
        for n in range(200):  # one of many addresses each
            await web.get("/schedules", key=f"tb_live_wrong{n}", x_forwarded_for=f"203.0.{n}.7")
        assert len(await list_log(web, admin, "?action=key.use&limit=500")) == refusals.MAX_RECORDS_PER_MINUTE
        # They used up the records of clients without a key, not those of tenants.
        await web.post("/tenants", {"id": "x"}, key=viewer)
        assert (await list_log(web, admin))[0]["action"] == "tenant.create"


async def test_the_use_of_a_revoked_key_is_recorded_with_its_name(make: Make) -> None:
    async with make(open_here=False) as web:
        admin, expired = await web.key("admin"), await web.key("editor", expires_at=START - timedelta(days=999))
        is_problem(await web.get("/schedules", key=expired), 401, "UNAUTHORIZED")
        [record] = await list_log(web, admin, "?action=key.use")
        assert (record["code"], record["keyId"]) == ("UNUSABLE_KEY", expired.split("_")[2])
        assert record["actor"].startswith("editor-")


async def test_the_export_streams_every_record_oldest_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timebell.api.audit_log.EXPORT_BATCH_SIZE", 2)
    async with make(open_here=False) as web:
        admin = await web.key("admin")
        for n in range(5):
            await web.post("/schedules", {**NIGHTLY, "name": f"s{n}"}, key=admin)
        await web.post("/schedules", {**NIGHTLY, "name": "x"}, key=await web.key("admin", "theirs"))
        response = await web.get("/audit-log/export", key=admin)
        assert response.headers["content-type"] == "application/x-ndjson"
        exported = [json.loads(line) for line in response.text.splitlines()]
        assert [one["subjectName"] for one in exported] == [f"s{n}" for n in range(5)]
        assert exported[::-1] == await list_log(web, admin)
        filtered = (await web.get("/audit-log/export?subject=s3", key=admin)).text
        assert [json.loads(line)["subjectName"] for line in filtered.splitlines()] == ["s3"]
        is_problem(await web.get("/audit-log/export?from=x", key=admin), 422, "INVALID_INSTANT")
