"""Start, kill and freeze node processes; read their effects and the store."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import chdir
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.faults import node
from timebell import Timebell
from timebell.model.job import Job

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.faults.node", "timebell.store.dialects.postgres.store", "timebell.store.dialects.sqlite.store", "uvloop"]
)


def wait_until(condition: Callable[[], T], what: str, seconds: float = 120) -> T:
    """Poll until the condition holds, at growing intervals because polling may be expensive."""
    limit, pause = time.monotonic() + seconds, 0.02
    while time.monotonic() < limit:
        found = condition()
        if found:
            return found
        time.sleep(pause)
        pause = min(pause * 1.2, 0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


def forked(target: Callable[..., None], *args: object) -> ForkServerProcess:
    """Start a process that calls a function."""
    process = FORKS.Process(target=target, args=args, daemon=True)
    with chdir(ROOT):  # so that it can import the tests
        process.start()
    return process


class NodeProcess:
    """A node process, forked from a server that has imported everything, because imports dominate the start."""

    def __init__(self, url: str, effects: Path, *, ready: bool = True, **environment: str) -> None:
        self.effects = effects
        self.log = open(effects.with_suffix(f".{time.monotonic_ns()}.log"), "wb")  # noqa: SIM115 - open while the process runs
        reader, writer = FORKS.Pipe(duplex=False)
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        self.process = forked(node.forked, writer, self.log.name, os.environ | environment, url, str(effects))
        writer.close()
        if ready:
            assert self.stdout.readline().strip() == "READY", Path(self.log.name).read_text()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        wait_until(lambda: self.state == "T", "frozen")

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def died(self, seconds: float = 120) -> int:
        """Wait for the end of the process and return its exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"not within {seconds} s: its end"
        return self.process.exitcode

    def terminate(self) -> tuple[int, dict[str, Any]]:
        """Send SIGTERM; return the exit code and the report of the node."""
        self.signal(signal.SIGTERM)
        code = self.died()
        last = (self.stdout.read().strip().splitlines() or ["{}"])[-1]
        return code, json.loads(last) if last.startswith("{") else {}

    def end(self) -> None:
        """End the process whatever its state."""
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        self.stdout.close()
        self.log.close()


def lines(effects: Path, what: str | None = None) -> list[dict[str, Any]]:
    """Return the lines that the nodes wrote."""
    if not effects.exists():
        return []
    read = [json.loads(line) for line in effects.read_text().splitlines() if line.endswith("}")]
    return [line for line in read if what is None or line["what"] == what]


def starts(effects: Path) -> dict[str, list[int]]:
    """Return the started attempts by occurrence key."""
    found = defaultdict(list)
    for line in lines(effects, "start"):
        found[line["key"]].append(line["attempt"])
    return found


def taken_over(attempts: list[int], last: int) -> bool:
    """Return whether these started attempts are those of a reclaimed job up to its last attempt.

    Usually there are two; more only if the machine stalled for longer than a lease.
    """
    return len(attempts) > 1 and attempts[0] == 1 and attempts[-1] == last and attempts == sorted(set(attempts))


def ask(url: str, question: Callable[[Timebell], Coroutine[Any, Any, T]]) -> T:
    """Use the store as a client, from this process."""

    async def call() -> T:
        app = Timebell(url, timezone="UTC")
        try:
            return await question(app)
        finally:
            await app.close()

    return asyncio.run(call())


def jobs(url: str, **filters: Any) -> list[Job]:
    """Return all jobs of the store."""

    async def read(app: Timebell) -> list[Job]:
        found, cursor = [], None
        while True:
            page = await app.list(limit=500, cursor=cursor, **filters)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                return found

    return ask(url, read)


def accounted(found: list[Job], step: float) -> None:
    """Assert that each occurrence between the first and the last has one row or lies in one range row."""
    seen: list[float] = []
    for job in found:
        if job.skipped_count > 1:
            assert job.skipped_to is not None
            count = round((job.skipped_to - job.scheduled_at).total_seconds() / step) + 1
            assert count == job.skipped_count
            seen += [job.scheduled_at.timestamp() + index * step for index in range(count)]
        else:
            seen.append(job.scheduled_at.timestamp())
    seen.sort()
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(seen)]
    assert set(gaps) <= {step}, f"occurrences missing or duplicated: {gaps}"
