"""The measured processes, from outside: clients that create jobs, workers that run them."""

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

CLIENT_LIMIT, STOP_LIMIT = 600.0, 40.0  # seconds


async def start(module: str, command: str, url: str, spec: dict[str, Any]) -> Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
    if module.endswith(".mjs"):
        from benchmarks import node  # needs a package of its own

        begin = [node.binary(), str(Path(__file__).with_name("peers") / Path(module).name)]
        environment["BENCH_NODE"] = str(node.FOLDER)
    else:
        begin = [sys.executable, "-m", f"benchmarks.{module}"]
    # In a session of its own, so that Ctrl-C reaches us alone and we end it in good order.
    return await asyncio.create_subprocess_exec(
        *begin, command, url, json.dumps(spec), stdin=PIPE, stdout=PIPE, start_new_session=True, env=environment
    )


@asynccontextmanager
async def child(module: str, command: str, url: str, spec: dict[str, Any]) -> AsyncIterator[Process]:
    """A process that runs within the block, after which its input ends, and soon it."""
    process = await start(module, command, url, spec)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_LIMIT)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def call(module: str, command: str, url: str, **spec: Any) -> dict[str, Any]:
    """Run a client to its end; what it told last. RuntimeError when it failed."""
    process = await start(module, command, url, spec)
    try:
        async with asyncio.timeout(CLIENT_LIMIT):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            _kill(process)
            await process.wait()
    if process.returncode or not out:
        raise RuntimeError(f"{module} {command} failed (exit {process.returncode})")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def _kill(process: Process) -> None:
    """With all that it started: it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Workers:
    """Worker processes, started and ready within the block; `records` has what they saw after `stop`."""

    def __init__(self, module: str, url: str, count: int, **spec: Any) -> None:
        self._module, self._url, self._count, self._spec = module, url, count, spec
        self._folder = tempfile.TemporaryDirectory(prefix="timebell-bench-")
        self._processes: list[Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._seen: list[int] = []
        self.records: list[tuple[int, float, float]] = []
        self.passes: list[float] = []
        """Milliseconds of those of our planner that fired something."""

    async def __aenter__(self) -> Workers:
        try:
            ready = []
            for number in range(self._count):
                out = os.path.join(self._folder.name, str(number))
                process = await start(self._module, "work", self._url, {**self._spec, "out": out})
                self._processes.append(process)
                self._seen.append(0)
                ready.append(asyncio.Event())
                self._readers.append(asyncio.create_task(self._read(number, process, ready[number])))
            async with asyncio.timeout(60):
                await asyncio.gather(*(each.wait() for each in ready))
            if dead := [each.returncode for each in self._processes if each.returncode is not None]:
                raise RuntimeError(f"a worker ended at its start (exit {dead[0]})")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _read(self, number: int, process: Process, ready: asyncio.Event) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with suppress(ValueError):  # a library that prints
                told = json.loads(line)
                self._seen[number] = told.get("count", self._seen[number])
                self.passes += told.get("passes_ms", [])
                ready.set()
        await process.wait()
        ready.set()

    @property
    def count(self) -> int:
        """Starts so far."""
        return sum(self._seen)

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    async def stop(self) -> None:
        """Let them end, and collect what they recorded."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
        if (await asyncio.wait(ends, timeout=STOP_LIMIT))[1]:
            raise RuntimeError(f"a worker did not end within {STOP_LIMIT:g} s")
        await asyncio.wait(self._readers, timeout=2)  # what they said last
        for path in sorted(Path(self._folder.name).iterdir()):
            flat = array.array("d", path.read_bytes())
            self.records += [(int(flat[at]), *flat[at + 1 : at + 3]) for at in range(0, len(flat), 3)]

    async def __aexit__(self, *_: object) -> None:
        for process, reader in zip(self._processes, self._readers, strict=False):
            if process.returncode is None or not reader.done():  # one of its own may outlive it, and hold the pipe
                _kill(process)
        if self._readers:
            await asyncio.wait(self._readers, timeout=10)
        self._folder.cleanup()
