"""A real Celery worker runs the task of a due job and reports its result."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis as Client

from tests.brokers.conformance import DELIVERY
from tests.brokers.conftest import flush
from tests.brokers.node import Process, until
from tests.brokers.scene import scene
from tests.servers import Redis
from timebell.targets.brokers import create_broker

REPORTER = Path(__file__).parents[2] / "packages" / "timebell-celery" / "src"


def target(**options: Any) -> dict[str, Any]:
    return {"kind": "celery", "ack": "reported", **options}


@asynccontextmanager
async def celery_worker(folder: Path, url: str, key: str) -> AsyncIterator[Process]:
    """Run a Celery worker for the duration of the block."""
    place = folder / "celery"
    place.mkdir()
    shutil.copy(Path(__file__).with_name("celery_worker.py"), place / "tasks.py")
    command = ("-m", "celery", "-A", "tasks", "worker", "--pool", "solo", "--without-gossip", "--without-mingle",
               "--without-heartbeat", "-l", "info")  # fmt: skip
    running = Process(
        await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=place, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TIMEBELL_API_KEY": key, "BROKER": url, "PYTHONPATH": str(REPORTER)},
        )
    )  # fmt: skip
    try:
        await until(lambda: any("ready." in line for line in running.output), about=lambda: running.output)
        yield running
    finally:
        await running.end()


async def test_the_task_runs_with_the_payload_and_its_report_completes_the_job(
    store_url: str, redis: Redis, tmp_path: Path
) -> None:
    async with (
        scene(store_url, broker_celery_url=redis.url) as here,
        celery_worker(tmp_path, redis.url, here.key) as worker,
    ):
        named = await here.due("nightly", target(task="mail.digest"), payload={"user": 7}, expires_after=600)
        done = await here.job(named, "completed", attempt=1)
        assert done.result == {"rows": 3}
        listed = await here.due("mail.digest", target(), payload=[1, "two"])
        await here.job(listed, "completed")
        retry = {"attempts": 2, "delay": 0.05}
        flaky = await here.due("mail.digest", target(), payload={"failures": 1}, retry=retry)
        await here.job(flaky, "completed", attempt=2)

        async def on_record() -> bool:  # also if the report was faster than the engine
            return [line["error"] for line in (await here.app.get(flaky)).attempts] == ["disk full", None]

        await until(on_record)
        runs = worker.runs()
    first, second = runs[:2]
    assert (first["id"], first["args"], first["kwargs"]) == (done.occurrence_key, [], {"user": 7})
    assert (first["timebell"]["topic"], "payload" in first["timebell"]) == ("nightly", False)
    assert first["expires"] is not None
    assert (second["args"], second["kwargs"]) == ([1, "two"], {})
    assert [run["id"] for run in runs] == [named, listed, flaky, flaky]


async def test_jobs_lost_by_a_flushed_redis_are_published_again_and_run(
    sqlite_url: str, redis: Redis, tmp_path: Path
) -> None:
    async with scene(sqlite_url, broker_celery_url=redis.url) as here:
        ids = [await here.due("mail.digest", target()) for _ in range(10)]
        for id_ in ids:
            await here.job(id_, "dispatched")
        await until(
            lambda: here.service.repair_report.skip_reasons.get("known"), about=lambda: here.service.repair_report
        )
        flush(redis)
        await until(
            lambda: here.service.repair_report.repairs.get("message") == 10, about=lambda: here.service.repair_report
        )
        async with celery_worker(tmp_path, redis.url, here.key) as worker:
            for id_ in ids:
                await here.job(id_, "completed", attempt=1)
            assert sorted(run["id"] for run in worker.runs()) == sorted(ids)


async def test_publishing_completes_a_job_unless_reports_are_requested(sqlite_url: str, redis: Redis) -> None:
    async with scene(sqlite_url, broker_celery_url=redis.url) as here:
        id_ = await here.due("mail.digest", {"kind": "celery", "queue": "late"})
        assert (await here.job(id_, "completed")).result == {"messageId": id_, "task": "mail.digest"}
        async with Client.from_url(redis.url) as client:
            assert await client.llen("late") == 1
            assert not await client.keys("timebell:*")


async def test_an_unresponsive_broker_does_not_block_threads_of_others() -> None:
    connected = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connected.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    celery = create_broker("celery", url, server="http://127.0.0.1:8700", secret_key="k" * 32)
    deliveries = [asyncio.create_task(celery.deliver(DELIVERY, celery.check({}))) for _ in range(40)]
    try:
        await asyncio.wait_for(connected.wait(), 40)
        assert await asyncio.wait_for(asyncio.to_thread(int), 40) == 0
        assert not any(delivery.done() for delivery in deliveries)
    finally:
        for delivery in deliveries:
            delivery.cancel()
        await asyncio.gather(*deliveries, return_exceptions=True)
        server.close()
        for _ in range(5):
            await asyncio.sleep(0)  # connections that were accepted before get their writers
        for writer in writers:
            writer.transport.abort()
        await celery.close()
