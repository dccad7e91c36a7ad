"""`timebell job import`: a file of one-shots, in batches; bad lines go to a file of their own with the reason."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from timebell.app import Timebell
from timebell.cli.output import FAILED, OK, emit_one, say
from timebell.cli.progress import progress
from timebell.client import job_lines
from timebell.client.job_lines import Line, Reader
from timebell.errors import InvalidInput, StoreError, TimebellError
from timebell.settings import load
from timebell.store.jobs.bind_targets import no_such_target

BATCH = 5000


@dataclass(slots=True)
class Tally:
    """What became of the lines."""

    lines: int = 0
    created: int = 0
    kept: int = 0
    skipped: int = 0
    refused: int = 0
    codes: dict[str, int] = field(default_factory=dict)


def take(file: Path, past: str, timezone: str | None, database: str | None, form: str | None) -> int:
    """Import a file; the exit code. Raises TimebellError."""
    chosen = load(database_url=database, default_timezone=timezone, output=form)
    if not file.is_file():
        raise InvalidInput(f"There is no file {file}.", code="FILE_UNREADABLE")
    importer = Importer(Timebell(database, timezone=timezone), file, past)
    seconds = asyncio.run(importer.run())
    tally = importer.tally
    rejected = str(importer.rejected) if tally.refused else None
    if chosen.output == "table":
        say(
            f"{tally.lines:,} lines in {seconds:.1f} s ({tally.lines / max(seconds, 0.001):,.0f}/s): {tally.created:,}"
            f" jobs made, {tally.kept:,} were there already, {tally.skipped:,} skipped, {tally.refused:,} refused."
        )
    else:
        facts = {**dataclasses.asdict(tally), "seconds": round(seconds, 3), "rejectedFile": rejected}
        emit_one(facts, chosen.output)
    if rejected:
        common = ", ".join(f"{code} {count:,}" for code, count in sorted(tally.codes.items()))
        say(f"Refused lines are in {rejected} with reasons ({common}). Mend them there and import again: it is safe.")
    return FAILED if tally.refused else OK


class Importer:
    """One import."""

    def __init__(self, app: Timebell, file: Path, past: str) -> None:
        self.app = app
        self.file = file
        self.reader = Reader(app.jobs, past, app.settings.default_timezone, lambda named: named)
        self.rejected = file.with_name(f"{file.stem}.rejected.ndjson")
        self.tally = Tally()

    async def run(self) -> float:
        """Import everything; the seconds it took."""
        clock = self.app.clock
        began = clock.monotonic()
        self.rejected.unlink(missing_ok=True)
        try:
            await self.app.open()
            with self.file.open("rb") as source, progress("Importing", self.file.stat().st_size, clock) as advance:
                await self._import(source, advance)
        except StoreError as failed:
            made = self.tally.created + self.tally.kept
            say(f"Stopped after {made:,} jobs. Import the file again: what is there already is not made twice.")
            raise failed
        finally:
            await self.app.close()
        return clock.monotonic() - began

    async def _import(self, source: BinaryIO, advance: Callable[[int, int, int], None]) -> None:
        batch: list[Line] = []
        for line in _lines(source):
            self.tally.lines += 1
            batch.append(line)
            if len(batch) == BATCH:
                await self._take(batch)
                batch = []
                advance(source.tell(), self.tally.lines, self.tally.refused)
        await self._take(batch)
        advance(source.tell(), self.tally.lines, self.tally.refused)

    async def _take(self, lines: list[Line]) -> None:
        found = self.reader.read(lines, self.app.clock.now())
        for (number, line), bad in found.refused:
            self._reject(number, line, bad)
        nowhere = await self.app.jobs.nowhere(found.new)
        for job, (number, line) in zip(found.new, found.lines, strict=True):
            if job.id in nowhere:
                self._reject(number, line, no_such_target(str(job.named)))
        new = [job for job in found.new if job.id not in nowhere]
        kept = await self.app.jobs.take_in(new)
        self.tally.skipped += found.skipped
        self.tally.kept += kept
        self.tally.created += len(new) - kept

    def _reject(self, number: int, line: bytes, bad: TimebellError) -> None:
        self.tally.refused += 1
        self.tally.codes[bad.code] = self.tally.codes.get(bad.code, 0) + 1
        entry: dict[str, Any] = {"line": number, "code": bad.code, "message": str(bad)}
        try:
            entry["job"] = orjson.loads(line)
        except orjson.JSONDecodeError:
            entry["text"] = line[:1000].decode(errors="replace")
        with self.rejected.open("ab") as out:
            out.write(orjson.dumps(entry) + b"\n")


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that say something, numbered, without their ends; of an endless one, so much as shows that it is."""
    number = 0
    while line := source.readline(job_lines.LONGEST + 2):
        whole = line.endswith(b"\n") or len(line) < job_lines.LONGEST + 2
        while not whole:
            more = source.readline(job_lines.LONGEST)
            whole = not more or more.endswith(b"\n")
        number += 1
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield number, text.strip()
