"""Processes for `benchmarks/steady.py`: a node under a constant load, and the producer of its jobs.

Neither stores anything per job, so that any growth of memory is caused by Timebell.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import time
from datetime import UTC, datetime
from typing import Any

from benchmarks import child
from benchmarks.machine import rss_mb
from timebell.app import Timebell
from timebell.client.job_spec import JobSpec
from timebell.engine.leader import leader
from timebell.observe.counters import Histogram
from timebell.store.jobs.claim import claim_batch
from timebell.targets.arrived import Arrived

LEAD_SECONDS = 3.0  # from creating a job to its due instant
SLICE_SECONDS = 0.25  # the jobs due in one slice are created together
FIRST_BUCKET_MS, BUCKET_FACTOR, BUCKETS = 0.01, 1.05, 400


class TimeHistogram:
    """Histogram of values in milliseconds with an error of 5 % and constant memory."""

    def __init__(self) -> None:
        self.buckets, self.count, self.maximum = [0] * BUCKETS, 0, 0.0

    def add(self, ms: float) -> None:
        """Add a value."""
        bucket = 0
        if ms > FIRST_BUCKET_MS:
            bucket = min(BUCKETS - 1, int(math.log(ms / FIRST_BUCKET_MS, BUCKET_FACTOR)) + 1)
        self.buckets[bucket] += 1
        self.count += 1
        self.maximum = max(self.maximum, ms)

    def pop_figures(self, name: str) -> dict[str, float]:
        """Return the quantiles and the maximum, and clear the histogram."""
        figures = {
            f"{name}_p50_ms": self._quantile(0.5), f"{name}_p99_ms": self._quantile(0.99),
            f"{name}_max_ms": self.maximum,
        }  # fmt: skip
        self.__init__()  # type: ignore[misc]
        return figures

    def _quantile(self, share: float) -> float:
        remaining = self.count * share
        for bucket, count in enumerate(self.buckets):
            remaining -= count
            if remaining <= 0:
                return FIRST_BUCKET_MS * BUCKET_FACTOR**bucket
        return self.maximum


class ClaimRecorder:
    """Replacement for the histogram of a store that also records the durations of claims."""

    def __init__(self, histogram: Histogram, claims: TimeHistogram) -> None:
        self.histogram, self.claims = histogram, claims

    def observe(self, seconds: float, name: str) -> None:
        """Record the duration of an operation, like `Histogram.observe`."""
        if name == claim_batch.__name__:
            self.claims.add(seconds * 1000)
        self.histogram.observe(seconds, name)


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one node; print its figures every `every` seconds."""
    app, lags, claims = Timebell(url, timezone="UTC"), TimeHistogram(), TimeHistogram()
    leader.CLEANUP_INTERVAL_SECONDS = spec["tidy"]

    @app.on("bench")
    async def handle(event: Arrived) -> None:
        lags.add(time.time() * 1000 - event.payload["due"])

    child.tune_process()
    async with app.running(retention=spec["retention"]) as service:
        store: Any = service.node.store
        store.histogram = ClaimRecorder(store.histogram, claims)
        child.print_json(ready=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        closing = asyncio.ensure_future(reader.read())
        while not closing.done():
            await asyncio.wait([closing], timeout=spec["every"])
            counts = {"jobs": lags.count, "claims": claims.count, "mb": rss_mb(os.getpid())}
            child.print_json(**counts, **lags.pop_figures("lag"), **claims.pop_figures("claim"))
    await app.close()


async def produce(url: str, spec: dict[str, Any]) -> None:
    """Create `rate` jobs per second for `seconds`; print their number and how often the producer was behind."""
    app, generator = Timebell(url, timezone="UTC"), random.Random(1)
    await app.open()
    batch_size, created, behind = max(1, round(spec["rate"] * SLICE_SECONDS)), 0, 0
    begin = time.time()
    for number in range(round(spec["seconds"] / SLICE_SECONDS)):
        slice_start = begin + number * SLICE_SECONDS
        if (wait := slice_start - time.time()) > 0:
            await asyncio.sleep(wait)
        behind += time.time() - slice_start > LEAD_SECONDS / 2
        dues = [
            int((slice_start + LEAD_SECONDS + generator.random() * SLICE_SECONDS) * 1000) for _ in range(batch_size)
        ]
        await app.schedule_many(
            JobSpec(topic="bench", run_at=datetime.fromtimestamp(due / 1000, UTC), payload=child.payload(created, due))
            for due in dues
        )
        created += batch_size
    child.print_json(made=created, behind=behind, seconds=time.time() - begin)
    await app.close()


if __name__ == "__main__":
    child.main({"work": work, "produce": produce})
