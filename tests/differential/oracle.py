"""A cron oracle by definition: it looks up every local time of every local day of a period in zoneinfo.

It is independent of Timebell's code.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from importlib import resources
from io import BytesIO
from zoneinfo import ZoneInfo

DAY, SECOND = timedelta(days=1), timedelta(seconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAMES = {name: n for n, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))}
MONTHS = {calendar.month_abbr[n].upper(): n for n in range(1, 13)}
RANGES = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7), (1970, 2199))


@cache
def info(name: str) -> ZoneInfo:
    """Return the zone from the tzdata package."""
    data = resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()
    return ZoneInfo.from_file(BytesIO(data), key=name)


def offset(zone: ZoneInfo, at: datetime) -> timedelta:
    found = at.astimezone(zone).utcoffset()
    assert found is not None
    return found


def transitions(zone: ZoneInfo, first: int, last: int) -> list[datetime]:
    """Return the offset changes within these years, by comparing half days and bisecting."""
    found = []
    low, end = datetime(first, 1, 1, tzinfo=UTC), datetime(last, 1, 1, tzinfo=UTC)
    while low < end:
        high = low + DAY / 2
        if offset(zone, low) != offset(zone, high):
            before, after = low, high
            while after - before > SECOND:
                middle = before + SECOND * ((after - before) // SECOND // 2)
                before, after = (middle, after) if offset(zone, middle) == offset(zone, low) else (before, middle)
            found.append(after)
        low = high
    return found


@lru_cache(maxsize=20_000)
def instants(zone: ZoneInfo, wall: datetime) -> tuple[datetime, ...]:
    """Return the instants of a local time: none, one or two."""
    found = []
    for fold in (0, 1):
        at = wall.replace(tzinfo=zone, fold=fold).astimezone(UTC)
        if at.astimezone(zone).replace(tzinfo=None, fold=0) == wall and at not in found:
            found.append(at)
    return tuple(found)


@lru_cache(maxsize=20_000)
def gap_end(zone: ZoneInfo, wall: datetime) -> datetime:
    """Return the end of the gap that contains this local time: the first instant whose local time is later."""
    low, high = (datetime(wall.year, wall.month, wall.day, tzinfo=UTC) + n * 3 * DAY for n in (-1, 1))
    while high - low > SECOND:
        middle = low + SECOND * ((high - low) // SECOND // 2)
        before = middle.astimezone(zone).replace(tzinfo=None) <= wall
        low, high = (middle, high) if before else (low, middle)
    return high


@lru_cache(maxsize=20_000)
def exists(zone: ZoneInfo, day: date) -> bool:
    """Return whether any second of this local date exists."""
    midnight = datetime(day.year, day.month, day.day)
    return any(instants(zone, midnight + timedelta(minutes=n)) for n in range(0, 1440, 15))


class Cron:
    """A cron expression of five, six or seven fields, parsed strictly."""

    def __init__(self, text: str) -> None:
        fields = text.upper().split()
        if len(fields) == 5:
            fields = ["0", *fields]
        self.fields = fields if len(fields) == 7 else [*fields, "*"]
        second, minute, hour = self.fields[:3]
        self.wildcard = any(field.startswith("*") for field in (second, minute, hour))
        self.times = [
            timedelta(hours=h, minutes=m, seconds=s)
            for h in sorted(values(hour, 2))
            for m in sorted(values(minute, 1))
            for s in sorted(values(second, 0))
        ]
        self.months = values(self.fields[4], 4)
        self.years = values(self.fields[6], 6)

    def day(self, day: date) -> bool:
        """Return whether the three day fields and the year match this date."""
        if day.month not in self.months or day.year not in self.years:
            return False
        dates, weekdays = self.fields[3], self.fields[5]
        by_date = any(names_date(item, day) for item in dates.split(","))
        by_weekday = any(names_weekday(item, day) for item in weekdays.removeprefix("+").split(","))
        both = dates[0] in "*?" or weekdays[0] in "*?+"
        return by_date and by_weekday if both else by_date or by_weekday

    def fires(self, zone: ZoneInfo, start: date, end: date) -> list[datetime]:
        """Return every instant on a local date of [start, end), in order."""
        found: set[datetime] = set()
        for day in (start + n * DAY for n in range((end - start).days)):
            if self.day(day) and exists(zone, day):
                midnight = datetime(day.year, day.month, day.day)
                for time in self.times:
                    found.update(self._at(zone, midnight + time))
        return sorted(found)

    def _at(self, zone: ZoneInfo, wall: datetime) -> Iterator[datetime]:
        seen = instants(zone, wall)
        if self.wildcard:
            yield from seen
        elif seen:
            yield min(seen)
        else:
            yield gap_end(zone, wall)


@lru_cache(maxsize=10_000)
def values(field: str, place: int) -> frozenset[int]:
    """Return the numbers of a plain field."""
    low, high = RANGES[place]
    names = MONTHS if place == 4 else NAMES if place == 5 else {}
    found: set[int] = set()
    for item in field.split(","):
        body, _, step = item.partition("/")
        if body in ("*", "?"):
            first, last = low, high
        elif "-" in body:
            first, last = (names.get(part) or int(names.get(part, part)) for part in body.split("-"))
            last = 7 if last == 0 and first > 0 and place == 5 else last
        else:
            first = int(names.get(body, body))
            last = high if step else first
        found.update(range(first, last + 1, int(step or 1)))
    return frozenset(found)


def names_date(item: str, day: date) -> bool:
    """Return whether an item of the day-of-month field matches a date."""
    length = calendar.monthrange(day.year, day.month)[1]
    if match := re.fullmatch(r"L(?:-(\d+))?", item):
        return day.day == length - int(match[1] or 0)
    if match := re.fullmatch(r"(\d+|L)W", item):
        wanted = length if match[1] == "L" else int(match[1])
        return wanted <= length and day == weekday_nearest(date(day.year, day.month, wanted))
    return day.day in values(item, 3)


def weekday_nearest(day: date) -> date:
    """Return the weekday (Monday to Friday) nearest to a date, in its month."""
    near = [day, day - DAY, day + DAY, day - 2 * DAY, day + 2 * DAY]
    return next(one for one in near if one.weekday() < 5 and one.month == day.month)


def names_weekday(item: str, day: date) -> bool:
    """Return whether an item of the day-of-week field matches a date."""
    if match := re.fullmatch(r"(\w+)#(\d)", item):
        return names_weekday(match[1], day) and (day.day - 1) // 7 + 1 == int(match[2])
    if match := re.fullmatch(r"(\d|[A-Z]{3})L", item):
        return names_weekday(match[1], day) and (day + 7 * DAY).month != day.month
    return (day.weekday() + 1) % 7 in {value % 7 for value in values(item, 5)}
