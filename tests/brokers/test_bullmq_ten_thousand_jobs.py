"""10,000 jobs for a real BullMQ worker, while Timebell is killed and Redis is flushed: none is lost.

`python -m pytest tests/brokers/test_bullmq_ten_thousand_jobs.py -m soak -s` prints the figures.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import redis as client

from tests.api.web import SECRET
from tests.brokers.conftest import flush
from tests.brokers.node import bullmq_worker, until
from tests.servers import Redis, free_port
from timebell import JobSpec, Timebell
from timebell.ids import new_id
from timebell.model.job import Job
from timebell.store.tenancy import api_keys as key_rows
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

JOBS = int(os.environ.get("JOBS", "10000"))
OVER = 60.0  # seconds over which the jobs are due
LOOK = 10.0  # seconds between reconciliations by the leader; it publishes again after two


class Flush(NamedTuple):
    """A FLUSHALL, between these two instants (seconds since 1970)."""

    before: float
    after: float

    @classmethod
    def of(cls, redis: Redis) -> Flush:
        before = time.time()
        flush(redis)
        return cls(before, time.time())

    def explains(self, job: Job, runs: list[float]) -> bool:
        """Return whether this flush explains a second run of a job: published before the flush and not reported by
        then, started before the leader could publish it again, and started again after that."""
        assert job.started_at is not None
        assert job.finished_at is not None
        published, reported = job.started_at.timestamp(), job.finished_at.timestamp()
        if len(runs) != 2 or not published < self.after or not reported > self.before:
            return False
        return min(runs) < self.before + LOOK <= max(runs)


def queued(redis: Redis) -> int:
    """Return the number of unfinished jobs in BullMQ."""
    with client.Redis.from_url(redis.url) as connection:
        lists = sum(connection.llen(f"bull:mail:{name}") for name in ("wait", "active", "paused"))
        return int(lists + sum(connection.zcard(f"bull:mail:{name}") for name in ("prioritized", "delayed")))


@asynccontextmanager
async def node(url: str, redis: Redis, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `timebell run`; kill it with -9 at the end of the block."""
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


@pytest.mark.soak  # a minute in real time
async def test_no_job_is_lost_across_a_kill_and_a_flush(store_url: str, redis: Redis, tmp_path: Path) -> None:
    app, port = Timebell(store_url, timezone="UTC"), free_port()
    app.settings = app.settings.__class__(
        database_url=store_url, broker_bullmq_url=redis.url, secret_key=SECRET, url=f"http://127.0.0.1:{port}"
    )
    await app.open()
    id_, text = keys.generate_key()
    now = app.clock.now()
    made = Key(id=id_, tenant_id="default", name=new_id(now), role=Role.OPERATOR, created_at=now)
    await app.store.run(key_rows.create_key, made, keys.digest(SECRET, text))
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
            flushed = Flush.of(redis)
            flushed_after = len(worker.runs())
            await until(completed, 900, about=lambda: worker.output[-5:])
            took = (app.clock.now() - begin).total_seconds()
            await until(lambda: not queued(redis), 300, about=lambda: queued(redis))  # second runs happen now
        runs: dict[str, list[float]] = defaultdict(list)
        for run in worker.runs():
            runs[run["id"]].append(run["at"])
    jobs: dict[str, Job] = {}
    cursor = None
    while True:
        page = await app.list(limit=500, cursor=cursor)
        jobs |= {job.id: job for job in page.items}
        if (cursor := page.next_cursor) is None:
            break
    await app.close()
    states = Counter(job.state.value for job in jobs.values())
    twice = {id_: at for id_, at in runs.items() if len(at) > 1}
    strange = {id_: at for id_, at in twice.items() if not flushed.explains(jobs[id_], at)}
    print(
        f"\n{store_url.partition(':')[0]}: {JOBS} jobs in {took:.0f} s; kill -9 after {killed_after} runs,"
        f" FLUSHALL after {flushed_after}; {dict(states)}, {len(ids - set(runs))} lost,"
        f" {sum(map(len, runs.values())) - len(runs)} runs too many, of {len(twice)} jobs,"
        f" {len(twice) - len(strange)} of which the worker had when Redis was flushed, unreported;"
        f" load {os.getloadavg()[0]:.1f}"
    )
    assert 0 < killed_after < flushed_after < JOBS, "the kill or the flush did not come amid the work: too busy here"
    assert states == {"completed": JOBS}
    assert ids == set(runs)
    assert not strange, [(jobs[id_], at, flushed) for id_, at in list(strange.items())[:5]]
