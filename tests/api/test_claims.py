"""Remote workers: they claim jobs over HTTP and report the outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from timebell.ids import new_id

from .web import Web, is_problem, wait_until

Make = Callable[..., Any]
LEASE_SECONDS = 5  # longer than this process may be delayed between two heartbeats


@asynccontextmanager
async def served(make: Make, **options: Any) -> AsyncIterator[Web]:
    """Run an engine without handlers behind the API."""
    async with make() as web, web.app.running(**{"heartbeat": 0.1, **options}):
        yield web


async def create(web: Web, topic: str = "mail.send", **fields: Any) -> str:
    created = await web.post("/jobs", {"topic": topic, "timezone": "UTC", **fields})
    assert created.status_code == 201, created.text
    return created.json()["id"]  # type: ignore[no-any-return]


async def claim(web: Web, **fields: Any) -> list[dict[str, Any]]:
    """Claim jobs of `mail.send`, unless fields say otherwise."""
    key = fields.pop("key", None)
    restriction = {} if "queues" in fields else {"topics": ["mail.send"]}
    response = await web.post("/claims", {"worker": "w1", **restriction, **fields}, key=key)
    assert response.status_code == 200, response.text
    return response.json()["jobs"]  # type: ignore[no-any-return]


async def claim_all(web: Web, number: int) -> list[dict[str, Any]]:
    """Claim this many due jobs of `mail.send`: one claim may find fewer, while some are held or being released."""
    claimed: list[dict[str, Any]] = []
    while len(claimed) < number:
        claimed += await claim(web, max=number - len(claimed), waitSeconds=30)
    return claimed


def proof(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"jobId": job["jobId"], "token": job["token"], **more}


async def report(web: Web, verb: str, *jobs: dict[str, Any]) -> list[str | None]:
    response = await web.post(f"/claims/{verb}", {"jobs": list(jobs)})
    assert response.status_code == 200, response.text
    return [job["code"] for job in response.json()["jobs"]]


async def job(web: Web, id_: str) -> dict[str, Any]:
    return (await web.get(f"/jobs/{id_}")).json()  # type: ignore[no-any-return]


async def test_a_claimed_job_is_completed(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web, payload={"to": "x"}, metadata={"ownerId": "u1"})
        (claimed,) = await claim(web)
        assert (claimed["jobId"], claimed["payload"], claimed["attempt"]) == (id_, {"to": "x"}, 1)
        assert claimed["metadata"]["ownerId"] == "u1"
        assert (await job(web, id_))["status"] == "dispatched"
        assert await report(web, "complete", proof(claimed, result={"sent": 1})) == [None]
        done = await job(web, id_)
        assert (done["status"], done["result"], done["attemptNumber"]) == ("completed", {"sent": 1}, 1)
        assert await report(web, "complete", proof(claimed)) == [None], "a repeated report has no effect"
        assert await report(web, "fail", proof(claimed, error="late")) == ["ATTEMPT_ENDED"]


async def test_a_waiting_claim_gets_a_job_when_it_becomes_due(make: Make) -> None:
    async with served(make) as web:
        waiting = asyncio.create_task(claim(web, waitSeconds=20))
        await asyncio.sleep(0)
        run_at = web.app.clock.now() + timedelta(seconds=0.5)
        id_ = await create(web, runAt=run_at.isoformat())
        (claimed,) = await waiting
        assert claimed["jobId"] == id_
        assert claimed["firedAt"] >= claimed["scheduledAt"]


async def test_a_claim_without_due_jobs_ends_after_its_wait(make: Make) -> None:
    async with served(make) as web:
        assert await claim(web, waitSeconds=0) == []
        assert await claim(web, waitSeconds=0.2) == []


async def test_workers_share_jobs_without_overlap_up_to_their_maximum(make: Make) -> None:
    async with served(make) as web:
        for worker in ("a", "b"):
            assert await claim(web, worker=worker, waitSeconds=0) == [], "known workers, whose jobs are not held"
        ids = {await create(web) for _ in range(5)}
        created_at = web.app.clock.now()
        # By then, all of them are due by the clock of the database, too.
        await wait_until(lambda: web.app.clock.now() > created_at + timedelta(seconds=1))
        first, second = await asyncio.gather(claim(web, worker="a", max=3), claim(web, worker="b", max=3))
        assert (len(first), len(second)) in ((3, 2), (2, 3))
        assert {each["jobId"] for each in first + second} == ids


async def test_a_repeated_claim_returns_the_same_jobs(make: Make) -> None:
    async with served(make) as web:
        for _ in range(2):
            await create(web)
        first = await claim(web, max=1, claimId="c1")
        again = await claim(web, max=1, claimId="c1")
        assert [each["token"] for each in again] == [each["token"] for each in first]
        assert again[0]["firedAt"] == first[0]["firedAt"]
        (other,) = await claim(web, max=1, claimId="c2")
        assert other["jobId"] != first[0]["jobId"]
        assert await claim(web, worker="w2", max=1, claimId="c1", waitSeconds=0) == [], "another worker's claim"


async def test_a_lost_lease_is_retried_and_the_late_report_refused(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web, retry={"attempts": 2, "backoff": {"type": "fixed", "delay": 60}})
        (lost,) = await claim(web, leaseSeconds=1)
        (claimed,) = await claim(web, worker="w2", waitSeconds=30)
        assert (claimed["jobId"], claimed["attempt"]) == (id_, 2)
        assert await report(web, "complete", proof(lost)) == ["ATTEMPT_ENDED"]
        assert await report(web, "complete", proof(claimed)) == [None]
        done = await job(web, id_)
        assert (done["status"], done["attempts"][0]["code"]) == ("completed", "LEASE_LOST")


async def test_heartbeats_extend_the_lease_and_report_cancellation_and_progress(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web)
        (claimed,) = await claim(web, leaseSeconds=LEASE_SECONDS)

        async def beat(**more: Any) -> dict[str, Any]:
            body = {"worker": "w1", "leaseSeconds": LEASE_SECONDS, "jobs": [proof(claimed, **more)]}
            renewed = await web.post("/claims/heartbeat", body)
            assert renewed.status_code == 200, renewed.text
            return renewed.json()["jobs"][0]  # type: ignore[no-any-return]

        until = claimed["leaseUntil"]
        first_end = datetime.fromisoformat(until)
        while web.app.clock.now() < first_end + timedelta(seconds=1):
            await asyncio.sleep(0.4)
            renewed = await beat(progress=0.5, progressText="half")
            assert renewed["leaseUntil"] > until
            assert renewed["cancelRequested"] is False
            until = renewed["leaseUntil"]
        assert (await job(web, id_))["progress"]["fraction"] == 0.5
        cancelled = await web.post(f"/jobs/{id_}/cancel")
        assert cancelled.json()["outcome"] == "in_flight"
        assert (await beat())["cancelRequested"] is True
        assert await report(web, "fail", proof(claimed, error="stopped")) == [None]
        assert (await job(web, id_))["status"] == "cancelled"
        assert (await beat())["code"] == "ATTEMPT_ENDED"


async def test_an_attempt_times_out_whatever_its_heartbeats(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web, timeoutSeconds=1, maxRetries=0)
        (claimed,) = await claim(web, leaseSeconds=60)
        assert claimed["timeoutSeconds"] == 1

        async def failed() -> bool:
            await web.post("/claims/heartbeat", {"worker": "w1", "leaseSeconds": 60, "jobs": [proof(claimed)]})
            return (await job(web, id_))["status"] == "failed"  # type: ignore[no-any-return]

        await wait_until(failed)
        assert (await job(web, id_))["attempts"][-1]["code"] == "TIMEOUT"


async def test_failures_are_retried_by_the_policy_of_the_job(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web, retry={"attempts": 2, "backoff": {"type": "fixed", "delay": 0}})
        (first,) = await claim(web)
        assert await report(web, "fail", proof(first, error="disk full", code="DISK_FULL")) == [None]
        assert await report(web, "fail", proof(first, error="disk full", code="DISK_FULL")) == [None]
        (second,) = await claim(web)
        assert second["attempt"] == 2
        assert await report(web, "fail", proof(second, error="still full")) == [None]
        dead = await job(web, id_)
        assert (dead["status"], [each["code"] for each in dead["attempts"]]) == ("failed", ["DISK_FULL", "REPORTED"])
        assert [each["id"] for each in (await web.get("/dead-letters")).json()["items"]] == [id_]


async def test_a_returned_job_is_due_again_and_has_used_no_attempt(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web, maxRetries=0)
        (first,) = await claim(web)
        assert await report(web, "return", proof(first)) == [None]
        (second,) = await claim(web)
        assert (second["jobId"], second["attempt"]) == (id_, 2)
        assert await report(web, "complete", proof(second)) == [None]
        assert (await job(web, id_))["attemptsMade"] == 1


async def test_batches_report_each_job_separately(make: Make) -> None:
    async with served(make) as web:
        for _ in range(3):
            await create(web)
        one, two, three = await claim_all(web, 3)
        wrong = {"jobId": two["jobId"], "token": one["token"]}
        unknown = proof({**three, "jobId": "00000000-0000-0000-0000-000000000000"})
        assert await report(web, "complete", proof(one), wrong, unknown) == [None, "INVALID_TOKEN", "INVALID_TOKEN"]
        assert [(await job(web, each["jobId"]))["status"] for each in (one, two)] == ["completed", "dispatched"]


async def test_workers_claim_by_queue_and_prefix(make: Make) -> None:
    async with served(make) as web:
        in_queue = await create(web, "any.topic", queue="bulk")
        by_prefix = await create(web, "billing.invoice")
        await create(web, "billingx.other")
        assert [each["jobId"] for each in await claim(web, queues=["bulk"])] == [in_queue]
        assert [each["jobId"] for each in await claim(web, topics=["billing.*"])] == [by_prefix]
        assert await claim(web, queues=["bulk"], topics=["mail.send"], waitSeconds=0) == []


async def test_limits_of_queues_and_tenants_apply(make: Make) -> None:
    async with served(make) as web:
        await web.ask("PUT", "/queues/narrow", {"concurrency": 1})
        for _ in range(2):
            await create(web, queue="narrow")
        (first,) = await claim(web)
        waiting = asyncio.create_task(claim(web, worker="w2", waitSeconds=30))
        assert await claim(web, waitSeconds=0.3) == []
        assert await report(web, "complete", proof(first)) == [None]
        assert len(await waiting) == 1


async def test_a_worker_makes_its_topics_handled(make: Make) -> None:
    async with served(make, lease=1) as web:
        id_ = await create(web)

        async def held() -> bool:
            return (await job(web, id_))["hold"] == "unhandled"  # type: ignore[no-any-return]

        await wait_until(held)
        (claimed,) = await claim(web)
        assert claimed["jobId"] == id_


async def test_a_key_claims_only_jobs_of_its_tenant(make: Make) -> None:
    async with served(make) as web:
        keys = {tenant: await web.key("operator", tenant, scopes=("claims",)) for tenant in ("ours", "theirs")}
        editors = {tenant: await web.key("editor", tenant) for tenant in keys}
        ids = {}
        for tenant, key in editors.items():
            body = {"topic": "mail.send", "timezone": "UTC"}
            ids[tenant] = (await web.post("/jobs", body, key=key)).json()["id"]
        (ours,) = await claim(web, key=keys["ours"])
        assert (ours["jobId"], ours["tenantId"]) == (ids["ours"], "ours")
        assert await claim(web, key=keys["ours"], waitSeconds=0) == []
        stolen = await web.post("/claims/complete", {"jobs": [proof(ours)]}, key=keys["theirs"])
        assert stolen.json()["jobs"][0]["code"] == "JOB_NOT_FOUND"
        in_ours = {"worker": "w1", "topics": ["mail.send"], "waitSeconds": 0}
        assert (await web.post("/claims", in_ours, timebell_tenant="ours")).json()["jobs"] == []
        (theirs,) = await claim(web)
        assert theirs["jobId"] == ids["theirs"], "a platform key claims the jobs of all tenants, or of the one it names"
        is_problem(await web.get(f"/jobs/{ids['ours']}", key=keys["ours"]), 403, "SCOPE_MISSING")


async def test_nodes_show_workers_of_the_own_tenant_and_drain_them(make: Make) -> None:
    async with served(make) as web:
        ours, theirs = [await web.key("operator", tenant) for tenant in ("ours", "theirs")]
        assert await claim(web, key=ours, topics=["billing.*", "mail.send"], waitSeconds=0) == []
        (shown,) = (await web.get("/nodes", key=ours)).json()["workers"]
        assert (shown["name"], shown["topics"], shown["queues"]) == ("w1", ["billing.*", "mail.send"], None)
        assert (await web.get("/nodes", key=theirs)).json()["workers"] == []
        assert len((await web.get("/nodes")).json()["workers"]) == 1
        waiting = asyncio.create_task(web.post("/claims", {"worker": "w1", "topics": ["mail.send"]}, key=ours))
        await asyncio.sleep(0)
        assert (await web.post(f"/nodes/{shown['id']}/drain")).json()["draining"] is True
        assert (await waiting).json()["jobs"] == []
        again = await web.post("/claims", {"worker": "w1", "topics": ["mail.send"]}, key=ours)
        assert again.json() == {"jobs": [], "draining": True}
        beat = await web.post("/claims/heartbeat", {"worker": "w1"}, key=ours)
        assert beat.json() == {"jobs": [], "draining": True}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"worker": "w"}, 422, "INVALID_FIELDS"),
        ({"worker": "w", "topics": ["@http"]}, 422, "INVALID_TOPIC"),
        ({"worker": "w", "topics": ["a"], "waitSeconds": 31}, 422, "INVALID_FIELDS"),
        ({"worker": "w", "topics": ["a"], "max": 501}, 422, "INVALID_FIELDS"),
        ({"topics": ["a"]}, 422, "INVALID_FIELDS"),
        ({"worker": "w", "topics": ["a"], "claimId": "a b"}, 422, "INVALID_FIELDS"),
        ({"worker": "w", "topic": ["a"]}, 422, "UNKNOWN_FIELD"),
    ],
)
async def test_invalid_claims_are_refused(make: Make, body: dict[str, Any], status: int, code: str) -> None:
    async with make() as web:
        is_problem(await web.post("/claims", body), status, code)


async def test_a_node_without_a_secret_key_claims_nothing(make: Make) -> None:
    async with served(make) as web:
        id_ = await create(web)
        web.app.settings = replace(web.app.settings, secret_key=None)
        is_problem(await web.post("/claims", {"worker": "w", "topics": ["mail.send"]}), 403, "SECRET_KEY_MISSING")
        assert (await job(web, id_))["status"] == "pending"


async def test_a_process_without_an_engine_serves_claims(make: Make) -> None:
    async with make() as web:
        id_ = await create(web)
        (claimed,) = await claim(web)
        assert claimed["jobId"] == id_
        waiting = asyncio.create_task(claim(web, waitSeconds=20))
        await asyncio.sleep(0)
        second = await create(web)
        assert [each["jobId"] for each in await waiting] == [second]
        assert await report(web, "complete", proof(claimed)) == [None]


async def test_stopping_answers_waiting_claims(make: Make) -> None:
    async with make() as web:
        async with web.app.running(heartbeat=0.1):
            waiting = asyncio.create_task(claim(web, waitSeconds=30))

            async def is_waiting() -> bool:
                return bool(web.app.remote_workers.waiting_claims._waiting)

            await wait_until(is_waiting)
        assert await asyncio.wait_for(waiting, 10) == []


async def test_reports_take_turns_with_the_other_requests_of_their_tenant(make: Make) -> None:
    async with make() as web, AsyncExitStack() as held:
        for _ in range(6):
            await held.enter_async_context(web.site.authenticator.capacity.reads.hold("default"))
        job = {"jobId": new_id(web.app.clock.now()), "token": "1.x"}
        bodies = {
            "heartbeat": {"worker": "w1", "jobs": [job]}, "complete": {"jobs": [job]}, "return": {"jobs": [job]},
            "fail": {"jobs": [{**job, "error": "e"}]},
        }  # fmt: skip
        requests = [asyncio.create_task(web.post(f"/claims/{verb}", body)) for verb, body in bodies.items()]
        done, _ = await asyncio.wait(requests, timeout=0.3)
        assert not done
        await held.aclose()
        assert {(await request).status_code for request in requests} == {200}
