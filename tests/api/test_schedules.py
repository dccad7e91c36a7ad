"""Schedules over HTTP: creation, revisions, actions, previews and pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


async def test_a_schedule_is_created_with_all_fields(make: Make) -> None:
    async with make() as web:
        created = await web.post("/schedules", NIGHTLY)
        assert created.status_code == 201
        body = created.json()
        assert created.headers["location"] == f"/api/v1/schedules/{body['id']}"
        assert created.headers["etag"] == '"1"'
        for name, value in NIGHTLY.items():
            assert body[name] == value, name
        assert body["topic"] == "report.build"
        assert body["retry"]["attempts"] == 4
        assert body["lastFiredAt"] is None
        assert body["createdBy"] == "local"
        assert body["createdAt"] == body["updatedAt"]
        assert datetime.fromisoformat(body["nextFireAt"]).astimezone(UTC) > web.app.clock.now()
        assert (await web.get(f"/schedules/{body['id']}")).json() == body


async def test_schedules_are_filtered_paused_resumed_and_triggered(make: Make) -> None:
    async with make() as web:
        id_ = (await web.post("/schedules", NIGHTLY)).json()["id"]
        await web.post("/schedules", {**NIGHTLY, "name": "other", "jobType": "other", "labels": {"team.x": "a=b"}})
        only = (await web.get("/schedules?enabled=true&jobType=report.build")).json()["items"]
        assert [found["name"] for found in only] == ["nightly"]
        labelled = (await web.get("/schedules?label=team.x=a=b")).json()["items"]
        assert [found["name"] for found in labelled] == ["other"]
        paused = (await web.post(f"/schedules/{id_}/pause", {"reason": "month end"})).json()
        assert (paused["enabled"], paused["pauseReason"], paused["nextFireAt"]) == (False, "month end", None)
        assert (await web.get("/schedules?enabled=true")).json()["items"][0]["name"] == "other"
        resumed = (await web.post(f"/schedules/{id_}/resume")).json()
        assert resumed["enabled"] is True
        run = await web.post(f"/schedules/{id_}/trigger")
        assert (run.status_code, run.json()["kind"], run.json()["status"]) == (201, "manual", "pending")
        rows = (await web.get(f"/schedules/{id_}/executions?limit=20&status=pending")).json()["items"]
        assert [row["id"] for row in rows] == [run.json()["id"]]
        assert {"scheduledAt", "firedAt", "completedAt", "errorMessage", "attemptNumber", "durationMs"} <= rows[
            0
        ].keys()
        assert (await web.get(f"/schedules/{id_}/executions?status=failed")).json()["items"] == []


async def test_a_change_requires_the_current_revision(make: Make) -> None:
    async with make() as web:
        id_ = (await web.post("/schedules", NIGHTLY)).json()["id"]
        change = {"cronExpression": "0 3 * * *", "labels": {"team": "billing"}}
        is_problem(await web.ask("PATCH", f"/schedules/{id_}", change), 428, "REVISION_MISSING")
        changed = await web.ask("PATCH", f"/schedules/{id_}", change, if_match='"1"')
        assert (changed.status_code, changed.json()["revision"], changed.headers["etag"]) == (200, 2, '"2"')
        stale = is_problem(
            await web.ask("PATCH", f"/schedules/{id_}", {"priority": 1}, if_match='"1"'), 412, "REVISION_STALE"
        )
        assert "revision 2" in stale["detail"]
        same = (await web.ask("PATCH", f"/schedules/{id_}", change, if_match='"2"')).json()
        assert same["revision"] == 2, "the same spec again is no edit"
        back = (await web.post(f"/schedules/{id_}/revert", {"revision": 1})).json()
        assert (back["revision"], back["cronExpression"], back["labels"]) == (3, "0 2 * * *", {})
        history = (await web.get(f"/schedules/{id_}/revisions")).json()["items"]
        assert [(one["revision"], one["cronExpression"]) for one in history] == [
            (3, "0 2 * * *"), (2, "0 3 * * *"), (1, "0 2 * * *"),
        ]  # fmt: skip
        is_problem(await web.post(f"/schedules/{id_}/revert", {"revision": 9}), 404, "REVISION_NOT_FOUND")


async def test_every_recurrence_is_returned_unchanged_and_survives_a_patch(make: Make) -> None:
    ways: list[dict[str, Any]] = [
        {"cronExpression": "0 9 * * 1-5", "dst": {"gap": "skip", "fold": "both"}},
        {"interval": {"everyMs": 1500, "anchor": "2026-01-01T00:00:00Z"}},
        {"interval": {"every": "P1M", "anchor": "2026-01-31T09:00:00"}},
        {"interval": {"everyMs": 600_000, "anchor": "2026-01-01T00:00:00Z", "since": "last_end"}},
        {"rrule": "DTSTART:20260101T090000Z\nRRULE:FREQ=MONTHLY;BYDAY=-1FR"},
        {"dates": ["2040-01-01T00:00:00Z", "2041-01-01T09:00:00"]},
        {"recurrence": {"kind": "union", "spec": [
            {"kind": "cron", "spec": "0 9 * * *"}, {"kind": "dates", "spec": ["2040-06-01T00:00:00Z"]},
        ]}},
    ]  # fmt: skip
    async with make() as web:
        for number, way in enumerate(ways):
            base = {"name": f"way-{number}", "topic": "t", "timezone": "Europe/Paris"}
            created = await web.post("/schedules", base | way)
            assert created.status_code == 201, created.text
            body = created.json()
            for name, value in way.items():
                if name != "recurrence":
                    assert body[name] == value
            patched = await web.ask("PATCH", f"/schedules/{body['id']}", {"priority": 7}, if_match="*")
            assert patched.status_code == 200, patched.text
            assert patched.json()["recurrence"] == body["recurrence"]
            assert patched.json()["priority"] == 7


async def test_notify_channels_survive_a_patch(make: Make) -> None:
    async with make() as web:
        body = (await web.post("/schedules", {**NIGHTLY, "notify": ["billing", "ops"]})).json()
        assert body["notify"] == ["billing", "ops"]
        changed = await web.ask("PATCH", f"/schedules/{body['id']}", {"priority": 7}, if_match="*")
        assert changed.json()["notify"] == ["billing", "ops"]
        refused = await web.post("/schedules", {**NIGHTLY, "name": "other", "notify": ["slack://key"]})
        assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_NOTIFY")


async def test_put_by_name_creates_and_replaces(make: Make) -> None:
    spec = {"topic": "a", "cronExpression": "0 5 * * *", "timezone": "UTC"}
    async with make() as web:
        first = await web.ask("PUT", "/schedules/by-name/from-git", spec)
        assert first.status_code == 201
        is_problem(await web.ask("PUT", "/schedules/by-name/from-git", spec, if_none_match="*"), 409, "SCHEDULE_EXISTS")
        is_problem(await web.ask("PUT", "/schedules/by-name/from-git", spec), 428, "REVISION_MISSING")
        second = await web.ask("PUT", "/schedules/by-name/from-git", {**spec, "priority": 3}, if_match='"1"')
        assert (second.status_code, second.json()["id"]) == (200, first.json()["id"])
        assert second.json()["revision"] == 2


async def test_an_occurrence_is_skipped_moved_and_restored(make: Make) -> None:
    async with make() as web:
        id_ = (await web.post("/schedules", NIGHTLY)).json()["id"]
        first, second, third = (one["utc"] for one in (await web.get(f"/schedules/{id_}/next?count=3")).json()["items"])
        assert (await web.post(f"/schedules/{id_}/skip-next")).json()["nextFireAt"] == second
        moved = await web.post(
            f"/schedules/{id_}/overrides", {"at": second, "action": "move", "to": second.replace(":00:00Z", ":30:00Z")}
        )
        assert len(moved.json()["overrides"]) == 2
        after = [one["utc"] for one in (await web.get(f"/schedules/{id_}/next?count=2")).json()["items"]]
        assert after == [second.replace(":00:00Z", ":30:00Z"), third]
        undone = await web.ask("DELETE", f"/schedules/{id_}/overrides?at={first}")
        assert undone.json()["nextFireAt"] == first


async def test_a_preview_writes_nothing_and_notes_clock_changes(make: Make) -> None:
    async with make() as web:
        body = {"topic": "t", "timezone": "Europe/Paris", "cronExpression": "30 2 * * *"}
        seen = (await web.post("/schedules/preview?count=3", body)).json()
        assert seen["description"] == "At 02:30, Europe/Paris"
        assert len(seen["next"]) == 3
        assert any("does not exist" in note for note in seen["notes"])
        assert (await web.get("/schedules")).json()["items"] == []


async def test_a_backfill_is_previewed_then_executed_once(make: Make) -> None:
    async with make() as web:
        hourly = {"name": "hourly", "topic": "t", "timezone": "UTC", "cronExpression": "0 * * * *"}
        id_ = (await web.post("/schedules", hourly)).json()["id"]
        span = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T05:00:00Z"}
        plan = (await web.post(f"/schedules/{id_}/backfill", {**span, "dryRun": True})).json()
        assert (plan["created"], len(plan["instants"])) == (0, 5)
        done = (await web.post(f"/schedules/{id_}/backfill", span)).json()
        assert done["created"] == 5
        assert (await web.post(f"/schedules/{id_}/backfill", span)).json() == {
            "dryRun": False, "instants": [], "created": 0, "alreadyRun": 5,
        }  # fmt: skip


HOSTILE: list[tuple[dict[str, Any], str | None]] = [
    ({"cronExpression": "0 0 30 2 *"}, "NEVER_FIRES"),
    ({"cronExpression": "0 0 29 2 MON#5"}, None),
    ({"cronExpression": "0 0 31 2,4,6,9,11 *"}, "NEVER_FIRES"),
    ({"rrule": "FREQ=DAILY;INTERVAL=0"}, "INVALID_RRULE"),
    ({"rrule": "FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30"}, "NEVER_FIRES"),
    ({"rrule": "DTSTART:19000101T000000\nRRULE:FREQ=SECONDLY"}, "INVALID_RRULE"),
    ({"rrule": "FREQ=YEARLY;BYWEEKNO=53;BYMONTH=6"}, "NEVER_FIRES"),
    ({"rrule": "FREQ=MINUTELY;BYSETPOS=366;BYHOUR=5"}, "NEVER_FIRES"),
]


async def test_no_recurrence_keeps_a_node_busy(make: Make) -> None:
    async with make() as web:
        for recurrence, refused in HOSTILE:
            began = time.process_time()
            answer = await web.post("/schedules/preview", {"topic": "t", "timezone": "Europe/Paris", **recurrence})
            assert time.process_time() - began < 5, recurrence  # an upper bound that only an endless search exceeds
            if refused is None:
                assert answer.status_code == 200, answer.text
            else:
                is_problem(answer, 422, refused)


async def test_next_and_preview_return_at_most_1000_occurrences(make: Make) -> None:
    async with make() as web:
        id_ = (await web.post("/schedules", NIGHTLY)).json()["id"]
        assert len((await web.get(f"/schedules/{id_}/next?count=1000")).json()["items"]) == 1000
        is_problem(await web.get(f"/schedules/{id_}/next?count=1001"), 422, "INVALID_FIELDS")
        seen = await web.post("/schedules/preview?count=1000", NIGHTLY)
        assert len(seen.json()["next"]) == 1000
        is_problem(await web.post("/schedules/preview?count=1001", NIGHTLY), 422, "INVALID_FIELDS")


async def test_a_page_has_at_most_500_items(make: Make) -> None:
    async with make() as web:
        lists = ("/schedules", "/jobs", "/dead-letters", "/operations", "/keys", "/audit-log", "/tenants", "/calendars")
        for path in lists:
            assert (await web.get(f"{path}?limit=500")).status_code == 200, path
            is_problem(await web.get(f"{path}?limit=501"), 422, "INVALID_FIELDS")
            is_problem(await web.get(f"{path}?limit=0"), 422, "INVALID_FIELDS")


async def test_pages_end_and_never_repeat(make: Make) -> None:
    async with make() as web:
        for number in range(7):
            await web.post("/schedules", {**NIGHTLY, "name": f"s{number}"})
        names: list[str] = []
        cursor = ""
        for _ in range(10):
            page = (await web.get(f"/schedules?limit=3{cursor}")).json()
            names += [item["name"] for item in page["items"]]
            if page["nextCursor"] is None:
                break
            cursor = f"&cursor={page['nextCursor']}"
        assert names == [f"s{number}" for number in reversed(range(7))]
        is_problem(await web.get("/schedules?cursor=nonsense"), 422, "INVALID_CURSOR")


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/schedules", NIGHTLY | {"name": "x" * 201}, ["name is too long; the maximum length is 200."]),
        (
            "/schedules", NIGHTLY | {"maxRetries": -1, "priority": 1.5},
            ["maxRetries must be at least 0.", "priority must be a whole number."],
        ),
        (
            "/schedules", NIGHTLY | {"overlapPolicy": "never"},
            ["overlapPolicy must be 'skip', 'queue', 'cancel_previous' or 'allow'."],
        ),
        ("/schedules", NIGHTLY | {"topic": 5, "labels": {"a": 1}}, ["topic must be text.", "labels.a must be text."]),
        ("/schedules", ["no object"], ["The body must be an object."]),
        ("/schedules/preview?count=1001", NIGHTLY, ["The query parameter count must be at most 1000."]),
        ("/claims", {"worker": "w"}, ["Specify topics, queues or both."]),
        ("/claims", {"topics": ["a"]}, ["worker is missing."]),
    ],
)  # fmt: skip
async def test_the_error_of_a_field_is_a_sentence(make: Make, path: str, body: Any, details: list[str]) -> None:
    async with make() as web:
        problem = is_problem(await web.post(path, body), 422, "INVALID_FIELDS")
        assert [error["detail"] for error in problem["errors"]] == details
        assert problem["detail"] == details[0]


async def test_an_error_names_the_field_and_the_fix(make: Make) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"cronExpression": "61 2 * * *"}, "INVALID_CRON", "/cronExpression"),
        ({"timezone": "Europe/Pariss"}, "INVALID_TIMEZONE", "/timezone"),
        ({"cronExpresion": "0 2 * * *"}, "UNKNOWN_FIELD", "/cronExpresion"),
        ({"overlapPolicy": "never"}, "INVALID_FIELDS", "/overlapPolicy"),
        ({"maxRetries": -1}, "INVALID_FIELDS", "/maxRetries"),
        ({"name": "x" * 201}, "INVALID_FIELDS", "/name"),
        ({"interval": {"everyMs": 1000}}, "RECURRENCE_MISSING", ""),
    ]
    async with make() as web:
        for wrong, code, pointer in cases:
            body = is_problem(await web.post("/schedules", NIGHTLY | wrong), 422, code)
            assert body["errors"][0]["pointer"] == pointer, body
        assert "Did you mean cronExpression?" in str(
            (await web.post("/schedules", NIGHTLY | {"cronExpresion": "x"})).json()
        )
        assert "Invalid timezone: Europe/Pariss. Use IANA format (e.g., America/New_York)" in str(
            (await web.post("/schedules", NIGHTLY | {"timezone": "Europe/Pariss"})).json()
        )
        assert (await web.get("/schedules")).json()["items"] == []
