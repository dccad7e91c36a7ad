"""`timebell job import`: insert one-shot jobs from a file in batches; refused lines go to a second file."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from timebell.app import Timebell
from timebell.cli.output import FAILED, OK, print_message, print_record
from timebell.cli.progress import explain_interrupt, progress
from timebell.client import job_lines
from timebell.client.job_lines import Line, LineReader
from timebell.errors import InvalidInput, StoreError, TimebellError
from timebell.settings import load
from timebell.store.jobs.bind_targets import target_not_found

BATCH_SIZE = 5000
REPEATABLE = "Import the file again: existing jobs are not created twice."


@dataclass(slots=True)
class ImportCounts:
    """Counts of lines by outcome, and of refused lines by error code."""

    lines: int = 0
    created: int = 0
    existing: int = 0
    skipped: int = 0
    refused: int = 0
    codes: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the counts by outcome as a sentence."""
        return (
            f"{self.created:,} jobs created, {self.existing:,} already existed, {self.skipped:,} skipped,"
            f" {self.refused:,} refused."
        )


def import_jobs(file: Path, past: str, timezone: str | None, database: str | None, output_format: str | None) -> int:
    """Import a file and return the exit code: 1 if lines were refused. Raises TimebellError."""
    chosen = load(database_url=database, default_timezone=timezone, output=output_format)
    if not file.is_file():
        raise InvalidInput(f"There is no file {file}.", code="FILE_UNREADABLE")
    importer = Importer(Timebell(database, timezone=timezone), file, past)
    counts = importer.counts
    with explain_interrupt(lambda: f"{counts.describe()} {REPEATABLE}"):
        seconds = asyncio.run(importer.run())
    rejected = str(importer.rejected_file) if counts.refused else None
    if chosen.output == "table":
        print_message(
            f"{counts.lines:,} lines in {seconds:.1f} s ({counts.lines / max(seconds, 0.001):,.0f}/s):"
            f" {counts.describe()}"
        )
    else:
        facts = {**dataclasses.asdict(counts), "seconds": round(seconds, 3), "rejectedFile": rejected}
        print_record(facts, chosen.output)
    if rejected:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(counts.codes.items()))
        print_message(
            f"Refused lines and their reasons are in {rejected} ({codes}). Correct the lines and import the file again."
        )
    return FAILED if counts.refused else OK


class Importer:
    """One import of a file. `rejected_file` lies beside it; `counts` is updated while the import runs."""

    def __init__(self, app: Timebell, file: Path, past: str) -> None:
        self.app = app
        self.file = file
        self.reader = LineReader(app._jobs, past, app.settings.default_timezone, lambda tenant_id: tenant_id)
        self.rejected_file = file.with_name(f"{file.stem}.rejected.ndjson")
        self.counts = ImportCounts()

    async def run(self) -> float:
        """Import all lines; return the duration in seconds."""
        clock = self.app.clock
        started = clock.monotonic()
        self.rejected_file.unlink(missing_ok=True)
        try:
            await self.app.open()
            with self.file.open("rb") as source, progress("Importing", self.file.stat().st_size, clock) as advance:
                await self._import(source, advance)
        except StoreError as failed:
            print_message(f"Stopped. {self.counts.describe()} {REPEATABLE}")
            raise failed
        finally:
            await self.app.close()
        return clock.monotonic() - started

    async def _import(self, source: BinaryIO, advance: Callable[[int, int, int], None]) -> None:
        batch: list[Line] = []
        for line in _numbered_lines(source):
            self.counts.lines += 1
            batch.append(line)
            if len(batch) == BATCH_SIZE:
                await self._import_batch(batch)
                batch = []
                advance(source.tell(), self.counts.lines, self.counts.refused)
        await self._import_batch(batch)
        advance(source.tell(), self.counts.lines, self.counts.refused)

    async def _import_batch(self, lines: list[Line]) -> None:
        batch = self.reader.read(lines, self.app.clock.now())
        for (number, line), error in batch.rejected:
            self._reject(number, line, error)
        unknown_targets = await self.app._jobs.find_unknown_targets(batch.jobs)
        for job, (number, line) in zip(batch.jobs, batch.lines, strict=True):
            if job.id in unknown_targets:
                self._reject(number, line, target_not_found(str(job.target_name)))
        new = [job for job in batch.jobs if job.id not in unknown_targets]
        already_stored = await self.app._jobs.insert_drafts(new)
        self.counts.skipped += batch.skipped
        self.counts.existing += already_stored
        self.counts.created += len(new) - already_stored

    def _reject(self, number: int, line: bytes, error: TimebellError) -> None:
        self.counts.refused += 1
        self.counts.codes[error.code] = self.counts.codes.get(error.code, 0) + 1
        entry: dict[str, Any] = {"line": number, "code": error.code, "message": str(error)}
        try:
            entry["job"] = orjson.loads(line)
        except orjson.JSONDecodeError:
            entry["text"] = line[:1000].decode(errors="replace")
        with self.rejected_file.open("ab") as out:
            out.write(orjson.dumps(entry) + b"\n")


def _numbered_lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers, stripped; a line above `MAX_LINE_BYTES` is cut two bytes above it."""
    number = 0
    while line := source.readline(job_lines.MAX_LINE_BYTES + 2):
        complete = line.endswith(b"\n") or len(line) < job_lines.MAX_LINE_BYTES + 2
        while not complete:
            rest = source.readline(job_lines.MAX_LINE_BYTES)
            complete = not rest or rest.endswith(b"\n")
        number += 1
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield number, text.strip()
