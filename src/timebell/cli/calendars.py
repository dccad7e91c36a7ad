"""Print upcoming fires grouped by day, or as iCalendar (RFC 5545)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from timebell.cli.output import colorize, print_data, print_message
from timebell.clock import system_now

Fire = Mapping[str, Any]


def print_days(fires: Sequence[Fire]) -> None:
    """Print one heading per day and one line per fire, in the local time of its schedule."""
    if not fires:
        print_message("No upcoming fires.")
    width = max((len(fire["schedule"]) for fire in fires), default=0)
    for day, fires_of_day in groupby(fires, lambda fire: fire["local"][:10]):
        print_data(colorize(f"{datetime.fromisoformat(day):%A %d %B %Y}", "bold", sys.stdout))
        for fire in fires_of_day:
            note = f"  {fire['note']}" if fire["note"] else ""
            print_data(f"  {fire['local'][11:19]}  {fire['schedule']:<{width}}  {fire['timezone']}{note}")


def to_icalendar(fires: Iterable[Fire]) -> str:
    """Return an iCalendar object with one event per fire, in UTC, so no VTIMEZONE is needed."""
    stamp = _format_utc(system_now())
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//Timebell//calendar//EN", "CALSCALE:GREGORIAN"]
    for fire in fires:
        at = datetime.fromisoformat(fire["utc"])
        lines += [
            "BEGIN:VEVENT", f"UID:{fire['id']}-{_format_utc(at)}@timebell", f"DTSTAMP:{stamp}",
            f"DTSTART:{_format_utc(at)}", "DURATION:PT0S", f"SUMMARY:{_escape_text(fire['schedule'])}",
            f"DESCRIPTION:{_escape_text(fire['topic'])} ({_escape_text(fire['timezone'])})",
            "TRANSP:TRANSPARENT", "END:VEVENT",
        ]  # fmt: skip
    lines.append("END:VCALENDAR")
    return "".join(f"{_fold_line(line)}\r\n" for line in lines)


def _format_utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def _escape_text(value: str) -> str:
    """Escape a TEXT value (RFC 5545, section 3.3.11)."""
    for raw, escaped in (("\\", "\\\\"), (";", "\\;"), (",", "\\,"), ("\n", "\\n")):
        value = value.replace(raw, escaped)
    return value.replace("\r", "")


def _fold_line(line: str) -> str:
    """Fold a line at 75 octets; continuation lines begin with a space (RFC 5545, section 3.1)."""
    parts: list[str] = []
    part = ""
    for character in line:
        if len((part + character).encode()) > (75 if not parts else 74):
            parts.append(part)
            part = ""
        part += character
    return "\r\n ".join([*parts, part])
