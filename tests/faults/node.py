"""The node process of `harness.NodeProcess`. Its handlers append their effects to a file.

FAULT="operation.point:action[:nth]" strikes at a point of a store operation: before its n-th statement, before
(`commit`) or after (`done`) its commit; the action is `kill` (SIGKILL to itself) or `stop` (SIGSTOP).
WALL="seconds" shifts the wall clock of this process. TRACE=1 records every fault point passed. STUCK="file" blocks the
planner while the file exists.
"""

from __future__ import annotations

import asyncio
import datetime as real
import json
import os
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from sqlalchemy import text

import timebell.clock
from timebell import Arrived, JobSpec, Timebell
from timebell.engine.planner import Planner
from timebell.store import transaction

BLOCKED_SECONDS = 0.01
FAST = {"lease": 3.0, "heartbeat": 0.5, "poll": 0.2, "drain": 10.0}


def append(path: str, **line: object) -> None:
    """Append a line durably."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (json.dumps(line) + "\n").encode())
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
    """Shift the wall clock of this process."""

    class Wrong(real.datetime):
        @classmethod
        def now(cls, tz: real.tzinfo | None = None) -> real.datetime:  # type: ignore[override]
            return real.datetime.now(tz) + real.timedelta(seconds=seconds)

    timebell.clock.datetime = Wrong  # type: ignore[attr-defined]


def stick_planner(when: Path) -> None:
    """Block the planner, and nothing else, while this file exists."""
    turn = Planner.step

    async def step(self: Planner) -> real.datetime | None:
        while when.exists():
            await asyncio.sleep(0.1)
        return await turn(self)

    Planner.step = step  # type: ignore[method-assign]


def build(url: str, effects: str) -> Timebell:
    """Return the app: `work` waits for a file if its payload contains one; `flaky` fails the first time; `blocking`
    blocks the event loop, and kills its process if its payload says so."""
    app = Timebell(url, timezone="UTC")

    def note(what: str, event: Arrived) -> None:
        append(
            effects, what=what, key=event.occurrence_key, attempt=event.attempt, pid=os.getpid(),
            at=event.fired_at.timestamp(), due=event.scheduled_at.timestamp(), topic=event.topic,
        )  # fmt: skip

    @app.on("work")
    async def work(event: Arrived) -> int:
        note("start", event)
        gate = (event.payload or {}).get("gate")
        while gate and not Path(gate).exists():
            await asyncio.sleep(0.02)
        note("end", event)
        return os.getpid()

    @app.on("flaky", retry={"attempts": 5, "delay": 0.1})
    async def flaky(event: Arrived) -> None:
        note("start", event)
        if event.attempt == 1:
            raise RuntimeError("the first time it fails")
        note("end", event)

    @app.on("blocking")
    async def blocking(event: Arrived) -> None:
        time.sleep(BLOCKED_SECONDS)
        if event.payload == "kill" and event.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        note("end", event)

    @app.on("order", retry={"attempts": 50})
    async def order(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text("INSERT INTO orders VALUES (:job, :attempt)"), row_of(event))
            note("start", event)

    @app.on("plain-order", retry={"attempts": 50})
    def plain_order(event: Arrived) -> None:
        with event.transaction() as connection:
            connection.execute(text("INSERT INTO orders VALUES (:job, :attempt)"), row_of(event))
            note("start", event)

    return app


def row_of(event: Arrived) -> dict[str, object]:
    """Return the row that the handler of an order writes."""
    return {"job": event.job_id, "attempt": event.attempt}


async def main(url: str, effects: str) -> None:
    """Run until SIGTERM."""
    app = build(url, effects)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with app.running(**FAST) as service:
        print("READY", flush=True)
        await stop.wait()
        print(json.dumps({"fenced": service.node.counters.fenced}), flush=True)
    await app.close()


def forked(stdout: Connection, log: str, environment: dict[str, str], url: str, effects: str) -> None:
    """Run the whole process; `stdout` replaces its stdout, the file `log` its stderr."""
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.get("WALL"):
        put_wall_clock_off(float(os.environ["WALL"]))
    aim(os.environ.get("FAULT", ""), effects)
    if os.environ.get("STUCK"):
        stick_planner(Path(os.environ["STUCK"]))
    asyncio.run(main(url, effects))


def made(url: str, effects: str, fault: str) -> None:
    """Create three jobs in one call, with a fault."""
    aim(fault, effects)
    specs = [JobSpec(topic="work", run_at=None, client_request_id=str(n)) for n in range(3)]
    asyncio.run(build(url, effects).schedule_many(specs))
