"""A node under a steady rate, and who makes its jobs, for `benchmarks/steady.py`. Neither keeps anything by job, so
that what grows is Timebell's."""

from __future__ import annotations

import asyncio
import gc
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
from timebell.client.jobs import JobSpec
from timebell.engine.leader import leader
from timebell.observe.counters import Spread
from timebell.targets.handler import Arrived

LEAD, SLICE = 3.0, 0.25  # seconds from making a job to its due instant; of jobs that are made at once
LEAST, STEP, MOST = 0.01, 1.05, 400  # ms; the buckets of a histogram, each so many times the one before


class Times:
    """How values in milliseconds are distributed, within 5 %, in room that does not grow."""

    def __init__(self) -> None:
        self.buckets, self.count, self.most = [0] * MOST, 0, 0.0

    def add(self, ms: float) -> None:
        """Take a value in."""
        at = 0 if ms <= LEAST else min(MOST - 1, int(math.log(ms / LEAST, STEP)) + 1)
        self.buckets[at] += 1
        self.count += 1
        self.most = max(self.most, ms)

    def told(self, name: str) -> dict[str, float]:
        """Its figures; then it is empty."""
        found = {f"{name}_p50_ms": self._share(0.5), f"{name}_p99_ms": self._share(0.99), f"{name}_max_ms": self.most}
        self.__init__()  # type: ignore[misc]
        return found

    def _share(self, share: float) -> float:
        left = self.count * share
        for at, count in enumerate(self.buckets):
            left -= count
            if left <= 0:
                return LEAST * STEP**at
        return self.most


class Claims:
    """Where a store's times go: those of claims here as well."""

    def __init__(self, spread: Spread, times: Times) -> None:
        self.spread, self.times = spread, times

    def observe(self, took: float, name: str) -> None:
        """As in Spread."""
        if name == "claim":
            self.times.add(took * 1000)
        self.spread.observe(took, name)


async def work(url: str, spec: dict[str, Any]) -> None:
    """One node, that says every `every` seconds how it goes."""
    app, lags, claims = Timebell(url, timezone="UTC"), Times(), Times()
    leader.TIDY_EVERY = spec["tidy"]

    @app.on("bench")
    async def handle(event: Arrived) -> None:
        lags.add(time.time() * 1000 - event.payload["due"])

    gc.freeze()  # as `timebell run` does
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.0005)
    async with app.running(retention=spec["retention"]) as service:
        store: Any = service.node.store
        store.spread = Claims(store.spread, claims)
        child.tell(ready=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        closing = asyncio.ensure_future(reader.read())
        while not closing.done():
            await asyncio.wait([closing], timeout=spec["every"])
            counts = {"jobs": lags.count, "claims": claims.count, "mb": rss_mb(os.getpid())}
            child.tell(**counts, **lags.told("lag"), **claims.told("claim"))
    await app.close()


async def make(url: str, spec: dict[str, Any]) -> None:
    """`rate` jobs a second for so many `seconds`; how many there were, and how often it was behind."""
    app, chance = Timebell(url, timezone="UTC"), random.Random(1)
    await app.open()
    each, made, behind = max(1, round(spec["rate"] * SLICE)), 0, 0
    begin = time.time()
    for turn in range(round(spec["seconds"] / SLICE)):
        since = begin + turn * SLICE
        if (early := since - time.time()) > 0:
            await asyncio.sleep(early)
        behind += time.time() - since > LEAD / 2
        dues = [int((since + LEAD + chance.random() * SLICE) * 1000) for _ in range(each)]
        await app.schedule_many(
            JobSpec(topic="bench", run_at=datetime.fromtimestamp(due / 1000, UTC), payload=child.payload(made, due))
            for due in dues
        )
        made += each
    child.tell(made=made, behind=behind, seconds=time.time() - begin)
    await app.close()


if __name__ == "__main__":
    child.main({"work": work, "make": make})
