"""Processes for `benchmarks/over_http.py`: a node with its API, and clients that send requests.

The clients use plain sockets, so that they need little CPU compared with the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from benchmarks import child
from timebell.api import health, server, v1
from timebell.app import Timebell

CHUNK = 65_536


async def serve(url: str, spec: dict[str, Any]) -> None:
    """Run a node with its API until standard input closes."""
    app = Timebell(url, timezone="UTC")
    app.settings = dataclasses.replace(app.settings, secret_key="a secret key of the benchmark")
    listening = server.bind("127.0.0.1", 0)
    web = server.HttpApp(app, [health.router(app), v1.build_routes(app.features)], allow_local=True)
    child.tune_process()
    async with server.serving(web, listening), app.running():
        child.print_json(port=listening.getsockname()[1])
        with child.profiling(spec):
            await _wait_until_input_closes()
    await app.close()


class BareJob(BaseModel):
    """The body that the bare route accepts."""

    topic: str
    run_at: datetime = Field(alias="runAt")
    payload: dict[str, Any]
    metadata: dict[str, Any]


async def setup(url: str, _: dict[str, Any]) -> None:
    """Create the table of the bare routes."""
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE bare (id uuid PRIMARY KEY, topic text, run_at timestamptz, body json)")
    await connection.close()
    child.print_json(ready=True)


async def serve_bare(url: str, spec: dict[str, Any]) -> None:
    """Run a FastAPI application whose routes execute one statement with asyncpg, until standard input closes."""
    pool = await asyncpg.create_pool(url, min_size=10, max_size=10)
    await pool.execute(
        "CREATE TABLE IF NOT EXISTS bare (id uuid PRIMARY KEY, topic text, run_at timestamptz, body json)"
    )
    bare = FastAPI()

    @bare.post("/api/v1/jobs", status_code=201)
    async def create_job(body: BareJob) -> dict[str, str]:
        id_ = uuid4()
        insert = "INSERT INTO bare (id, topic, run_at, body) VALUES ($1, $2, $3, $4)"
        await pool.execute(insert, id_, body.topic, body.run_at, json.dumps(body.payload))
        return {"id": str(id_)}

    @bare.get("/api/v1/schedules")
    async def list_schedules() -> dict[str, Any]:
        rows = await pool.fetch("SELECT id, topic, run_at FROM bare WHERE id < $1 ORDER BY id LIMIT 50", UUID(int=0))
        return {"items": [dict(row) for row in rows]}

    listening = server.bind("127.0.0.1", 0)
    config = uvicorn.Config(bare, log_config=None, access_log=False, lifespan="off", loop="none", http="httptools")
    running = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listening]))
    child.print_json(port=listening.getsockname()[1])
    with child.profiling(spec):
        await _wait_until_input_closes()
    running.cancel()
    await pool.close()


async def _wait_until_input_closes() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head[9:12]), await reader.readexactly(length)


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    content_type = b"Content-Type: application/json\r\n" if body else b""
    return (
        f"{method} /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n".encode()
        + content_type + b"\r\n" + body
    )  # fmt: skip


async def send_requests(url: str, spec: dict[str, Any]) -> None:
    """Send `n` requests over `connections` concurrent connections: GET `paths` in turn, or without paths POST /jobs."""
    durations: list[float] = []
    failures = 0
    numbers = iter(range(spec["first"], spec["first"] + spec["n"]))
    run_at = (datetime.now(UTC) + timedelta(days=300)).isoformat()

    def job(n: int) -> bytes:
        owner = {"ownerId": f"o{n % 500}", "clientRequestId": f"r-{n}"}
        return json.dumps(
            {"topic": "http", "runAt": run_at, "payload": child.payload(n, 0), "metadata": owner}
        ).encode()

    async def connection() -> None:
        nonlocal failures
        reader, writer = await asyncio.open_connection("127.0.0.1", spec["port"])
        for n in numbers:
            paths = spec["paths"]
            request = _request("POST", "/jobs", job(n)) if not paths else _request("GET", paths[n % len(paths)])
            sent_at = time.perf_counter()
            writer.write(request)
            status, _ = await _read_response(reader)
            durations.append(time.perf_counter() - sent_at)
            failures += status not in (200, 201)
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(spec["connections"])))
    seconds = time.perf_counter() - begin
    durations.sort()
    child.print_json(
        requests_s=spec["n"] / seconds, p50_ms=durations[len(durations) // 2] * 1e3,
        p99_ms=durations[int(len(durations) * 0.99)] * 1e3, wrong=failures,
    )  # fmt: skip


async def bulk(url: str, spec: dict[str, Any]) -> None:
    """Send `n` lines to /jobs/bulk in one request, which is built before the measurement."""
    run_at = (datetime.now(UTC) + timedelta(days=300)).isoformat()
    body = b"".join(
        json.dumps({"topic": "bulk", "runAt": run_at, "payload": child.payload(n, 0)}).encode() + b"\n"
        for n in range(spec["n"])
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", spec["port"])
    begin = time.perf_counter()
    writer.write(
        b"POST /api/v1/jobs/bulk HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
    )
    for at in range(0, len(body), CHUNK):
        writer.write(body[at : at + CHUNK])
        await writer.drain()
    status, response = await _read_response(reader)
    seconds = time.perf_counter() - begin
    done = json.loads(response)["progress"]["done"] if status == 201 else 0
    child.print_json(lines_s=spec["n"] / seconds, seconds=seconds, wrong=spec["n"] - done)


if __name__ == "__main__":
    child.main({"setup": setup, "serve": serve, "serve_bare": serve_bare, "send_requests": send_requests, "bulk": bulk})
