"""Due jobs as entries of a Redis stream, read by consumers."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from redis.asyncio import Redis as Client

from tests.brokers.conftest import flush
from tests.brokers.node import until
from tests.brokers.scene import scene
from tests.servers import Redis


def target(**options: Any) -> dict[str, Any]:
    return {"kind": "redis-stream", "stream": "due", **options}


async def entries(redis: Redis) -> list[dict[str, str]]:
    async with Client.from_url(redis.url, decode_responses=True) as client:
        return [fields for _, fields in await client.xrange("due")]


async def test_an_entry_has_an_id_and_a_body_and_its_consumer_reports(store_url: str, redis: Redis) -> None:
    async with scene(store_url, broker_redis_stream_url=redis.url) as here:
        id_ = await here.due("mail.digest", target(ack="reported"), payload={"user": 7})
        await here.job(id_, "dispatched")
        (entry,) = await entries(redis)
        body = json.loads(entry["body"])
        assert (entry["id"], entry["topic"], entry["attempt"]) == (id_, "mail.digest", "1")
        assert (body["payload"], body["occurrenceKey"]) == ({"user": 7}, id_)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {here.key}"}) as web:
            report = {"token": body["report"]["token"], "result": 5}
            answer = await web.post(f"{body['report']['url']}/complete", json=report)
            assert answer.status_code == 200, answer.text
        assert (await here.job(id_, "completed")).result == 5


async def test_publishing_completes_a_job_unless_reports_are_requested(sqlite_url: str, redis: Redis) -> None:
    async with scene(sqlite_url, broker_redis_stream_url=redis.url) as here:
        ids = [await here.due("mail.digest", target(body="cloudevents")) for _ in range(3)]
        for id_ in ids:
            assert (await here.job(id_, "completed")).result["stream"] == "due"
        found = [json.loads(entry["body"]) for entry in await entries(redis)]
        assert {event["id"] for event in found} == set(ids)
        assert {event["type"] for event in found} == {"timebell.job.due"}
        assert not any("report" in event["data"] for event in found)


async def test_a_stream_is_trimmed_to_about_its_maximum_length(sqlite_url: str, redis: Redis) -> None:
    async with scene(sqlite_url, broker_redis_stream_url=redis.url) as here:
        for ack in ("published", "reported"):
            ids = [await here.due("mail.digest", target(maxLength=10, ack=ack)) for _ in range(250)]
            await here.job(ids[-1], "completed" if ack == "published" else "dispatched")
            await until(lambda: not here.service.node.running_attempts)
            assert 10 <= len(await entries(redis)) < 250


async def test_jobs_lost_by_a_flushed_redis_are_published_again_once(store_url: str, redis: Redis) -> None:
    async with scene(store_url, broker_redis_stream_url=redis.url) as here:
        ids = [await here.due("mail.digest", target(ack="reported")) for _ in range(30)]
        for id_ in ids:
            await here.job(id_, "dispatched")
        before = {entry["id"]: json.loads(entry["body"])["report"] for entry in await entries(redis)}
        flush(redis)
        await until(
            lambda: here.service.repair_report.repairs.get("message") == 30, about=lambda: here.service.repair_report
        )
        for _ in range(3):
            await here.service.repair_now()
        after = await entries(redis)
        assert {entry["id"]: json.loads(entry["body"])["report"] for entry in after} == before
        assert len(after) == 30


async def test_jobs_lost_by_a_named_target_are_published_again(store_url: str, redis: Redis) -> None:
    async with scene(store_url, broker_redis_stream_url=redis.url) as here:
        await here.app.targets.put("orders", "redis-stream", {"stream": "due", "ack": "reported"})
        ids = [await here.due("mail.digest", {"name": "orders"}) for _ in range(3)]
        for id_ in ids:
            await here.job(id_, "dispatched")
        flush(redis)
        await until(
            lambda: here.service.repair_report.repairs.get("message") == 3, about=lambda: here.service.repair_report
        )
        assert sorted(entry["id"] for entry in await entries(redis)) == sorted(ids)


async def test_a_cancelled_job_is_not_published_again(sqlite_url: str, redis: Redis) -> None:
    async with scene(sqlite_url, broker_redis_stream_url=redis.url) as here:
        cancelled, other = [await here.due("mail.digest", target(ack="reported")) for _ in range(2)]
        for id_ in (cancelled, other):
            await here.job(id_, "dispatched")
        await here.app.cancel(cancelled)
        flush(redis)
        await until(
            lambda: here.service.repair_report.repairs.get("message") == 1, about=lambda: here.service.repair_report
        )
        for _ in range(3):
            await here.service.repair_now()
        assert [entry["id"] for entry in await entries(redis)] == [other]
