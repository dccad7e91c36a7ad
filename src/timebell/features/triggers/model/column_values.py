"""Values of the columns that a trigger reads: instants and recipients. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell.errors import TimebellError
from timebell.recurrence import resolve_local, zone

MAX_KEY_LENGTH = 200
MAX_RECIPIENTS = 1000  # of one item
MAX_YEAR = 2199
RFC_9557_ZONE = re.compile(r"([^\[]+)\[!?([A-Za-z0-9_+\-/]+)\](?:\[!?[a-z][a-z0-9-]*=[^\]]*\])*", re.ASCII)
RANGE_TEXT = re.compile(r"([^/\[]*(?:\[[^\]]*\])*)/([^/\[]*(?:\[[^\]]*\])*)")
RANGE_FIELDS = (("from", "to"), ("start", "end"))
RANGE_EDGES = ("start", "end")
FIRST_EPOCH_SECONDS, FIRST_MILLISECONDS = 1e9, 1e11


def select_edge(value: Any, edge: str) -> Any:
    """Return the start or the end of a range: `2027-03-01/2027-03-05`, or a mapping of from and to, or start and end.

    Other values are returned as they are.
    """
    position = RANGE_EDGES.index(edge)
    if isinstance(value, str):
        match = RANGE_TEXT.fullmatch(value.strip()) if "/" in value and len(value) <= 200 else None
        return value if match is None else match[position + 1].strip()
    if isinstance(value, Mapping):
        for names in RANGE_FIELDS:
            if value.keys() & set(names):
                return value.get(names[position])
    return value


def parse_column_zone(value: Any) -> str | None:
    """Return the time zone that a column names; None if it is empty or names no zone."""
    try:
        return zone(value.strip()).name if isinstance(value, str) else None
    except TimebellError:
        return None


def parse_value_zone(value: Any) -> str | None:
    """Return the time zone that an RFC 9557 value contains; None if it contains none, or an unknown one."""
    if not isinstance(value, str) or "[" not in value or len(value) > 100:
        return None
    match = RFC_9557_ZONE.fullmatch(value.strip())
    return None if match is None else parse_column_zone(match[2])


def parse_column_instant(value: Any, timezone: str | None) -> datetime | None:
    """Parse a column's value as an aware UTC instant; a date alone is the start of that day in the zone.

    The value is ISO 8601 text, also with a zone as in RFC 9557 (`2027-03-14T09:00[Europe/Madrid]`), or a number of
    seconds or milliseconds since 1970. Returns None for an unreadable value, and for local time without a zone.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _parse_epoch(value)
    if not isinstance(value, str) or len(value) > 100:
        return None
    text = value.strip()
    try:
        if "[" in text and (named := RFC_9557_ZONE.fullmatch(text)) is not None:
            text, timezone = named[1], named[2]
        instant = datetime.fromisoformat(text)
        if instant.tzinfo is None:
            instant = resolve_to_utc(instant, timezone) if timezone is not None else None  # type: ignore[assignment]
        else:
            instant = instant.astimezone(UTC)
    except (ValueError, OverflowError, TimebellError):
        return None
    return instant if instant is not None and 1970 <= instant.year <= MAX_YEAR else None


def _parse_epoch(value: float) -> datetime | None:
    """Parse seconds since 1970 (from 2001 on), or milliseconds. Smaller numbers are not instants."""
    seconds = value / 1000 if value >= FIRST_MILLISECONDS else value
    if not FIRST_EPOCH_SECONDS <= seconds < FIRST_MILLISECONDS:
        return None
    instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return instant if instant.year <= MAX_YEAR else None


def parse_recipients(value: Any) -> list[str] | None:
    """Return the distinct recipients in a field; an empty list for an empty field, None for an invalid value."""
    if value is None or value == "":
        return []
    values = value if isinstance(value, list) else [value]
    recipients = [str(one) for one in values if isinstance(one, str | int) and not isinstance(one, bool)]
    if (
        len(recipients) != len(values)
        or len(recipients) > MAX_RECIPIENTS
        or not all(0 < len(recipient) <= MAX_KEY_LENGTH for recipient in recipients)
    ):
        return None
    return list(dict.fromkeys(recipients))


def resolve_to_utc(local: datetime, timezone: str) -> datetime:
    """Return the UTC instant of a local time in a zone. Raises InvalidInstant."""
    return resolve_local(local, zone(timezone))[0]
