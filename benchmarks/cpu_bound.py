"""Jobs per second of a handler that uses 20 ms of CPU time, in threads and in worker processes.

`python -m benchmarks.cpu_bound [jobs] [rounds]`. Both run on SQLite and take turns with Python's ProcessPoolExecutor,
which runs the same function without a scheduler, so that all see the same machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from benchmarks import machine, report
from timebell import JobSpec, Timebell
from timebell.targets.process_pool import available_cores

CPU_SECONDS = 0.02
WARM_UP_JOBS = 20  # until all processes are started


def hash_for_20_ms(_: object) -> None:
    """Hash short texts, which holds the interpreter lock, for CPU_SECONDS of this thread."""
    digest, end = b"", time.thread_time() + CPU_SECONDS
    while time.thread_time() < end:
        for _ in range(100):
            digest = sha256(digest).digest()


async def measure(executor: Literal["process"] | None, count: int) -> float:
    """Return jobs per second, from their creation to the last completion."""
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'timebell.db'}"
        app = Timebell(url, timezone="UTC")
        app.on("hash", executor=executor)(hash_for_20_ms)
        await app.upgrade()
        async with app.running() as service:
            for jobs in (WARM_UP_JOBS, count):
                began = time.perf_counter()
                await app.schedule_many([JobSpec(topic="hash")] * jobs)
                await service.wait_until_idle()
            rate = count / (time.perf_counter() - began)
        await app.close()
    return rate


def measure_executor(count: int) -> float:
    """Return calls per second of a ProcessPoolExecutor."""
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as executor:
        for calls in (WARM_UP_JOBS, count):
            began = time.perf_counter()
            list(executor.map(hash_for_20_ms, range(calls)))
        return count / (time.perf_counter() - began)


async def main(count: int = 200, rounds: int = 3) -> None:
    """Print the medians of all, and of their ratios to threads in the same round."""
    rates: list[dict[str, float]] = []
    for _ in range(rounds):
        threads, processes = await measure(None, count), await measure("process", count)
        rates.append({"threads": threads, "processes": processes, "ProcessPoolExecutor": measure_executor(count)})
    medians = report.medians(rates)
    ratios = report.medians([{name: rate / each["threads"] for name, rate in each.items()} for each in rates])
    rows = [["", "jobs/s", "ratio"], *([name, f"{medians[name]:.1f}", f"{ratios[name]:.2f}"] for name in medians)]
    print(machine.summary_line(), report.format_table(rows), sep="\n\n")


if __name__ == "__main__":
    # Worker processes import the handler from this module, which is not the main module there.
    asyncio.run(import_module("benchmarks.cpu_bound").main(*map(int, sys.argv[1:])))
