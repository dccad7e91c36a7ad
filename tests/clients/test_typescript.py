"""The TypeScript client and its worker, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks

from .server import TIMEOUT_SECONDS, Server, running, running_server, wait_until
from .typescript import CLIENT, build

JOB_COUNT = int(os.environ.get("TIMEBELL_TEST_CLIENT_JOBS", "2000"))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server(tmp_path) as started:
        yield started


def environment(server: Server) -> dict[str, str]:
    return {"TIMEBELL_URL": server.url, "TIMEBELL_API_KEY": server.key}


def test_the_client_works_as_its_readme_says(server: Server) -> None:
    ran = subprocess.run(
        ["node", "test/client.mjs"], cwd=CLIENT, env={**os.environ, **environment(server)}, capture_output=True,
        text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert ran.stdout == "ok\n", ran.stdout + ran.stderr


PRELUDE = """import { Timebell as Client, JobFailure } from "timebell";
declare const %s;
"""
STUBS = {
    "timebell": "timebell: Client",
    "send": "send: (payload: unknown, options: { signal: AbortSignal; idempotencyKey: string }) => Promise<void>",
    "rawBody": "rawBody: string, request: Request, process: { env: { WEBHOOK_SECRET: string } }",
    "handle": "handle: (job: unknown) => Promise<void>, connection: object",
}
BULLMQ = """declare module "bullmq" {
  export class Queue { constructor(name: string, options: object); getJob(id: string): Promise<any>; }
  export class Worker {
    constructor(name: string, handle: Function, options: object);
    on(event: string, listener: Function): this;
  }
}
"""


def test_the_samples_of_the_guide_compile() -> None:
    folder = CLIENT / "build-samples"
    folder.mkdir(exist_ok=True)
    try:
        (folder / "bullmq.d.ts").write_text(BULLMQ)
        for number, sample in enumerate(samples()):
            used = [
                stub for name, stub in STUBS.items()
                if re.search(rf"\b{name}\b", sample) and f"const {name} " not in sample
            ]  # fmt: skip
            (folder / f"sample{number}.ts").write_text((PRELUDE % ", ".join(used) if used else "") + sample)
        options = ["--noEmit", "--module", "NodeNext", "--target", "ES2022", "--strict", "--skipLibCheck"]
        compiled = subprocess.run(
            ["npx", "tsc", *options, *map(str, sorted(folder.glob("*.ts")))], cwd=CLIENT, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert compiled.returncode == 0, compiled.stdout + compiled.stderr
    finally:
        shutil.rmtree(folder)


def test_the_client_sample_of_the_guide_runs(server: Server) -> None:
    sample = CLIENT / "test" / "guide-sample.mjs"
    try:
        sample.write_text(samples()[0].replace("https://timebell.internal", server.url))
        ran = subprocess.run(
            ["node", str(sample)], env={**os.environ, **environment(server)}, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        assert ran.stdout == "too late\n", ran.stdout + ran.stderr
    finally:
        sample.unlink()


def samples() -> list[str]:
    return [block.text for block in blocks(DOCS / "guides" / "typescript.md") if block.language == "typescript"]


def test_no_job_is_lost_by_kills_of_node_and_worker(server: Server, tmp_path: Path) -> None:
    lines = b"".join(b'{"topic": "count.one", "timezone": "UTC", "key": "%d"}\n' % each for each in range(JOB_COUNT))
    server.request("POST", "/jobs/bulk", lines, "application/x-ndjson")
    file, log = tmp_path / "runs.txt", tmp_path / "worker.log"
    file.touch()
    command = ["node", str(CLIENT / "test" / "worker.mjs"), str(file)]

    def runs() -> list[str]:
        return file.read_text().split()

    def wait_for(count: int) -> None:
        def describe() -> str:
            return f"{len(set(runs()))} of {count}\n{log.read_text()[-2000:]}"

        wait_until(lambda: len(set(runs())) >= count, describe, TIMEOUT_SECONDS + JOB_COUNT / 20)

    with running(command, log, **environment(server)) as worker:
        wait_for(JOB_COUNT // 5)
        worker.kill()
    with running(command, log, **environment(server)) as worker:
        wait_for(JOB_COUNT // 2)
        server.kill()
        server.start()
        wait_for(JOB_COUNT)
        wait_until(lambda: not server.request("GET", "/jobs?status=active&limit=1")["items"])
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(TIMEOUT_SECONDS) == 0
    counts = Counter(runs())
    repeated = sum(count - 1 for count in counts.values())
    print(json.dumps({"jobs": JOB_COUNT, "lost": JOB_COUNT - len(counts), "repeated": repeated}))
    assert len(counts) == JOB_COUNT
    # A killed worker repeats at most the jobs that it ran; a killed node none, as leases and reports outlive it.
    assert repeated <= 50
