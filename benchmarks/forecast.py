"""`python -m benchmarks forecast [options]`: time to show what runs next, with many pending jobs.

All jobs are due within the period of the forecast, which is the worst case. With `--tenants 2`, half of them belong to
a second tenant. CPU time is that of the node and the database server, or of the command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from benchmarks import machine, report
from benchmarks.pages import serve
from benchmarks.systems import INSERT_JOBS, PAYLOAD_SQL, TimebellOnPostgres, open_systems
from timebell import Every, Timebell

PATHS = (
    "/api/v1/forecast", "/ui/forecast", "/api/v1/forecast/upcoming?limit=500", "/ui/upcoming", "/api/v1/jobs?limit=50",
    "/ui/",
)  # fmt: skip
COMMAND = "timebell upcoming"
POSTGRES_VALUES = {
    "id": "(lpad(to_hex(1760000000000 + i / 1000), 12, '0') || '7' || substr(md5(i::text), 1, 3) || 'a'"
    " || substr(md5(i::text), 4, 15))::uuid",
    "at": "now() + i * interval '{step} us'", "no": "false", "now": "now()",
    "numbers": "generate_series({first}, {last}) i",
}  # fmt: skip
SQLITE_VALUES = {
    "id": "printf('0199c851-0000-7000-a000-%012x', i)",
    "at": "CAST(strftime('%s') AS INTEGER) * 1000000 + i * {step}", "no": "0",
    "now": "CAST(strftime('%s') AS INTEGER) * 1000000",
    "numbers": "(WITH RECURSIVE n(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i < {last})"
    " SELECT i FROM n)",
}  # fmt: skip


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks forecast", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--jobs", type=int, default=1_000_000, help="pending jobs, due within --hours")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--schedules", type=int, default=1_000)
    parser.add_argument("--tenants", type=int, default=1, choices=(1, 2))
    parser.add_argument("--times", type=int, default=10, help="requests of each path")
    return parser.parse_args(argv)


async def _insert_pending(system: Any, app: Timebell, args: argparse.Namespace) -> None:
    await app.schedule_at("tick", timezone="UTC")  # creates the tenant
    values = POSTGRES_VALUES if isinstance(system, TimebellOnPostgres) else SQLITE_VALUES
    share = args.jobs // args.tenants
    for number in range(args.tenants):
        tenant = ("default", "second")[number]
        if number:
            await app.schedule_at("tick", timezone="UTC", tenant_id=tenant)
        ranges = {"first": 1 + number * share, "last": (number + 1) * share}
        sql = INSERT_JOBS.format(
            **{name: text.format(step=int(args.hours * 3.6e9 / args.jobs), **ranges) for name, text in values.items()},
            tenant=tenant, topic="report.daily", payload=PAYLOAD_SQL,
            shared=("true" if isinstance(system, TimebellOnPostgres) else "1") if number else "false",
        )  # fmt: skip
        await system.execute(sql)
    for n in range(args.schedules):
        await app.schedule_repeat("report", Every(f"PT{60 + n % 600}M"), name=f"schedule-{n}", timezone="UTC")
    await system.settle()


async def _measure(call: Callable[[], Any], times: int) -> list[float]:
    """Return the first, the median and the longest duration, in milliseconds."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        await call()
        durations.append((time.perf_counter() - began) * 1000)
    return [durations[0], sorted(durations)[times // 2], max(durations)]


async def _measure_paths(base_url: str, system: Any, args: argparse.Namespace) -> list[list[str]]:
    rows = []
    async with httpx2.AsyncClient(base_url=base_url, timeout=120) as client:
        for path in PATHS:
            failures = 0

            async def get(path: str = path) -> None:
                nonlocal failures
                failures += (await client.get(path)).status_code != 200

            cpu = time.process_time() + machine.cpu_seconds(system.server_pid)
            figures = await _measure(get, args.times)
            cpu = (time.process_time() + machine.cpu_seconds(system.server_pid) - cpu) * 1000 / args.times
            rows.append([f"{system.store}: {path}", *map(report.format_number, [*figures, cpu]), str(failures)])
    return rows


async def _measure_command(base_url: str, store: str, times: int) -> list[str]:
    environment = {**os.environ, "TIMEBELL_URL": base_url}
    arguments = [sys.executable, "-m", "timebell.cli.main", *COMMAND.split()[1:]]
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)

    async def call() -> None:
        await asyncio.to_thread(subprocess.run, arguments, env=environment, check=True, stdout=subprocess.DEVNULL)

    figures = await _measure(call, times)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime) * 1000 / times
    return [f"{store}: {COMMAND}", *map(report.format_number, [*figures, used]), "0"]


async def _main(args: argparse.Namespace) -> bool:
    rows = [["", "first ms", "p50 ms", "worst ms", "CPU ms", "failed"]]
    async with open_systems(args.stores) as systems:
        for system in systems:
            async with system, serve(system.url) as (app, base_url):
                await _insert_pending(system, app, args)
                rows += await _measure_paths(base_url, system, args)
                rows.append(await _measure_command(base_url, system.store, args.times))
    facts = machine.describe()
    print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{args.jobs:,} jobs due within {args.hours:g} h, {args.schedules:,} schedules, tenants: {args.tenants}\n")
    print(report.format_table(rows))
    return all(row[-1] == "0" for row in rows[1:])


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if every request succeeded."""
    return 0 if asyncio.run(_main(_parse_arguments(argv))) else 1
