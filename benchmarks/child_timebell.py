"""Timebell's side of the workloads, through its public API."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from datetime import UTC, datetime
from typing import Any

from benchmarks import child
from timebell.app import Timebell
from timebell.client.jobs import JobSpec
from timebell.engine.planner import Planner
from timebell.recurrence import Cron
from timebell.store.jobs import retention
from timebell.store.open import upgrade
from timebell.targets.handler import Arrived

passes: list[float] = []
"""Of the planner, those that fired something; in ms."""


async def setup(url: str, _: dict[str, Any]) -> None:
    """An empty database gets its tables, and the partitions that its first node would make in its first second."""
    await upgrade(url)
    app = Timebell(url, timezone="UTC")
    await app.open()
    await app.store.run(retention.prepare, datetime.now(UTC))
    await app.close()
    child.tell(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """One-shots, by schedule_many."""
    app = Timebell(url, timezone="UTC")
    await app.open()
    now = spec["lead"] <= 0

    async def write(batch: list[dict[str, Any]]) -> None:
        await app.schedule_many(
            JobSpec(
                topic="bench",
                run_at=None if now else datetime.fromtimestamp(each["due"] / 1000, UTC),
                payload=each,
                tenant_id=spec.get("tenant"),
            )
            for each in batch
        )

    await child.create(spec, write)
    await app.close()


async def repeat(url: str, spec: dict[str, Any]) -> None:
    """Schedules that fire at every minute."""
    app = Timebell(url, timezone="UTC")
    await app.open()
    begin = time.perf_counter()
    for number in range(spec["n"]):
        await app.schedule_repeat("bench", Cron("* * * * *"), name=f"s{number}", payload=child.payload(number, 0))
    child.tell(seconds=time.perf_counter() - begin, created=time.time())
    await app.close()


async def work(url: str, spec: dict[str, Any]) -> None:
    """One node with one async handler that does nothing."""
    if spec.get("schedules"):
        _time_planner()
    app = Timebell(url, timezone="UTC")

    @app.on("bench")
    async def handle(event: Arrived) -> None:
        child.mark(event.payload["i"], event.payload["due"] / 1000)

    @app.on("flood")
    async def pass_by(_: Arrived) -> None:
        pass

    gc.freeze()  # as `timebell run` does
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.0005)
    async with app.running():
        await asyncio.sleep(1)  # past its first heartbeat
        await child.working(spec["out"])
        child.tell(passes_ms=passes)
    await app.close()


def _time_planner() -> None:
    step = Planner.step

    async def timed(self: Planner) -> datetime | None:
        before, began = self.node.counters.fired, time.perf_counter()
        until = await step(self)
        if self.node.counters.fired > before:
            passes.append((time.perf_counter() - began) * 1000)
        return until

    Planner.step = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "repeat": repeat, "work": work})
