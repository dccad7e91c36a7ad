"""`python -m benchmarks pages [options]`: response times of the dashboard with many jobs, and cost of open pages."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx2
from sqlalchemy import insert

from benchmarks import machine, report
from benchmarks.systems import Server, TimebellOnPostgres, TimebellOnSqlite
from timebell import Arrived, Timebell
from timebell.api import health, server, v1
from timebell.dashboard import site
from timebell.ids import new_ids
from timebell.store.schema import finished

PAGES = (
    "/ui/", "/ui/runs", "/ui/schedules", "/ui/jobs", "/ui/jobs?q=status:failed", "/ui/dead-letters", "/ui/nodes",
    "/ui/schedules/new", "/ui/campaigns", "/ui/triggers", "/ui/tenants", "/ui/jobs?q=lag:1ms", "/ui/forecast",
    "/ui/new/trigger", "/ui/new/campaign", "/ui/jobs?from=1h", "/ui/jobs?q=status:failed&from=24h",
    "/ui/jobs?q=status:failed&sort=created", "/ui/jobs?from=30h&to=29h", "/ui/dead-letters?from=24h",
    "/ui/runs?from=1h", "/ui/runs?from=7d", "/ui/schedules?sort=nextFireAt", "/ui/upcoming", "/ui/search?q=topic-3",
)  # fmt: skip
ASSETS = ("timebell.css", "timebell.js", "vendor/htmx.min.js", "vendor/hx-sse.min.js", "vendor/inter.woff2",
         "vendor/mono.woff2")  # fmt: skip
INSERT_BATCH_SIZE = 5_000


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pages", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--history", type=int, default=1_000_000, help="finished jobs of the last two days")
    parser.add_argument("--times", type=int, default=100, help="requests of each page")
    parser.add_argument("--viewers", type=int, default=100, help="open pages")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration for which the pages are open")
    return parser.parse_args(argv)


async def _insert_history(app: Timebell, count: int) -> None:
    """Insert `count` jobs that ended in the last two days; one in a thousand failed."""
    now = app.clock.now()
    for first in range(0, count, INSERT_BATCH_SIZE):
        ended = now - timedelta(days=2) * (1 - first / count) - timedelta(seconds=1)
        rows = [
            {
                "id": id_, "tenant_id": "default", "topic": f"topic-{n % 7}", "kind": "once", "scheduled_at": ended,
                "run_at": ended, "timezone": "UTC", "payload": "null", "queue": "default", "priority": 0,
                "serial": False, "state": "failed" if n % 1000 == 0 else "completed", "attempt": 1, "attempts_used": 1,
                "created_at": ended, "started_at": ended, "finished_at": ended, "error_code": "ValueError",
            }
            for n, id_ in enumerate(new_ids(ended, min(INSERT_BATCH_SIZE, count - first)))
        ]  # fmt: skip
        await app.store.run(lambda tx, rows=rows: tx.execute(insert(finished), rows))


@asynccontextmanager
async def serve(url: str) -> AsyncIterator[tuple[Timebell, str]]:
    """Run a node with the dashboard; yield the app and the base URL."""
    app = Timebell(url)
    app.settings = replace(app.settings, database_auto_upgrade=True, secret_key="benchmark")

    @app.on("tick")
    async def tick(event: Arrived) -> None: ...

    web = server.HttpApp(
        app, [health.router(app), v1.build_routes(app.features), site.build_routes(app.features)], allow_local=True
    )
    listening = server.bind("127.0.0.1", 0)
    async with app.running(), server.serving(web, listening):
        yield app, f"http://127.0.0.1:{listening.getsockname()[1]}"
    await app.close()


async def _measure_pages(base_url: str, store: str, jobs: int, times: int) -> list[list[str]]:
    """Return a row of the table for each page."""
    rows = []
    async with httpx2.AsyncClient(base_url=base_url, timeout=60) as client:
        for path in PAGES:
            durations, failures, size, cpu = [], 0, 0, time.process_time()
            for _ in range(times):
                began = time.perf_counter()
                response = await client.get(path)
                durations.append((time.perf_counter() - began) * 1000)
                failures += response.status_code != 200
                size = len(response.content)
            cpu = (time.process_time() - cpu) * 1000 / times
            first, durations = durations[0], sorted(durations)
            p50, p99 = (durations[int(share * (times - 1))] for share in (0.5, 0.99))
            figures = [first, p50, p99, durations[-1], cpu, size / 1024]
            rows.append([f"{store}: {path}", f"{jobs:,}", *map(report.format_number, figures), str(failures)])
        size = sum([len((await client.get(f"/ui/static/{name}")).content) for name in ASSETS])
        size += len((await client.get("/ui/")).content)
        rows.append(
            [f"{store}: first page with all assets", "", "", "", "", "", "", report.format_number(size / 1024), "0"]
        )
    return rows


async def _view(base_url: str, opened: asyncio.Event, updates: asyncio.Queue[float] | None) -> None:
    """Keep the event stream of a page open; put the time of every update into `updates`."""
    host, port = base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /ui/live HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/event-stream\r\n\r\n".encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"data: "):
                opened.set()
                if updates is not None:
                    updates.put_nowait(time.perf_counter())
    finally:
        writer.close()


async def _measure_live_updates(app: Timebell, base_url: str, store: str, args: argparse.Namespace) -> list[list[str]]:
    """Return rows with the delay from a firing to the tiles, and the share of a core that open pages cost."""
    updates: asyncio.Queue[float] = asyncio.Queue()
    opened = [asyncio.Event() for _ in range(args.viewers)]
    delays = []
    first = asyncio.create_task(_view(base_url, opened[0], updates))
    await opened[0].wait()
    for _ in range(5):
        await asyncio.sleep(2)
        while not updates.empty():
            updates.get_nowait()
        began = time.perf_counter()
        await app.schedule_at("tick", timezone="UTC")
        delays.append(await asyncio.wait_for(updates.get(), 60) - began)

    async def cpu_share() -> float:
        cpu, began = time.process_time(), time.perf_counter()
        while time.perf_counter() - began < args.seconds:
            await app.schedule_at("tick", timezone="UTC")
            await asyncio.sleep(0.5)
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    without_viewers = await cpu_share()
    tasks = [asyncio.create_task(_view(base_url, event, None)) for event in opened]
    for event in opened:
        event.clear()
    await asyncio.gather(*(event.wait() for event in opened))
    with_viewers = await cpu_share()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [
        [
            f"{store}: from a firing to the tiles, s, worst of 5",
            "",
            "",
            report.format_number(max(delays)),
            "",
            "",
            "",
            "",
            "0",
        ],
        [
            f"{store}: {args.viewers} open pages, % of a core",
            "",
            "",
            report.format_number(100 * (with_viewers - without_viewers)),
            "",
            "",
            "",
            "",
            "0",
        ],
    ]


async def _main(args: argparse.Namespace) -> bool:
    database = Server() if "postgres" in args.stores else None
    rows = [["", "jobs", "first ms", "p50 ms", "p99 ms", "worst ms", "CPU ms", "KiB", "failed"]]
    try:
        if database is not None:
            await database.start()
        systems: list[Any] = [TimebellOnSqlite()] if "sqlite" in args.stores else []
        systems += [TimebellOnPostgres(database)] if database is not None else []
        for system in systems:
            async with system, serve(system.url) as (app, base_url):
                await _insert_history(app, args.history)
                rows += await _measure_pages(base_url, system.store, args.history, args.times)
                rows += await _measure_live_updates(app, base_url, system.store, args)
    finally:
        if database is not None:
            await database.close()
        facts = machine.describe()
        print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}\n")
        print(report.format_table(rows))
    return all(row[-1] == "0" for row in rows[1:])


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if every request succeeded."""
    return 0 if asyncio.run(_main(_parse_arguments(argv))) else 1
