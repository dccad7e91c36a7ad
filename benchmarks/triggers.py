"""How fast triggers are: `python -m benchmarks.triggers [rows]`, in about a minute.

Timebell and the table that it watches are in one PostgreSQL. An edit counts as rescheduled
when another connection sees the job at its new time, or when the hook, asked over HTTP, has answered: it does after
the commit; a firing begins when the handler does, and reads its row once more before that.
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
from timebell.model.trigger import Place, key_of
from timebell.store.open import upgrade
from timebell.torture.postgres import Postgres
from timebell.triggers.sql_table import SqlTable

EDITS = 200
FIRINGS, APART = 600, 0.007  # seconds
ROWS = 100_000


def percentiles(seconds: list[float]) -> str:
    """p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1000 for q in (0.5, 0.99))
    return f"p50 {p50:.1f} ms  p99 {p99:.1f} ms"


async def measure(url: str, rows: int) -> None:
    """All of it, printed."""
    await upgrade(url)
    app = Timebell(url, timezone="UTC")
    lags: list[float] = []

    @app.on("due")
    async def due(event: Arrived) -> None:
        lags.append((datetime.now(UTC) - event.scheduled_at).total_seconds())

    table, ours = await asyncpg.connect(url), await asyncpg.connect(url)
    await table.execute("CREATE TABLE shifts (id integer PRIMARY KEY, at timestamptz)")
    options = {"url": url, "table": "shifts", "changes": "notify"}
    await table.execute(SqlTable(options).install())
    far = datetime.now(UTC) + timedelta(days=30)
    await table.execute("ALTER TABLE shifts DISABLE TRIGGER USER")
    await table.execute("INSERT INTO shifts SELECT n, $2 FROM generate_series(1, $1::int) n", rows, far)
    await table.execute("ALTER TABLE shifts ENABLE TRIGGER USER")
    await app.triggers.put_source("shifts", "sql", options)
    made, scan = await app.triggers.put("due", "shifts", "at", "due")
    assert scan is not None
    key = key_of(made.id, "1", Place("0"))
    told = await app.triggers.put_source("told")
    await app.triggers.put("told", "told", "at", "other")
    listening = server.bind("127.0.0.1", 0)
    web = server.Site(app, [v1.routes], open_here=True)
    hook = f"http://127.0.0.1:{listening.getsockname()[1]}/api/v1/hooks/{told.id}"
    try:
        async with app.running(), server.serving(web, listening), httpx2.AsyncClient(trust_env=False) as client:
            await _scanned(app, scan.id, rows)
            print(
                "edit to rescheduled, NOTIFY:  ", percentiles([await _edit(table, ours, key, n) for n in range(EDITS)])
            )
            print("edit to rescheduled, webhook: ", percentiles([await _tell(client, hook, n) for n in range(EDITS)]))
            first = datetime.now(UTC) + timedelta(seconds=5)
            dated = [(rows + n, first + timedelta(seconds=n * APART)) for n in range(1, FIRINGS + 1)]
            await table.executemany("INSERT INTO shifts VALUES ($1, $2)", dated)
            async with asyncio.timeout(60):
                while len(lags) < FIRINGS:
                    await asyncio.sleep(0.1)
            print(f"column to firing, {FIRINGS} rows:    ", percentiles(lags))
    finally:
        await app.close()
        await table.close()
        await ours.close()


async def _edit(table: asyncpg.Connection, ours: asyncpg.Connection, key: str, number: int) -> float:
    at = datetime.now(UTC) + timedelta(days=1, seconds=number)
    began = time.perf_counter()
    await table.execute("UPDATE shifts SET at = $1 WHERE id = 1", at)
    mine = "SELECT run_at FROM timebell_jobs WHERE tenant_id = 'default' AND key = $1"
    while await ours.fetchval(mine, key) != at:
        await asyncio.sleep(0.001)
    return time.perf_counter() - began


async def _scanned(app: Timebell, operation: str, rows: int) -> None:
    """Until the first scan is over, telling how far it is."""
    began = told = time.perf_counter()
    read = None
    while (found := await app.triggers.progress(operation)).state == "running":
        now = time.perf_counter()
        if read is None and found.spec["phase"] == "plan":
            read = now - began
        if now - told >= 5:
            told = now
            print(f"  {now - began:5.0f} s  {found.spec['phase']:5} {found.done:,} of {found.total or rows:,}")
        await asyncio.sleep(0.05)
    took = time.perf_counter() - began
    assert (found.state, found.done) == ("completed", rows), found
    print(
        f"scan of {rows:,} rows: {rows / (read or took):,.0f} items/s read and planned;"
        f" {rows / took:,.0f} items/s with the look over all of them after it"
    )


async def _tell(client: httpx2.AsyncClient, hook: str, number: int) -> float:
    at = datetime.now(UTC) + timedelta(days=1, seconds=number)
    said = {"key": "1", "version": number + 1, "fields": {"at": at.isoformat()}}
    began = time.perf_counter()
    answered = await client.post(hook, json=said)
    took = time.perf_counter() - began
    assert answered.json()["made"] == 1, answered.text
    return took


def main() -> None:
    """With a server of its own."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with tempfile.TemporaryDirectory(prefix="triggers-") as temporary:
        Path(temporary).chmod(0o755)
        server = Postgres(Path(temporary) / "postgres")
        server.start()
        try:
            asyncio.run(measure(server.url(), rows))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
