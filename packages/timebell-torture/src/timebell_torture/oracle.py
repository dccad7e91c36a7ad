"""The instants of a recurrence, by brute force: every second of an interval is checked.

This module uses nothing of `timebell.recurrence`. Instants are whole seconds since 1970 UTC; the caller adds the
milliseconds of an interval's anchor. Zones come from the `tzdata` package, as Timebell's do, because the host's zone
data may be from another year with other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any
from zoneinfo import ZoneInfo

FIELD_LIMITS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
UNIT_SECONDS = {"SECONDLY": 1, "MINUTELY": 60, "HOURLY": 3600}


def instants(spec: Mapping[str, Any], start: int, end: int) -> list[int]:
    """Return every instant of a recurrence in [start, end)."""
    match spec["kind"]:
        case "interval":
            return [
                at for at in range(start, end) if at >= spec["anchor"] and not (at - spec["anchor"]) % spec["every"]
            ]
        case "cron":
            return _cron(spec["expression"], spec["timezone"], start, end)
        case "rrule":
            return [at for at in range(start, end) if _matches_rule(spec, at)]
    raise ValueError(f"the oracle does not support {spec['kind']!r}")


def has_constant_offset(timezone: str, start: int, end: int) -> bool:
    """Return whether the zone's UTC offset is constant from a day before `start` to a day after `end`."""
    zone = load_zone(timezone)
    days = range(start - 86_400, end + 86_401, 3600)
    return len({datetime.fromtimestamp(at, zone).utcoffset() for at in days}) == 1


@cache
def load_zone(timezone: str) -> ZoneInfo:
    """Return a zone by its name."""
    with resources.files("tzdata.zoneinfo").joinpath(*timezone.split("/")).open("rb") as data:
        return ZoneInfo.from_file(data, key=timezone)


def _cron(expression: str, timezone: str, start: int, end: int) -> list[int]:
    """Evaluate six fields, seconds first.

    Both day fields must match, because one of them is always a wildcard in these tests.
    """
    zone = load_zone(timezone)
    fields = [_values(text, *limits) for text, limits in zip(expression.split(), FIELD_LIMITS, strict=True)]
    matches = []
    for at in range(start, end):
        local = datetime.fromtimestamp(at, zone)
        values = (local.second, local.minute, local.hour, local.day, local.month, local.isoweekday() % 7)
        if all(value in allowed for value, allowed in zip(values, fields, strict=True)):
            matches.append(at)
    return matches


@cache
def _values(text: str, low: int, high: int) -> frozenset[int]:
    values: set[int] = set()
    for item in text.split(","):
        range_text, _, step = item.partition("/")
        if range_text == "*":
            first, last = low, high
        elif "-" in range_text:
            first, last = map(int, range_text.split("-"))
        else:
            first = int(range_text)
            last = high if step else first
        values.update(range(first, last + 1, int(step or 1)))
    return frozenset(values)


def _matches_rule(spec: Mapping[str, Any], at: int) -> bool:
    """Evaluate FREQ SECONDLY to HOURLY with INTERVAL and BYSECOND, in elapsed time from DTSTART."""
    first = spec["dtstart"]
    unit = UNIT_SECONDS[spec["freq"]]
    if at < first or ((at // unit) - (first // unit)) % spec["interval"]:
        return False
    local = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=at)
    seconds = spec.get("bysecond") or ([first % 60] if unit > 1 else range(60))
    minutes = [first // 60 % 60] if unit > 60 else range(60)
    return local.second in seconds and local.minute in minutes
