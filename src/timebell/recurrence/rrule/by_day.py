"""The days of a recurrence rule, one bit mask per year; bit 0 is 1 January (RFC 5545, 3.3.10).

The BY parts of a rule depend only on the shape of a year: its first weekday, its length and the lengths of the adjacent
years. There are few shapes, so masks are built once per shape and then limited by the rule's INTERVAL.
Days are counted from 1970-01-01, a Thursday; Monday is 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from calendar import isleap
from collections.abc import Iterator
from datetime import date
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from timebell.recurrence.instants import DAY_S
from timebell.recurrence.rrule.parser import DAILY, MONTHLY, WEEKLY, YEARLY, Parts
from timebell.recurrence.rules.local_times import LocalTimes, TimesOfDay

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 1969, 2200  # local dates extend a day beyond the instants 1970..2199
_YEARS = range(_FIRST_YEAR, _LAST_YEAR + 1)
_YEAR_STARTS = [date(year, 1, 1).toordinal() - _EPOCH_DAY for year in _YEARS]
_END = _YEAR_STARTS[-1] + 365 + isleap(_LAST_YEAR)
_WEEKLY_BITS = sum(1 << 7 * week for week in range(55))


class YearShape(NamedTuple):
    """The weekday of 1 January of a year, and the numbers of days of the previous, this and the next year."""

    weekday: int
    before: int
    length: int
    after: int


_YEAR_SHAPES = [
    YearShape((first + 3) % 7, 365 + isleap(year - 1), 365 + isleap(year), 365 + isleap(year + 1))
    for first, year in zip(_YEAR_STARTS, _YEARS, strict=True)
]


class YearDays:
    """The days of a rule whose DTSTART is on the local day `start`, including earlier periods in the same phase.

    With `setpos`, BYSETPOS is applied to the days; this requires a rule with one time per day, so that positions are
    days.
    """

    __slots__ = ("_interval", "_masks", "_masks_by_shape", "_parts", "_phase", "_setpos")

    def __init__(self, parts: Parts, start: int, *, setpos: bool = False) -> None:
        self._parts = parts
        self._setpos = parts.setpos if setpos and parts.freq <= WEEKLY else ()
        self._interval = parts.interval
        self._phase = self._phase_start(start)
        self._masks_by_shape: dict[YearShape, list[int]] = {}
        self._masks: list[int | None] = [None] * len(_YEAR_STARTS)

    def __contains__(self, day: int) -> bool:
        n = bisect_right(_YEAR_STARTS, day) - 1
        return bool(self.year_mask(n) >> (day - _YEAR_STARTS[n]) & 1)

    def next(self, day: int) -> int | None:
        """Return the first day from `day` (inclusive), or None."""
        n = bisect_right(_YEAR_STARTS, day) - 1
        mask = self._masks[n]
        if mask is None:
            mask = self.year_mask(n)
        mask = mask >> (day - _YEAR_STARTS[n])
        if mask:
            return day + (mask & -mask).bit_length() - 1
        for later in range(n + 1, len(_YEAR_STARTS)):
            if mask := self.year_mask(later):
                return _YEAR_STARTS[later] + (mask & -mask).bit_length() - 1
        return None

    def previous(self, day: int) -> int | None:
        """Return the last day up to `day` (inclusive), or None."""
        n = bisect_right(_YEAR_STARTS, day) - 1
        mask = self.year_mask(n) & ((2 << (day - _YEAR_STARTS[n])) - 1)
        while not mask:
            n -= 1
            if n < 0:
                return None
            mask = self.year_mask(n)
        return _YEAR_STARTS[n] + mask.bit_length() - 1

    def count(self, start: int, end: int) -> int:
        """Return the number of days in [start, end)."""
        n, last = bisect_right(_YEAR_STARTS, start) - 1, bisect_right(_YEAR_STARTS, end) - 1
        total = -(self.year_mask(n) & ((1 << (start - _YEAR_STARTS[n])) - 1)).bit_count()
        total += sum(self.year_mask(year).bit_count() for year in range(n, last))
        return total + (self.year_mask(last) & ((1 << (end - _YEAR_STARTS[last])) - 1)).bit_count()

    def iter_runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the days in [start, end) as ranges [from, to) of consecutive days within a year."""
        for n in range(bisect_right(_YEAR_STARTS, start) - 1, bisect_right(_YEAR_STARTS, end - 1)):
            first, mask = _YEAR_STARTS[n], self.year_mask(n)
            starts, ends = _set_bits(mask & ~(mask << 1)), _set_bits(mask << 1 & ~mask)
            for low, high in zip(starts, ends, strict=True):
                if first + high > start and first + low < end:
                    yield max(first + low, start), min(first + high, end)

    def year_mask(self, n: int) -> int:
        """Return the mask of the n-th year."""
        mask = self._masks[n]
        if mask is None:
            if self._setpos:
                length = _YEAR_SHAPES[n].length
                selected = [self._select_by_setpos(days) for days in self.periods(n)]
                carried_over = (
                    [self._select_by_setpos(days) >> _YEAR_SHAPES[n - 1].length for days in self.periods(n - 1)]
                    if n
                    else []
                )
                mask = _or_masks(selected + carried_over) & ((1 << length) - 1)
            else:
                mask = self._unselected_days(n)
            self._masks[n] = mask
        return mask

    def periods(self, n: int) -> list[int]:
        """Return the masks, relative to the n-th year, of the periods that begin in it.

        The period of DAILY and finer rules is the year.
        """
        if self._parts.freq == MONTHLY:
            return self._months(n)
        if self._parts.freq != WEEKLY:
            return [self._unselected_days(n)]
        length = _YEAR_SHAPES[n].length
        two_years = self._unselected_days(n) | (
            self._unselected_days(n + 1) << length if n + 1 < len(_YEAR_STARTS) else 0
        )
        return [two_years & 0x7F << day for day in range((self._parts.wkst - _YEAR_SHAPES[n].weekday) % 7, length, 7)]

    def _unselected_days(self, n: int) -> int:
        """Return the mask of the n-th year before BYSETPOS."""
        if self._parts.freq == MONTHLY:
            return _or_masks(self._months(n))
        return self._shape_masks(n)[0] & self._in_phase(n)

    def _months(self, n: int) -> list[int]:
        first = (_FIRST_YEAR + n) * 12
        return [days for i, days in enumerate(self._shape_masks(n)) if (first + i - self._phase) % self._interval == 0]

    def _shape_masks(self, n: int) -> list[int]:
        shape = _YEAR_SHAPES[n]
        if shape not in self._masks_by_shape:
            self._masks_by_shape[shape] = masks_of_shape(self._parts, shape)
        return self._masks_by_shape[shape]

    def _select_by_setpos(self, days: int) -> int:
        bits = _set_bits(days)
        return _or_masks([1 << bits[i] for i in setpos_indexes(self._setpos, len(bits))])

    def _phase_start(self, start: int) -> int:
        """Return the year, month or day number at which a period selected by INTERVAL begins."""
        date_of_start = date.fromordinal(start + _EPOCH_DAY)
        if self._parts.freq == YEARLY:
            return date_of_start.year
        if self._parts.freq == MONTHLY:
            return date_of_start.year * 12 + date_of_start.month - 1
        return start - (date_of_start.weekday() - self._parts.wkst) % 7 if self._parts.freq == WEEKLY else start

    def _in_phase(self, n: int) -> int:
        """Return the mask of the days of the n-th year in periods selected by INTERVAL; -1 for all days."""
        if self._interval == 1 or self._parts.freq > DAILY:
            return -1
        if self._parts.freq == YEARLY:
            return -1 if (_FIRST_YEAR + n - self._phase) % self._interval == 0 else 0
        width, period = (7, self._interval * 7) if self._parts.freq == WEEKLY else (1, self._interval)
        offset = (self._phase - _YEAR_STARTS[n]) % period
        carried_over = ((1 << width) - 1) >> (period - offset)  # days of a period that began in the previous year
        return _repeat_bits(width, period) << offset | carried_over


class SetposLocalTimes(LocalTimes):
    """Local times selected by BYSETPOS in each period (a week, a month or a year), for several times per day."""

    def __init__(self, parts: Parts, days: YearDays, times: TimesOfDay) -> None:
        self._setpos, self._days, self._times = parts.setpos, days, times
        self._periods: dict[int, list[list[int]]] = {}
        self._indexes_by_length: dict[int, list[int]] = {}

    def next(self, local: int) -> int | None:
        n = max(0, bisect_right(_YEAR_STARTS, local // DAY_S) - 1)
        for year in range(max(0, n - 1), len(_YEAR_STARTS)):  # a week may begin in the previous year
            for days in self._periods_of_year(year):
                if (days[-1] + 1) * DAY_S > local:
                    indexes = self._chosen_indexes(days)
                    if (i := bisect_left(indexes, self._index_before(days, local))) < len(indexes):
                        return self._local_time_at(days, indexes[i])
        return None

    def previous(self, local: int) -> int | None:
        n = min(len(_YEAR_STARTS), bisect_right(_YEAR_STARTS, local // DAY_S)) - 1
        for year in range(n, -1, -1):
            for days in reversed(self._periods_of_year(year)):
                if days[0] * DAY_S < local:
                    indexes = self._chosen_indexes(days)
                    if i := bisect_left(indexes, self._index_before(days, local)):
                        return self._local_time_at(days, indexes[i - 1])
        return None

    def count(self, low: int, high: int) -> int:
        since = max(0, bisect_right(_YEAR_STARTS, low // DAY_S) - 2)
        return self._count_before_since(since, high) - self._count_before_since(since, low)

    def _count_before_since(self, since: int, local: int) -> int:
        """Return the number of local times before `local` in the periods from the year `since` on."""
        total = 0
        for year in range(since, bisect_right(_YEAR_STARTS, local // DAY_S)):
            for days in self._periods_of_year(year):
                if days[0] * DAY_S >= local:
                    break
                indexes = self._chosen_indexes(days)
                is_complete = (days[-1] + 1) * DAY_S <= local
                total += len(indexes) if is_complete else bisect_left(indexes, self._index_before(days, local))
        return total

    def _periods_of_year(self, year: int) -> list[list[int]]:
        periods = self._periods.get(year)
        if periods is None:
            periods = [
                [_YEAR_STARTS[year] + day for day in _set_bits(days)] for days in self._days.periods(year) if days
            ]
            self._periods[year] = periods
        return periods

    def _chosen_indexes(self, days: list[int]) -> list[int]:
        """Return the indexes of the selected times among all times of a period."""
        indexes = self._indexes_by_length.get(len(days))
        if indexes is None:
            indexes = self._indexes_by_length[len(days)] = setpos_indexes(self._setpos, len(days) * self._times.per_day)
        return indexes

    def _index_before(self, days: list[int], local: int) -> int:
        """Return the number of times of the period before `local`."""
        day, second = divmod(local, DAY_S)
        i = bisect_left(days, day)
        today = self._times.count(second) if i < len(days) and days[i] == day else 0
        return i * self._times.per_day + today

    def _local_time_at(self, days: list[int], index: int) -> int:
        day, time = divmod(index, self._times.per_day)
        return days[day] * DAY_S + self._times.at(time)


def setpos_indexes(setpos: tuple[int, ...], size: int) -> list[int]:
    """Return the indexes that BYSETPOS selects from a set of this size, in order."""
    return sorted({p - 1 if p > 0 else size + p for p in setpos if 1 <= abs(p) <= size})


def masks_of_shape(parts: Parts, shape: YearShape) -> list[int]:
    """Return the days of a year of this shape that match the BY parts: one mask, or one per month for MONTHLY."""
    year_mask = (1 << shape.length) - 1
    weekdays, numbered = _split_by_day(parts)
    starts = _month_starts(shape.length)
    months = [year_mask & (1 << end) - (1 << first) for first, end in pairwise(starts)]
    masks = [month if not parts.months or i in parts.months else 0 for i, month in enumerate(months, 1)]
    if parts.monthdays:
        on_missing_day = parts.skip or "skip" if parts.freq <= MONTHLY else "skip"
        masks = [
            _month_day_mask(starts, i, parts.monthdays, on_missing_day) if month else 0 for i, month in enumerate(masks)
        ]
    if parts.days:
        unnumbered = _weekday_mask(weekdays, shape.weekday) & year_mask
        scopes = months if parts.freq == MONTHLY or parts.months else [year_mask]
        weekday_days = unnumbered | _or_masks(
            [_nth_weekday_mask(numbered, scope, shape.weekday) for scope in scopes] if numbered else []
        )
        masks = [month & weekday_days for month in masks]
    if parts.freq == MONTHLY:
        return masks
    mask = _or_masks(masks)
    if parts.yeardays:
        mask &= _or_masks([1 << d for d in (y - 1 if y > 0 else shape.length + y for y in parts.yeardays) if d >= 0])
    if parts.weeknos:
        mask &= _week_number_mask(parts.weeknos, parts.wkst, shape)
    return [mask & year_mask]


def _split_by_day(parts: Parts) -> tuple[int, list[tuple[int, int]]]:
    """Return the weekdays of BYDAY without a number, as a mask, and those with one, as (n, weekday)."""
    return _or_masks([1 << day for n, day in parts.days if n == 0]), [pair for pair in parts.days if pair[0]]


def _weekday_mask(mask: int, first_weekday: int) -> int:
    """Return all days with these weekdays in a year that begins with `first_weekday`; may exceed the year."""
    return ((mask | mask << 7) >> first_weekday & 0x7F) * _WEEKLY_BITS


def _nth_weekday_mask(numbered: list[tuple[int, int]], scope: int, first_weekday: int) -> int:
    """Return the days that are the n-th given weekday within `scope`, the mask of a month or a year."""
    mask = 0
    for n, day in numbered:
        candidates = _set_bits(_weekday_mask(1 << day, first_weekday) & scope)
        if abs(n) <= len(candidates):
            mask |= 1 << candidates[n - 1 if n > 0 else n]
    return mask


def _month_day_mask(starts: list[int], month: int, days: tuple[int, ...], on_missing_day: str) -> int:
    """Return the days of BYMONTHDAY in one month.

    By RFC 7529, a day that the month lacks is omitted ("skip"), or replaced by the nearest valid day before it ("back")
    or after it ("next").
    """
    first, end = starts[month], starts[month + 1]
    mask = 0
    for day in days:
        at = first + day - 1 if day > 0 else end + day
        if first <= at < end:
            mask |= 1 << at
        elif on_missing_day != "skip":
            edge = end if day > 0 else first
            mask |= 1 << (edge - 1 if on_missing_day == "back" else edge)
    return mask


def _week_number_mask(numbers: tuple[int, ...], wkst: int, shape: YearShape) -> int:
    """Return the days of BYWEEKNO. Week 1 is the first with at least four days in the year.

    Days at the start and the end of the year can belong to weeks of the adjacent years.
    """
    weekday, before, length, after = shape
    start = _week_one_start(weekday, wkst)
    following = length + _week_one_start((weekday + length) % 7, wkst)
    last = length + after + _week_one_start((weekday + length + after) % 7, wkst)
    earlier = -before + _week_one_start((weekday - before) % 7, wkst)
    mask = 0
    for low, high in ((earlier, start), (start, following), (following, last)):
        count = (high - low) // 7
        for number in numbers:
            week = number if number > 0 else count + 1 + number
            if 1 <= week <= count:
                at = low + 7 * (week - 1)
                mask |= 0x7F << at if at >= 0 else 0x7F >> -at
    return mask


def _week_one_start(weekday: int, wkst: int) -> int:
    """Return the start of week 1 in days after a 1 January with this weekday; may be negative."""
    ahead = (wkst - weekday) % 7
    return ahead if ahead < 4 else ahead - 7


@lru_cache(maxsize=2)
def _month_starts(length: int) -> list[int]:
    february = length - 337
    return [0, *accumulate((31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31))]


@lru_cache(maxsize=1024)
def _repeat_bits(width: int, period: int) -> int:
    """Return a mask with `width` bits at each multiple of `period`, for at least a year."""
    return _or_masks([((1 << width) - 1) << at for at in range(0, 373, period)])


def _set_bits(mask: int) -> list[int]:
    """Return the numbers of the set bits, in order; the time depends on how many are set."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def _or_masks(masks: list[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
