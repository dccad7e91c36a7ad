"""What a cron expression means, by definition: walk real time step by step and look at the clock.

Deliberately naive and independent of the engine: its own reading of the fields, its own use of zoneinfo.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from importlib import resources
from io import BytesIO
from typing import NamedTuple
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
    """Found by looking every day and halving."""

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
    values: list[set[int]]

    @property
    def wildcard(self) -> bool:
        return any(text[0] == "*" for text in self.texts[:3])

    def on(self, day: date) -> bool:
        by_date = day.day in self.values[3]
        by_weekday = day.isoweekday() % 7 in self.values[5]
        both = self.texts[3][0] == "*" or self.texts[5][0] == "*"
        return day.month in self.values[4] and (by_date and by_weekday if both else by_date or by_weekday)

    def at(self, wall: datetime) -> bool:
        return (
            wall.second in self.values[0]
            and wall.minute in self.values[1]
            and wall.hour in self.values[2]
            and self.on(wall.date())
        )


def read(text: str) -> Expression:
    texts = text.split()
    texts = texts if len(texts) == 6 else ["0", *texts]
    limits = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
    values = [_read(field, *limit) for field, limit in zip(texts, limits, strict=True)]
    return Expression(texts, [*values[:5], {day % 7 for day in values[5]}])


def _read(field: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            first, last = str(low), str(high)
        elif not last:
            last = str(high) if step else first
        found |= set(range(int(first), int(last) + 1, int(step or 1)))
    return found


class Walk:
    """What clocks in a zone show, every `step` from `start` to `end`."""

    def __init__(self, name: str, start: datetime, end: datetime, step: timedelta) -> None:
        self.step = step
        zone = info(name)
        self.shown: list[tuple[datetime, datetime]] = []
        self.at: dict[datetime, list[datetime]] = {}
        at = start
        while at < end:
            wall = at.astimezone(zone).replace(tzinfo=None, fold=0)
            self.shown.append((at, wall))
            self.at.setdefault(wall, []).append(at)
            at += step
        self.dates = {wall.date() for wall in self.at}
        self.jumps = [
            (before, after)
            for before, after in zip(self.shown, self.shown[1:], strict=False)
            if after[1] - before[1] > step
        ]

    def fires(self, text: str, gap: str = "end", fold: str = "first") -> list[datetime]:
        """Every instant of an expression, in order. Near the edges of the walk it may miss some."""
        expression = read(text)
        if expression.wildcard:
            return [at for at, wall in self.shown if expression.at(wall)]
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
