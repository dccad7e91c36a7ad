"""Outside workers: a webhook answers 202, and says later what became of the job."""

from __future__ import annotations

import asyncio
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

from .web import Web, is_problem

Make = Callable[..., Any]


async def until(found: Callable[[], Any]) -> Any:
    """Wait until it is true."""
    async with asyncio.timeout(40):
        while True:
            seen = found()
            seen = await seen if asyncio.iscoroutine(seen) else seen
            if seen:
                return seen
            await asyncio.sleep(0.02)


@asynccontextmanager
async def handing_out(make: Make, **options: Any) -> AsyncIterator[tuple[Web, Sink]]:
    """An engine that delivers webhooks to a receiver on this machine."""
    async with make() as web, sink() as receiver:
        web.app.settings = replace(
            web.app.settings, webhook_signing_secret=SIGNING, webhook_allow_private=True
        )  # fmt: skip
        async with web.app.running(**{"heartbeat": 0.1, **options}):
            yield web, receiver


async def hand(web: Web, receiver: Sink, status: int = 202, **fields: Any) -> str:
    """Make a job for the receiver; its id once it is dispatched."""
    target = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/{status}", "reportsBack": True}
    given = {"topic": "outside", "timezone": "UTC", "target": target, **fields}
    made = await web.post("/jobs", given)
    assert made.status_code == 201, made.text
    assert made.json()["target"]["reportsBack"] is True
    return made.json()["id"]  # type: ignore[no-any-return]


async def job(web: Web, id_: str) -> dict[str, Any]:
    return (await web.get(f"/jobs/{id_}")).json()  # type: ignore[no-any-return]


async def in_state(web: Web, id_: str, state: str, attempt: int = 1) -> dict[str, Any]:
    async def there() -> Any:
        seen = await job(web, id_)
        return seen if (seen["status"], seen["attemptNumber"]) == (state, attempt) else None

    return await until(there)  # type: ignore[no-any-return]


def token(receiver: Sink) -> str:
    return receiver.requests[-1].headers["timebell-token"]


async def test_a_job_handed_over_is_completed_by_its_token(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        id_ = await hand(web, receiver)
        await in_state(web, id_, "dispatched")
        assert [one["id"] for one in (await web.get("/jobs?status=active")).json()["items"]] == [id_]
        said = {"token": token(receiver), "result": {"rows": 3}}
        done = await web.post(f"/jobs/{id_}/complete", said)
        assert (done.status_code, done.json()["status"], done.json()["result"]) == (200, "completed", {"rows": 3})
        assert (await web.post(f"/jobs/{id_}/complete", said)).json() == done.json()
        failed = {"token": said["token"], "error": "no"}
        is_problem(await web.post(f"/jobs/{id_}/fail", failed), 409, "ATTEMPT_OVER")
        is_problem(await web.post(f"/jobs/{id_}/heartbeat", {"token": said["token"]}), 409, "ATTEMPT_OVER")


@pytest.mark.parametrize("bad", ["1.0", "x", "2.", "1", "99999999999.a", "\u0661.a"])
async def test_another_token_opens_nothing(make: Make, bad: str) -> None:
    async with handing_out(make) as (web, receiver):
        id_ = await hand(web, receiver)
        await in_state(web, id_, "dispatched")
        number, _, mac = token(receiver).partition(".")
        for wrong in (bad, f"2.{mac}", f"{number}.{mac[:-1]}", f"0{number}.{mac}"):
            for verb, more in (("complete", {}), ("fail", {"error": "no"}), ("heartbeat", {})):
                is_problem(await web.post(f"/jobs/{id_}/{verb}", {"token": wrong, **more}), 403, "TOKEN_INVALID")
        assert (await job(web, id_))["status"] == "dispatched"


async def test_a_reported_failure_is_tried_again_with_another_token(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        retry = {"attempts": 2, "backoff": {"type": "fixed", "delay": 0}}
        id_ = await hand(web, receiver, retry=retry)
        await in_state(web, id_, "dispatched")
        first = token(receiver)
        body = {"token": first, "error": "disk full", "code": "DISK_FULL"}
        assert (await web.post(f"/jobs/{id_}/fail", body)).status_code == 200
        again = await in_state(web, id_, "dispatched", attempt=2)
        assert [line["code"] for line in again["attempts"]] == ["DISK_FULL", None]
        assert token(receiver) != first
        is_problem(await web.post(f"/jobs/{id_}/complete", {"token": first}), 409, "ATTEMPT_OVER")
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
async def test_a_report_that_comes_before_the_202_leaves_the_delivery_on_record(
    make: Make, verb: str, more: dict[str, Any], state: str
) -> None:
    async with handing_out(make) as (web, receiver):

        async def early(reader: Any, writer: Any, line: str) -> None:
            id_ = json.loads(receiver.requests[-1].body)["data"]["jobId"]
            said.append(await web.post(f"/jobs/{id_}/{verb}", {"token": token(receiver), **more}))
            await receiver.answer(writer, "202 Accepted", b"taken")

        said: list[Any] = []
        receiver.early = early  # type: ignore[attr-defined]
        target = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/early", "reportsBack": True}
        made = (await web.post("/jobs", {"topic": "outside", "timezone": "UTC", "target": target})).json()

        async def on_record() -> Any:
            seen = await job(web, made["id"])
            return seen if any("status" in line for line in seen["attempts"]) else None

        seen = await until(on_record)
        assert [(one.status_code, one.json()["status"]) for one in said] == [(200, state)]
        assert seen["status"] == state
        (line,) = seen["attempts"]
        assert (line["attempt"], line["kind"], line["messageId"]) == (1, "http", made["id"])
        assert (line["status"], line["response"], line["error"]) == (202, "taken", more.get("error"))


async def test_a_final_failure_is_not_tried_again(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        id_ = await hand(web, receiver)
        await in_state(web, id_, "dispatched")
        body = {"token": token(receiver), "error": "gone", "retryable": False}
        assert (await web.post(f"/jobs/{id_}/fail", body)).json()["status"] == "failed"


async def test_what_is_not_reported_in_time_has_failed(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        id_ = await hand(web, receiver, timeoutSeconds=3, maxRetries=0)
        failed = await in_state(web, id_, "failed")
        assert failed["attempts"][-1]["code"] == "TIMEOUT"
        assert "reported" in failed["errorMessage"]
        is_problem(await web.post(f"/jobs/{id_}/complete", {"token": token(receiver)}), 409, "ATTEMPT_OVER")


async def test_heartbeats_keep_it_alive(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        id_ = await hand(web, receiver, timeoutSeconds=3, maxRetries=0)
        short = await hand(web, receiver, timeoutSeconds=3, maxRetries=0)
        await in_state(web, id_, "dispatched")
        await in_state(web, short, "dispatched")
        mine = next(one.headers for one in receiver.requests if id_.encode() in one.body)["timebell-token"]

        async def other_failed() -> bool:
            beat = await web.post(f"/jobs/{id_}/heartbeat", {"token": mine})
            assert beat.status_code == 200, beat.text
            assert beat.json()["cancelAsked"] is False
            return (await job(web, short))["status"] == "failed"  # type: ignore[no-any-return]

        await until(other_failed)
        assert (await job(web, id_))["status"] == "dispatched"


async def test_a_cancel_is_told_and_a_late_success_counts(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        for verb, more, state in (("complete", {}, "completed"), ("fail", {"error": "stopped"}, "cancelled")):
            id_ = await hand(web, receiver)
            await in_state(web, id_, "dispatched")
            given = token(receiver)
            assert (await web.post(f"/jobs/{id_}/cancel")).json()["outcome"] == "in_flight"
            assert (await web.post(f"/jobs/{id_}/heartbeat", {"token": given})).json()["cancelAsked"] is True
            ended = (await web.post(f"/jobs/{id_}/{verb}", {"token": given, **more})).json()
            assert ended["status"] == state
            assert (await web.post(f"/jobs/{id_}/cancel")).json()["outcome"] == "in_flight"


async def test_other_answers_are_the_end(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        id_ = await hand(web, receiver, status=200)
        await in_state(web, id_, "completed")
        plain = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/202"}
        made = (await web.post("/jobs", {"topic": "outside", "timezone": "UTC", "target": plain})).json()
        await in_state(web, made["id"], "completed")
        assert "timebell-token" not in receiver.requests[-1].headers


async def test_a_queue_counts_what_is_outside(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        await web.app.store.run(queues.put, "narrow", Limits(concurrency=1))
        first = await hand(web, receiver, queue="narrow")
        await in_state(web, first, "dispatched")
        second = await hand(web, receiver, queue="narrow")
        other = await hand(web, receiver)
        await in_state(web, other, "dispatched")
        assert (await job(web, second))["status"] == "pending"
        mine = next(one.headers for one in receiver.requests if first.encode() in one.body)["timebell-token"]
        await web.post(f"/jobs/{first}/complete", {"token": mine})
        await in_state(web, second, "dispatched")


async def test_without_a_secret_key_nothing_can_report_back(make: Make) -> None:
    async with handing_out(make) as (web, receiver):
        web.app.settings = replace(web.app.settings, secret_key=None)
        web.app.kinds.pop("http")
        target = {"kind": "http", "url": f"http://127.0.0.1:{receiver.port}/status/202", "reportsBack": True}
        given = {"topic": "outside", "timezone": "UTC", "target": target}
        is_problem(await web.post("/jobs", given), 403, "SECRET_KEY_MISSING")
