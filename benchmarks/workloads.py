"""The seven workloads, each a function of a system in its fresh database; what they measure is in README.md.

Lag is the wall clock at the start of the handler minus the due instant, on one machine. Every job has a
number, and every number is checked to have been seen once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import processes
from benchmarks.machine import Meter, cpu, rss_mb
from benchmarks.systems import Measured, TimebellOnPostgres

Figures = dict[str, Any]
SLOWEST = 150  # jobs/s below which waiting for a run is given up
SETTLE = 2.0  # seconds for the server to calm down before an idle stretch
EDGE = 1.0  # seconds before a minute in which a start counts as one of it, and as early
MOST_LATE = 48.0  # seconds after a minute that its starts are waited for


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each workload."""

    create: int = 100_000
    burst: int = 20_000
    steady: int = 6_000
    span: float = 30.0
    backlog: int = 1_000_000
    idle: float = 20.0
    schedules: int = 2_000
    drain: int = 50_000
    flood: int = 1_000_000
    flood_on_sqlite: int = 200_000
    beside: int = 30


SCALES = {
    "full": Sizes(),
    "small": Sizes(10_000, 4_000, 1_000, 5.0, 50_000, 5.0, 200, 10_000, 100_000, 60_000, 8),
}


async def w1(system: Measured, workers: int, sizes: Sizes) -> Figures:
    """Create one-shots spread over the 24 hours that begin in an hour; `workers` clients at once."""
    each = _count(system, "W1", sizes.create) // workers
    with Meter(system.server_pid) as meter:
        told = await asyncio.gather(
            *(_create(system, each, lead=3600, span=86_400, first=each * n) for n in range(workers))
        )
    seconds = max(one["seconds"] for one in told)
    count = each * workers
    return {"jobs": count, "jobs_s": count / seconds, "lost": count - await system.pending(), **meter.figures}


async def w2(system: Measured, workers: int, sizes: Sizes) -> Figures:
    """Jobs due at one instant: from that instant to the last start."""
    return await _due(system, workers, _count(system, "W2", sizes.burst), 0.0)


async def w3(system: Measured, workers: int, sizes: Sizes) -> Figures:
    """Jobs at random milliseconds over a time."""
    return await _due(system, workers, sizes.steady, sizes.span)


async def w4(system: Measured, workers: int, sizes: Sizes) -> Figures:
    """W3 with a backlog of jobs due in a year; then what an idle stretch costs."""
    backlog = _count(system, "W4", sizes.backlog)
    begin = time.monotonic()
    await system.backlog(backlog)
    loaded = time.monotonic() - begin
    figures = await _due(system, workers, sizes.steady, sizes.span, idle=sizes.idle)
    return {"backlog": backlog, "load_s": loaded, **figures}


async def w5(system: Measured, workers: int, sizes: Sizes) -> Figures:
    """Schedules that all fire at the next top of a minute."""
    count = sizes.schedules
    need = 8 + count / 80  # seconds to start the workers and write the schedules
    while 60 - time.time() % 60 < need:
        await asyncio.sleep(0.2)
    due = (time.time() // 60 + (2 if system.fires_at_once else 1)) * 60
    own = count if system.in_code else 0
    async with AsyncExitStack() as stack:
        meter = stack.enter_context(Meter(system.server_pid))
        running = processes.Workers(system.module, system.url, workers, schedules=count)
        if system.notices:
            await stack.enter_async_context(running)
        told = {"seconds": 0.0, "created": time.time()}
        if not own:
            told = await processes.call(system.module, "repeat", system.url, n=count)
        if not system.notices:
            await stack.enter_async_context(running)
        await asyncio.sleep(due - EDGE - time.time())
        before = running.count  # some also fire for the minute in which they are made
        await _started(running, before + count, due + MOST_LATE)
        await asyncio.sleep(0.5)  # a second start of one would come about now
        await running.stop()
    records = [(number, due, start) for number, _, start in running.records if start > due - EDGE]
    figures = _lags(records, count) | {"created_in": "code" if own else "store", "create_s": told["seconds"]}
    if running.passes:
        figures |= {"passes": len(running.passes), "pass_p99_ms": _share(sorted(running.passes), 0.99)}
    return figures | {"created_late": told["created"] >= due, **meter.figures}


async def w6(system: Measured, workers: int, sizes: Sizes) -> Figures:
    """Jobs available now, created before the workers start: from the first start to durable completion."""
    count = _count(system, "W6", sizes.drain)
    created = await _create(system, count, lead=0, span=0)
    with Meter(system.server_pid) as meter:
        async with processes.Workers(system.module, system.url, workers) as running:
            end = await _durable(system, running, count, time.time() + count / SLOWEST + 30)
            await running.stop()
    figures = await _checked(system, running, count)
    begin = min((start for _, _, start in running.records), default=end)
    figures = {name: figures[name] for name in figures if not name.startswith("lag")}
    figures |= {"jobs_s": count / max(end - begin, 0.001), "create_jobs_s": count / created["seconds"]}
    return figures | {"durable_s": end - begin, **meter.figures}


async def w7(system: Any, workers: int, sizes: Sizes) -> Figures:
    """A tenant's flood of due jobs, and one job a second of another tenant: how late those are. Of Timebell alone."""
    flood = sizes.flood if isinstance(system, TimebellOnPostgres) else sizes.flood_on_sqlite
    begin = time.monotonic()
    await system.flood(flood)
    loaded = time.monotonic() - begin
    count = sizes.beside
    with Meter(system.server_pid) as meter:
        told = await _create(system, count, lead=4, span=count, tenant="other")
        async with processes.Workers(system.module, system.url, workers) as running:
            since = time.time()
            await _started(running, count, told["due"] + count + 60)
            seconds, left = time.time() - since, await system.pending()
            await running.stop()
    figures = _lags(running.records, count) | {"flood": flood, "load_s": loaded, "flood_left": left}
    return (
        figures
        | {"flood_jobs_s": (flood - left) / seconds, "created_late": told["created"] >= told["due"]}
        | meter.figures
    )


async def _due(system: Measured, workers: int, count: int, span: float, idle: float | None = None) -> Figures:
    """Jobs created by a client while the workers are idle, then due."""
    async with AsyncExitStack() as stack:
        running = processes.Workers(system.module, system.url, workers)
        if system.notices:
            await stack.enter_async_context(running)
        lead = 3 + count / system.pace
        with Meter(system.server_pid) as meter:
            told = await _create(system, count, lead=lead, span=span)
            if not system.notices:
                await stack.enter_async_context(running)
            ready, due = time.time(), told["due"]
            end = await _durable(system, running, count, due + span + count / SLOWEST + 30)
        rest = {} if idle is None else await _idle(system, running, idle)
        await running.stop()
    figures = await _checked(system, running, count)
    if not span:
        last = max((start for _, _, start in running.records), default=end)
        figures |= {"jobs_s": count / max(last - due, 0.001), "drain_s": last - due, "durable_s": end - due}
    return figures | {"created_late": ready >= due, **rest, **meter.figures}


def _count(system: Measured, workload: str, size: int) -> int:
    return min(size, system.most.get(workload, size))


async def _create(system: Measured, count: int, **spec: Any) -> Figures:
    told = await processes.call(
        system.module, "create", system.url, **{"n": count, "first": 0, "batch": system.batch, **spec}
    )
    return told


async def _started(running: processes.Workers, count: int, until: float) -> None:
    while running.count < count and time.time() < until:
        await asyncio.sleep(0.005)


async def _durable(system: Measured, running: processes.Workers, count: int, until: float) -> float:
    """When the store held no unfinished job of the run any more."""
    await _started(running, count, until)
    while await system.unfinished() and time.time() < until:
        await asyncio.sleep(0.005)
    return time.time()


async def _idle(system: Measured, running: processes.Workers, seconds: float) -> Figures:
    """What the server and the workers spend while nothing is due."""
    await system.settle()
    await asyncio.sleep(SETTLE)
    before = (cpu(system.server_pid), sum(map(cpu, running.pids)))
    await asyncio.sleep(seconds)
    server, ours = (b - a for a, b in zip(before, (cpu(system.server_pid), sum(map(cpu, running.pids))), strict=True))
    return {
        "idle_s": seconds,
        "idle_server_cpu_s": server if system.server_pid else None,
        "idle_worker_cpu_s": ours,
        "worker_rss_mb": sum(map(rss_mb, running.pids)),
    }


async def _checked(system: Measured, running: processes.Workers, count: int) -> Figures:
    figures = _lags(running.records, count)
    done = await system.done()
    return figures if done is None else figures | {"not_completed": count - done}


def _lags(records: list[tuple[int, float, float]], count: int) -> Figures:
    seen = Counter(number for number, _, _ in records)
    lags = sorted((start - due) * 1000 for _, due, start in records)
    figures: Figures = {
        "jobs": count,
        "lost": sum(number not in seen for number in range(count)),
        "dup": sum(times - 1 for times in seen.values()),
        "early": sum(lag < 0 for lag in lags),
    }
    if lags:
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
            figures[f"lag_{name}_ms"] = _share(lags, share)
    return figures


def _share(values: list[float], share: float) -> float:
    """The value that so many of these, in order, do not exceed."""
    return values[min(len(values) - 1, int(len(values) * share))]


WORKLOADS = {"W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5, "W6": w6, "W7": w7}
