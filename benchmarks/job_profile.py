"""`python -m benchmarks profile W6|W7|W8|W8s|W9|W12|W12r [options]`: the CPU microseconds of a job or request, by step.

The workload runs twice: once to measure the CPU time of the node, and once under cProfile, whose shares distribute
that time over the steps. cProfile measures only the CPU time of the event loop's thread, so other programs on the
machine do not change the shares; the CPU time of other threads is one row. Shares of small Python functions are too
high, because the profiler adds a constant to each call. The requests of W12 and W12r are also sent to a bare FastAPI
route with one statement.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, processes, report
from benchmarks.peers.systems import PEERS
from benchmarks.systems import BenchmarkedSystem, open_systems
from benchmarks.workloads import SCALES, WORKLOADS

PROFILED = ("W6", "W7", "W8", "W8s", "W9", "W12", "W12r")
HTTP = ("W12", "W12r")
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
HTTP_STEPS = {
    "benchmarks/": "route function", "uvicorn": "HTTP protocol", "timebell/api/connections": "HTTP protocol",
    "timebell/api/server": "limits of requests, common headers", "timebell/api/client_address":
    "limits of requests, common headers", "timebell/api/admission": "fairness between tenants and clients",
    "timebell/api/authentication": "authentication, tenant, rate limit", "timebell/tenancy":
    "authentication, tenant, rate limit", "timebell/api/": "route: arguments, body, response",
    "pydantic": "route: arguments, body, response", "fastapi": "framework", "starlette": "framework",
    "timebell/store/audit": "audit record and usage", "timebell/store/tenancy": "audit record and usage",
    "timebell/model/audit": "audit record and usage", "timebell/store": "store: rows, transactions, connections",
    "timebell/clock": "clock, ids", "timebell/ids": "clock, ids", "uuid": "clock, ids",
    "timebell/": "the job or the list itself", "sqlalchemy": "SQLAlchemy", "greenlet": "SQLAlchemy",
    "asyncpg": "database driver", "asyncio": "event loop", "uvloop": "event loop",
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


class Profile(NamedTuple):
    """Figures of the workload without a profiler, and the seconds of each step and function under the profiler."""

    figures: dict[str, Any]
    steps: Counter[str]
    functions: Counter[str]

    def microseconds(self, name: str, seconds: Counter[str]) -> str:
        """Return the CPU time per job of a step or function."""
        return f"{seconds[name] / sum(self.steps.values()) * self.figures['main_us']:.1f}"


def step_of(function: Function, steps: Mapping[str, str]) -> str:
    """Return the step that a profiled function belongs to."""
    file, _, name = function
    path = file.replace("\\", "/")
    if path == "~":
        return "event loop" if "run_forever" in name or "uvloop" in name else OTHER
    return next((step for part, step in steps.items() if part in path), OTHER)


def seconds_by_step(stats: pstats.Stats, steps: Mapping[str, str]) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds of each step, and of each function. Built-in functions count for their callers."""
    by_step: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    for function, (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        by_function[f"{function[0].rpartition('site-packages/')[2]}:{function[1]} {function[2]}"] += own
        if function[0] != "~" or not callers or step_of(function, steps) != OTHER:
            by_step[step_of(function, steps)] += own
            continue
        for caller, (_, _, seconds, _) in callers.items():
            by_step[step_of(caller, steps)] += seconds
    return by_step, by_function


@contextmanager
def _profiled_nodes(file: str | None) -> Iterator[None]:
    """Let nodes write a profile to `file`, if it is not None, while the block runs."""
    workers, child = processes.Workers, processes.child
    ProfiledWorkers.file = file

    def profiled_child(module: str, command: str, url: str, spec: dict[str, Any]) -> Any:
        return child(module, command, url, spec if file is None else spec | {"profile": file})

    processes.Workers, processes.child = ProfiledWorkers, profiled_child  # type: ignore[misc]
    try:
        yield
    finally:
        processes.Workers, processes.child = workers, child  # type: ignore[misc]


async def _measure(system: BenchmarkedSystem, args: argparse.Namespace) -> Profile:
    figures: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile() as file:
        for path in (None, file.name):
            with _profiled_nodes(path):
                async with system:
                    run = await WORKLOADS[args.workload](system, 1, SCALES[args.scale])
            if path is None:
                main_us = ProfiledWorkers.main_seconds / run["jobs"] * 1e6
                figures = run | {"main_us": run["worker_us"] if args.workload in HTTP else main_us}
        steps = HTTP_STEPS if args.workload in HTTP else STEPS
        return Profile(figures, *seconds_by_step(pstats.Stats(file.name), steps))


def _render(profiles: Mapping[str, Profile], functions: int) -> str:
    """Return the tables of the steps and, if requested, of the functions that use the most time in the first system."""
    first, *_ = each = list(profiles.values())
    rows = [["step", *(f"{name}, us" for name in profiles)]]
    names = dict.fromkeys(name for profile in each for name, _ in profile.steps.most_common())
    rows += [[name, *(profile.microseconds(name, profile.steps) for profile in each)] for name in names]
    totals = {
        "other threads": [profile.figures["worker_us"] - profile.figures["main_us"] for profile in each],
        "node, in all": [profile.figures["worker_us"] for profile in each],
        "database server": [profile.figures["server_cpu_s"] / profile.figures["jobs"] * 1e6 for profile in each],
    }
    rows += [[name, *(f"{value:.1f}" for value in values)] for name, values in totals.items()]
    tables = [", ".join(f"{name}: {profile.figures['jobs_s']:,.0f}/s" for name, profile in profiles.items())]
    tables.append(report.format_table(rows))
    if functions:
        top = [[name, first.microseconds(name, first.functions)] for name, _ in first.functions.most_common(functions)]
        tables.append(report.format_table([["function", "us"], *top]))
    return "\n\n".join(tables)


async def _main(args: argparse.Namespace) -> None:
    print(machine.summary_line())
    async with open_systems(args.stores) as systems:
        for system in systems:
            peers = [PEERS["bare"](system.server)] if args.workload in HTTP and system.store == "postgres" else []
            profiles = {each.name: await _measure(each, args) for each in (system, *peers)}
            print(f"\n{args.workload} on {system.store}, {_render(profiles, args.functions)}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    asyncio.run(_main(_parse_arguments(argv)))
    return 0
