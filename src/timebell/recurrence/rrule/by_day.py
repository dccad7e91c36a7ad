"""Which days a recurrence rule names, a year at a time: the days of a year are one bit mask, bit 0 its 1 January.

What a rule's BY parts say of a year depends on its shape alone: the weekday it begins with, its length and
its neighbours'. There are few shapes, so masks are built once for each and then cut by the rule's INTERVAL.
Days are counted from 1970-01-01, which was a Thursday; Monday is 0. RFC 5545, 3.3.10.
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
from timebell.recurrence.local_times import TimesOfDay, Walls
from timebell.recurrence.rrule.parser import DAILY, MONTHLY, WEEKLY, YEARLY, Parts

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 1969, 2200  # local dates reach a day beyond the instants 1970..2199
_YEARS = range(_FIRST_YEAR, _LAST_YEAR + 1)
_FIRST = [date(year, 1, 1).toordinal() - _EPOCH_DAY for year in _YEARS]
_END = _FIRST[-1] + 365 + isleap(_LAST_YEAR)
_WEEKS = sum(1 << 7 * week for week in range(55))


class Shape(NamedTuple):
    """Of a year: the weekday of 1 January, the number of days in the year before, in it and in the one after."""

    weekday: int
    before: int
    length: int
    after: int


_SHAPES = [
    Shape((first + 3) % 7, 365 + isleap(year - 1), 365 + isleap(year), 365 + isleap(year + 1))
    for first, year in zip(_FIRST, _YEARS, strict=True)
]


class YearDays:
    """The days of a rule that begins on the local date `start`, and of the periods before it in its phase.

    With `setpos` BYSETPOS has chosen among them: one time a day, so that its positions are days.
    """

    __slots__ = ("_interval", "_kept", "_masks", "_parts", "_phase", "_setpos", "_shapes")

    def __init__(self, parts: Parts, start: int, *, setpos: bool = False) -> None:
        self._parts = parts
        self._setpos = parts.setpos if setpos and parts.freq <= WEEKLY else ()
        self._interval = parts.interval
        self._phase = self._phase_of(start)
        self._shapes: dict[Shape, list[int]] = {}
        self._masks: list[int | None] = [None] * len(_FIRST)

    def __contains__(self, day: int) -> bool:
        n = bisect_right(_FIRST, day) - 1
        return bool(self.mask(n) >> (day - _FIRST[n]) & 1)

    def next(self, day: int) -> int | None:
        """The first from `day` on."""
        n = bisect_right(_FIRST, day) - 1
        found = self._masks[n]
        if found is None:
            found = self.mask(n)
        found = found >> (day - _FIRST[n])
        if found:
            return day + (found & -found).bit_length() - 1
        for later in range(n + 1, len(_FIRST)):
            if found := self.mask(later):
                return _FIRST[later] + (found & -found).bit_length() - 1
        return None

    def previous(self, day: int) -> int | None:
        """The last up to `day`, which counts."""
        n = bisect_right(_FIRST, day) - 1
        found = self.mask(n) & ((2 << (day - _FIRST[n])) - 1)
        while not found:
            n -= 1
            if n < 0:
                return None
            found = self.mask(n)
        return _FIRST[n] + found.bit_length() - 1

    def count(self, start: int, end: int) -> int:
        """How many are in [start, end)."""
        n, last = bisect_right(_FIRST, start) - 1, bisect_right(_FIRST, end) - 1
        total = -(self.mask(n) & ((1 << (start - _FIRST[n])) - 1)).bit_count()
        total += sum(self.mask(year).bit_count() for year in range(n, last))
        return total + (self.mask(last) & ((1 << (end - _FIRST[last])) - 1)).bit_count()

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Those in [start, end), as stretches [from, to) of days one after another within a year."""
        for n in range(bisect_right(_FIRST, start) - 1, bisect_right(_FIRST, end - 1)):
            first, mask = _FIRST[n], self.mask(n)
            begins, ends = _bits(mask & ~(mask << 1)), _bits(mask << 1 & ~mask)
            for low, high in zip(begins, ends, strict=True):
                if first + high > start and first + low < end:
                    yield max(first + low, start), min(first + high, end)

    def mask(self, n: int) -> int:
        """The days of the n-th year."""
        found = self._masks[n]
        if found is None:
            if self._setpos:
                length = _SHAPES[n].length
                chosen = [self._chosen(days) for days in self.periods(n)]
                late = [self._chosen(days) >> _SHAPES[n - 1].length for days in self.periods(n - 1)] if n else []
                found = _union(chosen + late) & ((1 << length) - 1)
            else:
                found = self._days(n)
            self._masks[n] = found
        return found

    def periods(self, n: int) -> list[int]:
        """The masks, relative to the n-th year, of the periods that begin in it; of DAILY and finer rules, the year."""
        if self._parts.freq == MONTHLY:
            return self._months(n)
        if self._parts.freq != WEEKLY:
            return [self._days(n)]
        length = _SHAPES[n].length
        both = self._days(n) | (self._days(n + 1) << length if n + 1 < len(_FIRST) else 0)
        return [both & 0x7F << day for day in range((self._parts.wkst - _SHAPES[n].weekday) % 7, length, 7)]

    def _days(self, n: int) -> int:
        """The days of the n-th year before BYSETPOS."""
        if self._parts.freq == MONTHLY:
            return _union(self._months(n))
        return self._shape(n)[0] & self._in_phase(n)

    def _months(self, n: int) -> list[int]:
        first = (_FIRST_YEAR + n) * 12
        return [days for i, days in enumerate(self._shape(n)) if (first + i - self._phase) % self._interval == 0]

    def _shape(self, n: int) -> list[int]:
        shape = _SHAPES[n]
        if shape not in self._shapes:
            self._shapes[shape] = days_of_shape(self._parts, shape)
        return self._shapes[shape]

    def _chosen(self, days: int) -> int:
        found = _bits(days)
        return _union([1 << found[i] for i in chosen(self._setpos, len(found))])

    def _phase_of(self, start: int) -> int:
        """Where the periods that INTERVAL keeps begin: a year, a month or a day."""
        when = date.fromordinal(start + _EPOCH_DAY)
        if self._parts.freq == YEARLY:
            return when.year
        if self._parts.freq == MONTHLY:
            return when.year * 12 + when.month - 1
        return start - (when.weekday() - self._parts.wkst) % 7 if self._parts.freq == WEEKLY else start

    def _in_phase(self, n: int) -> int:
        """The days of the n-th year that are in periods kept by INTERVAL."""
        if self._interval == 1 or self._parts.freq > DAILY:
            return -1
        if self._parts.freq == YEARLY:
            return -1 if (_FIRST_YEAR + n - self._phase) % self._interval == 0 else 0
        wide, every = (7, self._interval * 7) if self._parts.freq == WEEKLY else (1, self._interval)
        ahead = (self._phase - _FIRST[n]) % every
        running = ((1 << wide) - 1) >> (every - ahead)  # of the period that began last year
        return _repeated(wide, every) << ahead | running


class SetWalls(Walls):
    """BYSETPOS among several times on the days of each period (a week, a month or a year)."""

    def __init__(self, parts: Parts, days: YearDays, times: TimesOfDay) -> None:
        self._setpos, self._days, self._times = parts.setpos, days, times
        self._periods: dict[int, list[list[int]]] = {}
        self._chosen: dict[int, list[int]] = {}

    def next(self, local: int) -> int | None:
        n = max(0, bisect_right(_FIRST, local // DAY_S) - 1)
        for year in range(max(0, n - 1), len(_FIRST)):  # a week may have begun in the year before
            for days in self._of(year):
                if (days[-1] + 1) * DAY_S > local:
                    places = self._places(days)
                    if (i := bisect_left(places, self._before(days, local))) < len(places):
                        return self._at(days, places[i])
        return None

    def previous(self, local: int) -> int | None:
        n = min(len(_FIRST), bisect_right(_FIRST, local // DAY_S)) - 1
        for year in range(n, -1, -1):
            for days in reversed(self._of(year)):
                if days[0] * DAY_S < local:
                    places = self._places(days)
                    if i := bisect_left(places, self._before(days, local)):
                        return self._at(days, places[i - 1])
        return None

    def count(self, low: int, high: int) -> int:
        since = max(0, bisect_right(_FIRST, low // DAY_S) - 2)
        return self._count(since, high) - self._count(since, low)

    def _count(self, since: int, local: int) -> int:
        """How many of the periods from a year on are before `local`."""
        total = 0
        for year in range(since, bisect_right(_FIRST, local // DAY_S)):
            for days in self._of(year):
                if days[0] * DAY_S >= local:
                    break
                places = self._places(days)
                whole = (days[-1] + 1) * DAY_S <= local
                total += len(places) if whole else bisect_left(places, self._before(days, local))
        return total

    def _of(self, year: int) -> list[list[int]]:
        found = self._periods.get(year)
        if found is None:
            found = [[_FIRST[year] + day for day in _bits(days)] for days in self._days.periods(year) if days]
            self._periods[year] = found
        return found

    def _places(self, days: list[int]) -> list[int]:
        """Which of the period's instants are chosen, by their index."""
        found = self._chosen.get(len(days))
        if found is None:
            found = self._chosen[len(days)] = chosen(self._setpos, len(days) * self._times.per_day)
        return found

    def _before(self, days: list[int], local: int) -> int:
        """How many instants of the period are before `local`."""
        day, second = divmod(local, DAY_S)
        i = bisect_left(days, day)
        today = self._times.count(second) if i < len(days) and days[i] == day else 0
        return i * self._times.per_day + today

    def _at(self, days: list[int], place: int) -> int:
        day, time = divmod(place, self._times.per_day)
        return days[day] * DAY_S + self._times.at(time)


def chosen(setpos: tuple[int, ...], size: int) -> list[int]:
    """The indexes that BYSETPOS takes of a set of this size, in order."""
    return sorted({p - 1 if p > 0 else size + p for p in setpos if 1 <= abs(p) <= size})


def days_of_shape(parts: Parts, shape: Shape) -> list[int]:
    """The days that the BY parts leave of such a year: one mask, or with MONTHLY one for each month."""
    whole = (1 << shape.length) - 1
    every, numbered = _weekday_sets(parts)
    starts = _month_starts(shape.length)
    months = [whole & (1 << end) - (1 << first) for first, end in pairwise(starts)]
    kept = [month if not parts.months or i in parts.months else 0 for i, month in enumerate(months, 1)]
    if parts.monthdays:
        move = parts.skip or "skip" if parts.freq <= MONTHLY else "skip"
        kept = [_monthdays(starts, i, parts.monthdays, move) if month else 0 for i, month in enumerate(kept)]
    if parts.days:
        plain = _weekdays(every, shape.weekday) & whole
        scopes = months if parts.freq == MONTHLY or parts.months else [whole]
        days = plain | _union([_nth(numbered, scope, shape.weekday) for scope in scopes] if numbered else [])
        kept = [month & days for month in kept]
    if parts.freq == MONTHLY:
        return kept
    found = _union(kept)
    if parts.yeardays:
        found &= _union([1 << d for d in (y - 1 if y > 0 else shape.length + y for y in parts.yeardays) if d >= 0])
    if parts.weeknos:
        found &= _weeks(parts.weeknos, parts.wkst, shape)
    return [found & whole]


def _weekday_sets(parts: Parts) -> tuple[int, list[tuple[int, int]]]:
    """BYDAY's weekdays without a number, as a mask, and those with one."""
    return _union([1 << day for n, day in parts.days if n == 0]), [pair for pair in parts.days if pair[0]]


def _weekdays(mask: int, first: int) -> int:
    """All days with these weekdays in a year that begins with the weekday `first`."""
    return ((mask | mask << 7) >> first & 0x7F) * _WEEKS


def _nth(numbered: list[tuple[int, int]], scope: int, first: int) -> int:
    """The n-th weekday within a month or a year."""
    found = 0
    for n, day in numbered:
        among = _bits(_weekdays(1 << day, first) & scope)
        if abs(n) <= len(among):
            found |= 1 << among[n - 1 if n > 0 else n]
    return found


def _monthdays(starts: list[int], month: int, days: tuple[int, ...], move: str) -> int:
    """BYMONTHDAY in one month. RFC 7529: a day that it lacks is left out, the one before or the one after."""
    first, end = starts[month], starts[month + 1]
    found = 0
    for day in days:
        at = first + day - 1 if day > 0 else end + day
        if first <= at < end:
            found |= 1 << at
        elif move != "skip":
            edge = end if day > 0 else first
            found |= 1 << (edge - 1 if move == "back" else edge)
    return found


def _weeks(numbers: tuple[int, ...], wkst: int, shape: Shape) -> int:
    """BYWEEKNO: week 1 is the first with four days in the year; days at its ends are in a neighbour's week."""
    weekday, before, length, after = shape
    start = _week_one(weekday, wkst)
    following = length + _week_one((weekday + length) % 7, wkst)
    last = length + after + _week_one((weekday + length + after) % 7, wkst)
    earlier = -before + _week_one((weekday - before) % 7, wkst)
    found = 0
    for low, high in ((earlier, start), (start, following), (following, last)):
        count = (high - low) // 7
        for number in numbers:
            week = number if number > 0 else count + 1 + number
            if 1 <= week <= count:
                at = low + 7 * (week - 1)
                found |= 0x7F << at if at >= 0 else 0x7F >> -at
    return found


def _week_one(weekday: int, wkst: int) -> int:
    """Where week 1 begins, in days after a 1 January with this weekday."""
    ahead = (wkst - weekday) % 7
    return ahead if ahead < 4 else ahead - 7


@lru_cache(maxsize=2)
def _month_starts(length: int) -> list[int]:
    february = length - 337
    return [0, *accumulate((31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31))]


@lru_cache(maxsize=1024)
def _repeated(wide: int, every: int) -> int:
    """`wide` bits at each multiple of `every`, for at least a year."""
    return _union([((1 << wide) - 1) << at for at in range(0, 373, every)])


def _bits(mask: int) -> list[int]:
    """The numbers of the bits that are set, in order; quick where they are few."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _union(masks: list[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found
