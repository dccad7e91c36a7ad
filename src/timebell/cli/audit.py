"""`timebell audit`: compare past occurrences with the schedules, read from the database itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from timebell import settings
from timebell.app import Timebell
from timebell.cli.database import is_missing, redact_url
from timebell.cli.output import (
    DIFFERENT,
    OK,
    Format,
    print_message,
    print_records,
    print_table,
)
from timebell.cli.progress import PROGRESS_INTERVAL_SECONDS
from timebell.clock import SystemClock
from timebell.engine.leader.continuous_audit import AuditResult
from timebell.errors import InvalidInput, StoreUnreachable
from timebell.model.audit_findings import AuditCounts, Difference
from timebell.recurrence.instants import format_instant, parse_instant

R = TypeVar("R")


def audit(
    start: str, end: str, schedule: str | None, tenant: str | None, database: str | None, output_format: str | None
) -> int:
    """Print every difference between expected and recorded runs; return the exit code."""
    chosen = settings.load(database_url=database, output=output_format)
    between = _parse_instant(start, "--from"), _parse_instant(end, "--to")
    result = run_on_database(chosen.database_url, lambda app: app.audit(
        *between, schedule=schedule, tenant_id=tenant, progress=_progress_printer()
    ))  # fmt: skip
    if chosen.output != Format.TABLE:
        print_records([difference.to_json() for difference in result.differences], chosen.output)
    elif result.differences:
        head = ("FINDING", "SCHEDULE", "FROM", "TO", "COUNT", "DETAIL")
        print_table([_difference_cells(difference) for difference in result.differences], head)
    for rewind in result.rewinds:
        print_message(rewind.describe())
    print_message(format_summary(result))
    return DIFFERENT if result.differences or result.rewinds else OK


def format_summary(report: AuditResult) -> str:
    """Return all counts of an audit in one line."""
    counts = report.counts
    words = [f"{number:,} {name}" for name, number in counts.totals().items() if number or name == "expected"]
    skipped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.skipped.items()))
    words += [f"skipped: {skipped}"] if skipped else []
    differences = sum(counts.found.values())
    more = f" (first {len(report.differences):,} shown)" if report.truncated else ""
    return f"{'; '.join(words)}. {differences:,} difference{'' if differences == 1 else 's'}{more}."


def _difference_cells(difference: Difference) -> tuple[str, ...]:
    to = "" if difference.to == difference.at else format_instant(difference.to)
    jobs = f" ({', '.join(difference.jobs)})" if difference.jobs else ""
    return (
        difference.finding.value,
        difference.schedule,
        format_instant(difference.at),
        to,
        f"{difference.count:,}",
        difference.detail + jobs,
    )


def run_on_database(url: str, call: Callable[[Timebell], Awaitable[R]]) -> R:
    """Run one call of the library on an existing database. Raises StoreUnreachable."""
    if is_missing(url):
        raise StoreUnreachable(
            f"There is no database {redact_url(url)}.", fix="Set --database or TIMEBELL_DATABASE_URL."
        )

    async def run() -> R:
        app = Timebell(url)
        try:
            return await call(app)
        finally:
            await app.close()

    return asyncio.run(run())


def _progress_printer() -> Callable[[AuditCounts], None]:
    """Return a callback that prints a progress line at most every `PROGRESS_INTERVAL_SECONDS`."""
    clock = SystemClock()
    last_printed = clock.monotonic()

    def print_progress(counts: AuditCounts) -> None:
        nonlocal last_printed
        if (now := clock.monotonic()) - last_printed >= PROGRESS_INTERVAL_SECONDS:
            last_printed = now
            print_message(f"{counts.schedules:,} schedules  {counts.expected:,} occurrences compared")

    return print_progress


def _parse_instant(text: str, label: str) -> datetime:
    instant = parse_instant(text, label)
    if instant.tzinfo is None:
        raise InvalidInput(
            f"{label} is {text!r:.60}, without a UTC offset.", code="INVALID_INSTANT",
            fix="Write it like 2027-03-14T07:00:00Z.",
        )  # fmt: skip
    return instant
