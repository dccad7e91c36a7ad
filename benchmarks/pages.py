"""`python -m benchmarks pages [options]`: how fast the dashboard is over many jobs, and what open pages cost."""

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
    "/ui/new/trigger", "/ui/new/campaign",
)  # fmt: skip
FILES = ("timebell.css", "timebell.js", "vendor/htmx.min.js", "vendor/hx-sse.min.js", "vendor/inter.woff2",
         "vendor/mono.woff2")  # fmt: skip
CHUNK = 5_000


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pages", description=__doc__, allow_abbrev=False)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--history", type=int, default=1_000_000, help="finished jobs of the last two days")
    parser.add_argument("--times", type=int, default=20, help="requests of each page")
    parser.add_argument("--viewers", type=int, default=100, help="open pages")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which they are open")
    return parser.parse_args(given)


async def _history(app: Timebell, many: int) -> None:
    """So many jobs that ended in the last two days, one in a thousand of them failed."""
    now = app.clock.now()
    for first in range(0, many, CHUNK):
        ended = now - timedelta(days=2) * (1 - first / many) - timedelta(seconds=1)
        rows = [
            {
                "id": id_, "tenant_id": "default", "topic": f"topic-{n % 7}", "kind": "once", "scheduled_at": ended,
                "run_at": ended, "timezone": "UTC", "payload": "null", "queue": "default", "priority": 0,
                "serial": False, "state": "failed" if n % 1000 == 0 else "completed", "attempt": 1, "tries": 1,
                "created_at": ended, "started_at": ended, "finished_at": ended, "error_code": "ValueError",
            }
            for n, id_ in enumerate(new_ids(ended, min(CHUNK, many - first)))
        ]  # fmt: skip
        await app.store.run(lambda tx, rows=rows: tx.execute(insert(finished), rows))


@asynccontextmanager
async def _served(url: str) -> AsyncIterator[tuple[Timebell, str]]:
    app = Timebell(url)
    app.settings = replace(app.settings, database_auto_upgrade=True, secret_key="benchmark")

    @app.on("tick")
    async def tick(event: Arrived) -> None: ...

    web = server.Site(app, [health.router(app), v1.routes, site.routes], open_here=True)
    listening = server.bind("127.0.0.1", 0)
    async with app.running(), server.serving(web, listening):
        yield app, f"http://127.0.0.1:{listening.getsockname()[1]}"
    await app.close()


async def _pages(at: str, store: str, there: int, times: int) -> list[list[str]]:
    rows = []
    async with httpx2.AsyncClient(base_url=at, timeout=60) as client:
        for path in PAGES:
            took, wrong, size, cpu = [], 0, 0, time.process_time()
            for _ in range(times):
                began = time.perf_counter()
                answer = await client.get(path)
                took.append((time.perf_counter() - began) * 1000)
                wrong += answer.status_code != 200
                size = len(answer.content)
            cpu = (time.process_time() - cpu) * 1000 / times
            first, took = took[0], sorted(took)
            figures = [first, took[len(took) // 2], took[-1], cpu, size / 1024]
            rows.append([f"{store}: {path}", f"{there:,}", *map(report.number, figures), str(wrong)])
        size = sum([len((await client.get(f"/ui/static/{name}")).content) for name in FILES])
        size += len((await client.get("/ui/")).content)
        rows.append([f"{store}: first page with all its files", "", "", "", "", "", report.number(size / 1024), "0"])
    return rows


async def _viewer(at: str, opened: asyncio.Event, news: asyncio.Queue[float] | None) -> None:
    """One open page."""
    host, port = at.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /ui/live HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/event-stream\r\n\r\n".encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"data: "):
                opened.set()
                if news is not None:
                    news.put_nowait(time.perf_counter())
    finally:
        writer.close()


async def _live(app: Timebell, at: str, store: str, given: argparse.Namespace) -> list[list[str]]:
    """How long a firing takes to the tiles, and the share of a core that open pages cost."""
    news: asyncio.Queue[float] = asyncio.Queue()
    opened = [asyncio.Event() for _ in range(given.viewers)]
    late = []
    first = asyncio.create_task(_viewer(at, opened[0], news))
    await opened[0].wait()
    for _ in range(5):
        await asyncio.sleep(2)
        while not news.empty():
            news.get_nowait()
        began = time.perf_counter()
        await app.schedule_at("tick", timezone="UTC")
        late.append(await asyncio.wait_for(news.get(), 60) - began)

    async def busy() -> float:
        cpu, began = time.process_time(), time.perf_counter()
        while time.perf_counter() - began < given.seconds:
            await app.schedule_at("tick", timezone="UTC")
            await asyncio.sleep(0.5)
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    alone = await busy()
    tasks = [asyncio.create_task(_viewer(at, event, None)) for event in opened]
    for event in opened:
        event.clear()
    await asyncio.gather(*(event.wait() for event in opened))
    seen = await busy()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [
        [f"{store}: from a firing to the tiles, s, worst of 5", "", "", report.number(max(late)), "", "", "", "0"],
        [
            f"{store}: {given.viewers} open pages, % of a core",
            "",
            "",
            report.number(100 * (seen - alone)),
            "",
            "",
            "",
            "0",
        ],
    ]


async def _main(given: argparse.Namespace) -> bool:
    database = Server() if "postgres" in given.stores else None
    rows = [["", "jobs there", "first ms", "p50 ms", "worst ms", "CPU ms", "KiB", "wrong"]]
    try:
        if database is not None:
            await database.start()
        systems: list[Any] = [TimebellOnSqlite()] if "sqlite" in given.stores else []
        systems += [TimebellOnPostgres(database)] if database is not None else []
        for system in systems:
            async with system, _served(system.url) as (app, at):
                await _history(app, given.history)
                rows += await _pages(at, system.store, given.history, given.times)
                rows += await _live(app, at, system.store, given)
    finally:
        if database is not None:
            await database.close()
        facts = machine.facts()
        print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}\n")
        print(report.table(rows))
    return all(row[-1] == "0" for row in rows[1:])


def main(given: Sequence[str]) -> int:
    """The exit status: 0 if every page was there."""
    return 0 if asyncio.run(_main(_arguments(given))) else 1
