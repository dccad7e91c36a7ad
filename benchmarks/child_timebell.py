"""Timebell's processes of the workloads, which use its public API."""

from __future__ import annotations

import asyncio
import base64
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from benchmarks import child
from timebell.app import Timebell
from timebell.client.job_spec import JobSpec
from timebell.engine.planner import Planner
from timebell.features import FEATURES
from timebell.recurrence import Cron
from timebell.store.jobs import retention
from timebell.store.open import upgrade
from timebell.targets.arrived import Arrived

LOADED_BY_A_NODE = (
    "timebell.engine.service", "timebell.targets.http", "timebell.features.campaigns.engine.chunk_target",
    "timebell.features.triggers.engine.source_poller",
)  # fmt: skip
planner_passes: list[float] = []
"""Durations in ms of the planner passes that fired something."""


async def setup(url: str, _: dict[str, Any]) -> None:
    """Create the tables of an empty database, and the partitions that its first node would create when it starts."""
    await upgrade(url, FEATURES)
    app = Timebell(url, timezone="UTC")
    await app.open()
    await app.store.run(retention.create_partitions, datetime.now(UTC))
    await app.close()
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create one-shots with schedule_many."""
    app = _app(url)
    await app.open()
    due_now = spec["lead"] <= 0
    webhook = spec.get("webhook")
    target = None if webhook is None else {"kind": "http", "url": webhook}

    async def write(batch: list[dict[str, Any]]) -> None:
        await app.schedule_many(
            JobSpec(
                topic="bench",
                run_at=None if due_now else datetime.fromtimestamp(each["due"] / 1000, UTC),
                payload=each,
                tenant_id=spec.get("tenant"),
                target=target,
            )
            for each in batch
        )

    await child.create(spec, write)
    await app.close()


async def repeat(url: str, spec: dict[str, Any]) -> None:
    """Create schedules that fire every minute."""
    app = Timebell(url, timezone="UTC")
    await app.open()
    begin = time.perf_counter()
    for number in range(spec["n"]):
        await app.schedule_repeat("bench", Cron("* * * * *"), name=f"s{number}", payload=child.payload(number, 0))
    child.print_json(seconds=time.perf_counter() - begin, created=time.time())
    await app.close()


async def work(url: str, spec: dict[str, Any]) -> None:
    """Run one node with a handler that records its start, and waits as the workload requires."""
    if spec.get("schedules"):
        _time_planner()
    app = _app(url)
    app.on("bench")(_handler(spec.get("handler", "record"), spec.get("wait_ms", 0) / 1000))

    @app.on("flood")
    async def do_nothing(_: Arrived) -> None:
        pass

    for module in LOADED_BY_A_NODE:  # the peers have imported all of their modules by now
        importlib.import_module(module)
    child.tune_process()
    child.report_startup()
    with child.profiling(spec):
        async with app.running():
            await asyncio.sleep(1)  # until after its first heartbeat
            await child.report_until_closed(spec["out"])
            child.print_json(passes_ms=planner_passes)
    await app.close()


def _app(url: str) -> Timebell:
    """Return the app, which may send webhooks to this machine."""
    app = Timebell(url, timezone="UTC")
    app.settings = replace(
        app.settings, webhook_allow_private=True, webhook_signing_secret=f"whsec_{base64.b64encode(bytes(32)).decode()}"
    )
    return app


def _handler(kind: str, wait_seconds: float) -> Callable[[Arrived], Any]:
    """Return a handler: `record` ends in its first step, `await` waits, `plain` runs in a thread."""

    async def record(event: Arrived) -> None:
        child.record_start(event.payload["i"], event.payload["due"] / 1000)

    async def record_and_await(event: Arrived) -> None:
        child.record_start(event.payload["i"], event.payload["due"] / 1000)
        await asyncio.sleep(wait_seconds)

    def plain(event: Arrived) -> None:
        child.record_start(event.payload["i"], event.payload["due"] / 1000)
        if wait_seconds:
            time.sleep(wait_seconds)

    return {"record": record, "await": record_and_await, "plain": plain}[kind]


def _time_planner() -> None:
    """Record the durations of planner passes in `planner_passes`."""
    step = Planner.step

    async def timed(self: Planner) -> datetime | None:
        before, began = self.node.counters.fired, time.perf_counter()
        until = await step(self)
        if self.node.counters.fired > before:
            planner_passes.append((time.perf_counter() - began) * 1000)
        return until

    Planner.step = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    child.main({"setup": setup, "create": create, "repeat": repeat, "work": work})
