"""Speed of triggers: `python -m benchmarks.triggers [rows]`, takes about a minute.

Timebell and the watched table are in one PostgreSQL. With NOTIFY, an edit counts as rescheduled when another connection
sees the job at its new time; with a webhook, when the HTTP response arrives, which is sent after the commit. The time
of a firing is measured until the start of its handler; before that, the row is read again.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import httpx2

from timebell import Arrived, Timebell
from timebell.api import server, v1
from timebell.features.triggers.model.trigger import FiringKey, firing_job_key
from timebell.features.triggers.sources.sql_table import SqlTable
from timebell.store.open import upgrade
from timebell_torture.postgres import PostgresServer

EDITS = 200
FIRINGS, FIRING_INTERVAL_SECONDS = 600, 0.007
ROWS = 100_000


def percentiles(seconds: list[float]) -> str:
    """Format p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1000 for q in (0.5, 0.99))
    return f"p50 {p50:.1f} ms  p99 {p99:.1f} ms"


async def measure(url: str, rows: int) -> None:
    """Measure everything and print it."""
    await upgrade(url)
    app = Timebell(url, timezone="UTC")
    lags: list[float] = []

    @app.on("due")
    async def due(event: Arrived) -> None:
        lags.append((datetime.now(UTC) - event.scheduled_at).total_seconds())

    table, store = await asyncpg.connect(url), await asyncpg.connect(url)
    await table.execute("CREATE TABLE shifts (id integer PRIMARY KEY, at timestamptz)")
    options = {"url": url, "table": "shifts", "changes": "notify"}
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
            notify = [await _reschedule_by_edit(table, store, key, n) for n in range(EDITS)]
            print("edit to rescheduled, NOTIFY:  ", percentiles(notify))
            webhook = [await _reschedule_by_webhook(client, hook, n) for n in range(EDITS)]
            print("edit to rescheduled, webhook: ", percentiles(webhook))
            first = datetime.now(UTC) + timedelta(seconds=5)
            firings = [
                (rows + n, first + timedelta(seconds=n * FIRING_INTERVAL_SECONDS)) for n in range(1, FIRINGS + 1)
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


async def _wait_for_scan(app: Timebell, operation_id: str, rows: int) -> None:
    """Wait for the end of the first scan, print its progress and its speed."""
    began = printed_at = time.perf_counter()
    read_seconds = None
    while (scan := await app.triggers.get_operation(operation_id)).state == "running":
        now = time.perf_counter()
        if read_seconds is None and scan.spec["phase"] == "plan":
            read_seconds = now - began
        if now - printed_at >= 5:
            printed_at = now
            print(f"  {now - began:5.0f} s  {scan.spec['phase']:5} {scan.done:,} of {scan.total or rows:,}")
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - began
    assert (scan.state, scan.done) == ("completed", rows), scan
    print(
        f"scan of {rows:,} rows: {rows / (read_seconds or seconds):,.0f} items/s read and planned;"
        f" {rows / seconds:,.0f} items/s including the final check of all items"
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


def main() -> None:
    """Measure with a temporary server."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with tempfile.TemporaryDirectory(prefix="triggers-") as temporary:
        Path(temporary).chmod(0o755)
        server = PostgresServer(Path(temporary) / "postgres")
        server.start()
        try:
            asyncio.run(measure(server.url(), rows))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
