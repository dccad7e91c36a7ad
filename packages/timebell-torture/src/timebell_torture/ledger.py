"""Ledgers: files of JSON lines, on disk before the writer proceeds, each line with both clocks in nanoseconds."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any


def read_clocks() -> dict[str, int]:
    """Return the current CLOCK_MONOTONIC, which all processes of this machine share, and the wall time."""
    return {"mono": time.monotonic_ns(), "wall": time.time_ns()}


class Ledger:
    """Appends lines to a file. Concurrent appends share one flush to disk."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lines: list[bytes] = []
        self._batch: asyncio.Future[None] | None = None
        self._flushing: asyncio.Task[None] | None = None

    async def append(self, **line: Any) -> dict[str, Any]:
        """Append a line stamped with both clocks, and return it when it is on disk."""
        stamped = read_clocks() | line
        self._lines.append(json.dumps(stamped, separators=(",", ":")).encode() + b"\n")
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await asyncio.shield(self._batch)
        return stamped

    async def _flush(self) -> None:
        while self._batch is not None:
            lines, batch = self._lines, self._batch
            self._lines, self._batch = [], None
            await asyncio.to_thread(self._write, b"".join(lines))
            batch.set_result(None)
        self._flushing = None

    def append_blocking(self, **line: Any) -> None:
        """Append a line and block until it is on disk. For threads without an event loop."""
        self._write(json.dumps(read_clocks() | line, separators=(",", ":")).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        os.write(self._file, data)
        os.fdatasync(self._file)


class RunningAttempts:
    """The attempts that started after the creation of this object and have not ended, by the receiver's ledger."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size
        self._started: dict[int, int] = {}

    def longer_than(self, seconds: float) -> set[int]:
        """Return the sequence numbers of those that have been running for this long."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in map(json.loads, complete.splitlines()):
            if line["what"] == "recv":
                self._started[line["seq"]] = line["mono"]
            elif line["what"] == "reply":
                self._started.pop(line["seq"], None)
        before = time.monotonic_ns() - int(seconds * 1e9)
        return {seq for seq, at in self._started.items() if at <= before}


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return every complete line of a ledger; an incomplete last line is ignored."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
