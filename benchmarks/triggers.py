"""Speed of triggers: `python -m benchmarks.triggers [rows]`, takes about two minutes. Prints the goals of W10.

Timebell and the watched table are in one PostgreSQL. With NOTIFY, an edit counts as rescheduled when another connection
sees the job at its new time; with a webhook, when the HTTP response arrives, which is sent after the commit. The time
of a firing is measured until the start of its handler; before that, the row is read again.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import uvloop

from benchmarks import child
from timebell import Arrived, Timebell
from timebell.api import server, v1
from timebell.features import FEATURES
from timebell.features.triggers.model.trigger import FiringKey, firing_job_key
from timebell.features.triggers.sources.sql_table import SqlTable
from timebell.store.open import upgrade
from timebell_torture.postgres import PostgresServer

EDITS = 200
FIRINGS, FIRING_INTERVAL_SECONDS = 600, 0.007
ROWS = 200_000
BOARD_SECONDS, HUNG_BOARD = 0.5, 21


def percentiles(seconds: list[float]) -> str:
    """Format p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1000 for q in (0.5, 0.99))
    return f"p50 {p50:.1f} ms  p99 {p99:.1f} ms"


async def measure(url: str, rows: int) -> None:
    """Measure everything and print it."""
    await upgrade(url, FEATURES)
    app = Timebell(url, timezone="UTC")
    lags: list[float] = []

    @app.on("due")
    async def due(event: Arrived) -> None:
        lags.append((datetime.now(UTC) - event.scheduled_at).total_seconds())

    table, store = await asyncpg.connect(url), await asyncpg.connect(url)
    await table.execute("CREATE TABLE shifts (id integer PRIMARY KEY, at timestamptz)")
    options = {"url": url, "table": "shifts", "changes": "outbox", "sweepEverySeconds": 200}
    await table.execute(SqlTable(options).install_sql())
    next_month = datetime.now(UTC) + timedelta(days=30)
    await table.execute("ALTER TABLE shifts DISABLE TRIGGER USER")
    await table.execute("INSERT INTO shifts SELECT n, $2 FROM generate_series(1, $1::int) n", rows, next_month)
    await table.execute("ALTER TABLE shifts ENABLE TRIGGER USER")
    await app.triggers.put_source("shifts", "sql", options)
    trigger, scan = await app.triggers.put("due", "shifts", "at", "due")
    assert scan is not None
    key = firing_job_key(trigger.id, "1", FiringKey("0"))
    webhook_source = await app.triggers.put_source("webhook")
    await app.triggers.put("webhook", "webhook", "at", "other")
    listening = server.bind("127.0.0.1", 0)
    web = server.HttpApp(app, [v1.build_routes(app.features)], allow_local=True)
    hook = f"http://127.0.0.1:{listening.getsockname()[1]}/api/v1/hooks/{webhook_source.id}"
    try:
        async with app.running(), server.serving(web, listening), httpx2.AsyncClient(trust_env=False) as client:
            await _wait_for_scan(app, scan.id, rows)
            await _scan_unchanged(app, store, options)
            await _fire_during_scan(app, table, options, lags, rows)
            lags.clear()
            notify = [await _reschedule_by_edit(table, store, key, n) for n in range(EDITS)]
            print("edit to rescheduled, NOTIFY:  ", percentiles(notify))
            webhook = [await _reschedule_by_webhook(client, hook, n) for n in range(EDITS)]
            print("edit to rescheduled, webhook: ", percentiles(webhook))
            first = datetime.now(UTC) + timedelta(seconds=5)
            firings = [
                (2 * rows + n, first + timedelta(seconds=n * FIRING_INTERVAL_SECONDS)) for n in range(1, FIRINGS + 1)
            ]
            await table.executemany("INSERT INTO shifts VALUES ($1, $2)", firings)
            async with asyncio.timeout(60):
                while len(lags) < FIRINGS:
                    await asyncio.sleep(0.1)
            print(f"column to firing, {FIRINGS} rows:    ", percentiles(lags))
    finally:
        await app.close()
        await table.close()
        await store.close()


async def _reschedule_by_edit(table: asyncpg.Connection, store: asyncpg.Connection, key: str, number: int) -> float:
    """Edit a row; return the seconds until its job has the new time."""
    at = datetime.now(UTC) + timedelta(days=1, seconds=number)
    began = time.perf_counter()
    await table.execute("UPDATE shifts SET at = $1 WHERE id = 1", at)
    select_run_at = "SELECT run_at FROM timebell_jobs WHERE tenant_id = 'default' AND key = $1"
    while await store.fetchval(select_run_at, key) != at:
        await asyncio.sleep(0.001)
    return time.perf_counter() - began


async def _scan_unchanged(app: Timebell, store: asyncpg.Connection, options: dict[str, Any]) -> None:
    """Scan the unchanged rows again; print the time and the WAL that it writes."""
    await store.execute("VACUUM")  # now, and not by autovacuum during the measurement
    await store.execute("CHECKPOINT")
    await _rescan(app, options, 201)  # writes full pages after the checkpoint
    before = await store.fetchval("SELECT pg_current_wal_lsn()")
    began, cpu_began = time.perf_counter(), time.process_time()
    await _rescan(app, options, 202)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    size = float(await store.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), $1)", before))
    print(
        f"scan with nothing changed:     {seconds:.1f} s ({cpu_seconds:.1f} s of CPU of the node),"
        f" {size / 1e6:.2f} MB of WAL (goal: 5 s, 1 MB)"
    )


async def _rescan(app: Timebell, options: dict[str, Any], sweep: int) -> None:
    """Change an option of the source, which starts a full scan, and wait for its end."""
    synced_at = (await app.triggers.get_source("shifts")).synced_at
    await app.triggers.put_source("shifts", "sql", {**options, "sweepEverySeconds": sweep})
    while (await app.triggers.get_source("shifts")).synced_at == synced_at:
        await asyncio.sleep(0.02)


async def _fire_during_scan(
    app: Timebell, table: asyncpg.Connection, options: dict[str, Any], lags: list[float], rows: int
) -> None:
    """Insert rows that are due soon while scans run; print their lags."""
    await _rescan(app, options, 1)  # from now on, scans follow each other
    for n in range(100):
        await table.execute(
            "INSERT INTO shifts VALUES ($1, $2)", rows + 1 + n, datetime.now(UTC) + timedelta(seconds=2)
        )
        await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        while len(lags) < 100:
            await asyncio.sleep(0.1)
    print("lag of rows inserted in a scan:", percentiles(lags), "(goal: p99 250 ms)")


async def measure_boards(url: str) -> None:
    """Fire one item on each of 20 boards that answer in 0.5 s, beside a hung one; print the lags."""
    await upgrade(url, FEATURES)
    app = Timebell(url, timezone="UTC")
    lags: dict[str, float] = {}
    at = datetime.now(UTC) + timedelta(seconds=15)

    @app.on("due")
    async def due(event: Arrived) -> None:
        lags[event.payload.get("boardId", "plain")] = (datetime.now(UTC) - event.scheduled_at).total_seconds()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        variables = json.loads(await reader.readexactly(size))["variables"]
        board = head.split(b" ")[1].decode().strip("/")
        if "ids" in variables:
            try:
                await asyncio.sleep(3600 if board == str(HUNG_BOARD) else BOARD_SECONDS)
            except asyncio.CancelledError:  # the end of the measurement; asyncio would print it
                writer.close()
                return
        date = json.dumps({"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}"})
        item = {"id": "1", "name": "Item", "state": "active", "column_values": [{"id": "due", "value": date}]}
        found = (
            {"items": [item]} if "ids" in variables else {"boards": [{"items_page": {"cursor": None, "items": [item]}}]}
        )
        body = json.dumps({"data": found}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    boards = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = boards.sockets[0].getsockname()[1]
    try:
        for number in range(1, HUNG_BOARD + 1):
            options = {"token": "x", "boardId": number, "url": f"http://127.0.0.1:{port}/{number}", "dailyCalls": 1000}
            await app.triggers.put_source(f"board{number}", "monday", options)
            await app.triggers.put(f"board{number}", f"board{number}", "due", "due")
        await app.schedule_at("due", at, payload={"on": True}, condition={"on": True})
        async with app.running(), asyncio.timeout(60):
            while len(lags) < HUNG_BOARD + 1:
                await asyncio.sleep(0.1)
    finally:
        boards.close()
        await app.close()
    slow = [late for board, late in lags.items() if board not in ("plain", str(HUNG_BOARD))]
    print(f"20 boards of {BOARD_SECONDS} s, due together:", percentiles(slow), "(goal: 0.8 s)")
    print(
        f"  beside them: a job without a source {lags['plain'] * 1000:.1f} ms, "
        f"a hung board {lags[str(HUNG_BOARD)]:.1f} s"
    )


async def _wait_for_scan(app: Timebell, operation_id: str, rows: int) -> None:
    """Wait for the end of the first scan, print its progress and its speed."""
    began = printed_at = time.perf_counter()
    cpu_began = time.process_time()
    read_seconds = cpu_seconds = None
    while (scan := await app.triggers.get_operation(operation_id)).state == "running":
        now = time.perf_counter()
        if read_seconds is None and scan.spec["phase"] == "plan":
            read_seconds, cpu_seconds = now - began, time.process_time() - cpu_began
        if now - printed_at >= 5:
            printed_at = now
            print(f"  {now - began:5.0f} s  {scan.spec['phase']:5} {scan.done:,} of {scan.total or rows:,}")
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - began
    assert (scan.state, scan.done) == ("completed", rows), scan
    print(
        f"first scan of {rows:,} rows:  {read_seconds or seconds:.1f} s read and planned (goal: 30 s),"
        f" {cpu_seconds or time.process_time() - cpu_began:.1f} s of CPU of the node;"
        f" {seconds:.1f} s including the final check of all items"
    )


async def _reschedule_by_webhook(client: httpx2.AsyncClient, hook: str, number: int) -> float:
    """Send a change to the webhook; return the seconds until its response."""
    at = datetime.now(UTC) + timedelta(days=1, seconds=number)
    change = {"key": "1", "version": number + 1, "fields": {"at": at.isoformat()}}
    began = time.perf_counter()
    response = await client.post(hook, json=change)
    seconds = time.perf_counter() - began
    assert response.json()["created"] == 1, response.text
    return seconds


def create_database(server: PostgresServer, name: str) -> str:
    """Create a database; return its URL."""

    async def create() -> None:
        connection = await asyncpg.connect(server.url())
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()

    asyncio.run(create())
    return server.url().replace("/postgres", f"/{name}")


def main() -> None:
    """Measure with a temporary server."""
    child.tune_process()
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with tempfile.TemporaryDirectory(prefix="triggers-") as temporary:
        Path(temporary).chmod(0o755)
        server = PostgresServer(Path(temporary) / "postgres")
        server.start()
        try:
            uvloop.run(measure_boards(create_database(server, "boards")))
            uvloop.run(measure(create_database(server, "rows"), rows))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
