"""What a job costs a PostgreSQL: statements, WAL and room on disk. `python -m benchmarks.costs [jobs]`.

The server is that of the other benchmarks (BENCH_POSTGRES_URL, else one of our own). What is counted does not depend on
how busy the machine is, but for the sizes of batches: the more is due at once, the more jobs share a statement.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg

from benchmarks.systems import Server
from timebell import Arrived, JobSpec, Timebell
from timebell.store import transaction
from timebell.store.open import upgrade

PAYLOAD = {"i": 1, "pad": "x" * 80}
BATCH, ALONE = 5_000, 500
FINISHED = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('timebell_finished')"
JOBS = "SELECT pg_total_relation_size('timebell_jobs')"


class Costs:
    """Counts while its block runs."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection

    @asynccontextmanager
    async def of(self, what: str, jobs: int) -> AsyncIterator[None]:
        """Print what these jobs cost, each."""
        passed: Counter[str] = Counter()
        before = await self._wal()
        transaction.probe = lambda point: passed.update([point])
        try:
            yield
        finally:
            transaction.probe = None
        statements = sum(count for point, count in passed.items() if point.rpartition(".")[2].isdigit())
        wal = await self._wal() - before
        print(f"{what:42} {statements / jobs:10.4f} statements  {wal / jobs:8,.0f} bytes of WAL", flush=True)

    async def _wal(self) -> int:
        return int(await self._connection.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


async def measure(url: str, jobs: int) -> None:
    """Make, run and finish so many jobs, and print what that costs."""
    await upgrade(url)
    connection = await asyncpg.connect(url)
    app = Timebell(url, timezone="UTC")

    @app.on("bench")
    async def handle(_: Arrived) -> None:
        pass

    async def made(run_at: Any, count: int) -> None:
        for _ in range(count // BATCH):
            await app.schedule_many([JobSpec(topic="bench", run_at=run_at, payload=PAYLOAD)] * BATCH)

    later = app.clock.now() + timedelta(days=1)
    await app.schedule_at("bench", later)  # opens the store, makes the tenant
    costs = Costs(connection)
    async with costs.of(f"made, {BATCH:,} a call", jobs):
        await made(later, jobs)
    print(f"{'on disk while it waits':42} {await connection.fetchval(JOBS) / jobs:10,.0f} bytes, indexes and all")
    async with costs.of("made, one a call", ALONE):
        for _ in range(ALONE):
            await app.schedule_at("bench", later, payload=PAYLOAD)
    await made(None, jobs)
    async with app.running() as service, costs.of("claimed, run and finished, all due at once", jobs):
        while service.node.counters.ended < jobs:
            await asyncio.sleep(0.05)
    print(
        f"{'on disk when it is finished':42} {await connection.fetchval(FINISHED) / jobs:10,.0f} bytes, indexes and all"
    )
    await app.close()
    await connection.close()


async def main(jobs: int) -> None:
    """In a fresh database."""
    server = Server()
    await server.start()
    name = f"timebell_bench_{os.getpid()}"
    try:
        await measure(await server.fresh(name), jobs)
    finally:
        await server.drop(name)
        await server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000))
