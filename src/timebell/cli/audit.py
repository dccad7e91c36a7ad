"""`timebell audit`: compare past occurrences with the schedules, by the server if one is configured, or else in the
database."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

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
from timebell.cli.progress import status_line
from timebell.cli.remote import ServerClient, has_server
from timebell.clock import system_now
from timebell.durations import parse_duration
from timebell.errors import InvalidInput, StoreUnreachable
from timebell.formatting import format_count
from timebell.model.audit_findings import AuditCounts
from timebell.recurrence.instants import format_instant, parse_instant

DAY = timedelta(days=1)
DEFAULT_PERIOD = "24h"
COUNT_NAMES = tuple(AuditCounts().totals())

R = TypeVar("R")


@dataclass
class Report:
    """Merged result of an audit: counts, differences in their JSON form, and losses of acknowledged writes."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    found: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    lost_writes: list[str] = field(default_factory=list)


def audit(
    start: str | None, end: str | None, schedule: str | None, tenant: str | None, database: str | None,
    output_format: str | None,
) -> int:  # fmt: skip
    """Print every difference between expected and recorded runs; return the exit code."""
    chosen = settings.load(database_url=database, output=output_format, tenant=tenant)
    now = system_now()
    between = _parse_instant(start or DEFAULT_PERIOD, "--from", now), _parse_instant(end, "--to", now)
    if database is None and has_server(chosen):
        report = _audit_server(ServerClient(chosen), *between, schedule)
    else:
        report = _audit_database(chosen.database_url, *between, schedule, tenant)
    if chosen.output != Format.TABLE:
        print_records(report.differences, chosen.output)
    elif report.differences:
        head = ("FINDING", "SCHEDULE", "FROM", "TO", "COUNT", "DETAIL")
        print_table([_difference_cells(difference) for difference in report.differences], head)
    for sentence in report.lost_writes:
        print_message(sentence)
    print_message(format_summary(report))
    return DIFFERENT if report.differences or report.lost_writes else OK


def _audit_server(remote: ServerClient, start: datetime, end: datetime, schedule: str | None) -> Report:
    """Audit over HTTP, day by day, so that each request is short and progress is visible."""
    report, position = Report(), start
    with status_line(lambda: _describe_interrupt(start, position)) as show:
        while position < end:
            until = min(position + DAY, end)
            show(f"Comparing  {format_instant(position)}  {100 * (position - start) / (end - start):.0f} %")
            params = {"from": format_instant(position), "to": format_instant(until), "schedule": schedule}
            found = remote.request("GET", "/audit", params=params)
            schedules = max(report.counts["schedules"], found["counts"]["schedules"])
            report.counts += Counter(found["counts"])
            report.counts["schedules"] = schedules
            report.skipped += Counter(found["skipped"])
            report.found += sum(found["found"].values())
            report.differences += found["differences"]
            report.truncated |= found["more"]
            report.lost_writes += [each for each in found["lostWrites"] if each not in report.lost_writes]
            position = until
    return report


def _audit_database(url: str, start: datetime, end: datetime, schedule: str | None, tenant: str | None) -> Report:
    with status_line(lambda: _describe_interrupt(start, None)) as show:
        result = run_on_database(url, lambda app: app.audit(
            start, end, schedule=schedule, tenant_id=tenant, progress=lambda counts: show(
                f"{format_count(counts.schedules, 'schedule')}  {format_count(counts.expected, 'occurrence')} compared"
            ),
        ))  # fmt: skip
    return Report(
        Counter(result.counts.totals()), result.counts.skipped, sum(result.counts.found.values()),
        [difference.to_json() for difference in result.differences], result.truncated,
        [rewind.describe() for rewind in result.rewinds],
    )  # fmt: skip


def _describe_interrupt(start: datetime, position: datetime | None) -> str:
    compared = "" if position in (None, start) else f"Compared until {format_instant(position)}. "
    return f"{compared}An audit changes nothing. Run the command again."


def format_summary(report: Report) -> str:
    """Return all counts of an audit in one line."""
    counts = {name: report.counts[name] for name in COUNT_NAMES if report.counts[name] or name == "expected"}
    words = [format_count(n, "schedule") if name == "schedules" else f"{n:,} {name}" for name, n in counts.items()]
    skipped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(report.skipped.items()))
    words += [f"skipped: {skipped}"] if skipped else []
    more = f" (first {len(report.differences):,} shown)" if report.truncated else ""
    return f"{'; '.join(words)}. {format_count(report.found, 'difference')}{more}."


def _difference_cells(difference: dict[str, Any]) -> tuple[str, ...]:
    to = "" if difference["to"] == difference["at"] else difference["to"]
    jobs = f" ({', '.join(difference['jobs'])})" if difference["jobs"] else ""
    return (
        difference["finding"], difference["schedule"], difference["at"], to, f"{difference['count']:,}",
        difference["detail"] + jobs,
    )  # fmt: skip


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


def _parse_instant(text: str | None, label: str, now: datetime) -> datetime:
    """Convert an instant, or a duration before now; None means now."""
    ago = 0.0 if text is None else parse_duration(text)
    if ago is not None:
        return now - timedelta(seconds=ago)
    instant = parse_instant(str(text), label)
    if instant.tzinfo is None:
        raise InvalidInput(
            f"{label} is {text!r:.60}, without a UTC offset.", code="INVALID_INSTANT",
            fix="Write it like 2027-03-14T07:00:00Z, or 24h for 24 hours ago.",
        )  # fmt: skip
    return instant
