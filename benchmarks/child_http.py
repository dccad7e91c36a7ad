"""A node that answers HTTP, and a client that asks it, for `benchmarks/over_http.py`.

The client speaks HTTP/1.1 over sockets of its own, so that it costs little beside what it measures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks import child
from timebell.api import health, server, v1
from timebell.app import Timebell

CHUNK = 65_536


async def serve(url: str, _: dict[str, Any]) -> None:
    """One node with its API, until standard input closes."""
    app = Timebell(url, timezone="UTC")
    listening = server.bind("127.0.0.1", 0)
    web = server.Site(app, [health.router(app), v1.routes], open_here=True)
    async with server.serving(web, listening), app.running():
        child.tell(port=listening.getsockname()[1])
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()
    await app.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head[9:12]), await reader.readexactly(length)


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    kind = b"Content-Type: application/json\r\n" if body else b""
    return (
        f"{method} /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n".encode()
        + kind + b"\r\n" + body
    )  # fmt: skip


async def ask(url: str, spec: dict[str, Any]) -> None:
    """`n` requests over `connections` at once; `paths` in turn, or with `jobs` a POST /jobs each."""
    took: list[float] = []
    wrong = 0
    numbers = iter(range(spec["first"], spec["first"] + spec["n"]))
    far = (datetime.now(UTC) + timedelta(days=300)).isoformat()

    def job(n: int) -> bytes:
        owner = {"ownerId": f"o{n % 500}", "clientRequestId": f"r-{n}"}
        return json.dumps({"topic": "http", "runAt": far, "payload": child.payload(n, 0), "metadata": owner}).encode()

    async def connection() -> None:
        nonlocal wrong
        reader, writer = await asyncio.open_connection("127.0.0.1", spec["port"])
        for n in numbers:
            paths = spec["paths"]
            text = _request("POST", "/jobs", job(n)) if not paths else _request("GET", paths[n % len(paths)])
            sent = time.perf_counter()
            writer.write(text)
            status, _ = await _answer(reader)
            took.append(time.perf_counter() - sent)
            wrong += status not in (200, 201)
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(spec["connections"])))
    seconds = time.perf_counter() - begin
    took.sort()
    child.tell(
        requests_s=spec["n"] / seconds, p50_ms=took[len(took) // 2] * 1e3, p99_ms=took[int(len(took) * 0.99)] * 1e3,
        wrong=wrong,
    )  # fmt: skip


async def bulk(url: str, spec: dict[str, Any]) -> None:
    """`n` lines to /jobs/bulk in one request, made before the clock starts."""
    far = (datetime.now(UTC) + timedelta(days=300)).isoformat()
    body = b"".join(
        json.dumps({"topic": "bulk", "runAt": far, "payload": child.payload(n, 0)}).encode() + b"\n"
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
    status, answered = await _answer(reader)
    seconds = time.perf_counter() - begin
    done = json.loads(answered)["progress"]["done"] if status == 201 else 0
    child.tell(lines_s=spec["n"] / seconds, seconds=seconds, wrong=spec["n"] - done)


if __name__ == "__main__":
    child.main({"serve": serve, "ask": ask, "bulk": bulk})
