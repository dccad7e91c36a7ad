"""Webhook deliveries of jobs: previewed, recorded and redelivered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tests.unit.targets.sink import Sink, local, sink
from timebell.model import attempts

from .web import SECRET, Web, is_problem

Make = Callable[..., Any]
TEMPLATE = {"title": "{{payload.title}}", "n": "{{payload.n}}", "in": "{{timezone}}", "x": "{{payload.x?}}"}
PAYLOAD = {"title": "Shift", "n": 0}


def webhook(server: Sink, path: str = "/status/200", **options: Any) -> dict[str, Any]:
    """Return a webhook target that resolves to the sink, under a public name."""
    return {"kind": "http", "url": f"http://hooks.example:{server.port}{path}", **options}


async def finished(web: Web, id_: str) -> dict[str, Any]:
    """Wait until the job is finished and return it."""
    async with asyncio.timeout(40):
        while True:
            job: dict[str, Any] = (await web.get(f"/jobs/{id_}")).json()
            if job["completedAt"] is not None:
                return job
            await asyncio.sleep(0.02)


async def test_a_preview_equals_the_sent_request(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()
        target = webhook(server, template=TEMPLATE, headers={"Authorization": "Bearer x"})
        job = {"topic": "shift.reminder", "timezone": "Asia/Seoul", "payload": PAYLOAD, "target": target}
        preview = (await web.post("/jobs/preview", job)).json()["request"]
        every = {**job, "cronExpression": "0 9 * * *"}
        daily = (await web.post("/schedules/preview", every)).json()["request"]
        assert (await web.get("/jobs")).json()["items"] == []
        async with web.app.running():
            await finished(web, (await web.post("/jobs", job)).json()["id"])
        (sent,) = server.requests
        assert preview["body"] == daily["body"] == sent.body.decode()
        assert json.loads(preview["body"]) == {"title": "Shift", "n": 0, "in": "Asia/Seoul"}
        assert (preview["kind"], preview["method"], preview["url"]) == ("http", "POST", target["url"])
        assert preview["headers"].keys() == daily["headers"].keys() == sent.headers.keys() - {"content-length"}
        made_then = {"webhook-id", "webhook-timestamp", "webhook-signature"}
        assert {name: value for name, value in sent.headers.items() if name not in made_then | {"content-length"}} == {
            name: value for name, value in preview["headers"].items() if name not in made_then
        }
        assert "v1," not in preview["headers"]["webhook-signature"]


async def test_a_preview_for_handlers_has_no_request(make: Make) -> None:
    async with make() as web:
        assert (await web.post("/jobs/preview", {"topic": "t", "timezone": "UTC"})).json()["request"] is None


@pytest.mark.parametrize("path", ["/jobs", "/jobs/preview", "/schedules", "/schedules/preview"])
async def test_a_payload_without_a_template_field_is_refused(make: Make, path: str) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()
        body = {"topic": "t", "timezone": "UTC", "payload": {"n": 1}, "target": webhook(server, template=TEMPLATE)}
        if path.startswith("/schedules"):
            body |= {"cronExpression": "0 9 * * *", "name": "shifts"}
        problem = is_problem(await web.post(path, body), 422, "INVALID_BODY")
        assert "template.title needs {{payload.title}}, which is absent" in problem["detail"]
        body["target"] = webhook(server, template={"a": "{{payload.n"})
        is_problem(await web.post(path, body), 422, "INVALID_TEMPLATE")


async def test_every_delivery_is_recorded_with_its_response(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()
        job = {
            "topic": "hook", "timezone": "UTC", "target": webhook(server, "/status/500"),
            "retry": {"attempts": 2, "backoff": {"type": "fixed", "delay": 0}},
        }  # fmt: skip
        async with web.app.running():
            failed = await finished(web, (await web.post("/jobs", job)).json()["id"])
            done = await finished(web, (await web.post("/jobs", job | {"target": webhook(server)})).json()["id"])
        assert (failed["status"], done["status"]) == ("failed", "completed")
        first, second = failed["attempts"]
        (only,) = done["attempts"]
        assert [one["attempt"] for one in (first, second, only)] == [1, 2, 1]
        assert first["messageId"] == second["messageId"] == server.requests[0].headers["webhook-id"] == failed["id"]
        for one, status in ((first, 500), (second, 500), (only, 200)):
            assert (one["kind"], one["to"], one["status"]) == ("http", f"hooks.example:{server.port}", status)
            assert one["response"] == '{"said":"hi"}'
            assert 0 < one["durationMs"] < 10_000
            assert one["startedAt"] <= one["endedAt"]
        assert (first["code"], only["code"], only["error"]) == ("HTTP_STATUS", None, None)


async def test_a_timed_out_delivery_is_recorded(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()
        job = {"topic": "hook", "timezone": "UTC", "target": webhook(server, "/hang"), "maxRetries": 0}
        async with web.app.running():
            created = (await web.post("/jobs", job | {"timeoutSeconds": 0.2})).json()
            (cut,) = (await finished(web, created["id"]))["attempts"]
        assert (cut["code"], cut["kind"], cut["messageId"]) == ("TIMEOUT", "http", created["id"])
        assert cut["durationMs"] >= 200
        assert "status" not in cut


async def test_recorded_responses_are_limited_in_size(make: Make) -> None:
    """The record of any response can be written, so that a job is never stuck on it."""
    lines = [{"attempt": n, "response": "\x01" * 4096} for n in range(-1, 20)]
    recorded = json.loads(attempts.encode_recent(lines))
    assert [one["attempt"] for one in recorded] == [-1, *range(1, 20)]  # the first one is kept
    assert [one["attempt"] for one in recorded if "response" in one] == [19]


@pytest.mark.parametrize("path", ["/status/200", "/status/500"])
async def test_a_redelivered_webhook_has_a_new_message_id(make: Make, path: str) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()
        job = {
            "topic": "hook", "timezone": "UTC", "payload": {"n": 1}, "target": webhook(server, path), "maxRetries": 0,
        }  # fmt: skip
        async with web.app.running():
            id_ = (await web.post("/jobs", job)).json()["id"]
            before = await finished(web, id_)
            for _ in range(2):
                again = await web.post(f"/jobs/{id_}/redeliver")
                assert (again.status_code, again.json()["status"], again.json()["id"]) == (200, "pending", id_)
                after = await finished(web, id_)
        assert before["status"] == after["status"]
        assert [one["messageId"] for one in after["attempts"]] == [id_, f"{id_}.r1", f"{id_}.r2"]
        assert [one.headers["webhook-id"] for one in server.requests] == [id_, f"{id_}.r1", f"{id_}.r2"]
        assert [json.loads(one.body)["id"] for one in server.requests] == [id_, f"{id_}.r1", f"{id_}.r2"]
        assert {json.loads(one.body)["data"]["occurrenceKey"] for one in server.requests} == {id_}


async def test_unfinished_and_handler_jobs_cannot_be_redelivered(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()

        @web.app.on("mine")
        async def mine(event: Any) -> None: ...

        later = {"topic": "hook", "runAt": "2098-01-01T00:00:00Z", "timezone": "UTC", "target": webhook(server)}
        waiting = (await web.post("/jobs", later)).json()["id"]
        is_problem(await web.post(f"/jobs/{waiting}/redeliver"), 409, "JOB_NOT_SENT")
        async with web.app.running():
            handled = await finished(web, (await web.post("/jobs", {"topic": "mine", "timezone": "UTC"})).json()["id"])
        problem = is_problem(await web.post(f"/jobs/{handled['id']}/redeliver"), 409, "JOB_NOT_SENT")
        assert "no target outside Python" in problem["detail"]
        assert handled["attempts"] == []
        is_problem(await web.post("/jobs/01a400f6-3600-7000-8000-000000000000/redeliver"), 404, "JOB_NOT_FOUND")


async def test_a_dispatched_delivery_keeps_its_record(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local(secret_key=SECRET)
        job = {
            "topic": "hook",
            "timezone": "UTC",
            "target": webhook(server, "/status/202", reportsBack=True),
            "maxRetries": 0,
        }
        async with web.app.running():
            id_ = (await web.post("/jobs", job)).json()["id"]
            async with asyncio.timeout(40):
                while (await web.get(f"/jobs/{id_}")).json()["status"] != "dispatched":
                    await asyncio.sleep(0.02)
            token = server.requests[0].headers["timebell-token"]
            for _ in range(2):  # a repeated report changes nothing
                failed = await web.post(f"/jobs/{id_}/fail", {"token": token, "error": "disk full"})
                assert failed.status_code == 200, failed.text
        (one,) = (await web.get(f"/jobs/{id_}")).json()["attempts"]
        assert (one["status"], one["to"], one["error"]) == (202, f"hooks.example:{server.port}", "disk full")


async def test_410_is_final_and_retry_after_is_respected(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app._targets_by_kind["http"] = local()
        job = {
            "topic": "hook", "timezone": "UTC", "retry": {"attempts": 5, "backoff": {"type": "fixed", "delay": 0}},
        }  # fmt: skip
        async with web.app.running():
            created = (await web.post("/jobs", job | {"target": webhook(server, "/status/410")})).json()
            gone = await finished(web, created["id"])
            created = (await web.post("/jobs", job | {"target": webhook(server, "/later/503")})).json()
            async with asyncio.timeout(40):
                while not (late := (await web.get(f"/jobs/{created['id']}")).json())["attempts"]:
                    await asyncio.sleep(0.02)
        assert (gone["status"], [one["status"] for one in gone["attempts"]]) == ("failed", [410])
        assert (late["status"], late["attempts"][0]["status"]) == ("pending", 503)
        pause = datetime.fromisoformat(late["runAt"]) - datetime.fromisoformat(late["attempts"][0]["endedAt"])
        assert pause.total_seconds() == pytest.approx(59.4, abs=1)  # the Retry-After date, by the clock of the receiver
