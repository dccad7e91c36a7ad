"""Writes of one tenant while others attack: `python -m benchmarks.front_door [seconds]`, about eight times as long.

One node on PostgreSQL. A tenant creates 20 jobs a second over one HTTP connection per request in flight; the latency of
a request counts from the time at which it should have been sent. Other clients attack meanwhile: 520 half-sent bodies,
100 wrong keys a second, the import of a million lines by another tenant, 500 writers of another tenant that give up
after a second, 400 readers of another tenant, the first three together (the goal: at most twice the calm p99), or all
together. The last columns are the CPU seconds of the node per second, and the responses by status.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.machine import cpu_seconds
from benchmarks.triggers import percentiles
from timebell import Timebell
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.store.open import upgrade
from timebell.store.tenancy import api_keys
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role
from timebell_torture.postgres import PostgresServer

SECRET = "a secret key of the benchmark"
REQUESTS_PER_SECOND = 20
WARM_UP_SECONDS = 5.0
"""The first requests compile statements and open connections, and would dominate the calm p99."""
HALF_SENT_BODIES, WRONG_KEYS_PER_SECOND, IMPORTED_LINES, IMPATIENT_WRITERS, READERS = 520, 100, 1_000_000, 500, 400
JOB = {"topic": "later", "timezone": "UTC", "runAt": "2090-01-01T00:00:00Z"}
Attack = Callable[[str, str], Coroutine[Any, Any, None]]


async def half_sent_bodies(base: str, key: str) -> None:
    """Keep connections open whose body has begun and does not continue; replace those that the server closes."""
    port = int(base.rsplit(":", 1)[1])
    head = (
        "POST /api/v1/schedules/preview HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Forwarded-For: 203.0.113.9\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n{{"
    )

    async def hold() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode())
                await reader.read()
                writer.close()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(hold() for _ in range(HALF_SENT_BODIES)))


async def wrong_keys(base: str, key: str) -> None:
    """Send requests with a wrong key."""
    headers = {"Authorization": f"Bearer {key[:-9]}{'0' * 9}", "X-Forwarded-For": "203.0.113.9"}
    async with (
        httpx2.AsyncClient(base_url=f"{base}/api/v1", headers=headers, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        while True:
            group.create_task(_ignore_errors(client.get("/schedules")))
            await asyncio.sleep(1 / WRONG_KEYS_PER_SECOND)


async def bulk_import(base: str, key: str) -> None:
    """Import lines in one request."""
    line = json.dumps(JOB).encode()

    async def body() -> AsyncIterator[bytes]:
        for first in range(0, IMPORTED_LINES, 1000):
            yield b"".join(line[:-1] + b', "metadata": {"clientRequestId": "%d"}}\n' % (first + n) for n in range(1000))

    headers = {
        "Authorization": f"Bearer {key}", "Content-Type": "application/x-ndjson", "X-Forwarded-For": "203.0.113.9",
    }  # fmt: skip
    async with httpx2.AsyncClient(base_url=f"{base}/api/v1", timeout=None, trust_env=False) as client:
        await client.post("/jobs/bulk", content=body(), headers=headers)


async def impatient_writers(base: str, key: str) -> None:
    """Create jobs with many clients, each of which closes its connection after a second and tries again."""
    options = _client_options(base, key)

    async def write() -> None:
        while True:
            async with httpx2.AsyncClient(**options, timeout=1.0) as client:
                await _ignore_errors(client.post("/jobs", json=JOB))

    await asyncio.gather(*(write() for _ in range(IMPATIENT_WRITERS)))


async def readers(base: str, key: str) -> None:
    """List jobs over many connections, without a pause."""
    options = _client_options(base, key)

    async def read() -> None:
        async with httpx2.AsyncClient(**options, timeout=30) as client:
            while True:
                await _ignore_errors(client.get("/jobs?limit=5"))

    await asyncio.gather(*(read() for _ in range(READERS)))


def _client_options(base: str, key: str) -> dict[str, Any]:
    """Return the options of many clients. They share a TLS context: each would load its certificates for 30 ms."""
    headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "203.0.113.9"}
    return {
        "base_url": f"{base}/api/v1", "headers": headers, "trust_env": False, "verify": ssl.create_default_context(),
    }  # fmt: skip


GOAL = (half_sent_bodies, wrong_keys, bulk_import)
ATTACKS: dict[str, tuple[Attack, ...]] = {
    "calm": (), "half-sent bodies": (half_sent_bodies,), "wrong keys": (wrong_keys,), "import": (bulk_import,),
    "the goal's three": GOAL, "impatient writers": (impatient_writers,), "readers": (readers,),
    "all": (*GOAL, impatient_writers, readers),
}  # fmt: skip


async def _ignore_errors(request: Coroutine[Any, Any, Any]) -> None:
    with suppress(httpx2.HTTPError):
        await request


def _attack(names: list[str], base: str, key: str) -> None:
    async def run() -> None:
        await asyncio.gather(*(globals()[name](base, key) for name in names))

    asyncio.run(run())


async def measure(base: str, key: str, seconds: float) -> tuple[list[float], Counter[int | str]]:
    """Create jobs at a fixed rate; return the latencies of created ones, and the number of responses by status."""
    latencies: list[float] = []
    statuses: Counter[int | str] = Counter()
    headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "198.51.100.7"}

    async def write(due: float) -> None:
        try:
            statuses[(await client.post("/jobs", json=JOB)).status_code] += 1
            latencies.append(time.perf_counter() - due)
        except httpx2.HTTPError as error:
            statuses[type(error).__name__] += 1

    async with (
        httpx2.AsyncClient(base_url=f"{base}/api/v1", headers=headers, timeout=30, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        began = time.perf_counter()
        for number in range(int(seconds * REQUESTS_PER_SECOND)):
            due = began + number / REQUESTS_PER_SECOND
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(write(due))
    return latencies, statuses


async def _create_keys(url: str) -> tuple[str, str]:
    app, texts = Timebell(url), []
    await app.open()
    for tenant in ("ours", "theirs"):
        id_, text = keys.generate_key()
        now = app.clock.now()
        key = Key(id=id_, tenant_id=tenant, name=f"{tenant}-{new_id(now)[-4:]}", role=Role.EDITOR, created_at=now)
        await app.store.run(api_keys.create_key, key, keys.digest(SECRET, text))
        texts.append(text)
    await app.close()
    return texts[0], texts[1]


def main() -> None:
    """Run all attacks and print one line for each."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = PostgresServer(Path(folder) / "postgres")
        server.start()
        url = server.url()
        asyncio.run(upgrade(url, FEATURES))
        ours, theirs = asyncio.run(_create_keys(url))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        base = f"http://127.0.0.1:{port}"
        node = subprocess.Popen(
            [sys.executable, "-m", "timebell.cli.main", "run", "--port", str(port)], cwd=folder,
            env={**os.environ, "TIMEBELL_DATABASE_URL": url, "TIMEBELL_SECRET_KEY": SECRET,
                 "TIMEBELL_HTTP_TRUSTED_PROXIES": "127.0.0.0/8", "TIMEBELL_LOG_LEVEL": "error"},
        )  # fmt: skip
        try:
            _wait_until_ready(base)
            asyncio.run(measure(base, ours, WARM_UP_SECONDS))
            calm: float | None = None
            for name, attacks in ATTACKS.items():
                attacker = spawn.Process(
                    target=_attack, args=([each.__name__ for each in attacks], base, theirs), daemon=True
                )
                attacker.start()
                if attacks:
                    time.sleep(3)  # until the attack has begun
                used, began = cpu_seconds(node.pid), time.perf_counter()
                latencies, statuses = asyncio.run(measure(base, ours, seconds))
                cpu = (cpu_seconds(node.pid) - used) / (time.perf_counter() - began)
                if attacks and not attacker.is_alive():
                    raise SystemExit(f"The attack {name!r} ended with an error before the measurement did.")
                attacker.kill()
                attacker.join()
                p99 = sorted(latencies)[int(len(latencies) * 0.99)]
                calm = calm or p99
                print(
                    f"{name:18} {percentiles(latencies)}  {p99 / calm:4.1f} x calm  {cpu:4.2f} CPU  {dict(statuses)}",
                    flush=True,
                )
        finally:
            node.terminate()
            node.wait()
            server.stop()


def _wait_until_ready(base: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{base}/readyz", trust_env=False).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("The node did not become ready.")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
