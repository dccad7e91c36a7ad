"""A node to be struck: `python -m tests.faults.node URL EFFECTS`. Its handlers append what they do to a file.

What the environment may ask for:
FAULT="operation.point:action[:nth]" strikes at a point of a store operation: before its n-th statement, before
(`commit`) or after (`done`) its commit; the action is `kill` (SIGKILL to itself) or `stop` (SIGSTOP).
TRACE=1 writes every point passed. CREATE=1 makes three jobs and runs nothing. DEAF=1 never listens for hints.
WALL=seconds puts this process's wall clock off by so much. TOPIC=name hears one topic more.
LEASE, HEARTBEAT, POLL and DRAIN are seconds.
"""

from __future__ import annotations

import asyncio
import datetime as real
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import timebell.clock
from timebell import Arrived, JobSpec, Timebell
from timebell.store import transaction
from timebell.store.dialects.postgres import PostgresStore

FAST = {"lease": 3.0, "heartbeat": 0.5, "poll": 0.2, "drain": 10.0}


def append(path: str, **line: object) -> None:
    """One line, durable before this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    known = {"pid": os.getpid(), "mono": time.monotonic_ns(), "wall": time.time()}
    os.write(handle, (json.dumps(line | known) + "\n").encode())
    os.fsync(handle)
    os.close(handle)


def aim(fault: str, effects: str) -> None:
    """Install the fault."""
    point, _, action = fault.partition(":")
    action, _, nth = action.partition(":")
    passed: Counter[str] = Counter()

    def probe(name: str) -> None:
        passed[name] += 1
        if os.environ.get("TRACE"):
            append(effects, what="point", name=name)
        if name == point and passed[name] == int(nth or 1):
            append(effects, what="fault", name=name)
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    transaction.probe = probe


def put_wall_clock_off(seconds: float) -> None:
    """As if this machine's clock were wrong."""

    class Wrong(real.datetime):
        @classmethod
        def now(cls, tz: real.tzinfo | None = None) -> real.datetime:  # type: ignore[override]
            return real.datetime.now(tz) + real.timedelta(seconds=seconds)

    timebell.clock.datetime = Wrong  # type: ignore[attr-defined]


async def _hear_nothing(*_: Any) -> bool:
    return False


def build(url: str, effects: str) -> Timebell:
    """The app: `work` naps or waits for a file if its payload says so; `flaky` fails the first time; `plain` runs
    in a thread; `poison` kills its node."""
    app = Timebell(url, timezone="UTC")

    def note(what: str, event: Arrived) -> None:
        append(
            effects, what=what, key=event.occurrence_key, attempt=event.attempt, topic=event.topic,
            at=event.fired_at.timestamp(), due=event.scheduled_at.timestamp(),
        )  # fmt: skip

    @app.on("work")
    async def work(event: Arrived) -> int:
        note("start", event)
        payload = event.payload or {}
        await asyncio.sleep(payload.get("nap", 0))
        while "gate" in payload and not Path(payload["gate"]).exists():
            await asyncio.sleep(0.02)
        note("end", event)
        return os.getpid()

    @app.on("plain")
    def plain(event: Arrived) -> int:
        note("start", event)
        while not Path(event.payload["gate"]).exists():
            time.sleep(0.02)
        note("end", event)
        return os.getpid()

    @app.on("flaky", retry={"attempts": 20, "delay": 0.1})
    async def flaky(event: Arrived) -> None:
        note("start", event)
        if event.attempt == 1:
            raise RuntimeError("the first time it fails")
        note("end", event)

    @app.on("poison")
    async def poison(event: Arrived) -> None:
        note("start", event)
        os.kill(os.getpid(), signal.SIGKILL)

    if extra := os.environ.get("TOPIC"):
        app.on(extra)(work)
    return app


async def serve(url: str, effects: str) -> None:
    """Run until SIGTERM."""
    app = build(url, effects)
    if os.environ.get("CREATE"):
        await app.schedule_many([JobSpec(topic="work", client_request_id=str(number)) for number in range(3)])
        return
    stop = asyncio.Event()

    def told() -> None:
        append(effects, what="told to stop")
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told)
    options = {name: float(os.environ.get(name.upper(), default)) for name, default in FAST.items()}
    async with app.running(**options) as service:
        append(effects, what="ready", node=service.node.id)
        await stop.wait()
        counters = service.node.counters
    append(effects, what="left", fenced=counters.fenced, rescued=counters.rescued, clock_steps=counters.clock_steps)
    await app.close()


def run(url: str, effects: str) -> None:
    """The whole life of a node."""
    if os.environ.get("WALL"):
        put_wall_clock_off(float(os.environ["WALL"]))
    if os.environ.get("DEAF"):
        PostgresStore.listen = _hear_nothing  # type: ignore[method-assign]
    aim(os.environ.get("FAULT", ""), effects)
    asyncio.run(serve(url, effects))


if __name__ == "__main__":
    run(*sys.argv[1:3])
