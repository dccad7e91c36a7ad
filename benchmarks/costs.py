"""Cost of a job for PostgreSQL: statements, WAL and disk space. `python -m benchmarks.costs [jobs]`.

The server is that of BENCH_POSTGRES_URL, or a temporary one. The load of the machine influences the figures only
through the sizes of batches: the more jobs are due simultaneously, the more of them share a statement.

The WAL is also printed by table and index, if the server (15 or newer) has the extension pg_walinspect.
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
from timebell.features import FEATURES
from timebell.store import transaction
from timebell.store.open import upgrade

PAYLOAD = {"i": 1, "pad": "x" * 80}
BATCH, SINGLE_CALLS = 5_000, 500  # jobs
FINISHED_BYTES = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('timebell_finished')"
JOBS_BYTES = "SELECT pg_total_relation_size('timebell_jobs')"
# Partitions count for their parents. Records of several pages, as of a page split, count for the first of them.
WAL_BY_RELATION = """
SELECT COALESCE(parent.relname, relation.relname, 'commits, vacuum and others') AS name, sum(wal.record_length) AS bytes
FROM pg_get_wal_records_info($1, $2) AS wal
LEFT JOIN pg_class relation
    ON pg_relation_filenode(relation.oid) = CAST(substring(wal.block_ref FROM 'rel \\d+/\\d+/(\\d+)') AS oid)
LEFT JOIN pg_inherits ON inhrelid = relation.oid
LEFT JOIN pg_class parent ON parent.oid = inhparent
GROUP BY 1 ORDER BY 2 DESC
"""
SMALLEST_SHARE_BYTES = 1  # of the WAL of a job, to be printed


class CostMeter:
    """Count statements and WAL bytes while a block runs."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection

    @asynccontextmanager
    async def measure(self, label: str, jobs: int) -> AsyncIterator[None]:
        """Print the cost per job of the block."""
        points: Counter[str] = Counter()
        before = await self._wal_position()
        transaction.probe = lambda point: points.update([point])
        try:
            yield
        finally:
            transaction.probe = None
        statements = sum(count for point, count in points.items() if point.rpartition(".")[2].isdigit())
        after = await self._wal_position()
        wal = (after - before) / jobs
        print(f"{label:42} {statements / jobs:10.4f} statements  {wal:8,.0f} bytes of WAL", flush=True)
        for name, size in await self._wal_by_relation(before, after):
            if size / jobs >= SMALLEST_SHARE_BYTES:
                print(f"    {name:59} {size / jobs:8,.0f}", flush=True)

    async def _wal_position(self) -> int:
        return int(await self._connection.fetchval("SELECT pg_current_wal_flush_lsn()"))

    async def _wal_by_relation(self, before: int, after: int) -> list[tuple[str, float]]:
        """Return the tables and indexes with their bytes of WAL, largest first; empty if the server cannot tell."""
        try:
            await self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
            rows = await self._connection.fetch(WAL_BY_RELATION, before, after)
        except asyncpg.PostgresError:
            return []
        return [(row["name"], float(row["bytes"])) for row in rows]


async def measure(url: str, jobs: int) -> None:
    """Create, run and finish `jobs` jobs, and print their cost."""
    await upgrade(url, FEATURES)
    connection = await asyncpg.connect(url)
    app = Timebell(url, timezone="UTC")

    @app.on("bench")
    async def handle(_: Arrived) -> None:
        pass

    async def create(run_at: Any, count: int) -> None:
        for _ in range(count // BATCH):
            await app.schedule_many([JobSpec(topic="bench", run_at=run_at, payload=PAYLOAD)] * BATCH)

    later = app.clock.now() + timedelta(days=1)
    await app.schedule_at("bench", later)  # opens the store, creates the tenant
    meter = CostMeter(connection)
    async with meter.measure(f"create, {BATCH:,} per call", jobs):
        await create(later, jobs)
    print(f"{'pending, on disk':42} {await connection.fetchval(JOBS_BYTES) / jobs:10,.0f} bytes, with indexes")
    async with meter.measure("create, one per call", SINGLE_CALLS):
        for _ in range(SINGLE_CALLS):
            await app.schedule_at("bench", later, payload=PAYLOAD)
    await create(None, jobs)
    async with app.running() as service, meter.measure("claim, run and finish, all due at one instant", jobs):
        while service.node.counters.ended < jobs:
            await asyncio.sleep(0.05)
    print(f"{'finished, on disk':42} {await connection.fetchval(FINISHED_BYTES) / jobs:10,.0f} bytes, with indexes")
    await app.close()
    await connection.close()


async def main(jobs: int) -> None:
    """Measure in a new database, and drop it."""
    server = Server()
    await server.start()
    name = f"timebell_bench_{os.getpid()}"
    try:
        await measure(await server.create_database(name), jobs)
    finally:
        await server.drop_database(name)
        await server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000))
