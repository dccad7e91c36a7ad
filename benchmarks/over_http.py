"""`python -m benchmarks http [options]`: requests per second of one node, sent by a separate process."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from benchmarks import machine, processes, report
from benchmarks.machine import rss_mb
from benchmarks.peers.systems import PEERS
from benchmarks.systems import Server, TimebellOnPostgres, open_systems
from benchmarks.workloads import SCALES, WORKLOADS

LISTS = {
    "newest first": ["/jobs"],
    "pending": ["/jobs?status=pending"],
    "failed (none)": ["/jobs?status=failed"],
    "rare topic": ["/jobs?topic=http"],
    "no such topic": ["/jobs?topic=none"],
    "one owner": ["/jobs?ownerId=o7"],
    "dead letters": ["/dead-letters", "/dead-letters?groupBy=error"],
    "schedules": ["/schedules"],
    "queues": ["/queues"],
}


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks http", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--jobs", type=int, default=5_000, help="jobs created by POST /jobs")
    parser.add_argument("--lines", type=int, default=100_000, help="jobs created by POST /jobs/bulk")
    parser.add_argument("--backlog", type=int, default=1_000_000, help="pending jobs during the list requests")
    parser.add_argument("--pages", type=int, default=300, help="requests of each list")
    parser.add_argument("--connections", type=int, default=20)
    parser.add_argument("--bare", action="store_true", help="only compare with a bare FastAPI route, on PostgreSQL")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of that comparison")
    return parser.parse_args(argv)


@asynccontextmanager
async def _node(system: Any) -> AsyncIterator[tuple[int, int]]:
    """Run one node with its API; yield its port and process id."""
    async with processes.child("child_http", "serve", system.url, {}) as node:
        assert node.stdout is not None
        yield json.loads(await asyncio.wait_for(node.stdout.readline(), 60))["port"], node.pid


async def _measure(system: Any, args: argparse.Namespace) -> list[list[str]]:
    """Return a row (label, jobs in the store, per second, p50 ms, p99 ms, failures) for each kind of request."""
    rows: list[list[str]] = []

    async def request(label: str, jobs: int, n: int, paths: list[str], port: int, connections: int = 1) -> None:
        spec = {"port": port, "n": n, "paths": paths, "connections": connections, "first": jobs}
        result = await processes.run_client("child_http", "send_requests", system.url, **spec)
        figures = [report.format_number(result[name]) for name in ("requests_s", "p50_ms", "p99_ms")]
        rows.append([f"{system.store}: {label}", f"{jobs:,}", *figures, str(result["wrong"])])

    async with _node(system) as (port, pid):
        await request("POST /jobs, 1 connection", 0, args.jobs // 5, [], port)
        await request(
            f"POST /jobs, {args.connections} connections", args.jobs // 5, args.jobs, [], port, args.connections
        )
        memory_before, jobs = rss_mb(pid), args.jobs // 5 + args.jobs
        result = await processes.run_client("child_http", "bulk", system.url, port=port, n=args.lines)
        rate, growth = (
            report.format_number(result["lines_s"]),
            report.format_number(max(0.0, rss_mb(pid) - memory_before)),
        )
        rows.append([f"{system.store}: lines of /jobs/bulk", f"{jobs:,}", rate, "", "", str(result["wrong"])])
        rows.append([f"{system.store}: memory growth, MB", "", growth, "", "", "0"])
    await system.backlog(args.backlog)
    jobs += args.lines + args.backlog
    async with _node(system) as (port, pid):
        await request(f"POST /jobs, {args.connections} connections", jobs, args.jobs // 5, [], port, args.connections)
        for label, paths in LISTS.items():
            await request(label, jobs, args.pages, paths, port)
    return rows


async def _compare_with_bare_route(server: Server, args: argparse.Namespace) -> str:
    """Return the tables of W12 and W12r: Timebell beside a FastAPI route with asyncpg and one statement."""
    sizes, tables = replace(SCALES["full"], requests=args.jobs), []
    for workload in ("W12", "W12r"):
        cells: list[dict[str, Any]] = [
            {"system": system.name, "store": system.store, "processes": 1, "kind": system, "runs": []}
            for system in (TimebellOnPostgres(server), PEERS["bare"](server))
        ]
        for _ in range(args.rounds):
            for cell in cells:
                async with cell["kind"] as system:
                    cell["runs"].append(await WORKLOADS[workload](system, 1, sizes))
        tables.append(
            report.workload_table(workload, [{**cell, "median": report.medians(cell["runs"])} for cell in cells])
        )
    return "\n\n".join(tables)


async def _main(args: argparse.Namespace) -> bool:
    rows = [["", "jobs", "per second", "p50 ms", "p99 ms", "failed"]]
    try:
        async with open_systems("postgres" if args.bare else args.stores) as systems:
            for system in systems:
                if isinstance(system, TimebellOnPostgres):
                    print(await _compare_with_bare_route(system.server, args), end="\n\n")
                if args.bare:
                    continue
                async with system:
                    rows += await _measure(system, args)
    finally:
        if len(rows) > 1:
            print(machine.summary_line(), report.format_table(rows), sep="\n\n")
    return all(row[-1] == "0" for row in rows[1:])


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if every request succeeded."""
    return 0 if asyncio.run(_main(_parse_arguments(argv))) else 1
