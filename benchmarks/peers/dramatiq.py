"""Processes of Dramatiq: a Redis broker, one process with eight threads, no retries, no results.

It cannot publish in bulk.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks import child

THREADS = 8


def _actor(url: str, wait_seconds: float = 0.0) -> Any:
    """Return the actor of the benchmark on a broker."""
    dramatiq.set_broker(RedisBroker(url=url))

    @dramatiq.actor(actor_name="bench", max_retries=0)
    def bench(i: int, due: int, pad: str) -> None:
        child.record_start(i, due / 1000)
        if wait_seconds:
            time.sleep(wait_seconds)

    return bench


async def setup(_url: str, _: dict[str, Any]) -> None:
    """Do nothing; Redis needs no setup."""
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create jobs that are due now."""
    bench = _actor(url)

    async def write(batch: list[dict[str, Any]]) -> None:
        for each in batch:
            bench.send(**each)

    await child.create(spec, write)


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one worker."""
    bench = _actor(url, spec["wait_ms"] / 1000)
    worker = dramatiq.Worker(bench.broker, worker_threads=THREADS)
    child.report_startup()
    worker.start()
    await child.report_until_closed(spec["out"])
    await asyncio.to_thread(worker.stop)


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "work": work})
