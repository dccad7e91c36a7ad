"""The devices of `benchmarks campaigns`: as a CSV file, loaded into the tables, or imported over HTTP."""

from __future__ import annotations

import asyncio
import csv
import http.client
import itertools
import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks import machine, processes
from benchmarks.campaign_ledger import GONE
from timebell import Timebell
from timebell.features.campaigns.model.device import hash_token
from timebell.features.campaigns.store.tables import devices
from timebell.ids import new_ids
from timebell.store.transaction import Transaction

ZONES = ("Asia/Seoul", "America/New_York", "Europe/Berlin", None)
TIERS = 5
HEADER = ("token", "userId", "platform", "age", "timezone", "marketingOnOff", "tier:number")
COLUMNS = ("id", "tenant_id", "token", "token_hash", "user_id", "platform", "age", "timezone", "marketing_on",
           "attributes", "created_at", "updated_at")  # fmt: skip
LOAD_BATCH_SIZE = 50_000
IMPORT_PARTS = 10
LINES_PER_WRITE = 500


def device_token(n: int) -> str:
    """Return the token of device `n`, as long as real ones; one in a hundred is of a phone without the app."""
    return f"{GONE if n % 100 == 7 else 'd'}{n:09d}:{'APA91b' * 23}"


def write_csv(path: Path, count: int) -> None:
    """Write the devices as a file for `timebell device import`, with the column `tier` as the ledger reads it."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([name.partition(":")[0] for name in HEADER])
        for n in range(count):
            consent = "Y" if n % 3 else "N"
            writer.writerow([device_token(n), f"user-{n}", ("android", "ios")[n % 2], n % 90, ZONES[n % 4] or "",
                             consent, n % TIERS])  # fmt: skip


def device_records(tx: Transaction, first: int, end: int, now: datetime) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the devices from `first` to `end`, in the order of COLUMNS."""
    when = tx.dialect.to_db(now)
    for n, id_ in zip(range(first, end), new_ids(now, end - first), strict=True):
        token = device_token(n)
        yield (
            id_, "default", token, hash_token("default", token), f"user-{n}", ("android", "ios")[n % 2], n % 90,
            ZONES[n % 4], n % 3 > 0, f'{{"tier":{n % TIERS}}}', when, when,
        )  # fmt: skip


async def load(app: Timebell, count: int) -> None:
    """Write `count` devices directly into the tables."""
    for first in range(0, count, LOAD_BATCH_SIZE):
        end, now = min(first + LOAD_BATCH_SIZE, count), app.clock.now()

        def insert(tx: Transaction, first: int = first, end: int = end, now: datetime = now) -> None:
            tx.bulk_insert(devices.name, COLUMNS, device_records(tx, first, end, now))

        await app.store.run(insert)


async def import_over_http(url: str, people: Path, count: int, server_pid: int | None) -> dict[str, Any]:
    """Import the CSV file through a node, in IMPORT_PARTS requests; return the speed of the first and the last one.

    On PostgreSQL, the table has no statistics: autovacuum is off.
    """
    if url.startswith("postgres"):
        connection = await asyncpg.connect(url)
        await connection.execute(f"ALTER TABLE {devices.name} SET (autovacuum_enabled = off)")
        await connection.close()
    rates, cpu, server_cpu = [], 0.0, 0.0
    async with processes.child("child_http", "serve", url, {}) as node:
        assert node.stdout is not None
        port = json.loads(await asyncio.wait_for(node.stdout.readline(), 60))["port"]
        cpu, server_cpu = -machine.cpu_seconds(node.pid), -machine.cpu_seconds(server_pid)
        with people.open("rb") as file:
            file.readline()
            for _ in range(IMPORT_PARTS):
                rates.append(await asyncio.to_thread(_post, port, file, -(-count // IMPORT_PARTS)))
        cpu, server_cpu = cpu + machine.cpu_seconds(node.pid), server_cpu + machine.cpu_seconds(server_pid)
        memory = machine.rss_mb(node.pid)
    return {
        "import_first_per_s": rates[0], "import_last_per_s": rates[-1], "import_per_core": count / cpu,
        "import_server_per_core": count / server_cpu if server_cpu else None, "import_mb": memory,
    }  # fmt: skip


def _post(port: int, file: Any, lines: int) -> float:
    """Import the next lines of a file; return how many per second. Raises RuntimeError if one was refused."""
    body = [",".join(HEADER).encode() + b"\n", *itertools.islice(file, lines)]
    blocks = [b"".join(body[at : at + LINES_PER_WRITE]) for at in range(0, len(body), LINES_PER_WRITE)]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    begin = time.perf_counter()
    connection.request("POST", "/api/v1/devices/bulk", iter(blocks), {"Content-Type": "text/csv"}, encode_chunked=True)
    response = connection.getresponse()
    result = json.loads(response.read())
    seconds = time.perf_counter() - begin
    connection.close()
    if response.status != 201 or result["progress"]["failed"] or result["progress"]["done"] != len(body) - 1:
        raise RuntimeError(f"The import failed: {result}")
    return (len(body) - 1) / seconds
