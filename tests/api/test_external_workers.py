"""External workers: a receiver answers a webhook with 202 and reports the result of the job later."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.targets.sink import SECRET as SIGNING
from tests.unit.targets.sink import Sink, sink
from timebell.model.limits import Limits
from timebell.store.jobs import queues

from .web import Web, is_problem, wait_until

Make = Callable[..., Any]


@asynccontextmanager
async def delivering(make: Make, **options: Any) -> AsyncIterator[tuple[Web, Sink]]:
    """Run an engine that delivers webhooks to a receiver on this machine."""
    async with make() as web, sink() as receiver:
        web.app.settings = replace(
            web.app.settings, webhook_signing_secret=SIGNING, webhook_allow_private=True
        )  # fmt: skip
        async with web.app.running(**{"heartbeat": 0.1, **options}):
            yield web, receiver


async def dispatch(web: Web, receiver: Sink, status: int = 202, **fields: Any) -> str:
    """Create a job for the receiver and return its id."""
    target = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/{status}", "reportsBack": True}
    body = {"topic": "outside", "timezone": "UTC", "target": target, **fields}
    created = await web.post("/jobs", body)
    assert created.status_code == 201, created.text
    assert created.json()["target"]["reportsBack"] is True
    return created.json()["id"]  # type: ignore[no-any-return]


async def job(web: Web, id_: str) -> dict[str, Any]:
    return (await web.get(f"/jobs/{id_}")).json()  # type: ignore[no-any-return]


async def in_state(web: Web, id_: str, state: str, attempt: int = 1) -> dict[str, Any]:
    async def there() -> Any:
        seen = await job(web, id_)
        return seen if (seen["status"], seen["attemptNumber"]) == (state, attempt) else None

    return await wait_until(there)  # type: ignore[no-any-return]


def token(receiver: Sink) -> str:
    return receiver.requests[-1].headers["timebell-token"]


async def test_a_dispatched_job_is_completed_with_its_token(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        id_ = await dispatch(web, receiver)
        await in_state(web, id_, "dispatched")
        assert [one["id"] for one in (await web.get("/jobs?status=active")).json()["items"]] == [id_]
        reports = {"token": token(receiver), "result": {"rows": 3}}
        done = await web.post(f"/jobs/{id_}/complete", reports)
        assert (done.status_code, done.json()["status"], done.json()["result"]) == (200, "completed", {"rows": 3})
        assert (await web.post(f"/jobs/{id_}/complete", reports)).json() == done.json()
        failed = {"token": reports["token"], "error": "no"}
        is_problem(await web.post(f"/jobs/{id_}/fail", failed), 409, "ATTEMPT_ENDED")
        is_problem(await web.post(f"/jobs/{id_}/heartbeat", {"token": reports["token"]}), 409, "ATTEMPT_ENDED")


@pytest.mark.parametrize("bad", ["1.0", "x", "2.", "1", "99999999999.a", "\u0661.a"])
async def test_other_tokens_are_refused(make: Make, bad: str) -> None:
    async with delivering(make) as (web, receiver):
        id_ = await dispatch(web, receiver)
        await in_state(web, id_, "dispatched")
        number, _, mac = token(receiver).partition(".")
        for wrong in (bad, f"2.{mac}", f"{number}.{mac[:-1]}", f"0{number}.{mac}"):
            for verb, more in (("complete", {}), ("fail", {"error": "no"}), ("heartbeat", {})):
                is_problem(await web.post(f"/jobs/{id_}/{verb}", {"token": wrong, **more}), 403, "INVALID_TOKEN")
        assert (await job(web, id_))["status"] == "dispatched"


async def test_a_reported_failure_is_retried_with_another_token(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        retry = {"attempts": 2, "backoff": {"type": "fixed", "delay": 0}}
        id_ = await dispatch(web, receiver, retry=retry)
        await in_state(web, id_, "dispatched")
        first = token(receiver)
        body = {"token": first, "error": "disk full", "code": "DISK_FULL"}
        assert (await web.post(f"/jobs/{id_}/fail", body)).status_code == 200
        again = await in_state(web, id_, "dispatched", attempt=2)
        assert [line["code"] for line in again["attempts"]] == ["DISK_FULL", None]
        assert token(receiver) != first
        is_problem(await web.post(f"/jobs/{id_}/complete", {"token": first}), 409, "ATTEMPT_ENDED")
        ended = (await web.post(f"/jobs/{id_}/fail", {"token": token(receiver), "error": "still full"})).json()
        assert (ended["status"], ended["errorMessage"], ended["attemptsMade"]) == ("failed", "still full", 2)


@pytest.mark.parametrize(
    ("verb", "more", "state"),
    [
        ("complete", {}, "completed"),
        ("fail", {"error": "disk full", "retryable": False}, "failed"),
        ("fail", {"error": "disk full", "retryAfterSeconds": 3600}, "pending"),
    ],
)
async def test_a_report_before_the_202_keeps_the_delivery_record(
    make: Make, verb: str, more: dict[str, Any], state: str
) -> None:
    async with delivering(make) as (web, receiver):

        async def early(reader: Any, writer: Any, line: str) -> None:
            id_ = json.loads(receiver.requests[-1].body)["data"]["jobId"]
            reports.append(await web.post(f"/jobs/{id_}/{verb}", {"token": token(receiver), **more}))
            heartbeats: set[str] = set()

            async def three_heartbeats() -> bool:  # the last one began after the report
                (node,) = (await web.get("/nodes")).json()["items"]
                heartbeats.add(node["lastHeartbeatAt"])
                return len(heartbeats) == 3

            await wait_until(three_heartbeats)
            await receiver.answer(writer, "202 Accepted", b"taken")

        reports: list[Any] = []
        receiver.early = early  # type: ignore[attr-defined]
        target = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/early", "reportsBack": True}
        created = (await web.post("/jobs", {"topic": "outside", "timezone": "UTC", "target": target})).json()

        async def on_record() -> Any:
            seen = await job(web, created["id"])
            return seen if any("status" in line for line in seen["attempts"]) else None

        seen = await wait_until(on_record)
        assert [(one.status_code, one.json()["status"]) for one in reports] == [(200, state)]
        assert seen["status"] == state
        (line,) = seen["attempts"]
        assert (line["attempt"], line["kind"], line["messageId"]) == (1, "http", created["id"])
        assert (line["status"], line["response"], line["error"]) == (202, "taken", more.get("error"))


async def test_a_final_failure_is_not_retried(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        id_ = await dispatch(web, receiver)
        await in_state(web, id_, "dispatched")
        body = {"token": token(receiver), "error": "gone", "retryable": False}
        assert (await web.post(f"/jobs/{id_}/fail", body)).json()["status"] == "failed"


async def test_a_job_without_a_report_fails_at_its_timeout(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        id_ = await dispatch(web, receiver, timeoutSeconds=3, maxRetries=0)
        failed = await in_state(web, id_, "failed")
        assert failed["attempts"][-1]["code"] == "TIMEOUT"
        assert "No report arrived within the timeout" in failed["errorMessage"]
        is_problem(await web.post(f"/jobs/{id_}/complete", {"token": token(receiver)}), 409, "ATTEMPT_ENDED")


async def test_heartbeats_extend_the_timeout(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        # Longer than this process may be delayed between two heartbeats.
        id_ = await dispatch(web, receiver, timeoutSeconds=6, maxRetries=0)
        short = await dispatch(web, receiver, timeoutSeconds=6, maxRetries=0)
        await in_state(web, id_, "dispatched")
        await in_state(web, short, "dispatched")
        mine = next(one.headers for one in receiver.requests if id_.encode() in one.body)["timebell-token"]

        async def other_failed() -> bool:
            beat = await web.post(f"/jobs/{id_}/heartbeat", {"token": mine})
            assert beat.status_code == 200, beat.text
            assert beat.json()["cancelRequested"] is False
            return (await job(web, short))["status"] == "failed"  # type: ignore[no-any-return]

        await wait_until(other_failed)
        assert (await job(web, id_))["status"] == "dispatched"


async def test_a_cancel_request_is_returned_and_a_late_success_counts(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        for verb, more, state in (("complete", {}, "completed"), ("fail", {"error": "stopped"}, "cancelled")):
            id_ = await dispatch(web, receiver)
            await in_state(web, id_, "dispatched")
            job_token = token(receiver)
            assert (await web.post(f"/jobs/{id_}/cancel")).json()["outcome"] == "in_flight"
            assert (await web.post(f"/jobs/{id_}/heartbeat", {"token": job_token})).json()["cancelRequested"] is True
            ended = (await web.post(f"/jobs/{id_}/{verb}", {"token": job_token, **more})).json()
            assert ended["status"] == state
            assert (await web.post(f"/jobs/{id_}/cancel")).json()["outcome"] == "in_flight"


async def test_other_responses_complete_the_job(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        id_ = await dispatch(web, receiver, status=200)
        await in_state(web, id_, "completed")
        plain = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/202"}
        created = (await web.post("/jobs", {"topic": "outside", "timezone": "UTC", "target": plain})).json()
        await in_state(web, created["id"], "completed")
        assert "timebell-token" not in receiver.requests[-1].headers


async def test_dispatched_jobs_count_towards_the_concurrency_of_a_queue(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        await web.app.store.run(queues.set_limits, "narrow", Limits(concurrency=1))
        first = await dispatch(web, receiver, queue="narrow")
        await in_state(web, first, "dispatched")
        second = await dispatch(web, receiver, queue="narrow")
        other = await dispatch(web, receiver)
        await in_state(web, other, "dispatched")
        assert (await job(web, second))["status"] == "pending"
        mine = next(one.headers for one in receiver.requests if first.encode() in one.body)["timebell-token"]
        await web.post(f"/jobs/{first}/complete", {"token": mine})
        await in_state(web, second, "dispatched")


async def test_reporting_back_requires_a_secret_key(make: Make) -> None:
    async with delivering(make) as (web, receiver):
        web.app.settings = replace(web.app.settings, secret_key=None)
        web.app._targets_by_kind.pop("http")
        target = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/202", "reportsBack": True}
        body = {"topic": "outside", "timezone": "UTC", "target": target}
        refused = is_problem(await web.post("/jobs", body), 403, "SECRET_KEY_MISSING")
        assert refused["detail"].startswith("Attempt tokens, with which workers and receivers report results, require")
        assert "TIMEBELL_SECRET_KEY" in refused["fix"]
