"""What the measured processes share. Each is `python -m benchmarks.<child> <command> <url> <spec as JSON>`.

A worker records its starts in memory, says how many there are so far, and writes them out when its standard
input closes; so it also ends when whoever started it is gone.
"""

from __future__ import annotations

import array
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop

PAD = "x" * 60
LOOK_EVERY = 0.01
AT_ONCE = 2  # batches on their way: a client makes one while the server writes the other

starts = array.array("d")  # number, due, start; times in seconds
record = starts.extend


def mark(number: int, due: float) -> None:
    """A handler started."""
    record((number, due, time.time()))


def payload(number: int, due_ms: int) -> dict[str, Any]:
    """About 100 bytes of JSON."""
    return {"i": number, "due": due_ms, "pad": PAD}


def dues(spec: dict[str, Any], begin: float) -> Iterator[list[dict[str, Any]]]:
    """The payloads to create, in batches: `n` from number `first`, due `lead` s from now or over `span` s."""
    chance = random.Random(spec["first"])
    base, span = int((begin + spec["lead"]) * 1000), int(spec["span"] * 1000)
    numbers = range(spec["first"], spec["first"] + spec["n"])
    for at in range(0, len(numbers), spec["batch"]):
        batch = numbers[at : at + spec["batch"]]
        yield [payload(number, base + (chance.randrange(span) if span else 0)) for number in batch]


async def create(spec: dict[str, Any], write: Callable[[list[dict[str, Any]]], Awaitable[None]]) -> None:
    """Create the jobs of a spec, and say when they are due and how long it took."""
    begin = time.time()
    clock = time.perf_counter()
    batches = dues(spec, begin)

    async def some() -> None:
        for batch in batches:
            await write(batch)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    tell(
        seconds=time.perf_counter() - clock,
        due=int((begin + spec["lead"]) * 1000) / 1000,
        created=time.time(),
    )


def tell(**facts: Any) -> None:
    """One line of JSON to whoever started this process."""
    print(json.dumps(facts), flush=True)


async def working(out: str) -> None:
    """Ready; report the number of starts until standard input closes; then write them to `out`."""
    tell(ready=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    closing = asyncio.ensure_future(reader.read())
    told = 0
    while not closing.done():
        if len(starts) != told:
            told = len(starts)
            tell(count=told // 3)
        await asyncio.wait([closing], timeout=LOOK_EVERY if told else 0.2)
    with open(out, "wb") as file:
        starts.tofile(file)


def main(commands: dict[str, Callable[[str, dict[str, Any]], Any]]) -> None:
    """Run the command of this process's arguments."""
    name, url, spec = sys.argv[1:4]
    uvloop.run(commands[name](url, json.loads(spec)))
