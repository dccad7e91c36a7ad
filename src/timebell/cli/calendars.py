"""Fires to come, by day for people and as iCalendar (RFC 5545) for their calendar programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from timebell.cli.output import paint, say, show
from timebell.clock import wall

Fire = Mapping[str, Any]


def show_days(fires: Sequence[Fire]) -> None:
    """A heading a day, a line a fire; each time in its schedule's zone."""
    if not fires:
        say("Nothing fires.")
    width = max((len(fire["schedule"]) for fire in fires), default=0)
    for day, of_day in groupby(fires, lambda fire: fire["local"][:10]):
        show(paint(f"{datetime.fromisoformat(day):%A %d %B %Y}", "bold", sys.stdout))
        for fire in of_day:
            note = f"  {fire['note']}" if fire["note"] else ""
            show(f"  {fire['local'][11:19]}  {fire['schedule']:<{width}}  {fire['timezone']}{note}")


def ics_of(fires: Iterable[Fire]) -> str:
    """An iCalendar object with an event a fire, in UTC, so that no zone has to be told."""
    stamp = _utc(wall())
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//Timebell//calendar//EN", "CALSCALE:GREGORIAN"]
    for fire in fires:
        at = datetime.fromisoformat(fire["utc"])
        lines += [
            "BEGIN:VEVENT", f"UID:{fire['id']}-{_utc(at)}@timebell", f"DTSTAMP:{stamp}", f"DTSTART:{_utc(at)}",
            "DURATION:PT0S", f"SUMMARY:{_text(fire['schedule'])}",
            f"DESCRIPTION:{_text(fire['topic'])} ({_text(fire['timezone'])})", "TRANSP:TRANSPARENT", "END:VEVENT",
        ]  # fmt: skip
    lines.append("END:VCALENDAR")
    return "".join(f"{_folded(line)}\r\n" for line in lines)


def _utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def _text(value: str) -> str:
    """TEXT with its four escapes (RFC 5545, section 3.3.11)."""
    for raw, escaped in (("\\", "\\\\"), (";", "\\;"), (",", "\\,"), ("\n", "\\n")):
        value = value.replace(raw, escaped)
    return value.replace("\r", "")


def _folded(line: str) -> str:
    """A line of at most 75 octets, and what is left on lines that begin with a space (section 3.1)."""
    parts: list[str] = []
    part = ""
    for character in line:
        if len((part + character).encode()) > (75 if not parts else 74):
            parts.append(part)
            part = ""
        part += character
    return "\r\n ".join([*parts, part])
