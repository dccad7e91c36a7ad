"""`python -m benchmarks remote [options]`: remote workers that claim the jobs of one node over HTTP.

After a warm-up, measures the rate at which workers claim and complete jobs that are all due, from their first claim to
the last confirmed result, and the time from the instant at which a job is due to the first byte of the response that
its waiting worker receives. The workers share the machine with the node; their own CPU time is printed beside that of
the node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, processes, report
from benchmarks.machine import cpu_seconds
from benchmarks.systems import open_systems

WARM_UP_JOBS = 2_000
DELAY_SECONDS = 15.0
"""Until the first of the jobs that become due one after another, so that the workers wait by then."""


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks remote", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--jobs", type=int, default=50_000, help="jobs that are due when the workers start")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--max", type=int, default=200, help="jobs of one claim")
    parser.add_argument("--timed", type=int, default=500, help="jobs that become due one after another")
    parser.add_argument("--rate", type=float, default=20.0, help="of these jobs, per second")
    return parser.parse_args(argv)


async def _measure(system: Any, args: argparse.Namespace) -> list[list[str]]:
    async with processes.child("child_http", "serve", system.url, {}) as node:
        assert node.stdout is not None
        port = json.loads(await asyncio.wait_for(node.stdout.readline(), 60))["port"]

        async def run(jobs: dict[str, Any], workers: int, most: int) -> dict[str, Any]:
            await processes.run_client("child_remote", "create", system.url, **jobs)
            spec = {"port": port, "n": jobs["n"], "workers": workers, "max": most, "backlog": "interval" not in jobs}
            before = cpu_seconds(node.pid)
            figures = await processes.run_client("child_remote", "work", system.url, **spec)
            return {**figures, "node_us": (cpu_seconds(node.pid) - before) / jobs["n"] * 1e6}

        await run({"n": WARM_UP_JOBS}, args.workers, args.max)
        backlog = await run({"n": args.jobs}, args.workers, args.max)
        timed = {"n": args.timed, "interval": 1 / args.rate, "delay": DELAY_SECONDS}
        lags = await run(timed, args.workers, 1)
    return [[
        system.name, f"{backlog['jobs_s']:,.0f}", f"{backlog['node_us']:,.0f}", f"{backlog['worker_us']:,.0f}",
        *(f"{lags[name]:.1f}" for name in ("p50_ms", "p99_ms", "max_ms")), str(lags["early"]),
        str(backlog["repeated"] + lags["repeated"]),
    ]]  # fmt: skip


async def _main(args: argparse.Namespace) -> bool:
    rows = [["", "jobs/s", "node CPU us/job", "workers CPU us/job", "p50 ms", "p99 ms", "max ms", "early", "repeated"]]
    try:
        async with open_systems(args.stores) as systems:
            for system in systems:
                async with system:
                    rows += await _measure(system, args)
    finally:
        print(machine.summary_line(), report.format_table(rows), sep="\n\n")
    return all(row[-2:] == ["0", "0"] for row in rows[1:])


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if no job ran early or twice."""
    return 0 if asyncio.run(_main(_parse_arguments(argv))) else 1
