"""`python -m benchmarks profile W6|W7|W8|W8s|W9 [options]`: the CPU microseconds of a job, by the step that uses them.

The workload runs twice: once to measure the CPU time of the node, and once under cProfile, whose shares distribute
that time over the steps. cProfile measures only the CPU time of the event loop's thread, so other programs on the
machine do not change the shares; the CPU time of other threads is one row. Shares of small Python functions are too
high, because the profiler adds a constant to each call.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, processes, report
from benchmarks.systems import BenchmarkedSystem, open_systems
from benchmarks.workloads import SCALES, WORKLOADS

PROFILED = ("W6", "W7", "W8", "W8s", "W9")
STEPS = {  # the step of a function, by the first of these parts that its file contains
    "benchmarks/": "handler",
    "timebell/engine/worker": "slots and tasks", "timebell/engine/time_slice": "slots and tasks",
    "timebell/engine/deadlines": "deadlines",
    "timebell/engine/completer": "collect completions", "timebell/engine/": "attempt: prepare, check, outcome",
    "timebell/targets/handler": "attempt: call the handler", "timebell/targets/event_loop_watch":
    "attempt: call the handler", "timebell/targets/thread": "attempt: call the handler",
    "timebell/targets/": "webhook: request and response", "timebell/http_client": "webhook: HTTP client",
    "timebell/model": "attempt: prepare, check, outcome", "timebell/observe": "counters",
    "timebell/store": "claim and complete: rows", "timebell/clock": "clock", "timebell/": "other",
    "sqlalchemy": "database driver", "asyncpg": "database driver", "greenlet": "database driver",
    "sqlite3": "database driver", "aiohttp": "webhook: HTTP client", "h11": "webhook: HTTP client",
    "ssl.py": "webhook: HTTP client", "ipaddress": "webhook: address guard", "socket": "webhook: HTTP client",
    "concurrent/futures": "hand over to threads", "threading": "hand over to threads",
    "asyncio": "event loop", "uvloop": "event loop",
}  # fmt: skip
OTHER = "other"
Function = tuple[str, int, str]


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description=__doc__, allow_abbrev=False)
    parser.add_argument("workload", choices=PROFILED)
    parser.add_argument("--stores", default="postgres")
    parser.add_argument("--scale", default="full", choices=[*SCALES])
    parser.add_argument("--functions", type=int, default=0, help="also print the functions that use the most time")
    return parser.parse_args(argv)


class ProfiledWorkers(processes.Workers):
    """Workers that write a profile to `file`; records the CPU seconds of their main threads."""

    file: str | None = None
    main_seconds = 0.0

    def __init__(self, module: str, url: str, count: int, command: str = "work", **spec: Any) -> None:
        profile = {} if self.file is None or command != "work" else {"profile": self.file}
        super().__init__(module, url, count, command, **spec, **profile)
        self._is_worker = command == "work"

    async def stop(self) -> None:
        if self._is_worker:
            ProfiledWorkers.main_seconds = sum(map(_main_thread_seconds, self.pids)) - self.startup_cpu
        await super().stop()


def _main_thread_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def step_of(function: Function) -> str:
    """Return the step that a profiled function belongs to."""
    file, _, name = function
    path = file.replace("\\", "/")
    if path == "~":
        return "event loop" if "run_forever" in name or "uvloop" in name else OTHER
    return next((step for part, step in STEPS.items() if part in path), OTHER)


def seconds_by_step(stats: pstats.Stats) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds of each step, and of each function. Built-in functions count for their callers."""
    steps: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for function, (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        functions[f"{function[0].rpartition('site-packages/')[2]}:{function[1]} {function[2]}"] += own
        if function[0] != "~" or not callers or step_of(function) != OTHER:
            steps[step_of(function)] += own
            continue
        for caller, (_, _, seconds, _) in callers.items():
            steps[step_of(caller)] += seconds
    return steps, functions


async def _measure(system: BenchmarkedSystem, args: argparse.Namespace) -> str:
    """Return the tables of one store."""
    figures: dict[str, Any] = {}
    original = processes.Workers
    processes.Workers = ProfiledWorkers  # type: ignore[misc]
    try:
        with tempfile.NamedTemporaryFile() as file:
            for path in (None, file.name):
                ProfiledWorkers.file = path
                async with system:
                    run = await WORKLOADS[args.workload](system, 1, SCALES[args.scale])
                if path is None:
                    figures = run | {"main_us": ProfiledWorkers.main_seconds / run["jobs"] * 1e6}
            steps, functions = seconds_by_step(pstats.Stats(file.name))
    finally:
        processes.Workers = original  # type: ignore[misc]
    total = sum(steps.values())
    rows = [["step", "us a job", "share"]]
    for step, seconds in steps.most_common():
        rows.append([step, f"{seconds / total * figures['main_us']:.1f}", f"{seconds / total:.0%}"])
    rows.append(["other threads", f"{figures['worker_us'] - figures['main_us']:.1f}", ""])
    rows.append(["node, in all", f"{figures['worker_us']:.1f}", ""])
    rows.append(["database server", f"{figures['server_cpu_s'] / figures['jobs'] * 1e6:.1f}", ""])
    heading = f"{args.workload} on {system.store}: {figures['jobs']:,} jobs, {figures['jobs_s']:,.0f} jobs/s"
    text = f"{heading}\n\n{report.format_table(rows)}"
    if args.functions:
        top = [["function", "us a job"]]
        top += [
            [name, f"{seconds / total * figures['main_us']:.1f}"]
            for name, seconds in functions.most_common(args.functions)
        ]
        text += f"\n\n{report.format_table(top)}"
    return text


async def _main(args: argparse.Namespace) -> None:
    print(machine.summary_line())
    async with open_systems(args.stores) as systems:
        for system in systems:
            print(f"\n{await _measure(system, args)}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    asyncio.run(_main(_parse_arguments(argv)))
    return 0
