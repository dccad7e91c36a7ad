"""Processes of APScheduler: a store in PostgreSQL, 20 threads, no misfire limit.

It cannot add jobs in bulk. A running scheduler does not see jobs that other processes add, so the worker starts after
them.
"""

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
    """Run a one-shot."""
    child.record_start(i, due / 1000)


def fire(i: int) -> None:
    """Run a job of a schedule."""
    child.record_start(i, 0)


def _scheduler(url: str) -> BackgroundScheduler:
    return BackgroundScheduler(
        jobstores={"default": SQLAlchemyJobStore(url=url.replace("postgresql://", "postgresql+psycopg://"))},
        executors={"default": ThreadPoolExecutor(20)}, timezone="UTC",
        job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
    )  # fmt: skip


async def setup(url: str, _: dict[str, Any]) -> None:
    """Create the table of an empty database."""
    scheduler = _scheduler(url)
    scheduler.start(paused=True)
    scheduler.shutdown()
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create one-shots."""
    scheduler = _scheduler(url)
    scheduler.start(paused=True)

    async def write(batch: list[dict[str, Any]]) -> None:
        for each in batch:
            at = datetime.fromtimestamp(each["due"] / 1000, UTC)
            scheduler.add_job(f"{NAME}:tick", "date", run_date=at, kwargs=each, id=str(each["i"]))

    await child.create(spec, write)
    scheduler.shutdown()


async def repeat(url: str, spec: dict[str, Any]) -> None:
    """Create schedules that fire every minute."""
    scheduler = _scheduler(url)
    scheduler.start(paused=True)
    begin = time.perf_counter()
    for number in range(spec["n"]):
        scheduler.add_job(f"{NAME}:fire", "cron", minute="*", second="0", args=[number], id=f"s{number}")
    child.print_json(seconds=time.perf_counter() - begin, created=time.time())
    scheduler.shutdown()


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one scheduler, which also executes the jobs."""
    scheduler = _scheduler(url)
    scheduler.start()
    await child.report_until_closed(spec["out"])
    await asyncio.to_thread(scheduler.shutdown, wait=False)


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "repeat": repeat, "work": work})
