"""10,000 jobs for a real BullMQ worker, while Timebell is killed and Redis is flushed: none is lost.

`python -m pytest tests/brokers/test_ten_thousand.py -m slow -s` prints the figures.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.api.web import SECRET
from tests.brokers.conftest import flush
from tests.brokers.node import bullmq_worker, until
from tests.servers import Redis, free_port
from timebell import JobSpec, Timebell
from timebell.ids import new_id
from timebell.store.sql import keys as key_rows
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

JOBS = int(os.environ.get("JOBS", "10000"))
OVER = 60.0  # seconds in which they are due
HANDED = 1.0  # seconds until the worker has begun what Redis had handed to it


@asynccontextmanager
async def node(url: str, redis: Redis, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`timebell run`, killed with -9 at the end of the block."""
    settings = {
        "TIMEBELL_DATABASE_URL": url, "TIMEBELL_BROKER_BULLMQ_URL": redis.url, "TIMEBELL_SECRET_KEY": SECRET,
        "TIMEBELL_URL": f"http://127.0.0.1:{port}", "TIMEBELL_HTTP_PORT": str(port), "TIMEBELL_LOG_LEVEL": "warning",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "timebell.cli.main",
        "run",
        env={**os.environ, **settings},
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_none_is_lost_across_a_kill_and_a_flush(store_url: str, redis: Redis, tmp_path: Path) -> None:
    app, port = Timebell(store_url, timezone="UTC"), free_port()
    app.settings = app.settings.__class__(
        database_url=store_url, broker_bullmq_url=redis.url, secret_key=SECRET, url=f"http://127.0.0.1:{port}"
    )
    await app.open()
    id_, text = keys.mint()
    now = app.clock.now()
    made = Key(id=id_, tenant_id="default", name=new_id(now), role=Role.OPERATOR, created_at=now)
    await app.store.run(key_rows.create, made, keys.digest(SECRET, text))
    begin = now + timedelta(seconds=12)
    target = {"kind": "bullmq", "queue": "mail", "ack": "reported"}
    specs = [
        JobSpec(topic="mail", run_at=begin + timedelta(seconds=OVER * n / JOBS), target=target, timeout=3600,
                payload={"n": n, "milliseconds": 5})
        for n in range(JOBS)
    ]  # fmt: skip
    ids = {job.id for job in await app.schedule_many(specs)}

    async def wait_until(at: datetime) -> None:
        await asyncio.sleep(max(0.0, (at - app.clock.now()).total_seconds()))

    async def completed() -> bool:
        return not (await app.list(status=["pending", "running", "dispatched"], limit=1)).items

    async with bullmq_worker(tmp_path, redis.url, "mail", text, concurrency=50) as worker:
        async with node(store_url, redis, port):
            await wait_until(begin + timedelta(seconds=OVER / 3))
        killed_after = len(worker.runs())
        async with node(store_url, redis, port):
            await wait_until(begin + timedelta(seconds=OVER * 2 / 3))
            flush(redis)
            flushed_at, flushed_after = time.time(), len(worker.runs())
            await until(completed, 900, about=lambda: worker.talk[-5:])
        took = (app.clock.now() - begin).total_seconds()
        ran = [run["id"] for run in worker.runs()]
        first = {run["id"]: run["at"] for run in reversed(worker.runs())}
    counts = Counter(ran)
    twice = [id_ for id_, many in counts.items() if many > 1]
    # Those in the worker's hands, or done without their report being in, when Redis forgot them.
    at_flush = sum(first[id_] < flushed_at + HANDED for id_ in twice)
    states: Counter[str] = Counter()
    cursor = None
    while True:
        page = await app.list(limit=500, cursor=cursor)
        states.update(job.state.value for job in page.items)
        if (cursor := page.next_cursor) is None:
            break
    await app.close()
    print(
        f"\n{store_url.partition(':')[0]}: {JOBS} jobs in {took:.0f} s; kill -9 after {killed_after} runs,"
        f" FLUSHALL after {flushed_after}; {dict(states)}, {len(ids - set(ran))} lost,"
        f" {len(ran) - len(counts)} runs too many, of"
        f" {len(twice)} jobs, {at_flush} of which had begun before the flush and not been reported; load"
        f" {os.getloadavg()[0]:.1f}"
    )
    assert states == {"completed": JOBS}
    assert ids == set(ran)
    assert len(twice) == at_flush
