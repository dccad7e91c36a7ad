"""Reference evaluation of cron expressions: walk real time step by step and read the local clock.

Deliberately naive and independent of the engine: its own reading of the fields, its own use of zoneinfo.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from importlib import resources
from io import BytesIO
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

DAY = timedelta(days=1)


@cache
def info(name: str) -> ZoneInfo:
    return _load(resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes())


@cache
def _load(data: bytes) -> ZoneInfo:
    return ZoneInfo.from_file(BytesIO(data))


@cache
def changes(zone: ZoneInfo) -> list[datetime]:
    """The instants of 2000 to 2039 at which the UTC offset changes."""
    return list(_changes(zone, 2000, 2040))


def _changes(zone: ZoneInfo, first: int, last: int) -> Iterator[datetime]:
    """Find offset changes by comparing each day with the next and bisecting."""

    def offset(instant: datetime) -> timedelta | None:
        return instant.astimezone(zone).utcoffset()

    low, end = datetime(first, 1, 1, tzinfo=UTC), datetime(last, 1, 1, tzinfo=UTC)
    old = offset(low)
    while low < end:
        high = low + DAY
        if (new := offset(high)) != old:
            before, after = low, high
            while after - before > timedelta(seconds=1):
                middle = before + timedelta(seconds=(after - before) // timedelta(seconds=1) // 2)
                before, after = (middle, after) if offset(middle) == old else (before, middle)
            yield after
        low, old = high, new


class Expression(NamedTuple):
    texts: list[str]
    days: str | None
    month_end: str

    @property
    def wildcard(self) -> bool:
        return any(text[0] == "*" for text in self.texts[:3])

    def on(self, day: date) -> bool:
        dates, weekdays = self.texts[3], self.texts[5]
        by_date = any(self._is_date(item, day) for item in dates.split(","))
        by_weekday = any(_is_weekday(item, day) for item in weekdays.removeprefix("+").split(","))
        both = dates[0] in "*?" or weekdays[0] in "*?+"
        if self.days == "and" or {dates, weekdays} & {"*", "?", "*/1"}:
            both = True
        elif self.days == "or":
            both = False
        return (
            day.month in numbers(self.texts[4], 1, 12, MONTHS)
            and day.year in numbers(self.texts[6], 1970, 2199)
            and (by_date and by_weekday if both else by_date or by_weekday)
        )

    def _is_date(self, item: str, day: date) -> bool:
        last = (day.replace(day=28) + 4 * DAY).replace(day=1) - DAY
        if item[0] == "L":
            if item == "LW":
                return day == _nearest_workday(last)
            return last - day == int(item[2:] or 0) * DAY
        for number in [int(item[:-1])] if item[-1] == "W" else numbers(item, 1, 31):
            if number <= last.day or self.month_end == "back":
                named = day.replace(day=min(number, last.day))
                if day == (_nearest_workday(named) if item[-1] == "W" else named):
                    return True
        return False

    def at(self, wall: datetime) -> bool:
        return (
            wall.second in numbers(self.texts[0], 0, 59)
            and wall.minute in numbers(self.texts[1], 0, 59)
            and wall.hour in numbers(self.texts[2], 0, 23)
            and self.on(wall.date())
        )


def read(text: str, *, days: str | None = None, month_end: str = "skip", hash_key: str = "") -> Expression:
    texts = text.upper().split()
    texts = [*["0"][len(texts) > 5 :], *texts, *["*"][len(texts) > 6 :]]
    for n, (name, low, high) in enumerate(HASHED):
        items = texts[n].removeprefix("+").split(",")
        texts[n] = "+" * texts[n].startswith("+") + ",".join(_unhashed(one, hash_key, name, low, high) for one in items)
    return Expression(texts, days, month_end)


HASHED = [("second", 0, 59), ("minute", 0, 59), ("hour", 0, 23), ("day-of-month", 1, 28), ("month", 1, 12),
          ("day-of-week", 0, 6)]  # fmt: skip
MONTHS = ("", "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


def _unhashed(item: str, key: str, name: str, low: int, high: int) -> str:
    """Resolve H: the first 8 bytes of SHA-256 of field, NUL and key, modulo the number of choices."""
    found = re.fullmatch(r"H(?:\((\d+)-(\d+)\))?(?:/(\d+))?", item)
    if found is None:
        return item
    low, high = (low, high) if found[1] is None else (int(found[1]), int(found[2]))
    number = int(hashlib.sha256(f"{name}\0{key}".encode()).hexdigest()[:16], 16)
    if found[3] is None:
        return str(low + number % (high - low + 1))
    return f"{low + number % int(found[3])}-{high}/{found[3]}"


@cache
def numbers(field: str, low: int, high: int, names: tuple[str, ...] = ()) -> set[int]:
    found: set[int] = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        if span in ("*", "?"):
            first, last = str(low), str(high)
        elif not last:
            last = str(high) if step else first
        first, last = (str(names.index(end)) if end in names else end for end in (first, last))
        found |= set(range(int(first), int(last) + 1, int(step or 1)))
    return found


def _is_weekday(item: str, day: date) -> bool:
    if item[-1] == "L" or "#" in item:
        name, nth = (item[:-1], "") if item[-1] == "L" else item.split("#")
        if _weekday(name) != day.isoweekday() % 7:
            return False
        if item[-1] == "L":
            return (day + 7 * DAY).month != day.month
        return len([n for n in range(5) if (day - n * 7 * DAY).month == day.month and n * 7 < day.day]) == int(nth)
    item = str(_weekday(item)) if item in WEEKDAYS else item
    return day.isoweekday() % 7 in {number % 7 for number in numbers(item, 0, 7)}


def _weekday(name: str) -> int:
    return WEEKDAYS.index(name) if name in WEEKDAYS else int(name) % 7


def _nearest_workday(day: date) -> date:
    near = [day + n * DAY for n in (0, -1, 1, -2, 2)]
    return next(one for one in near if one.isoweekday() < 6 and one.month == day.month)


class Walk:
    """Local times of a zone, every `step` from `start` to `end`."""

    def __init__(self, name: str, start: datetime, end: datetime, step: timedelta) -> None:
        self.step = step
        zone = info(name)
        self.readings: list[tuple[datetime, datetime]] = []
        self.at: dict[datetime, list[datetime]] = {}
        at = start
        while at < end:
            wall = at.astimezone(zone).replace(tzinfo=None, fold=0)
            self.readings.append((at, wall))
            self.at.setdefault(wall, []).append(at)
            at += step
        self.dates = {wall.date() for wall in self.at}
        self.jumps = [
            (before, after)
            for before, after in zip(self.readings, self.readings[1:], strict=False)
            if after[1] - before[1] > step
        ]

    def fires(
        self, text: str, gap: str = "end", fold: str = "first", wildcard: str = "real", **options: Any
    ) -> list[datetime]:
        """Return the instants of an expression in order; some near the edges of the walk may be missing."""
        expression = read(text, **options)
        if expression.wildcard and wildcard == "real":
            return [at for at, wall in self.readings if expression.at(wall)]
        found: set[datetime] = set()
        for wall, instants in self.at.items():
            if expression.at(wall):
                found |= {"first": {instants[0]}, "last": {instants[-1]}, "both": set(instants)}[fold]
        for (before_at, before), (after_at, after) in self.jumps:
            wall = before + self.step
            while wall < after:
                if expression.at(wall) and wall.date() in self.dates and gap != "skip":
                    found.add(after_at if gap == "end" else before_at + (wall - before))
                wall += self.step
        return sorted(found)
