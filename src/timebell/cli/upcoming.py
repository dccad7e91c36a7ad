"""`timebell next`: what an expression means and when it fires. Needs no database and no server."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TextIO

from timebell import settings
from timebell.cli.output import emit, paint, say, show, table
from timebell.clock import wall
from timebell.errors import InvalidInput, InvalidRecurrence
from timebell.formatting import relative
from timebell.recurrence import Every, RRule, Spec, parse_cron, parse_interval, resolve_local, zone
from timebell.recurrence.instants import parse_instant
from timebell.recurrence.preview import answer_line, dst_notes, next_fires, then

YEAR = timedelta(days=366)
NOTES = {"gap": "moved: the clock skips this time", "fold": "the clock shows this time twice"}


def answer(lines: TextIO) -> None:
    """The door for machines: one answer for each line."""
    for line in lines:
        if line.strip():
            show(answer_line(line))


def explain(expression: str | None, every: str | None, rrule: str | None, since: str | None,
            timezone: str | None, count: int, start: str | None, form: str | None) -> None:  # fmt: skip
    """Words, fires, warnings and the coming year's clock changes. Raises InvalidInput."""
    chosen = settings.load(default_timezone=timezone, output=form)
    if chosen.default_timezone is None:
        raise InvalidInput(
            "No time zone was given, and there is no default.", code="TIMEZONE_MISSING",
            fix="Add --timezone Asia/Seoul (an IANA name). Timebell never guesses one.",
        )  # fmt: skip
    spec = _spec(expression, every, rrule, since)
    after = _instant(start, chosen.default_timezone)
    recurrence = spec.bind(chosen.default_timezone, created_at=after)
    fires = next_fires(recurrence, after, count)
    remarks = [*spec.warnings(), *dst_notes(recurrence, after, after + YEAR)]
    following = then(recurrence)
    if chosen.output != "table":
        emit(fires, chosen.output)
        if following:
            say(f"then {following}")
        for remark in remarks:
            say(f"! {remark}")
        return
    show(paint(recurrence.describe(), "bold", sys.stdout))
    if not fires:
        show("  It never fires after that instant.")
    rows = []
    for number, fire in enumerate(fires, 1):
        at = datetime.fromisoformat(str(fire["utc"]))
        local = recurrence.local(at)
        rows.append([
            f"{number:>3}", f"{local:%a} {local.day:>2} {local:%b %Y %H:%M:%S %Z}", f"{local:%z}", relative(at - after),
            str(fire["utc"]), NOTES.get(str(fire["note"]), ""),
        ])  # fmt: skip
    if rows:
        table(rows)
    if following:
        show(f"     then {following}")
    for remark in remarks:
        show(paint("! ", "yellow", sys.stdout) + remark)


def _spec(expression: str | None, every: str | None, rrule: str | None, since: Any) -> Spec:
    if sum(given is not None for given in (expression, every, rrule)) != 1:
        raise InvalidInput(
            "Give one expression, one interval or one RRULE.", code="RECURRENCE_MISSING",
            fix='For example: timebell next "0 9 * * 1-5", or timebell next --every PT90M.',
        )  # fmt: skip
    text = every or rrule or expression or ""
    spec: Spec
    if every is not None or text.startswith(("P", "R/")):
        spec = parse_interval(text)
    elif rrule is not None or text.upper().startswith(("FREQ=", "RRULE", "DTSTART")):
        spec = RRule(text.replace("\\n", "\n"))
    else:
        spec = parse_cron(text)
    if since is None:
        return spec
    if not isinstance(spec, Every):
        raise InvalidRecurrence(f"--since concerns intervals, and {text!r} is none.", fix="Use --every PT10M.")
    return replace(spec, since=since)


def _instant(text: str | None, timezone: str) -> datetime:
    """`--from` as an instant, local in the zone unless it says otherwise; without it, now."""
    place = zone(timezone)
    if text is None:
        return wall().replace(microsecond=0)
    found = parse_instant(text, "--from")
    return resolve_local(found, place)[0] if found.tzinfo is None else found
