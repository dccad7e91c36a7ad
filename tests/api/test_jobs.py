"""Jobs over HTTP: created, listed, cancelled, rescheduled and retried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import insert

from timebell import Arrived
from timebell.ids import new_id
from timebell.recurrence.instants import format_instant
from timebell.store.schema import finished

from .web import NIGHTLY, Web, is_problem

Make = Callable[..., Any]
NOW = {"topic": "mail.send", "timezone": "UTC"}


def at(web: Web, **spans: float) -> str:
    """Return an instant relative to now."""
    return format_instant(web.app.clock.now() + timedelta(**spans))


async def test_a_job_is_created_with_all_fields(make: Make) -> None:
    async with make() as web:
        fields = {
            "topic": "notifications.task-reminder", "runAt": "2098-02-10T02:30:00", "timezone": "America/New_York",
            "payload": {"task": 7}, "key": "task-7", "queue": "mail", "priority": -3, "timeoutSeconds": 12.5,
            "retry": {"attempts": 3, "backoff": {"type": "fixed", "delay": 5}},
            "metadata": {"ownerId": "ana", "correlationId": "c-1", "clientRequestId": "r-1", "team": "ops"},
        }  # fmt: skip
        created = await web.post("/jobs", fields)
        assert created.status_code == 201, created.text
        body = created.json()
        assert created.headers["location"] == f"/api/v1/jobs/{body['id']}"
        for name in ("topic", "timezone", "payload", "key", "queue", "priority", "timeoutSeconds", "metadata"):
            assert body[name] == fields[name], name
        assert (body["status"], body["retry"]["attempts"], body["tenantId"]) == ("pending", 3, "default")
        assert body["localTime"] == "2098-02-10T02:30:00"
        assert body["runAt"] == "2098-02-10T07:30:00Z"
        fetched = (await web.get(f"/jobs/{body['id']}")).json()
        assert fetched == body | {"adjusted": None}


async def test_a_job_without_run_at_is_due_immediately(make: Make) -> None:
    async with make() as web:
        before = web.app.clock.now() - timedelta(seconds=1)
        body = (await web.post("/jobs", NOW)).json()
        assert format_instant(before) < body["runAt"] <= at(web)


async def test_a_past_time_is_refused_with_400(make: Make) -> None:
    async with make() as web:
        refused = is_problem(await web.post("/jobs", {**NOW, "runAt": at(web, hours=-1)}), 400, "SCHEDULE_IN_THE_PAST")
        assert refused["detail"].startswith("Cannot schedule in the past")


async def test_a_request_repeated_after_its_time_returns_its_job(make: Make) -> None:
    async with make() as web:
        fields = NOW | {"metadata": {"clientRequestId": "r"}}
        created = (await web.post("/jobs", {**fields, "runAt": at(web, hours=1)})).json()
        late = {**fields, "runAt": at(web, hours=-1)}
        refused = is_problem(await web.post("/jobs", late), 409, "SCHEDULE_CLIENT_REQUEST_ID_IN_USE")
        assert created["id"] in refused["detail"]
        repeated = await web.post("/jobs", late | {"onConflict": "keep"})
        assert (repeated.status_code, repeated.json()["id"]) == (200, created["id"])


async def test_invalid_fields_are_refused_with_their_code(make: Make) -> None:
    cases = [
        ({"topik": "a"}, "UNKNOWN_FIELD"),
        ({"timezone": "Mars/Base"}, "INVALID_TIMEZONE"),
        ({"runAt": "soon"}, "INVALID_RUN_AT"),
        ({"maxRetries": 1, "retry": {"attempts": 2}}, "INVALID_RETRY"),
        ({"target": {"kind": "carrier-pigeon"}}, "UNKNOWN_TARGET_KIND"),
        ({"priority": 10**6}, "INVALID_FIELDS"),
        ({"metadata": {"ownerId": 7}}, "INVALID_OWNER_ID"),
        ({"topic": "no spaces"}, "INVALID_TOPIC"),
    ]
    async with make() as web:
        for change, code in cases:
            is_problem(await web.post("/jobs", NOW | change), 422, code)
        is_problem(await web.post("/jobs", {"topic": "a"}), 422, "TIMEZONE_MISSING")
        assert (await web.get("/jobs")).json()["items"] == []


async def test_a_client_request_id_creates_one_job(make: Make) -> None:
    async with make() as web:
        fields = {**NOW, "metadata": {"clientRequestId": "r-1"}}
        id_ = (await web.post("/jobs", fields)).json()["id"]
        refused = is_problem(await web.post("/jobs", fields), 409, "SCHEDULE_CLIENT_REQUEST_ID_IN_USE")
        assert refused["existing"] == id_
        repeated = await web.post("/jobs", fields | {"onConflict": "keep"})
        assert (repeated.status_code, repeated.json()["id"]) == (200, id_)
        assert "location" not in repeated.headers


async def test_a_job_with_a_key_can_be_replaced(make: Make) -> None:
    async with make() as web:
        fields = {**NOW, "runAt": at(web, days=1), "key": "k"}
        first = (await web.post("/jobs", fields)).json()
        is_problem(await web.post("/jobs", fields), 409, "KEY_IN_USE")
        second = (await web.post("/jobs", fields | {"onConflict": "replace"})).json()
        assert second["replaces"] == first["id"]
        first = (await web.get(f"/jobs/{first['id']}")).json()
        assert (first["status"], first["replacedBy"]) == ("cancelled", second["id"])


async def test_only_a_platform_key_can_name_another_tenant(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, platform = await web.key("editor", "ours"), await web.key("platform", None)
        foreign = {**NOW, "metadata": {"tenantId": "theirs"}}
        is_problem(await web.post("/jobs", foreign, key=ours), 403, "TENANT_FORBIDDEN")
        is_problem(await web.get("/jobs?tenantId=theirs", key=ours), 403, "TENANT_FORBIDDEN")
        own = await web.post("/jobs", {**NOW, "metadata": {"tenantId": "ours"}}, key=ours)
        assert (own.status_code, own.json()["tenantId"]) == (201, "ours")
        created = (await web.post("/jobs", foreign, key=platform)).json()
        assert created["tenantId"] == "theirs"
        assert [job["id"] for job in (await web.get("/jobs?tenantId=theirs", key=platform)).json()["items"]] == [
            created["id"]
        ]
        is_problem(await web.get(f"/jobs/{created['id']}", key=ours), 404, "JOB_NOT_FOUND")
        is_problem(await web.post(f"/jobs/{created['id']}/cancel", key=ours), 404, "JOB_NOT_FOUND")
        is_problem(await web.post(f"/jobs/{created['id']}/reschedule", {}, key=ours), 404, "JOB_NOT_FOUND")
        is_problem(await web.post(f"/jobs/{created['id']}/retry", key=ours), 404, "JOB_NOT_FOUND")


async def test_jobs_are_filtered_and_paged(make: Make) -> None:
    async with make() as web:
        ids = []
        for n in range(7):
            body = {
                "topic": f"t.{n % 2}", "timezone": "UTC", "runAt": at(web, days=1), "queue": f"q{n % 3}",
                "metadata": {"ownerId": f"o{n % 2}"}, "key": f"k{n}",
            }  # fmt: skip
            ids.append((await web.post("/jobs", body)).json()["id"])
        await web.post(f"/jobs/{ids[0]}/cancel")

        async def found(query: str) -> list[int]:
            return [ids.index(job["id"]) for job in (await web.get(f"/jobs?{query}")).json()["items"]]

        assert await found("") == [6, 5, 4, 3, 2, 1, 0]
        assert await found("topic=t.1") == await found("ownerId=o1") == [5, 3, 1]
        assert await found("queue=q0&status=pending") == [6, 3]
        assert await found("status=cancelled&status=failed") == [0]
        assert await found("status=active") == []
        assert await found("key=k4&topic=t.0") == [4]
        assert await found("minAttempts=1") == []
        assert await found(f"scheduleId={new_id(web.app.clock.now())}") == []
        is_problem(await web.get("/jobs?status=odd"), 422, "INVALID_STATUS")
        assert (await web.get("/jobs?status=retrying")).json()["items"] == []
        is_problem(await web.get("/jobs?status=held&status=failed"), 422, "INVALID_STATUS")
        is_problem(await web.get("/jobs?cursor=odd"), 422, "INVALID_CURSOR")
        seen, cursor = [], ""
        while cursor is not None:
            page = (await web.get(f"/jobs?limit=3{cursor and '&cursor=' + cursor}")).json()
            seen += [job["id"] for job in page["items"]]
            cursor = page["nextCursor"]
        assert seen == ids[::-1]


async def test_cancel_outcomes_of_pending_running_and_finished_jobs(make: Make) -> None:
    async with make() as web:
        id_ = (await web.post("/jobs", {**NOW, "runAt": at(web, days=1)})).json()["id"]
        for _ in range(2):
            answer = await web.post(f"/jobs/{id_}/cancel")
            assert answer.status_code == 200
            assert answer.json()["outcome"] == "prevented"
            assert answer.json()["job"]["status"] == "cancelled"
        going = asyncio.Event()
        may_end = asyncio.Event()

        @web.app.on("slow")
        async def slow(event: Any) -> None:
            going.set()
            await may_end.wait()

        async with web.app.running() as service:
            id_ = (await web.post("/jobs", {"topic": "slow", "timezone": "UTC"})).json()["id"]
            await going.wait()
            assert (await web.post(f"/jobs/{id_}/cancel")).json()["outcome"] == "in_flight"
            may_end.set()
            await service.wait_until_idle()
        answer = (await web.post(f"/jobs/{id_}/cancel")).json()
        assert (answer["outcome"], answer["job"]["status"]) == ("in_flight", "completed")


async def test_reschedule_creates_a_new_job(make: Make) -> None:
    async with make() as web:
        old = (await web.post("/jobs", {**NOW, "runAt": at(web, days=1)})).json()
        answer = await web.post(
            f"/jobs/{old['id']}/reschedule", {"runAt": "2098-07-01T09:00:00", "timezone": "Asia/Seoul"}
        )
        new = answer.json()
        assert (answer.status_code, new["replaces"], new["runAt"]) == (201, old["id"], "2098-07-01T00:00:00Z")
        assert answer.headers["location"] == f"/api/v1/jobs/{new['id']}"
        assert (await web.get(f"/jobs/{old['id']}")).json()["replacedBy"] == new["id"]
        is_problem(await web.post(f"/jobs/{old['id']}/reschedule", {}), 409, "JOB_FINISHED")
        past = await web.post(f"/jobs/{new['id']}/reschedule", {"runAt": "2001-01-01T00:00:00Z"})
        is_problem(past, 400, "SCHEDULE_IN_THE_PAST")


async def test_a_failed_job_is_retried(make: Make) -> None:
    async with make() as web:
        broken = True

        @web.app.on("shaky")
        async def shaky(event: Any) -> None:
            if broken:
                raise ValueError("no")

        async with web.app.running() as service:
            id_ = (await web.post("/jobs", {"topic": "shaky", "timezone": "UTC", "maxRetries": 0})).json()["id"]
            await service.wait_until_idle()
            failed = (await web.get(f"/jobs/{id_}")).json()
            assert (failed["status"], failed["attemptsMade"]) == ("failed", 1)
            assert [job["id"] for job in (await web.get("/jobs?status=failure&minAttempts=1")).json()["items"]] == [id_]
            broken = False
            again = await web.post(f"/jobs/{id_}/retry")
            assert (again.status_code, again.json()["status"], again.json()["id"]) == (200, "pending", id_)
            await service.wait_until_idle()
        assert (await web.get(f"/jobs/{id_}")).json()["status"] == "completed"
        is_problem(await web.post(f"/jobs/{id_}/retry"), 409, "JOB_NOT_FAILED")


async def test_a_failed_job_is_retried_with_another_payload(make: Make) -> None:
    async with make() as web:

        @web.app.on("picky")
        async def picky(event: Any) -> None:
            if event.payload != {"to": "ana"}:
                raise ValueError("whom?")

        fields = {"topic": "picky", "timezone": "UTC", "maxRetries": 0, "payload": {"to": ""}, "key": "k",
                 "metadata": {"team": "ops"}, "group": "g"}  # fmt: skip
        async with web.app.running() as service:
            old = (await web.post("/jobs", fields)).json()
            await service.wait_until_idle()
            answer = await web.post(f"/jobs/{old['id']}/retry", {"payload": {"to": "ana"}})
            assert answer.status_code == 201, answer.text
            new = answer.json()
            assert answer.headers["location"] == f"/api/v1/jobs/{new['id']}"
            await service.wait_until_idle()
        assert (new["payload"], new["replaces"], new["status"]) == ({"to": "ana"}, old["id"], "pending")
        for name in ("topic", "key", "group", "metadata", "retry", "timezone", "kind"):
            assert new[name] == old[name], name
        assert (await web.get(f"/jobs/{new['id']}")).json()["status"] == "completed"
        old = (await web.get(f"/jobs/{old['id']}")).json()
        assert (old["status"], old["reason"], old["payload"]) == ("failed", "discarded", {"to": ""})
        assert old["replacedBy"] == new["id"]
        assert (await web.get("/dead-letters")).json()["items"] == []
        again = is_problem(await web.post(f"/jobs/{old['id']}/retry", {"payload": 1}), 409, "JOB_NOT_FAILED")
        assert again["existing"] == new["id"]
        is_problem(await web.post(f"/jobs/{new['id']}/retry", {"payload": 1}), 409, "JOB_NOT_FAILED")
        is_problem(await web.post(f"/jobs/{new_id(web.app.clock.now())}/retry", {"payload": 1}), 404, "JOB_NOT_FOUND")


async def test_retrying_a_scheduled_job_with_another_payload_creates_a_manual_run(make: Make) -> None:
    async with make() as web:
        yearly = {**NIGHTLY, "cronExpression": "0 0 29 2 *", "maxRetries": 0}
        created = (await web.post("/schedules", yearly)).json()["id"]

        @web.app.on(NIGHTLY["jobType"])
        async def broken(event: Any) -> None:
            raise ValueError("no")

        async with web.app.running() as service:
            old = (await web.post(f"/schedules/{created}/trigger")).json()
            await service.wait_until_idle()
        first = (await web.post(f"/schedules/{created}/trigger")).json()
        assert (first["status"], first["hold"]) == ("pending", None)
        new = (await web.post(f"/jobs/{old['id']}/retry", {"payload": None})).json()
        assert (new["kind"], new["scheduleId"], new["hold"], new["payload"]) == ("manual", created, "overlap", None)
        assert len({one["occurrenceKey"] for one in (old, first, new)}) == 3
        kinds = [one["status"] for one in (await web.get(f"/schedules/{created}/executions")).json()["items"]]
        assert sorted(kinds) == ["failed", "pending", "pending"]


@dataclass
class Reminder:
    who: int


async def test_another_payload_is_validated_and_requires_an_editor(make: Make) -> None:
    async with make() as web:

        @web.app.on("typed")
        async def typed(event: Arrived[Reminder]) -> None:
            raise ValueError("no")

        async with web.app.running() as service:
            id_ = (await web.post("/jobs", {**NOW, "topic": "typed", "payload": {"who": 1}, "maxRetries": 0})).json()[
                "id"
            ]
            await service.wait_until_idle()
        refused = is_problem(await web.post(f"/jobs/{id_}/retry", {"payload": {"who": "ana"}}), 422, "INVALID_PAYLOAD")
        assert "who" in refused["detail"]
        operator = await web.key("operator")
        low = await web.post(f"/jobs/{id_}/retry", {"payload": {"who": 2}}, key=operator)
        is_problem(low, 403, "ROLE_TOO_LOW")
        assert (await web.get(f"/jobs/{id_}")).json()["replacedBy"] is None
        assert (await web.post(f"/jobs/{id_}/retry", {}, key=operator)).json()["status"] == "pending"


async def test_the_payload_of_a_campaign_job_cannot_be_replaced(make: Make) -> None:
    async with make() as web:
        await web.app.open()
        now = web.app.clock.now()
        row = {
            "id": new_id(now), "tenant_id": "default", "topic": "campaign", "kind": "once", "scheduled_at": now,
            "run_at": now, "timezone": "UTC", "payload": "{}", "queue": "default", "priority": 0, "serial": False,
            "state": "failed", "attempt": 1, "attempts_used": 1, "created_at": now, "finished_at": now,
            "target": '{"kind":"campaign","options":{}}',
        }  # fmt: skip
        await web.app.store.run(lambda tx: tx.execute(insert(finished), [row]))
        is_problem(await web.post(f"/jobs/{row['id']}/retry", {"payload": {"campaignId": "x"}}), 422, "INVALID_PAYLOAD")
