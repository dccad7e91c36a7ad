"""The app of the nodes: its handlers report each start and end to the receiver, and fail as the receiver decides.

If TIMEBELL_TEST_FAIL_POINT is set to a path, the process kills itself at the fail point that the file names, once the
file exists; `claim_batch.done`, for example, is after the commit of a claim. If TIMEBELL_TEST_CLOCK_REPORT is set to a
path, the process writes its wall clock to that file. No other app reads these variables.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from sqlalchemy import text

from timebell import clock
from timebell.app import Timebell
from timebell.store import transaction
from timebell.targets.arrived import Arrived
from timebell_torture.attempt_reports import encode_start, report_end, report_start
from timebell_torture.plan import terminate_with_parent
from timebell_torture.receiver import to_microseconds

app = Timebell(timezone="UTC")
RECEIVER = os.environ.get("TIMEBELL_TEST_RECEIVER", "")
FAIL_POINT = os.environ.get("TIMEBELL_TEST_FAIL_POINT")
CLOCK_REPORT = os.environ.get("TIMEBELL_TEST_CLOCK_REPORT")


def _describe(event: Arrived, by: str) -> dict[str, Any]:
    return {
        "schedule": event.payload["schedule"], "nonce": event.payload["nonce"], "key": event.occurrence_key,
        "due_us": to_microseconds(event.scheduled_at.isoformat()), "once": event.schedule_id is None,
        "attempt": event.attempt, "node": app.settings.node_name,
        "tenant": event.metadata.get("tenant_id", "default"), "by": by,
    }  # fmt: skip


class PlannedFailure(Exception):
    """The receiver decided that this attempt fails."""


@app.on("torture.async")
async def run_async(event: Arrived) -> None:
    """Run on the event loop."""
    reader, writer = await asyncio.open_unix_connection(RECEIVER)
    try:
        decision = await report_start(reader, writer, _describe(event, "async"))
        await report_end(reader, writer)
    finally:
        writer.close()
    if decision["plan"] != "ok":
        raise PlannedFailure


@app.on("torture.exact")
async def run_exact(event: Arrived) -> None:
    """Write a row in the transaction that completes the job."""
    reader, writer = await asyncio.open_unix_connection(RECEIVER)
    try:
        decision = await report_start(reader, writer, _describe(event, "exact"))
        if decision["plan"] != "ok":
            await report_end(reader, writer)
            raise PlannedFailure
        async with event.transaction() as connection:
            row = {"key": event.occurrence_key, "attempt": event.attempt}
            await connection.execute(text("INSERT INTO torture_rows VALUES (:key, :attempt)"), row)
            await report_end(reader, writer)
    finally:
        writer.close()


@app.on("torture.thread")
def run_thread(event: Arrived) -> None:
    """Run in a thread."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(RECEIVER)
        with connection.makefile("rwb") as stream:
            stream.write(encode_start(_describe(event, "thread")))
            stream.flush()
            decision = json.loads(stream.readline())
            threading.Event().wait(decision["seconds"])  # time.sleep fails under libfaketime
            stream.write(b"{}\n")
            stream.flush()
            stream.readline()
    if decision["plan"] != "ok":
        raise PlannedFailure


def _kill_at_fail_point(name: str) -> None:
    """Kill this process if the file names this fail point. The file is removed first, so that this happens once."""
    assert FAIL_POINT is not None
    with suppress(FileNotFoundError):
        if os.path.exists(FAIL_POINT) and open(FAIL_POINT).read().strip() == name:  # noqa: SIM115
            os.unlink(FAIL_POINT)
            os.kill(os.getpid(), signal.SIGKILL)


if FAIL_POINT:
    terminate_with_parent()
    transaction.probe = _kill_at_fail_point


def _report_clock(path: str) -> None:
    """Write this process's wall clock to a file every half second, for the process that shifts it."""
    draft = f"{path}.draft"
    while not threading.Event().wait(0.5):
        with open(draft, "w") as file:
            file.write(f"{time.time():.6f}\n")
        os.rename(draft, path)


if CLOCK_REPORT:
    # libfaketime also replaces the functions of kernel timers, even for the clock that it does not fake, and then the
    # timers never expire. Calling the C library directly bypasses it.
    library = ctypes.PyDLL("libc.so.6", use_errno=True)
    clock._libc = lambda: library  # type: ignore[assignment]
    threading.Thread(target=_report_clock, args=(CLOCK_REPORT,), daemon=True).start()
