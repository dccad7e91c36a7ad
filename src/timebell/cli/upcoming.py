"""`timebell next`: describe an expression and list its next fires, without a database or server."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TextIO

from timebell import settings
from timebell.cli.output import colorize, print_data, print_message, print_records, print_table
from timebell.clock import system_now
from timebell.errors import InvalidInput, InvalidRecurrence
from timebell.formatting import format_relative
from timebell.recurrence import Every, RRule, Spec, parse_cron, parse_interval, resolve_local, zone
from timebell.recurrence.instants import parse_instant
from timebell.recurrence.preview import answer_json_line, describe_fixed_delay, dst_notes, next_fires

DST_NOTES_PERIOD = timedelta(days=366)
FIRE_NOTES = {"gap": "moved: the clock skips this time", "fold": "the clock shows this time twice"}


def answer_lines(lines: TextIO) -> None:
    """Print one JSON line for each JSON line of the input (`--stdin`)."""
    for line in lines:
        if line.strip():
            print_data(answer_json_line(line))


def print_upcoming(
    expression: str | None, every: str | None, rrule: str | None, since: str | None, timezone: str | None, count: int,
    start: str | None, output_format: str | None,
) -> None:  # fmt: skip
    """Print the description, fires, warnings and clock changes of the coming year. Raises InvalidInput."""
    spec = _parse_spec(expression, every, rrule, since)
    chosen = settings.load(default_timezone=timezone, output=output_format)
    if chosen.default_timezone is None:
        raise InvalidInput(
            "No time zone is specified, and there is no default.", code="TIMEZONE_MISSING",
            fix="Add --timezone Asia/Seoul (an IANA name). Timebell never guesses a time zone.",
        )  # fmt: skip
    after = _parse_start(start, chosen.default_timezone)
    recurrence = spec.bind(chosen.default_timezone, created_at=after)
    fires = next_fires(recurrence, after, count)
    notes = [*spec.warnings(), *dst_notes(recurrence, after, after + DST_NOTES_PERIOD)]
    delay_text = describe_fixed_delay(recurrence)
    if chosen.output != "table":
        print_records(fires, chosen.output)
        if delay_text:
            print_message(f"then {delay_text}")
        for note in notes:
            print_message(f"! {note}")
        return
    print_data(colorize(recurrence.describe(), "bold", sys.stdout))
    if not fires:
        print_data("  It never fires after that time.")
    rows = []
    for number, fire in enumerate(fires, 1):
        at = datetime.fromisoformat(str(fire["utc"]))
        local = recurrence.local(at)
        rows.append([
            f"{number:>3}", f"{local:%a} {local.day:>2} {local:%b %Y %H:%M:%S %Z}", f"{local:%z}",
            format_relative(at - after), str(fire["utc"]), FIRE_NOTES.get(str(fire["note"]), ""),
        ])  # fmt: skip
    if rows:
        print_table(rows)
    if delay_text:
        print_data(f"     then {delay_text}")
    for note in notes:
        print_data(colorize("! ", "yellow", sys.stdout) + note)


def _parse_spec(expression: str | None, every: str | None, rrule: str | None, since: Any) -> Spec:
    if sum(value is not None for value in (expression, every, rrule)) != 1:
        raise InvalidInput(
            "Specify exactly one of expression, interval and RRULE.", code="RECURRENCE_MISSING",
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
        raise InvalidRecurrence(
            f"--since applies only to intervals, and {text!r} is not one.", fix="Use --every PT10M."
        )
    return replace(spec, since=since)


def _parse_start(text: str | None, timezone: str) -> datetime:
    """Convert `--from` to an instant, local in `timezone` unless it has an offset; None means now."""
    tz = zone(timezone)
    if text is None:
        return system_now().replace(microsecond=0)
    instant = parse_instant(text, "--from")
    return resolve_local(instant, tz)[0] if instant.tzinfo is None else instant
