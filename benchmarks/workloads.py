"""The workloads, each a function of a system with a new database; README.md describes what they measure.

Lag is the wall clock at the start of the handler minus the due instant, on one machine. Every job has a number, and the
benchmark verifies that every number was recorded exactly once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import processes
from benchmarks.machine import Meter, cpu_seconds, rss_mb
from benchmarks.systems import BenchmarkedSystem, TimebellOnPostgres

Figures = dict[str, Any]
MIN_JOBS_PER_SECOND = 150  # slower runs are aborted
SETTLE_SECONDS = 2.0  # before the idle period is measured
EARLY_SECONDS = 1.0  # a start up to this long before a minute belongs to that minute, and is early
MAX_LATE_SECONDS = 48.0  # wait for starts until this long after the minute
AWAIT_MS = 5  # what an async handler of W7 awaits
BLOCK_MS = 2  # what a plain function of W8s sleeps
CONNECTIONS = 20  # of the client of W12
NODE_START_SECONDS = 10.0  # a node has more to do after its start


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workloads; times in seconds."""

    create: int = 100_000
    burst: int = 20_000
    steady: int = 6_000
    span: float = 30.0
    backlog: int = 1_000_000
    idle: float = 20.0
    schedules: int = 2_000
    drain: int = 50_000
    calls: int = 50_000
    flood: int = 1_000_000
    flood_on_sqlite: int = 200_000
    beside: int = 30
    requests: int = 5_000


SCALES = {
    "full": Sizes(),
    "small": Sizes(10_000, 4_000, 1_000, 5.0, 50_000, 5.0, 200, 10_000, 2_000, 100_000, 60_000, 8),
}


async def w1(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Create one-shots spread over 24 hours, which begin in an hour, with `workers` concurrent clients."""
    each = _count(system, "W1", sizes.create) // workers
    with Meter(system.server_pid) as meter:
        results = await asyncio.gather(
            *(_create(system, each, lead=3600, span=86_400, first=each * n) for n in range(workers))
        )
    seconds = max(result["seconds"] for result in results)
    count = each * workers
    return {"jobs": count, "jobs_s": count / seconds, "lost": count - await system.pending(), **meter.figures}


async def w2(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run jobs due at one instant: from that instant to the last start."""
    return await _run_due(system, workers, _count(system, "W2", sizes.burst), 0.0)


async def w3(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run jobs due at random milliseconds of a period."""
    return await _run_due(system, workers, sizes.steady, sizes.span)


async def w4(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run W3 with a backlog of jobs due in a year; then measure the CPU of an idle period."""
    backlog = _count(system, "W4", sizes.backlog)
    begin = time.monotonic()
    await system.backlog(backlog)
    load_seconds = time.monotonic() - begin
    figures = await _run_due(system, workers, sizes.steady, sizes.span, idle=sizes.idle)
    return {"backlog": backlog, "load_s": load_seconds, **figures}


async def w5(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run schedules that all fire at the next full minute."""
    count = sizes.schedules
    preparation = 8 + count / 80  # seconds to start the workers and create the schedules
    while 60 - time.time() % 60 < preparation:
        await asyncio.sleep(0.2)
    due = (time.time() // 60 + (2 if system.fires_on_creation else 1)) * 60
    async with AsyncExitStack() as stack:
        meter = stack.enter_context(Meter(system.server_pid))
        pool = processes.Workers(system.module, system.url, workers, schedules=count)
        if system.sees_new_jobs:
            await stack.enter_async_context(pool)
        creation = {"seconds": 0.0, "created": time.time()}
        if not system.schedules_in_code:
            creation = await processes.run_client(system.module, "repeat", system.url, n=count)
        if not system.sees_new_jobs:
            await stack.enter_async_context(pool)
        await asyncio.sleep(due - EARLY_SECONDS - time.time())
        before = pool.count  # some systems also fire for the minute of creation
        await _wait_for_starts(pool, before + count, due + MAX_LATE_SECONDS)
        await asyncio.sleep(0.5)  # duplicates would start now
        await pool.stop()
    records = [(number, due, start) for number, _, start in pool.records if start > due - EARLY_SECONDS]
    figures = _lag_figures(records, count)
    figures |= {"created_in": "code" if system.schedules_in_code else "store", "create_s": creation["seconds"]}
    if pool.passes:
        figures |= {"passes": len(pool.passes), "pass_p99_ms": _quantile(sorted(pool.passes), 0.99)}
    return figures | {"created_late": creation["created"] >= due, **meter.figures}


async def w6(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run due jobs that were created before the workers start: from the first start to durable completion."""
    return await _drain(system, workers, _count(system, "W6", sizes.drain))


async def w7(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run W6 with async handlers that await AWAIT_MS."""
    return await _drain(system, workers, _count(system, "W7", sizes.drain), handler="await", wait_ms=AWAIT_MS)


async def w8(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run W6 with plain functions, in threads or child processes, that return immediately."""
    return await _drain(system, workers, _count(system, "W8", sizes.calls), handler="plain", wait_ms=0)


async def w8s(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run W8 with plain functions that sleep BLOCK_MS."""
    return await _drain(system, workers, _count(system, "W8s", sizes.calls), handler="plain", wait_ms=BLOCK_MS)


async def w9(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Run due jobs that are webhooks, sent to a receiver on this machine, which records their arrival."""
    count = _count(system, "W9", sizes.calls)
    async with processes.Workers("child_webhooks", "", 1, "receive") as receiver:
        url = f"http://127.0.0.1:{receiver.port}/hook"
        await _create(system, count, lead=0, span=0, webhook=url)
        with Meter(system.server_pid) as meter:
            async with processes.Workers(system.module, system.url, workers, webhook=url, n=count) as pool:
                end = await _wait_for_completion(
                    system, receiver, count, time.time() + count / MIN_JOBS_PER_SECOND + 30
                )
                cpu = pool.cpu
                await pool.stop()
        await receiver.stop()
    return await _drain_figures(system, receiver, count, end, cpu) | meter.figures


async def w12(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """Create jobs over HTTP, one per request, with CONNECTIONS connections to one node."""
    return await _send_requests(system, sizes.requests, [])


async def w12r(system: BenchmarkedSystem, workers: int, sizes: Sizes) -> Figures:
    """List schedules, of which there are none, over HTTP as in W12."""
    return await _send_requests(system, sizes.requests, ["/schedules"])


async def _send_requests(system: BenchmarkedSystem, count: int, paths: list[str]) -> Figures:
    """Send `count` requests after some that warm up the node: GET `paths`, or without paths POST /jobs."""
    async with processes.child("child_http", system.http_command, system.url, {}) as node:
        assert node.stdout is not None
        port = json.loads(await asyncio.wait_for(node.stdout.readline(), 60))["port"]
        spec = {"port": port, "paths": paths, "connections": CONNECTIONS}
        await processes.run_client("child_http", "send_requests", system.url, n=count // 5, first=0, **spec)
        await asyncio.sleep(NODE_START_SECONDS)
        before = cpu_seconds(node.pid)
        with Meter(system.server_pid) as meter:
            sent = await processes.run_client("child_http", "send_requests", system.url, n=count, first=count, **spec)
        cpu = cpu_seconds(node.pid) - before
    figures = {"jobs": count, "jobs_s": sent["requests_s"], "worker_us": cpu / count * 1e6, "lost": sent["wrong"]}
    return figures | {"lag_p50_ms": sent["p50_ms"], "lag_p99_ms": sent["p99_ms"], **meter.figures}


async def tenants(system: Any, workers: int, sizes: Sizes) -> Figures:
    """Measure the lag of one job per second of a tenant during a flood of due jobs of another; Timebell only."""
    flood = sizes.flood if isinstance(system, TimebellOnPostgres) else sizes.flood_on_sqlite
    begin = time.monotonic()
    await system.flood(flood)
    load_seconds = time.monotonic() - begin
    count = sizes.beside
    with Meter(system.server_pid) as meter:
        creation = await _create(system, count, lead=4, span=count, tenant="other")
        async with processes.Workers(system.module, system.url, workers) as pool:
            begin = time.time()
            await _wait_for_starts(pool, count, creation["due"] + count + 60)
            seconds, remaining = time.time() - begin, await system.pending()
            await pool.stop()
    figures = _lag_figures(pool.records, count)
    figures |= {"flood": flood, "load_s": load_seconds, "flood_left": remaining}
    return (
        figures
        | {"flood_jobs_s": (flood - remaining) / seconds, "created_late": creation["created"] >= creation["due"]}
        | meter.figures
    )


async def _drain(system: BenchmarkedSystem, workers: int, count: int, **spec: Any) -> Figures:
    """Run due jobs that exist before the workers start; `spec` describes their handler."""
    created = await _create(system, count, lead=0, span=0)
    with Meter(system.server_pid) as meter:
        async with processes.Workers(system.module, system.url, workers, **spec) as pool:
            end = await _wait_for_completion(system, pool, count, time.time() + count / MIN_JOBS_PER_SECOND + 30)
            cpu = pool.cpu
            await pool.stop()
    figures = await _drain_figures(system, pool, count, end, cpu)
    return figures | {"create_jobs_s": count / created["seconds"], **meter.figures}


async def _drain_figures(
    system: BenchmarkedSystem, starts: processes.Workers, count: int, end: float, cpu: float
) -> Figures:
    """Return jobs per second from the first start to `end`, and the CPU of the workers per job."""
    figures = await _check(system, starts, count)
    begin = min((start for _, _, start in starts.records), default=end)
    figures = {name: figures[name] for name in figures if not name.startswith("lag")}
    return figures | {
        "jobs_s": count / max(end - begin, 0.001), "durable_s": end - begin, "worker_us": cpu / count * 1e6,
    }  # fmt: skip


async def _run_due(
    system: BenchmarkedSystem, workers: int, count: int, span: float, idle: float | None = None
) -> Figures:
    """Run jobs that a client creates while the workers are idle; then measure `idle` seconds without due jobs."""
    async with AsyncExitStack() as stack:
        pool = processes.Workers(system.module, system.url, workers)
        if system.sees_new_jobs:
            await stack.enter_async_context(pool)
        lead = 3 + count / system.pace
        with Meter(system.server_pid) as meter:
            creation = await _create(system, count, lead=lead, span=span)
            if not system.sees_new_jobs:
                await stack.enter_async_context(pool)
            ready, due = time.time(), creation["due"]
            end = await _wait_for_completion(system, pool, count, due + span + count / MIN_JOBS_PER_SECOND + 30)
        idle_figures = {} if idle is None else await _measure_idle(system, pool, idle)
        await pool.stop()
    figures = await _check(system, pool, count)
    if not span:
        last = max((start for _, _, start in pool.records), default=end)
        figures |= {"jobs_s": count / max(last - due, 0.001), "drain_s": last - due, "durable_s": end - due}
    return figures | {"created_late": ready >= due, **idle_figures, **meter.figures}


def _count(system: BenchmarkedSystem, workload: str, size: int) -> int:
    return min(size, system.max_jobs.get(workload, size))


async def _create(system: BenchmarkedSystem, count: int, **spec: Any) -> Figures:
    return await processes.run_client(
        system.module, "create", system.url, **{"n": count, "first": 0, "batch": system.batch, **spec}
    )


async def _wait_for_starts(pool: processes.Workers, count: int, until: float) -> None:
    while pool.count < count and time.time() < until:
        await asyncio.sleep(0.005)


async def _wait_for_completion(system: BenchmarkedSystem, pool: processes.Workers, count: int, until: float) -> float:
    """Wait until the store has no unfinished job of the run; return that time."""
    await _wait_for_starts(pool, count, until)
    while await system.unfinished() and time.time() < until:
        await asyncio.sleep(0.005)
    return time.time()


async def _measure_idle(system: BenchmarkedSystem, pool: processes.Workers, seconds: float) -> Figures:
    """Return the CPU seconds of the server and of the workers while no job is due."""
    await system.settle()
    await asyncio.sleep(SETTLE_SECONDS)
    before = (cpu_seconds(system.server_pid), sum(map(cpu_seconds, pool.pids)))
    await asyncio.sleep(seconds)
    server, ours = (
        b - a for a, b in zip(before, (cpu_seconds(system.server_pid), sum(map(cpu_seconds, pool.pids))), strict=True)
    )
    return {
        "idle_s": seconds,
        "idle_server_cpu_s": server if system.server_pid else None,
        "idle_worker_cpu_s": ours,
        "worker_rss_mb": sum(map(rss_mb, pool.pids)),
    }


async def _check(system: BenchmarkedSystem, pool: processes.Workers, count: int) -> Figures:
    """Return the lag figures, and the number of jobs that the store does not have as completed."""
    figures = _lag_figures(pool.records, count)
    done = await system.done()
    return figures if done is None else figures | {"not_completed": count - done}


def _lag_figures(records: list[tuple[int, float, float]], count: int) -> Figures:
    """Return counts of errors and quantiles of the lag, from records (number, due, start)."""
    starts = Counter(number for number, _, _ in records)
    lags = sorted((start - due) * 1000 for _, due, start in records)
    figures: Figures = {
        "jobs": count,
        "lost": sum(number not in starts for number in range(count)),
        "dup": sum(times - 1 for times in starts.values()),
        "early": sum(lag < 0 for lag in lags),
    }
    if lags:
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
            figures[f"lag_{name}_ms"] = _quantile(lags, share)
    return figures


def _quantile(values: list[float], share: float) -> float:
    """Return the quantile of sorted values."""
    return values[min(len(values) - 1, int(len(values) * share))]


WORKLOADS = {
    "W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5, "W6": w6, "W7": w7, "W8": w8, "W8s": w8s, "W9": w9,
    "W12": w12, "W12r": w12r, "tenants": tenants,
}  # fmt: skip
