"""The TypeScript client and its worker, against a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import typescript_worker
from tests.docs.pages import DOCS, blocks

from .server import TIMEOUT_SECONDS, Server, running_server
from .typescript import CLIENT, build


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


@pytest.mark.slow
def test_no_job_is_lost_by_kills_of_node_and_worker(postgres_url: str, tmp_path: Path) -> None:
    server = Server(tmp_path, postgres_url)
    server.start()
    try:
        result = typescript_worker.run(server, tmp_path, jobs=1000, kills=1)
    finally:
        server.stop()
    print(result)
    assert (result.kills_of_worker, result.kills_of_node) == (1, 1)
    assert result.lost == 0
    assert result.scheduled > 0
    assert result.repeated_without_cause == []
    assert 0 < result.repeated_after_kill_of_worker <= 50  # the jobs that it ran
