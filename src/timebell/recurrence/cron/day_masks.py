"""Sets of matching days, one bit mask per month; bit 0 is the first day of the month.

Days are counted from 1970-01-01. A mask depends only on the shape of a month: the weekday of its first day and its
length. Masks are therefore computed once per shape, and a new kind of day rule is a function of these two numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import date
from functools import lru_cache
from typing import NamedTuple

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 1969, 2200  # local dates extend a day beyond the instants 1970..2199
_MONTHS = [(year, month) for year in range(_FIRST_YEAR, _LAST_YEAR + 1) for month in range(1, 13)]
_MONTH_STARTS = [date(year, month, 1).toordinal() - _EPOCH_DAY for year, month in _MONTHS]
_END = _MONTH_STARTS[-1] + 31
_MONTH_LENGTHS = [after - first for first, after in zip(_MONTH_STARTS, [*_MONTH_STARTS[1:], _END], strict=True)]
_FIRST_WEEKDAYS = [(first + 4) % 7 for first in _MONTH_STARTS]  # 1970-01-01 was a Thursday; Sunday is 0
_MONTH_SHAPES = [(weekday, length) for weekday in range(7) for length in range(28, 32)]
_MASK_INDEX = [  # index of the mask of each month in `MatchingDays._masks`
    (month - 1) * len(_MONTH_SHAPES) + weekday * 4 + length - 28
    for (_, month), weekday, length in zip(_MONTHS, _FIRST_WEEKDAYS, _MONTH_LENGTHS, strict=True)
]
_USED_MASK_INDEXES = frozenset(_MASK_INDEX)
_SATURDAY, _SUNDAY = 6, 0


class MonthDays(NamedTuple):
    """The days of a day-of-month field, as bit masks."""

    numbers: int
    """Bit n: day n."""
    from_end: int = 0
    """Bit n: n days before the last day (`L`, `L-n`)."""
    nearest: int = 0
    """Bit n: the day from Monday to Friday nearest day n (`nW`), bit 0 the one nearest the last day (`LW`)."""

    def mask(self, weekday: int, length: int, *, clamp_to_month_end: bool) -> int:
        """Return the days of a month of this shape; `clamp_to_month_end` replaces a missing day by the last day."""
        days = self.numbers >> 1 & ((1 << length) - 1)
        if clamp_to_month_end and self.numbers >> length + 1:
            days |= 1 << length - 1
        days |= sum(1 << length - 1 - n for n in range(length) if self.from_end >> n & 1)
        for n in range(self.nearest.bit_length()):
            if self.nearest >> n & 1 and (n <= length or clamp_to_month_end):
                days |= 1 << _nearest_weekday(min(n or length, length), weekday, length) - 1
        return days


class WeekDays(NamedTuple):
    """The days of a day-of-week field, as bit masks; Sunday is 0."""

    every: int
    """Bit d: every weekday d."""
    nth: tuple[int, ...] = (0,) * 5
    """Bit d of the k-th mask: the k-th weekday d of the month (`d#k`), k from 1."""
    last: int = 0
    """Bit d: the last weekday d of the month (`dL`)."""

    def mask(self, weekday: int, length: int) -> int:
        """Return the days of a month of this shape."""
        days = _weekday_mask(self.every, weekday, length)
        for k, weekdays in enumerate(self.nth):
            if weekdays:
                days |= _weekday_mask(weekdays, weekday, length) & 0x7F << 7 * k
        return days | (_weekday_mask(self.last, weekday, length) & 0x7F << length - 7 if self.last else 0)


EVERY_DATE = MonthDays(0xFFFF_FFFE)
EVERY_WEEKDAY = WeekDays(0x7F)
EVERY_YEAR = (1 << _LAST_YEAR - _FIRST_YEAR - 1) - 1


class MatchingDays:
    """Days in certain months that match both dates and weekdays, or either of them with `match_either`."""

    __slots__ = ("_masks",)

    def __init__(
        self,
        dates: MonthDays,
        months: int,
        weekdays: WeekDays,
        *,
        match_either: bool = False,
        clamp_to_month_end: bool = False,
    ) -> None:
        shape_masks = []
        for weekday, length in _MONTH_SHAPES:
            by_date, by_weekday = (
                dates.mask(weekday, length, clamp_to_month_end=clamp_to_month_end),
                weekdays.mask(weekday, length),
            )
            shape_masks.append(by_date | by_weekday if match_either else by_date & by_weekday)
        no_masks = [0] * len(_MONTH_SHAPES)
        self._masks = [mask for month in range(1, 13) for mask in (shape_masks if months >> month & 1 else no_masks)]

    def __bool__(self) -> bool:
        """Return whether any day matches; the range of years contains every shape that a month can have."""
        return any(self._masks[key] for key in _USED_MASK_INDEXES)

    def __contains__(self, day: int) -> bool:
        n = bisect_right(_MONTH_STARTS, day) - 1
        return bool(self._masks[_MASK_INDEX[n]] >> (day - _MONTH_STARTS[n]) & 1)

    def next(self, day: int) -> int | None:
        """Return the first matching day from `day` (inclusive), or None."""
        n = bisect_right(_MONTH_STARTS, day) - 1
        masks = self._masks
        first = _MONTH_STARTS[n]
        mask = masks[_MASK_INDEX[n]] >> (day - first) << (day - first)
        while not mask:
            n += 1
            if n == len(_MONTH_STARTS):
                return None
            mask = masks[_MASK_INDEX[n]]
        return _MONTH_STARTS[n] + (mask & -mask).bit_length() - 1

    def previous(self, day: int) -> int | None:
        """Return the last matching day up to `day` (inclusive), or None."""
        n = bisect_right(_MONTH_STARTS, day) - 1
        masks = self._masks
        mask = masks[_MASK_INDEX[n]] & ((2 << (day - _MONTH_STARTS[n])) - 1)
        while not mask:
            n -= 1
            if n < 0:
                return None
            mask = masks[_MASK_INDEX[n]]
        return _MONTH_STARTS[n] + mask.bit_length() - 1

    def count(self, start: int, end: int) -> int:
        """Return the number of matching days in [start, end)."""
        masks = self._masks
        n, last = bisect_right(_MONTH_STARTS, start) - 1, bisect_right(_MONTH_STARTS, end) - 1
        total = -(masks[_MASK_INDEX[n]] & ((1 << (start - _MONTH_STARTS[n])) - 1)).bit_count()
        total += sum(masks[key].bit_count() for key in _MASK_INDEX[n:last])
        return total + (masks[_MASK_INDEX[last]] & ((1 << (end - _MONTH_STARTS[last])) - 1)).bit_count()


class DaysInYears:
    """Matching days limited to certain years; bit n of `years` is 1970 + n."""

    __slots__ = ("_days", "_ends", "_firsts")

    def __init__(self, days: MatchingDays, years: int) -> None:
        self._days = days
        self._firsts: list[int] = []  # the first day of each run of consecutive years; `_ends`: the first day after it
        self._ends: list[int] = []
        for year in range(_FIRST_YEAR + 1, _LAST_YEAR):
            if years >> year - 1970 & 1:
                first, end = (date(edge, 1, 1).toordinal() - _EPOCH_DAY for edge in (year, year + 1))
                if self._ends and self._ends[-1] == first:
                    self._ends.pop()
                else:
                    self._firsts.append(first)
                self._ends.append(end)
        if self.next(_MONTH_STARTS[0]) is None:
            self._firsts, self._ends = [], []

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, day: int) -> bool:
        n = bisect_right(self._ends, day)
        return n < len(self._ends) and self._firsts[n] <= day and day in self._days

    def next(self, day: int) -> int | None:
        """Return the first matching day from `day` (inclusive), or None."""
        for n in range(bisect_right(self._ends, day), len(self._ends)):
            match = self._days.next(max(day, self._firsts[n]))
            if match is None or match < self._ends[n]:
                return match
        return None

    def previous(self, day: int) -> int | None:
        """Return the last matching day up to `day` (inclusive), or None."""
        for n in reversed(range(bisect_right(self._firsts, day))):
            match = self._days.previous(min(day, self._ends[n] - 1))
            if match is None or match >= self._firsts[n]:
                return match
        return None

    def count(self, start: int, end: int) -> int:
        """Return the number of matching days in [start, end)."""
        spans = range(bisect_right(self._ends, start), bisect_right(self._firsts, end))
        return sum(self._days.count(max(start, self._firsts[n]), min(end, self._ends[n])) for n in spans)


def matching_days(
    dates: MonthDays,
    months: int,
    weekdays: WeekDays,
    years: int,
    *,
    match_either: bool = False,
    clamp_to_month_end: bool = False,
) -> MatchingDays | DaysInYears:
    """Return the days in `months` and `years` that match both `dates` and `weekdays`.

    With `match_either` one of `dates` and `weekdays` is enough. `clamp_to_month_end` replaces a day that a month lacks
    by its last day.
    """
    days = MatchingDays(dates, months, weekdays, match_either=match_either, clamp_to_month_end=clamp_to_month_end)
    return days if years == EVERY_YEAR else DaysInYears(days, years)


def _nearest_weekday(day: int, weekday: int, length: int) -> int:
    """Return the day of the month from Monday to Friday that is nearest to `day`."""
    weekday_of_day = (weekday + day - 1) % 7
    if weekday_of_day == _SATURDAY:
        return day - 1 if day > 1 else day + 2
    if weekday_of_day == _SUNDAY:
        return day + 1 if day < length else day - 2
    return day


@lru_cache(maxsize=4096)
def _weekday_mask(weekdays: int, first: int, length: int) -> int:
    return sum(1 << day for day in range(length) if weekdays >> (first + day) % 7 & 1)
