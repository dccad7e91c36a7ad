"""Which days match, a month at a time: the days of a month are one bit mask, bit 0 its first day.

Days are counted from 1970-01-01. A rule about days needs to know only the weekday of the month's first
day and the month's length, its shape, so that new ones are one more function of these two.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import date
from functools import lru_cache
from typing import NamedTuple

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 1969, 2200  # local dates reach a day beyond the instants 1970..2199
_MONTHS = [(year, month) for year in range(_FIRST_YEAR, _LAST_YEAR + 1) for month in range(1, 13)]
_FIRST = [date(year, month, 1).toordinal() - _EPOCH_DAY for year, month in _MONTHS]
_END = _FIRST[-1] + 31
_LENGTH = [after - first for first, after in zip(_FIRST, [*_FIRST[1:], _END], strict=True)]
_WEEKDAY = [(first + 4) % 7 for first in _FIRST]  # 1970-01-01 was a Thursday; Sunday is 0
_SHAPES = [(weekday, length) for weekday in range(7) for length in range(28, 32)]
_KEY = [  # where in `Days._masks` each month has its mask
    (month - 1) * len(_SHAPES) + weekday * 4 + length - 28
    for (_, month), weekday, length in zip(_MONTHS, _WEEKDAY, _LENGTH, strict=True)
]
_KEYS = frozenset(_KEY)
_SATURDAY, _SUNDAY = 6, 0


class MonthDays(NamedTuple):
    """What a day-of-month field names, as bit masks."""

    numbers: int
    """Bit n: day n."""
    from_end: int = 0
    """Bit n: n days before the last one (`L`, `L-n`)."""
    nearest: int = 0
    """Bit n: the day from Monday to Friday nearest day n (`nW`), bit 0 the one nearest the last day (`LW`)."""

    def mask(self, weekday: int, length: int, *, back: bool) -> int:
        """The days of a month of this shape; with `back`, a day that it lacks is its last day."""
        found = self.numbers >> 1 & ((1 << length) - 1)
        if back and self.numbers >> length + 1:
            found |= 1 << length - 1
        found |= sum(1 << length - 1 - n for n in range(length) if self.from_end >> n & 1)
        for n in range(self.nearest.bit_length()):
            if self.nearest >> n & 1 and (n <= length or back):
                found |= 1 << _nearest(min(n or length, length), weekday, length) - 1
        return found


class WeekDays(NamedTuple):
    """What a day-of-week field names, as bit masks. Sunday is 0."""

    every: int
    """Bit d: each weekday d."""
    nth: tuple[int, ...] = (0,) * 5
    """Bit d of the k-th: the k-th weekday d of the month (`d#k`), k from 1."""
    last: int = 0
    """Bit d: the last weekday d of the month (`dL`)."""

    def mask(self, weekday: int, length: int) -> int:
        """The days of a month of this shape."""
        found = _weekdays(self.every, weekday, length)
        for k, days in enumerate(self.nth):
            if days:
                found |= _weekdays(days, weekday, length) & 0x7F << 7 * k
        return found | (_weekdays(self.last, weekday, length) & 0x7F << length - 7 if self.last else 0)


EVERY_DATE = MonthDays(0xFFFF_FFFE)
EVERY_WEEKDAY = WeekDays(0x7F)
EVERY_YEAR = (1 << _LAST_YEAR - _FIRST_YEAR - 1) - 1


class Days:
    """The days of some months that match dates and weekdays; with `either`, one of the two."""

    __slots__ = ("_masks",)

    def __init__(
        self, dates: MonthDays, months: int, weekdays: WeekDays, *, either: bool = False, back: bool = False
    ) -> None:
        found = []
        for weekday, length in _SHAPES:
            by_date, by_weekday = dates.mask(weekday, length, back=back), weekdays.mask(weekday, length)
            found.append(by_date | by_weekday if either else by_date & by_weekday)
        nothing = [0] * len(_SHAPES)
        self._masks = [mask for month in range(1, 13) for mask in (found if months >> month & 1 else nothing)]

    def __bool__(self) -> bool:
        """Whether any day ever matches: the range of years holds every shape that a month can have."""
        return any(self._masks[key] for key in _KEYS)

    def __contains__(self, day: int) -> bool:
        n = bisect_right(_FIRST, day) - 1
        return bool(self._masks[_KEY[n]] >> (day - _FIRST[n]) & 1)

    def next(self, day: int) -> int | None:
        """The first matching day from `day` on."""
        n = bisect_right(_FIRST, day) - 1
        masks = self._masks
        first = _FIRST[n]
        mask = masks[_KEY[n]] >> (day - first) << (day - first)
        while not mask:
            n += 1
            if n == len(_FIRST):
                return None
            mask = masks[_KEY[n]]
        return _FIRST[n] + (mask & -mask).bit_length() - 1

    def previous(self, day: int) -> int | None:
        """The last matching day up to `day`."""
        n = bisect_right(_FIRST, day) - 1
        masks = self._masks
        mask = masks[_KEY[n]] & ((2 << (day - _FIRST[n])) - 1)
        while not mask:
            n -= 1
            if n < 0:
                return None
            mask = masks[_KEY[n]]
        return _FIRST[n] + mask.bit_length() - 1

    def count(self, start: int, end: int) -> int:
        """How many days of [start, end) match."""
        masks = self._masks
        n, last = bisect_right(_FIRST, start) - 1, bisect_right(_FIRST, end) - 1
        total = -(masks[_KEY[n]] & ((1 << (start - _FIRST[n])) - 1)).bit_count()
        total += sum(masks[key].bit_count() for key in _KEY[n:last])
        return total + (masks[_KEY[last]] & ((1 << (end - _FIRST[last])) - 1)).bit_count()


class DaysInYears:
    """Those of some days that lie in some years; bit n of `years` is 1970 + n."""

    __slots__ = ("_days", "_ends", "_firsts")

    def __init__(self, days: Days, years: int) -> None:
        self._days = days
        self._firsts: list[int] = []  # of each run of years, and the first day after it
        self._ends: list[int] = []
        for year in range(_FIRST_YEAR + 1, _LAST_YEAR):
            if years >> year - 1970 & 1:
                first, end = (date(edge, 1, 1).toordinal() - _EPOCH_DAY for edge in (year, year + 1))
                if self._ends and self._ends[-1] == first:
                    self._ends.pop()
                else:
                    self._firsts.append(first)
                self._ends.append(end)
        if self.next(_FIRST[0]) is None:
            self._firsts, self._ends = [], []

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, day: int) -> bool:
        n = bisect_right(self._ends, day)
        return n < len(self._ends) and self._firsts[n] <= day and day in self._days

    def next(self, day: int) -> int | None:
        """The first matching day from `day` on."""
        for n in range(bisect_right(self._ends, day), len(self._ends)):
            found = self._days.next(max(day, self._firsts[n]))
            if found is None or found < self._ends[n]:
                return found
        return None

    def previous(self, day: int) -> int | None:
        """The last matching day up to `day`."""
        for n in reversed(range(bisect_right(self._firsts, day))):
            found = self._days.previous(min(day, self._ends[n] - 1))
            if found is None or found >= self._firsts[n]:
                return found
        return None

    def count(self, start: int, end: int) -> int:
        """How many days of [start, end) match."""
        spans = range(bisect_right(self._ends, start), bisect_right(self._firsts, end))
        return sum(self._days.count(max(start, self._firsts[n]), min(end, self._ends[n])) for n in spans)


def matching(
    dates: MonthDays, months: int, weekdays: WeekDays, years: int, *, either: bool = False, back: bool = False
) -> Days | DaysInYears:
    """The days that match all of these, or with `either` one of dates and weekdays."""
    days = Days(dates, months, weekdays, either=either, back=back)
    return days if years == EVERY_YEAR else DaysInYears(days, years)


def _nearest(day: int, weekday: int, length: int) -> int:
    """The day from Monday to Friday nearest this one and in the same month."""
    on = (weekday + day - 1) % 7
    if on == _SATURDAY:
        return day - 1 if day > 1 else day + 2
    if on == _SUNDAY:
        return day + 1 if day < length else day - 2
    return day


@lru_cache(maxsize=4096)
def _weekdays(weekdays: int, first: int, length: int) -> int:
    return sum(1 << day for day in range(length) if weekdays >> (first + day) % 7 & 1)
