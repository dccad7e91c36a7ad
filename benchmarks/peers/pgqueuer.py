"""Processes of PgQueuer in its best documented configuration: asyncpg pool, uvloop, batches.

It accepts delays, not instants, so its lags include the time between computing the delay and the insert.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import asyncpg
import orjson
from pgqueuer import PgQueuer
from pgqueuer.queries import Queries

from benchmarks import child


async def setup(url: str, _: dict[str, Any]) -> None:
    """Create the tables of an empty database."""
    async with asyncpg.create_pool(url) as pool:
        await Queries.from_asyncpg_pool(pool).install()
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create one-shots with enqueue."""
    async with asyncpg.create_pool(url, min_size=2, max_size=10) as pool:
        queries = Queries.from_asyncpg_pool(pool)

        async def write(batch: list[dict[str, Any]]) -> None:
            now = time.time() * 1000
            delays = None
            if spec["lead"] > 0:
                delays = [timedelta(milliseconds=max(0.0, each["due"] - now)) for each in batch]
            bodies = [orjson.dumps(each) for each in batch]
            await queries.enqueue(["bench"] * len(batch), bodies, [0] * len(batch), delays)

        await child.create(spec, write)


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one worker; schedules can only be defined in code."""
    async with asyncpg.create_pool(url, min_size=2, max_size=10) as pool:
        queue = PgQueuer.from_asyncpg_pool(pool)

        @queue.entrypoint("bench")
        async def handle(job: Any) -> None:
            each = orjson.loads(job.payload)
            child.record_start(each["i"], each["due"] / 1000)
            if wait_ms := spec.get("wait_ms"):
                await asyncio.sleep(wait_ms / 1000)

        def schedule(number: int) -> None:
            @queue.schedule(f"s{number}", "* * * * *")
            async def fire(_: Any) -> None:
                child.record_start(number, 0)

        for number in range(spec.get("schedules", 0)):
            schedule(number)
        child.report_startup()
        running = asyncio.create_task(queue.run(batch_size=250))
        await asyncio.sleep(1)
        await child.report_until_closed(spec["out"])
        queue.shutdown.set()
        await asyncio.wait([running], timeout=5)


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "work": work})
