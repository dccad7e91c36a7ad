"""`python -m benchmarks http [options]`: what one node answers over HTTP, asked by a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import machine, processes, report
from benchmarks.machine import rss_mb
from benchmarks.systems import chosen

PAGES = {
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


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks http", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--jobs", type=int, default=5_000, help="by POST /jobs")
    parser.add_argument("--lines", type=int, default=100_000, help="by POST /jobs/bulk")
    parser.add_argument("--backlog", type=int, default=1_000_000, help="pending jobs under the pages")
    parser.add_argument("--pages", type=int, default=300, help="requests of each page")
    parser.add_argument("--connections", type=int, default=16)
    return parser.parse_args(given)


@asynccontextmanager
async def _node(system: Any) -> AsyncIterator[tuple[int, int]]:
    """One node with its API: its port and process id."""
    async with processes.child("child_http", "serve", system.url, {}) as node:
        assert node.stdout is not None
        yield json.loads(await asyncio.wait_for(node.stdout.readline(), 60))["port"], node.pid


async def _measure(system: Any, given: argparse.Namespace) -> list[list[str]]:
    """A row of (what, jobs in the store, a second, p50 ms, p99 ms, wrong) for each thing asked."""
    rows: list[list[str]] = []

    async def ask(what: str, there: int, n: int, paths: list[str], port: int, connections: int = 1) -> None:
        spec = {"port": port, "n": n, "paths": paths, "connections": connections, "first": there}
        found = await processes.call("child_http", "ask", system.url, **spec)
        figures = [report.number(found[name]) for name in ("requests_s", "p50_ms", "p99_ms")]
        rows.append([f"{system.store}: {what}", f"{there:,}", *figures, str(found["wrong"])])

    async with _node(system) as (port, pid):
        await ask("POST /jobs, 1 connection", 0, given.jobs // 5, [], port)
        await ask(
            f"POST /jobs, {given.connections} connections", given.jobs // 5, given.jobs, [], port, given.connections
        )
        before, there = rss_mb(pid), given.jobs // 5 + given.jobs
        found = await processes.call("child_http", "bulk", system.url, port=port, n=given.lines)
        rate, grown = report.number(found["lines_s"]), report.number(max(0.0, rss_mb(pid) - before))
        rows.append([f"{system.store}: lines of /jobs/bulk", f"{there:,}", rate, "", "", str(found["wrong"])])
        rows.append([f"{system.store}: MB of memory that took", "", grown, "", "", "0"])
    await system.backlog(given.backlog)
    there += given.lines + given.backlog
    async with _node(system) as (port, pid):
        await ask(f"POST /jobs, {given.connections} connections", there, given.jobs // 5, [], port, given.connections)
        for what, paths in PAGES.items():
            await ask(what, there, given.pages, paths, port)
    return rows


async def _main(given: argparse.Namespace) -> bool:
    rows = [["", "jobs there", "a second", "p50 ms", "p99 ms", "wrong"]]
    try:
        async with chosen(given.stores) as systems:
            for system in systems:
                async with system:
                    rows += await _measure(system, given)
    finally:
        print(machine.line(), report.table(rows), sep="\n\n")
    return all(row[-1] == "0" for row in rows[1:])


def main(given: Sequence[str]) -> int:
    """The exit status: 0 if every answer was a success."""
    return 0 if asyncio.run(_main(_arguments(given))) else 1
