"""APScheduler's side: a store in PostgreSQL, 20 threads, nothing dropped for being late. It has no call for many, and
does not notice what other processes make, so its worker starts after them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from benchmarks import child

NAME = "benchmarks.peers.apscheduler"


def tick(i: int, due: int, pad: str) -> None:
    """A one-shot."""
    child.mark(i, due / 1000)


def fire(i: int) -> None:
    """A schedule."""
    child.mark(i, 0)


def _scheduler(url: str) -> BackgroundScheduler:
    return BackgroundScheduler(
        jobstores={"default": SQLAlchemyJobStore(url=url.replace("postgresql://", "postgresql+psycopg://"))},
        executors={"default": ThreadPoolExecutor(20)}, timezone="UTC",
        job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
    )  # fmt: skip


async def setup(url: str, _: dict[str, Any]) -> None:
    """An empty database gets its table."""
    scheduler = _scheduler(url)
    scheduler.start(paused=True)
    scheduler.shutdown()
    child.tell(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """One-shots."""
    scheduler = _scheduler(url)
    scheduler.start(paused=True)

    async def write(batch: list[dict[str, Any]]) -> None:
        for each in batch:
            at = datetime.fromtimestamp(each["due"] / 1000, UTC)
            scheduler.add_job(f"{NAME}:tick", "date", run_date=at, kwargs=each, id=str(each["i"]))

    await child.create(spec, write)
    scheduler.shutdown()


async def repeat(url: str, spec: dict[str, Any]) -> None:
    """Schedules of every minute."""
    scheduler = _scheduler(url)
    scheduler.start(paused=True)
    begin = time.perf_counter()
    for number in range(spec["n"]):
        scheduler.add_job(f"{NAME}:fire", "cron", minute="*", second="0", args=[number], id=f"s{number}")
    child.tell(seconds=time.perf_counter() - begin, created=time.time())
    scheduler.shutdown()


async def work(url: str, spec: dict[str, Any]) -> None:
    """One scheduler, which is its own worker."""
    scheduler = _scheduler(url)
    scheduler.start()
    await child.working(spec["out"])
    await asyncio.to_thread(scheduler.shutdown, wait=False)


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "repeat": repeat, "work": work})
