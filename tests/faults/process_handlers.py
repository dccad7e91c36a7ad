"""Functions that the worker processes of `test_process_handlers.py` import."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from timebell import Arrived, Cancel, Fail, Snooze, Timebell

time.sleep(float(os.environ.get("TEST_IMPORT_SECONDS", "0")))


@dataclass
class Order:
    number: int


class Declined(Exception):
    """Cannot be pickled as usual: its parameters differ from its args."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"declined: {reason}")
        self.code = code
        self.lock = threading.Lock()


def tell_pid(event: Arrived) -> int:
    return os.getpid()


def record_attempt(event: Arrived) -> None:
    with open(event.payload, "a") as file:
        file.write(f"{event.attempt} {datetime.now(UTC).isoformat()}\n")


def double(event: Arrived[Order]) -> Order:
    logging.getLogger("shop.orders").info("doubled order %d", event.payload.number)
    event.progress(0.5, "half")
    return Order(event.payload.number * 2)


def decline(event: Arrived) -> None:
    raise Declined(51, "no money")


def take_from_empty(event: Arrived) -> None:
    raise KeyError("price")


def end_early(event: Arrived) -> Any:
    match event.payload:
        case "snooze":
            raise Snooze(60)
        case "cancel":
            raise Cancel("gone")
        case "fail":
            raise Fail("stolen")
        case "stop":
            next(iter(()))
        case "exit":
            sys.exit(7)
        case "unstorable":
            return threading.Lock()
        case "awaitable":
            return asyncio.Future(loop=asyncio.new_event_loop())
    return None


def die_first(event: Arrived) -> int:
    if event.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return event.attempt


def leave_first(event: Arrived) -> int:
    if event.attempt == 1:
        os._exit(3)
    return event.attempt


def spin(event: Arrived) -> None:
    """Write the ids of this process and of one that it starts, and use the CPU until the file is gone."""
    child = subprocess.Popen(["sleep", "300"])
    pids = Path(event.payload)
    pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    pids.with_suffix(".new").rename(pids)
    while pids.exists():
        pass
    child.kill()
    child.wait()


def write_in_transaction(event: Arrived) -> None:
    with event.transaction():
        pass


def main() -> None:
    """Run a node until it is killed."""
    app = Timebell(sys.argv[1], timezone="UTC")
    app.on("spin", executor="process")(spin)

    async def run() -> None:
        await app.schedule_at("spin", payload=sys.argv[2], timezone="UTC")
        await app.run()

    asyncio.run(run())
