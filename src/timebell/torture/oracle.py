"""Which instants a recurrence has, by brute force: every second of a stretch of time is looked at.

Nothing of `timebell.recurrence` is used here. Instants are whole seconds since 1970, UTC; an interval whose anchor has
milliseconds has them in each of its instants, for whoever asks here to add. The zones are those of the
`tzdata` package, as the product's are: the host's may be of another year, in which another law held.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any
from zoneinfo import ZoneInfo

LIMITS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
UNITS = {"SECONDLY": 1, "MINUTELY": 60, "HOURLY": 3600}


def instants(spec: Mapping[str, Any], start: int, end: int) -> list[int]:
    """Every instant of a recurrence in [start, end)."""
    match spec["kind"]:
        case "interval":
            return [
                at for at in range(start, end) if at >= spec["anchor"] and not (at - spec["anchor"]) % spec["every"]
            ]
        case "cron":
            return _cron(spec["expression"], spec["timezone"], start, end)
        case "rrule":
            return [at for at in range(start, end) if _in_rule(spec, at)]
    raise ValueError(f"the oracle knows no {spec['kind']!r}")


def steady(timezone: str, start: int, end: int) -> bool:
    """Whether clocks there neither skip nor repeat anything from a day before to a day after."""
    zone = place(timezone)
    days = range(start - 86_400, end + 86_401, 3600)
    return len({datetime.fromtimestamp(at, zone).utcoffset() for at in days}) == 1


@cache
def place(timezone: str) -> ZoneInfo:
    """A zone by its name."""
    with resources.files("tzdata.zoneinfo").joinpath(*timezone.split("/")).open("rb") as data:
        return ZoneInfo.from_file(data, key=timezone)


def _cron(expression: str, timezone: str, start: int, end: int) -> list[int]:
    """Six fields, seconds first. The day is one that both day fields name, as one of them is always a wildcard here."""
    zone = place(timezone)
    fields = [_values(text, *limits) for text, limits in zip(expression.split(), LIMITS, strict=True)]
    found = []
    for at in range(start, end):
        here = datetime.fromtimestamp(at, zone)
        now = (here.second, here.minute, here.hour, here.day, here.month, here.isoweekday() % 7)
        if all(value in wanted for value, wanted in zip(now, fields, strict=True)):
            found.append(at)
    return found


@cache
def _values(text: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for item in text.split(","):
        body, _, step = item.partition("/")
        if body == "*":
            first, last = low, high
        elif "-" in body:
            first, last = map(int, body.split("-"))
        else:
            first = int(body)
            last = high if step else first
        found.update(range(first, last + 1, int(step or 1)))
    return frozenset(found)


def _in_rule(spec: Mapping[str, Any], at: int) -> bool:
    """FREQ SECONDLY to HOURLY with INTERVAL and BYSECOND, in real time from the first instant on."""
    first = spec["dtstart"]
    unit = UNITS[spec["freq"]]
    if at < first or ((at // unit) - (first // unit)) % spec["interval"]:
        return False
    local = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=at)
    seconds = spec.get("bysecond") or ([first % 60] if unit > 1 else range(60))
    minutes = [first // 60 % 60] if unit > 60 else range(60)
    return local.second in seconds and local.minute in minutes
