"""Reference evaluation of recurrence rules: check every day of every period, or every second.

Deliberately naive and independent of the engine: its own reading of RFC 5545's table, its own use of zoneinfo.
Rules are dicts of the text's parts: {"FREQ": "DAILY", "BYHOUR": "9,17"}.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import product
from zoneinfo import ZoneInfo

from tests.unit.recurrence.oracle import changes, info

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
NAMES = ["MO", "TU", "WE", "TH", "FR", "SA", "SU"]
UNITS = {"HOURLY": timedelta(hours=1), "MINUTELY": timedelta(minutes=1), "SECONDLY": SECOND}

Parts = dict[str, str]


def numbers(parts: Parts, name: str) -> list[int]:
    return [int(item) for item in parts[name].split(",")] if name in parts else []


def read(text: str) -> Parts:
    return dict(item.split("=") for item in text.split(";"))


def occurrences(
    parts: Parts, start: datetime, zone: str, end: datetime, *, gap: str = "shift", fold: str = "first"
) -> list[datetime]:
    """Return all instants from DTSTART, a local time, up to `end`, an aware datetime."""
    place = info(zone)
    first = (instants(start, place, gap, fold) or instants(start, place, "end", fold))[0]
    if parts["FREQ"] in UNITS:
        found = sorted(set(_stepped(parts, first, place, end)))
    else:
        local_times = _coarse(parts, start, end)
        found = sorted({at for local_time in local_times for at in instants(local_time, place, gap, fold)})
    found = [at for at in found if first <= at < end]
    if "UNTIL" in parts:
        limit = datetime.strptime(parts["UNTIL"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        found = [at for at in found if at <= limit]
    return found[: int(parts["COUNT"])] if "COUNT" in parts else found


def instants(local_time: datetime, place: ZoneInfo, gap: str, fold: str) -> list[datetime]:
    """PEP 495: with fold=0 a time in a gap has the offset before it."""
    passes = sorted({local_time.replace(tzinfo=place, fold=n).astimezone(UTC) for n in (0, 1)})
    in_local_time = [at for at in passes if at.astimezone(place).replace(tzinfo=None, fold=0) == local_time]
    if in_local_time:
        return {"first": in_local_time[:1], "last": in_local_time[-1:], "both": in_local_time}[fold]
    if gap == "skip":
        return []
    if gap == "shift":
        return [local_time.replace(tzinfo=place, fold=0).astimezone(UTC)]
    return [
        at
        for at in changes(place)
        if (at - SECOND).astimezone(place).replace(tzinfo=None) < local_time < at.astimezone(place).replace(tzinfo=None)
    ]


def _coarse(parts: Parts, start: datetime, end: datetime) -> Iterator[datetime]:
    parts = {**parts}
    if not parts.keys() & {"BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"}:
        if parts["FREQ"] == "YEARLY":
            parts.setdefault("BYMONTH", str(start.month))
        if parts["FREQ"] in ("YEARLY", "MONTHLY"):
            parts["BYMONTHDAY"] = str(start.day)
    if parts["FREQ"] == "WEEKLY" or ("BYWEEKNO" in parts and not parts.keys() & {"BYYEARDAY", "BYMONTHDAY"}):
        parts.setdefault("BYDAY", NAMES[start.weekday()])
    clock = [
        sorted(numbers(parts, name) or [getattr(start, name[2:].lower())])
        for name in ("BYHOUR", "BYMINUTE", "BYSECOND")
    ]
    day = start.date() - timedelta(days=366)
    periods: dict[int, list[date]] = {}
    while day <= end.date() + timedelta(days=366):
        periods.setdefault(_period(parts, day), []).append(day)
        day += DAY
    first_period = _period(parts, start.date())
    for number, days in periods.items():
        if number >= first_period and (number - first_period) % int(parts.get("INTERVAL", "1")) == 0:
            local_times = [
                datetime(d.year, d.month, d.day, *time) for d in _matching(parts, days) for time in product(*clock)
            ]
            yield from select_positions(local_times, numbers(parts, "BYSETPOS"))


def select_positions(found: list[datetime], places: list[int]) -> list[datetime]:
    if not places:
        return found
    return [at for i, at in enumerate(found) if i + 1 in places or i - len(found) in places]


def _period(parts: Parts, day: date) -> int:
    if parts["FREQ"] == "YEARLY":
        return day.year
    if parts["FREQ"] == "MONTHLY":
        return day.year * 12 + day.month
    if parts["FREQ"] == "WEEKLY":
        return (day.toordinal() - 1 - NAMES.index(parts.get("WKST", "MO"))) // 7
    return day.toordinal()


def _matching(parts: Parts, days: list[date]) -> Iterable[date]:
    skip = parts.get("SKIP", "OMIT")
    if skip != "OMIT" and "BYMONTHDAY" in parts and parts["FREQ"] in ("YEARLY", "MONTHLY"):
        months = {(day.year, day.month) for day in days}
        months = {m for m in months if not numbers(parts, "BYMONTH") or m[1] in numbers(parts, "BYMONTH")}
        moved = {_moved(*month, n, skip) for month in months for n in numbers(parts, "BYMONTHDAY")}
        rest = {name: value for name, value in parts.items() if name not in ("BYMONTH", "BYMONTHDAY")}
        return sorted(day for day in moved if matches(rest, day, "BYMONTH" in parts))
    return [day for day in days if matches(parts, day, "BYMONTH" in parts)]


def _moved(year: int, month: int, number: int, skip: str) -> date:
    first, length = date(year, month, 1), monthrange(year, month)[1]
    at = number - 1 if number > 0 else length + number
    if at < 0:
        return first - DAY if skip == "BACKWARD" else first
    if at >= length:
        return first + timedelta(days=length - 1 if skip == "BACKWARD" else length)
    return first + timedelta(days=at)


def matches(parts: Parts, day: date, by_month: bool = False) -> bool:
    """Return whether a day satisfies all parts of the rule that restrict days."""
    length, month = _year_length(day.year), monthrange(day.year, day.month)[1]
    of_year, (number, weeks) = day.timetuple().tm_yday, week(day, NAMES.index(parts.get("WKST", "MO")))
    counted = {
        "BYMONTH": (day.month,),
        "BYMONTHDAY": (day.day, day.day - month - 1),
        "BYYEARDAY": (of_year, of_year - length - 1),
        "BYWEEKNO": (number, number - weeks - 1),
    }
    for name, values in counted.items():
        if name in parts and not set(values) & set(numbers(parts, name)):
            return False
    return "BYDAY" not in parts or any(
        _is_day(item, day, parts["FREQ"] == "MONTHLY" or by_month) for item in parts["BYDAY"].split(",")
    )


def _is_day(item: str, day: date, in_month: bool) -> bool:
    if NAMES[day.weekday()] != item[-2:]:
        return False
    if not (n := int(item[:-2] or 0)):
        return True
    last = date(day.year, day.month, monthrange(day.year, day.month)[1]) if in_month else date(day.year, 12, 31)
    past = (day.day if in_month else day.timetuple().tm_yday) - 1
    return n == past // 7 + 1 or n == -((last - day).days // 7 + 1)


def _year_length(year: int) -> int:
    return (date(year + 1, 1, 1) - date(year, 1, 1)).days


@cache
def week(day: date, wkst: int) -> tuple[int, int]:
    """Return the week number of a day and the number of weeks of its year.

    A week belongs to the year that contains four of its days.
    """
    begin = day - timedelta(days=(day.weekday() - wkst) % 7)
    year = (begin + timedelta(days=3)).year
    starts = [d for d in (date(year - 1, 12, 25) + timedelta(days=n) for n in range(380)) if d.weekday() == wkst]
    starts = [d for d in starts if (d + timedelta(days=3)).year == year]
    return starts.index(begin) + 1, len(starts)


def _stepped(parts: Parts, first: datetime, place: ZoneInfo, end: datetime) -> Iterator[datetime]:
    first_local = first.astimezone(place)
    wide = {"HOURLY": 3600, "MINUTELY": 60, "SECONDLY": 1}[parts["FREQ"]]
    step = UNITS[parts["FREQ"]] * int(parts.get("INTERVAL", "1"))
    wanted = {name: set(numbers(parts, f"BY{name.upper()}")) for name in ("hour", "minute", "second")}
    begin, candidates = first, [0]
    if parts["FREQ"] == "HOURLY" and wanted["minute"]:
        begin -= timedelta(minutes=first_local.minute, seconds=first_local.second)
        wanted["second"] = wanted["second"] or {first_local.second}
        candidates = [s for s in range(wide) if s % 60 in wanted["second"]]
    elif parts["FREQ"] != "SECONDLY" and wanted["second"]:
        begin -= timedelta(seconds=first_local.second)
        candidates = [s for s in range(60) if s in wanted["second"]]
    while begin < end:
        found = []
        for second in candidates:
            local_time = (begin + second * SECOND).astimezone(place)
            right = all(not values or getattr(local_time, name) in values for name, values in wanted.items())
            if right and matches(parts, local_time.date()):
                found.append(begin + second * SECOND)
        yield from select_positions(found, numbers(parts, "BYSETPOS"))
        begin += step
