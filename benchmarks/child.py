"""Shared code of the measured processes. Each is `python -m benchmarks.<child> <command> <url> <spec as JSON>`.

A worker records the starts of handlers in memory, prints their number, and writes them to a file when its standard
input closes. It therefore also stops if its parent process dies.
"""

from __future__ import annotations

import array
import asyncio
import cProfile
import gc
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

PAD = "x" * 60
REPORT_INTERVAL_SECONDS = 0.01
CONCURRENT_BATCHES = 2  # the client builds one batch while the server writes the other

starts = array.array("d")  # number, due, start of each job; times in seconds
_append = starts.extend


def record_start(number: int, due: float) -> None:
    """Record that the handler of a job started now; `due` in seconds."""
    _append((number, due, time.time()))


def payload(number: int, due_ms: int) -> dict[str, Any]:
    """Return a payload of about 100 bytes of JSON."""
    return {"i": number, "due": due_ms, "pad": PAD}


def payload_batches(spec: dict[str, Any], begin: float) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of `n` payloads, numbered from `first`, due `lead` s after `begin`, spread over `span` s."""
    generator = random.Random(spec["first"])
    base, span = int((begin + spec["lead"]) * 1000), int(spec["span"] * 1000)
    numbers = range(spec["first"], spec["first"] + spec["n"])
    for at in range(0, len(numbers), spec["batch"]):
        batch = numbers[at : at + spec["batch"]]
        yield [payload(number, base + (generator.randrange(span) if span else 0)) for number in batch]


async def create(spec: dict[str, Any], write: Callable[[list[dict[str, Any]]], Awaitable[None]]) -> None:
    """Create the jobs of a spec with `write`; print the duration, the due instant and the time of completion."""
    begin = time.time()
    clock = time.perf_counter()
    batches = payload_batches(spec, begin)

    async def write_batches() -> None:
        for batch in batches:
            await write(batch)

    await asyncio.gather(*(write_batches() for _ in range(CONCURRENT_BATCHES)))
    print_json(
        seconds=time.perf_counter() - clock,
        due=int((begin + spec["lead"]) * 1000) / 1000,
        created=time.time(),
    )


def print_json(**facts: Any) -> None:
    """Print one line of JSON for the parent process."""
    print(json.dumps(facts), flush=True)


def tune_process() -> None:
    """Apply the settings of `timebell run` to this process."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.0005)


@contextmanager
def profiling(spec: dict[str, Any]) -> Iterator[None]:
    """Write a profile of the block to the file that the spec names, if it names one."""
    if "profile" not in spec:
        yield
        return
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()
        profiler.dump_stats(spec["profile"])


def report_startup() -> None:
    """Print the CPU time so far; called just before the worker begins to look for jobs."""
    print_json(startup_cpu=time.process_time())


async def report_until_closed(out: str, **facts: Any) -> None:
    """Print `ready` and `facts`, then the number of starts until standard input closes; then write all to `out`."""
    print_json(ready=True, **facts)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    closing = asyncio.ensure_future(reader.read())
    reported = 0
    while not closing.done():
        if len(starts) != reported:
            reported = len(starts)
            print_json(count=reported // 3)
        await asyncio.wait([closing], timeout=REPORT_INTERVAL_SECONDS if reported else 0.2)
    with open(out, "wb") as file:
        starts.tofile(file)


def main(commands: dict[str, Callable[[str, dict[str, Any]], Any]]) -> None:
    """Run the command named by the arguments of this process."""
    name, url, spec = sys.argv[1:4]
    uvloop.run(commands[name](url, json.loads(spec)))
