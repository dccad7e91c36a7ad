"""Processes of Huey: Redis, one consumer process with eight threads that wait for jobs, no results.

It cannot publish in bulk.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

from huey import RedisHuey

from benchmarks import child

THREADS = 8


def _task(url: str, wait_seconds: float = 0.0) -> tuple[RedisHuey, Any]:
    """Return the queue, and the task of the benchmark."""
    huey = RedisHuey("bench", host="127.0.0.1", port=urlsplit(url).port, results=False, blocking=True)

    @huey.task(name="bench")  # type: ignore[untyped-decorator]
    def bench(i: int, due: int, pad: str) -> None:
        child.record_start(i, due / 1000)
        if wait_seconds:
            time.sleep(wait_seconds)

    return huey, bench


async def setup(_url: str, _: dict[str, Any]) -> None:
    """Do nothing; Redis needs no setup."""
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create jobs that are due now."""
    _, bench = _task(url)

    async def write(batch: list[dict[str, Any]]) -> None:
        for each in batch:
            bench(**each)

    await child.create(spec, write)


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one consumer."""
    huey, _ = _task(url, spec["wait_ms"] / 1000)
    consumer = huey.create_consumer(workers=THREADS, worker_type="thread", periodic=False, initial_delay=0.001)
    child.report_startup()
    consumer.start()
    await child.report_until_closed(spec["out"])
    await asyncio.to_thread(consumer.stop)


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "work": work})
