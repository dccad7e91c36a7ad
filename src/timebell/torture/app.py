"""The app that the nodes of a run have: handlers that tell the sink when they start and end, and fail as it says.

With TIMEBELL_TEST_POINT, the path of a file, this process kills itself where the file says, as soon as there is one:
`claim.done` is after the commit of a claim. With TIMEBELL_TEST_TELL it writes what its wall clock says into that file.
No other app looks at these.
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
from timebell.targets.handler import Arrived
from timebell.torture.plan import end_with_parent
from timebell.torture.sink import micros

app = Timebell(timezone="UTC")
SINK = os.environ.get("TIMEBELL_TEST_SINK", "")
POINT = os.environ.get("TIMEBELL_TEST_POINT")
TELL = os.environ.get("TIMEBELL_TEST_TELL")


def _facts(event: Arrived, by: str) -> bytes:
    facts = {
        "schedule": event.payload["schedule"], "nonce": event.payload["nonce"], "key": event.occurrence_key,
        "due_us": micros(event.scheduled_at.isoformat()), "once": event.schedule_id is None, "attempt": event.attempt,
        "node": app.settings.node_name, "tenant": event.metadata.get("tenant_id", "default"), "by": by,
    }  # fmt: skip
    return json.dumps(facts).encode() + b"\n"


class Refused(Exception):
    """The sink wants this attempt to fail."""


@app.on("torture.async")
async def run_async(event: Arrived) -> None:
    """On the event loop."""
    reader, writer = await asyncio.open_unix_connection(SINK)
    try:
        told = await _start(reader, writer, event, "async")
        await _end(reader, writer)
    finally:
        writer.close()
    if told["plan"] != "ok":
        raise Refused


@app.on("torture.exact")
async def run_exact(event: Arrived) -> None:
    """Writes a row in the transaction that completes the job."""
    reader, writer = await asyncio.open_unix_connection(SINK)
    try:
        told = await _start(reader, writer, event, "exact")
        if told["plan"] != "ok":
            await _end(reader, writer)
            raise Refused
        async with event.transaction() as connection:
            row = {"key": event.occurrence_key, "attempt": event.attempt}
            await connection.execute(text("INSERT INTO torture_rows VALUES (:key, :attempt)"), row)
            await _end(reader, writer)
    finally:
        writer.close()


async def _start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, event: Arrived, by: str) -> dict[str, Any]:
    writer.write(_facts(event, by))
    told: dict[str, Any] = json.loads(await reader.readline())
    await asyncio.sleep(told["seconds"])
    return told


async def _end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"{}\n")
    await reader.readline()


@app.on("torture.thread")
def run_thread(event: Arrived) -> None:
    """In a thread."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(SINK)
        with connection.makefile("rwb") as sink:
            sink.write(_facts(event, "thread"))
            sink.flush()
            told = json.loads(sink.readline())
            threading.Event().wait(told["seconds"])  # time.sleep fails under libfaketime
            sink.write(b"{}\n")
            sink.flush()
            sink.readline()
    if told["plan"] != "ok":
        raise Refused


def _probe(name: str) -> None:
    """Die here, if the file says so; it is gone first, so that this happens once."""
    assert POINT is not None
    with suppress(FileNotFoundError):
        if os.path.exists(POINT) and open(POINT).read().strip() == name:  # noqa: SIM115
            os.unlink(POINT)
            os.kill(os.getpid(), signal.SIGKILL)


if POINT:
    end_with_parent()
    transaction.probe = _probe


def _tell(path: str) -> None:
    """Of this process's wall clock, for whoever set it wrong."""
    draft = f"{path}.draft"
    while not threading.Event().wait(0.5):
        with open(draft, "w") as file:
            file.write(f"{time.time():.6f}\n")
        os.rename(draft, path)


if TELL:
    # libfaketime bends the kernel's timers, too, even those of the clock that it leaves alone: then they never stop.
    # Asked of the C library itself they are as they should be.
    library = ctypes.PyDLL("libc.so.6", use_errno=True)
    clock._libc = lambda: library  # type: ignore[assignment]
    threading.Thread(target=_tell, args=(TELL,), daemon=True).start()
