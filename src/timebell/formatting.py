"""Format times, durations and counts for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell.errors import InvalidTimezone
from timebell.recurrence import zone

TIME_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def format_relative(span: timedelta) -> str:
    """Format a time relative to now in one or two units: `in 5 h 3 min`, `12 s ago`, `now`."""
    seconds = round(abs(span.total_seconds()))
    parts: list[str] = []
    for size, unit in TIME_UNITS:
        if seconds >= size and len(parts) < 2:
            parts.append(f"{seconds // size} {unit}")
            seconds %= size
        elif parts:
            break
    if not parts:
        return "now"
    return f"in {' '.join(parts)}" if span > timedelta(0) else f"{' '.join(parts)} ago"


def to_local(instant: datetime, timezone: str) -> datetime:
    """Convert an instant to local time in a zone; to UTC if the installed tzdata does not have the zone."""
    try:
        return zone(timezone).local(instant)
    except InvalidTimezone:
        return instant.astimezone(UTC)


def format_milliseconds(span: timedelta) -> str:
    """Format a lag in milliseconds: `0.8 ms`, `12 ms`, `3,012 ms`."""
    value = span.total_seconds() * 1000
    return f"{value:.1f} ms" if abs(value) < 10 else f"{value:,.0f} ms"


def format_progress(progress: Mapping[str, Any]) -> str:
    """Format the progress of an attempt, as in its JSON: `40%, page 3`."""
    fraction, text = progress["fraction"], progress["text"]
    return ", ".join(part for part in (None if fraction is None else f"{fraction:.0%}", text) if part)


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 job` or `1,200 jobs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
