"""Remote workers for `benchmarks/remote.py`: plain sockets, so that they need little CPU compared with the node."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks import child
from timebell import JobSpec, Timebell

CREATE_BATCH_SIZE = 5_000


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create `n` jobs: due now, or one each `interval` seconds, the first after `delay` seconds."""
    app = Timebell(url, timezone="UTC")
    await app.open()
    begin = datetime.now(UTC) + timedelta(seconds=spec.get("delay", 0))
    jobs = [
        JobSpec(
            topic="remote", run_at=begin + timedelta(seconds=n * spec["interval"]) if spec.get("interval") else None
        )
        for n in range(spec["n"])
    ]
    for at in range(0, len(jobs), CREATE_BATCH_SIZE):
        await app.schedule_many(jobs[at : at + CREATE_BATCH_SIZE])
    await app.close()
    child.print_json(created=len(jobs))


async def work(url: str, spec: dict[str, Any]) -> None:
    """Claim and complete `n` jobs with some workers; print the rate, the lags until the first byte, and repetitions."""
    seen: set[str] = set()
    lags: list[float] = []
    repeated = 0
    begin = last_at = time.time()
    cpu_before = time.process_time()

    async def worker(number: int) -> None:
        nonlocal repeated, last_at
        reader, writer = await asyncio.open_connection("127.0.0.1", spec["port"])

        async def post(path: str, body: Any) -> tuple[float, Any]:
            content = json.dumps(body).encode()
            head = f"POST /api/v1/claims{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            answer = await reader.readuntil(b"\r\n\r\n")
            received_at = time.time()
            length = next(int(each[15:]) for each in answer.lower().split(b"\r\n") if each[:15] == b"content-length:")
            return received_at, json.loads(await reader.readexactly(length))

        while len(seen) < spec["n"]:
            claim = {
                "worker": f"{os.getpid()}-{number}", "topics": ["remote"], "max": spec["max"], "waitSeconds": 1,
                "claimId": os.urandom(8).hex(),
            }  # fmt: skip
            received_at, answer = await post("", claim)
            jobs = answer["jobs"]
            if not jobs:
                continue
            for job in jobs:
                due_at = datetime.fromisoformat(job["scheduledAt"]).timestamp()
                if spec["backlog"] or due_at > begin:  # a worker was waiting
                    lags.append(received_at - due_at)
                repeated += job["jobId"] in seen
                seen.add(job["jobId"])
            proofs = [{"jobId": job["jobId"], "token": job["token"]} for job in jobs]
            _, answer = await post("/complete", {"jobs": proofs})
            assert not any(job["code"] for job in answer["jobs"]), answer
            last_at = time.time()
        writer.close()

    await asyncio.gather(*(worker(number) for number in range(spec["workers"])))
    lags.sort()
    child.print_json(
        jobs_s=spec["n"] / (last_at - begin), worker_us=(time.process_time() - cpu_before) / spec["n"] * 1e6,
        early=sum(lag < 0 for lag in lags), p50_ms=lags[len(lags) // 2] * 1e3,
        p99_ms=lags[int(len(lags) * 0.99)] * 1e3, max_ms=lags[-1] * 1e3, repeated=repeated,
    )  # fmt: skip


if __name__ == "__main__":
    child.main({"create": create, "work": work})
