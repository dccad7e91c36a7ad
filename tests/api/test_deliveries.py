"""What is sent to targets, over HTTP: shown before it is sent, recorded when it was, and sent again."""

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


def to(server: Sink, path: str = "/status/200", **options: Any) -> dict[str, Any]:
    """A webhook to the sink, under a public name."""
    return {"kind": "http", "url": f"http://hooks.example:{server.port}{path}", **options}


async def ended(web: Web, id_: str) -> dict[str, Any]:
    """The job, when it is over."""
    async with asyncio.timeout(40):
        while True:
            job: dict[str, Any] = (await web.get(f"/jobs/{id_}")).json()
            if job["completedAt"] is not None:
                return job
            await asyncio.sleep(0.02)


async def test_a_preview_shows_what_is_then_sent(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()
        target = to(server, template=TEMPLATE, headers={"Authorization": "Bearer x"})
        job = {"topic": "shift.reminder", "timezone": "Asia/Seoul", "payload": PAYLOAD, "target": target}
        shown = (await web.post("/jobs/preview", job)).json()["request"]
        every = {**job, "cronExpression": "0 9 * * *"}
        daily = (await web.post("/schedules/preview", every)).json()["request"]
        assert (await web.get("/jobs")).json()["items"] == []
        async with web.app.running():
            await ended(web, (await web.post("/jobs", job)).json()["id"])
        (sent,) = server.requests
        assert shown["body"] == daily["body"] == sent.body.decode()
        assert json.loads(shown["body"]) == {"title": "Shift", "n": 0, "in": "Asia/Seoul"}
        assert (shown["kind"], shown["method"], shown["url"]) == ("http", "POST", target["url"])
        assert shown["headers"].keys() == daily["headers"].keys() == sent.headers.keys() - {"content-length"}
        made_then = {"webhook-id", "webhook-timestamp", "webhook-signature"}
        assert {name: value for name, value in sent.headers.items() if name not in made_then | {"content-length"}} == {
            name: value for name, value in shown["headers"].items() if name not in made_then
        }
        assert "v1," not in shown["headers"]["webhook-signature"]


async def test_a_preview_for_handlers_has_no_request(make: Make) -> None:
    async with make() as web:
        assert (await web.post("/jobs/preview", {"topic": "t", "timezone": "UTC"})).json()["request"] is None


@pytest.mark.parametrize("path", ["/jobs", "/jobs/preview", "/schedules", "/schedules/preview"])
async def test_a_payload_that_lacks_what_the_template_asks_for_is_refused(make: Make, path: str) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()
        body = {"topic": "t", "timezone": "UTC", "payload": {"n": 1}, "target": to(server, template=TEMPLATE)}
        if path.startswith("/schedules"):
            body |= {"cronExpression": "0 9 * * *", "name": "shifts"}
        problem = is_problem(await web.post(path, body), 422, "BODY_UNFIT")
        assert "template.title needs {{payload.title}}, which is absent" in problem["detail"]
        body["target"] = to(server, template={"a": "{{payload.n"})
        is_problem(await web.post(path, body), 422, "TEMPLATE_INVALID")


async def test_every_delivery_is_recorded_with_what_was_answered(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()
        job = {
            "topic": "hook", "timezone": "UTC", "target": to(server, "/status/500"),
            "retry": {"attempts": 2, "backoff": {"type": "fixed", "delay": 0}},
        }  # fmt: skip
        async with web.app.running():
            failed = await ended(web, (await web.post("/jobs", job)).json()["id"])
            done = await ended(web, (await web.post("/jobs", job | {"target": to(server)})).json()["id"])
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


async def test_what_never_arrived_is_recorded_too(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()
        job = {"topic": "hook", "timezone": "UTC", "target": to(server, "/hang"), "maxRetries": 0}
        async with web.app.running():
            made = (await web.post("/jobs", job | {"timeoutSeconds": 0.2})).json()
            (cut,) = (await ended(web, made["id"]))["attempts"]
        assert (cut["code"], cut["kind"], cut["messageId"]) == ("TIMEOUT", "http", made["id"])
        assert cut["durationMs"] >= 200
        assert "status" not in cut


async def test_answers_of_many_attempts_are_kept_within_bounds(make: Make) -> None:
    """Whatever a receiver answers, the record can be written: the job never gets stuck on it."""
    lines = [{"attempt": n, "response": "\x01" * 4096} for n in range(-1, 20)]
    kept = json.loads(attempts.kept(lines))
    assert [one["attempt"] for one in kept] == list(range(20))
    assert [one["attempt"] for one in kept if "response" in one] == [19]


@pytest.mark.parametrize("path", ["/status/200", "/status/500"])
async def test_a_finished_webhook_is_sent_again_under_an_id_of_its_own(make: Make, path: str) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()
        job = {"topic": "hook", "timezone": "UTC", "payload": {"n": 1}, "target": to(server, path), "maxRetries": 0}
        async with web.app.running():
            id_ = (await web.post("/jobs", job)).json()["id"]
            before = await ended(web, id_)
            for _ in range(2):
                again = await web.post(f"/jobs/{id_}/resend")
                assert (again.status_code, again.json()["status"], again.json()["id"]) == (200, "pending", id_)
                after = await ended(web, id_)
        assert before["status"] == after["status"]
        assert [one["messageId"] for one in after["attempts"]] == [id_, f"{id_}.r1", f"{id_}.r2"]
        assert [one.headers["webhook-id"] for one in server.requests] == [id_, f"{id_}.r1", f"{id_}.r2"]
        assert [json.loads(one.body)["id"] for one in server.requests] == [id_, f"{id_}.r1", f"{id_}.r2"]
        assert {json.loads(one.body)["data"]["occurrenceKey"] for one in server.requests} == {id_}


async def test_what_is_not_over_or_went_nowhere_is_not_sent_again(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()

        @web.app.on("mine")
        async def mine(event: Any) -> None: ...

        later = {"topic": "hook", "runAt": "2098-01-01T00:00:00Z", "timezone": "UTC", "target": to(server)}
        waiting = (await web.post("/jobs", later)).json()["id"]
        is_problem(await web.post(f"/jobs/{waiting}/resend"), 409, "JOB_NOT_SENT")
        async with web.app.running():
            handled = await ended(web, (await web.post("/jobs", {"topic": "mine", "timezone": "UTC"})).json()["id"])
        problem = is_problem(await web.post(f"/jobs/{handled['id']}/resend"), 409, "JOB_NOT_SENT")
        assert "no target outside Python" in problem["detail"]
        assert handled["attempts"] == []
        is_problem(await web.post(f"/jobs/{waiting[:-4]}0000/resend"), 404, "JOB_NOT_FOUND")


async def test_a_delivery_that_reports_back_keeps_its_record(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local(secret_key=SECRET)
        job = {
            "topic": "hook",
            "timezone": "UTC",
            "target": to(server, "/status/202", reportsBack=True),
            "maxRetries": 0,
        }
        async with web.app.running():
            id_ = (await web.post("/jobs", job)).json()["id"]
            async with asyncio.timeout(40):
                while (await web.get(f"/jobs/{id_}")).json()["status"] != "dispatched":
                    await asyncio.sleep(0.02)
            token = server.requests[0].headers["timebell-token"]
            for _ in range(2):  # saying it twice changes nothing
                failed = await web.post(f"/jobs/{id_}/fail", {"token": token, "error": "disk full"})
                assert failed.status_code == 200, failed.text
        (one,) = (await web.get(f"/jobs/{id_}")).json()["attempts"]
        assert (one["status"], one["to"], one["error"]) == (202, f"hooks.example:{server.port}", "disk full")


async def test_gone_is_final_and_retry_after_is_waited_for(make: Make) -> None:
    async with make() as web, sink() as server:
        web.app.kinds["http"] = local()
        job = {
            "topic": "hook", "timezone": "UTC", "retry": {"attempts": 5, "backoff": {"type": "fixed", "delay": 0}},
        }  # fmt: skip
        async with web.app.running():
            gone = await ended(web, (await web.post("/jobs", job | {"target": to(server, "/status/410")})).json()["id"])
            asked = (await web.post("/jobs", job | {"target": to(server, "/later/503")})).json()
            async with asyncio.timeout(40):
                while not (late := (await web.get(f"/jobs/{asked['id']}")).json())["attempts"]:
                    await asyncio.sleep(0.02)
        assert (gone["status"], [one["status"] for one in gone["attempts"]]) == ("failed", [410])
        assert (late["status"], late["attempts"][0]["status"]) == ("pending", 503)
        pause = datetime.fromisoformat(late["runAt"]) - datetime.fromisoformat(late["attempts"][0]["endedAt"])
        assert pause.total_seconds() == pytest.approx(59.4, abs=1)  # the date it gave, by its clock
