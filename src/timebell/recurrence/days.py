"""Which days match, a month at a time: the days of a month are one bit mask, bit 0 its first day.

Days are counted from 1970-01-01. A rule about days needs to know only the month, the weekday of its
first day and its length, so that new ones are one more function of these three.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import date
from functools import lru_cache

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 1969, 2200  # local dates reach a day beyond the instants 1970..2199
_MONTHS = [(year, month) for year in range(_FIRST_YEAR, _LAST_YEAR + 1) for month in range(1, 13)]
_FIRST = [date(year, month, 1).toordinal() - _EPOCH_DAY for year, month in _MONTHS]
_END = _FIRST[-1] + 31
_LENGTH = [after - first for first, after in zip(_FIRST, [*_FIRST[1:], _END], strict=True)]
_WEEKDAY = [(first + 4) % 7 for first in _FIRST]  # 1970-01-01 was a Thursday; Sunday is 0
_SHAPE = [weekday * 4 + length - 28 for weekday, length in zip(_WEEKDAY, _LENGTH, strict=True)]
_SHAPES = frozenset((month, shape) for (_, month), shape in zip(_MONTHS, _SHAPE, strict=True))


class Days:
    """The days that a cron expression's three day fields match."""

    __slots__ = ("_masks",)

    def __init__(self, days: int, months: int, weekdays: int, either: bool) -> None:
        self._masks = [[0] * 28 for _ in range(12)]
        for month, shape in _SHAPES:
            if months >> month & 1:
                weekday, length = shape // 4, shape % 4 + 28
                by_date = days >> 1 & ((1 << length) - 1)
                by_weekday = _weekday_mask(weekdays, weekday, length)
                found = by_date | by_weekday if either else by_date & by_weekday
                self._masks[month - 1][shape] = found

    def __bool__(self) -> bool:
        """Whether any day ever matches: the range of years holds every shape of every month."""
        return any(map(any, self._masks))

    def __contains__(self, day: int) -> bool:
        n = bisect_right(_FIRST, day) - 1
        return bool(self._masks[n % 12][_SHAPE[n]] >> (day - _FIRST[n]) & 1)

    def next(self, day: int) -> int | None:
        """The first matching day from `day` on."""
        n = bisect_right(_FIRST, day) - 1
        masks = self._masks
        first = _FIRST[n]
        mask = masks[n % 12][_SHAPE[n]] >> (day - first) << (day - first)
        while not mask:
            n += 1
            if n == len(_FIRST):
                return None
            mask = masks[n % 12][_SHAPE[n]]
        return _FIRST[n] + (mask & -mask).bit_length() - 1

    def previous(self, day: int) -> int | None:
        """The last matching day up to `day`."""
        n = bisect_right(_FIRST, day) - 1
        masks = self._masks
        mask = masks[n % 12][_SHAPE[n]] & ((2 << (day - _FIRST[n])) - 1)
        while not mask:
            n -= 1
            if n < 0:
                return None
            mask = masks[n % 12][_SHAPE[n]]
        return _FIRST[n] + mask.bit_length() - 1

    def count(self, start: int, end: int) -> int:
        """How many days of [start, end) match."""
        n, last = bisect_right(_FIRST, start) - 1, bisect_right(_FIRST, end) - 1
        total = -(self._mask(n) & ((1 << (start - _FIRST[n])) - 1)).bit_count()
        total += sum(self._mask(month).bit_count() for month in range(n, last))
        return total + (self._mask(last) & ((1 << (end - _FIRST[last])) - 1)).bit_count()

    def _mask(self, n: int) -> int:
        return self._masks[n % 12][_SHAPE[n]]


@lru_cache(maxsize=4096)
def _weekday_mask(weekdays: int, first: int, length: int) -> int:
    return sum(1 << day for day in range(length) if weekdays >> (first + day) % 7 & 1)
