"""`timebell audit` and `timebell why`: a look back, straight at the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from timebell import settings
from timebell.app import Timebell
from timebell.cli.database import missing, shown
from timebell.cli.output import DIFFERENT, OK, Format, emit, emit_one, say, show, table
from timebell.cli.progress import EVERY
from timebell.clock import SystemClock
from timebell.engine.leader.continuous_audit import Audit
from timebell.errors import InvalidInput, StoreUnreachable
from timebell.model.audit_findings import Counts, Difference
from timebell.recurrence.instants import format_instant, parse_instant

R = TypeVar("R")


def audit(
    start: str, end: str, schedule: str | None, tenant: str | None, database: str | None, form: str | None
) -> int:
    """Print every difference; the exit code."""
    chosen = settings.load(database_url=database, output=form)
    between = _instant(start, "--from"), _instant(end, "--to")
    found = _on(chosen.database_url, lambda app: app.audit(
        *between, schedule=schedule, tenant_id=tenant, progress=_told()
    ))  # fmt: skip
    if chosen.output != Format.TABLE:
        emit([one.to_json() for one in found.differences], chosen.output)
    elif found.differences:
        head = ("FINDING", "SCHEDULE", "AT", "TO", "COUNT", "WHAT")
        table([_line(one) for one in found.differences], head)
    say(summary(found))
    return DIFFERENT if found.differences else OK


def why(schedule: str, instant: str, tenant: str, database: str | None, form: str | None) -> int:
    """Print what became of one occurrence; the exit code."""
    chosen = settings.load(database_url=database, output=form)
    at = _instant(instant, "the instant")
    found = _on(chosen.database_url, lambda app: app.why(schedule, at, tenant_id=tenant))
    if chosen.output != Format.TABLE:
        emit_one(found.to_json(), chosen.output)
    else:
        show("\n".join(found.sentences))
    return OK


def summary(found: Audit) -> str:
    """All that was counted, in a line."""
    counts = found.counts
    words = [f"{number:,} {name}" for name, number in counts.numbers().items() if number or name == "expected"]
    skipped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.skipped.items()))
    words += [f"skipped: {skipped}"] if skipped else []
    differences = sum(counts.found.values())
    more = f" (the first {len(found.differences):,} are shown)" if found.more else ""
    return f"{'; '.join(words)}. {differences:,} difference{'' if differences == 1 else 's'}{more}."


def _line(one: Difference) -> tuple[str, ...]:
    to = "" if one.to == one.at else format_instant(one.to)
    jobs = f" ({', '.join(one.jobs)})" if one.jobs else ""
    return one.finding.value, one.schedule, format_instant(one.at), to, f"{one.count:,}", one.detail + jobs


def _on(url: str, call: Callable[[Timebell], Awaitable[R]]) -> R:
    """Run a verb on a database, which has to be there."""
    if missing(url):
        raise StoreUnreachable(f"There is no database {shown(url)}.", fix="Give --database, or TIMEBELL_DATABASE_URL.")

    async def run() -> R:
        app = Timebell(url)
        try:
            return await call(app)
        finally:
            await app.close()

    return asyncio.run(run())


def _told() -> Callable[[Counts], None]:
    """How far it has come: a line now and then."""
    clock = SystemClock()
    last = clock.monotonic()

    def tell(counts: Counts) -> None:
        nonlocal last
        if (at := clock.monotonic()) - last >= EVERY:
            last = at
            say(f"{counts.schedules:,} schedules  {counts.expected:,} occurrences compared")

    return tell


def _instant(text: str, what: str) -> datetime:
    found = parse_instant(text, what)
    if found.tzinfo is None:
        raise InvalidInput(
            f"{what} is {text!r:.60}, which has no offset from UTC.", code="INVALID_INSTANT",
            fix="Write it like 2027-03-14T07:00:00Z.",
        )  # fmt: skip
    return found
