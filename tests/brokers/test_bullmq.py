"""A real BullMQ worker in Node runs due jobs and reports their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis.asyncio import Redis as Client

from tests.brokers.conftest import flush
from tests.brokers.node import bullmq_worker, until
from tests.brokers.scene import scene
from tests.servers import Redis
from timebell.engine.leader import broker_reconciler
from timebell.engine.node import Node

QUICK = {"attempts": 2, "backoff": "fixed", "delay": 0.05}
PATIENT = QUICK | {"attempts": 40}
"""Retry policy for an expected timeout, which may occur more than once on a busy machine."""


def target(**options: Any) -> dict[str, Any]:
    return {"kind": "bullmq", "queue": "mail", **options}


async def test_a_worker_takes_the_job_and_its_report_completes_it(store_url: str, redis: Redis, tmp_path: Path) -> None:
    async with (
        scene(store_url, broker_bullmq_url=redis.url) as here,
        bullmq_worker(tmp_path, redis.url, "mail", here.key) as worker,
    ):
        id_ = await here.due(
            "mail.digest", target(ack="reported"), payload={"user": 7}, priority=3,
            retry={"attempts": 5, "backoff": "exponential", "delay": 2},
        )  # fmt: skip
        done = await here.job(id_, "completed")
        assert done.result == {"rows": 3}
        (run,) = await until(worker.runs)
    assert (run["id"], run["name"], run["data"]["payload"]) == (done.occurrence_key, "mail.digest", {"user": 7})
    options = run["opts"]
    assert (options["attempts"], options["priority"]) == (5, 3)
    assert options["backoff"] == {"type": "exponential", "delay": 2000}
    assert run["data"]["occurrenceKey"] == done.occurrence_key


async def test_publishing_completes_a_job_unless_reports_are_requested(sqlite_url: str, redis: Redis) -> None:
    async with scene(sqlite_url, broker_bullmq_url=redis.url) as here:
        done = await here.job(await here.due("mail.digest", target(jobName="digest")), "completed")
        assert done.result == {"messageId": done.occurrence_key, "queue": "mail"}
        async with Client.from_url(redis.url, decode_responses=True) as client:
            assert await client.lrange("bull:mail:wait", 0, -1) == [done.occurrence_key]
            kept = await client.hgetall(f"bull:mail:{done.occurrence_key}")
    assert kept["name"] == "digest"
    assert "report" not in kept["data"]


async def test_bullmq_retries_and_its_last_failure_is_a_dead_letter_that_can_be_retried(
    sqlite_url: str, redis: Redis, tmp_path: Path
) -> None:
    async with (
        scene(sqlite_url, broker_bullmq_url=redis.url) as here,
        bullmq_worker(tmp_path, redis.url, "mail", here.key) as worker,
    ):
        flaky = await here.due("mail.digest", target(ack="reported"), payload={"failures": 1}, retry=QUICK)
        await here.job(flaky, "completed", attempt=1)
        broken = await here.due("mail.digest", target(ack="reported"), payload={"failures": 9}, retry=QUICK)
        dead = await here.job(broken, "failed", attempt=1)
        assert (dead.error, len(dead.attempts)) == ("disk full", 1)
        await here.app.retry(broken)
        await here.job(broken, "failed", attempt=2)
        await here.app.retry(broken)
        await here.job(broken, "failed", attempt=3)
        runs = [run["id"] for run in worker.runs()]
    key = dead.occurrence_key
    assert runs == [flaky, flaky, key, key, f"{key}.r1", f"{key}.r1", f"{key}.r2", f"{key}.r2"]


async def test_jobs_lost_by_a_flushed_redis_are_published_again_and_run(
    store_url: str, redis: Redis, tmp_path: Path
) -> None:
    async with scene(store_url, broker_bullmq_url=redis.url) as here:
        ids = [await here.due("mail.digest", target(ack="reported")) for _ in range(20)]
        for id_ in ids:
            await here.job(id_, "dispatched")
        flush(redis)
        await until(
            lambda: here.service.repair_report.repairs.get("message") == 20, about=lambda: here.service.repair_report
        )
        await until(
            lambda: here.service.repair_report.skip_reasons.get("known"), about=lambda: here.service.repair_report
        )
        async with bullmq_worker(tmp_path, redis.url, "mail", here.key) as worker:
            for id_ in ids:
                await here.job(id_, "completed", attempt=1)
            assert sorted(run["id"] for run in worker.runs()) == sorted(ids)
        assert here.service.repair_report.repairs["message"] == 20


async def test_a_lost_report_does_not_run_a_job_twice(sqlite_url: str, redis: Redis, tmp_path: Path) -> None:
    async with (
        scene(sqlite_url, broker_bullmq_url=redis.url) as here,
        bullmq_worker(tmp_path, redis.url, "mail", here.key, "silent") as worker,
    ):
        id_ = await here.due("mail.digest", target(ack="reported"), timeout=0.5, retry=PATIENT)
        done = await here.job(id_, "completed")
        assert done.result["returnValue"] == {"rows": 3}
        *late, last = [line["code"] for line in done.attempts]
        assert (set(late), last) == ({"TIMEOUT"}, None)
        assert len(worker.runs()) == 1


@pytest.fixture
def _all_but_the_first_attempt_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "timeout_for", lambda _, attempt: 0.5 if attempt.number == 1 else 600.0)


@pytest.mark.usefixtures("_all_but_the_first_attempt_have_time")
async def test_an_attempt_that_timed_out_in_the_queue_leaves_its_token_to_the_next(
    sqlite_url: str, redis: Redis, tmp_path: Path
) -> None:
    async with scene(sqlite_url, broker_bullmq_url=redis.url) as here:
        id_ = await here.due("mail.digest", target(ack="reported"), timeout=2, retry=PATIENT)
        await here.job(id_, "dispatched", attempt=2)
        async with bullmq_worker(tmp_path, redis.url, "mail", here.key) as worker:
            done = await here.job(id_, "completed")
            assert done.result.get("returnValue", done.result) == {"rows": 3}  # its report, or the next attempt
            assert len(worker.runs()) == 1


async def test_a_job_active_in_a_worker_during_a_flush_runs_once_if_it_reports_in_time(
    sqlite_url: str, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_reconciler, "RECONCILE_INTERVAL_SECONDS", 3600.0)
    async with (
        scene(sqlite_url, broker_bullmq_url=redis.url) as here,
        bullmq_worker(tmp_path, redis.url, "mail", here.key) as worker,
    ):
        id_ = await here.due("mail.digest", target(ack="reported"), payload={"milliseconds": 600_000})
        await until(worker.runs)
        await until(lambda: here.service.leader.fence)
        await here.job(id_, "dispatched")
        flush(redis)
        assert (await here.service.repair_now()).skip_reasons["missing"] == 1
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {here.key}"}) as web:
            report = worker.runs()[0]["data"]["report"]  # a BullMQ worker cannot finish a job that its Redis has lost
            assert (await web.post(f"{report['url']}/complete", json={"token": report["token"]})).status_code == 200
        assert not (await here.service.repair_now()).repairs.get("message")
        assert len(worker.runs()) == 1
