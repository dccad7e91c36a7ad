"""Which days an RRULE of days or longer periods names: a bit mask for each calendar year, made when asked for.

The sets are those of RFC 5545 3.3.10. Days are counted from 1970-01-01; bit 0 of a mask is January 1st.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import date
from functools import lru_cache

from timebell.recurrence.instants import DAY_S
from timebell.recurrence.rrule_text import Parts
from timebell.recurrence.walls import DailyWalls, TimesList, TimesOfDay, Walls, bits

_EPOCH_DAY = date(1970, 1, 1).toordinal()
FIRST_YEAR, LAST_YEAR = 1969, 2200  # local dates reach a day beyond the instants 1970..2199
_STARTS = [date(year, 1, 1).toordinal() - _EPOCH_DAY for year in range(FIRST_YEAR, LAST_YEAR + 2)]


def year_of(day: int) -> int:
    """The year of a day, within those that are known."""
    return min(max(bisect_right(_STARTS, day) - 1, 0), LAST_YEAR - FIRST_YEAR) + FIRST_YEAR


def start_of(year: int) -> int:
    """January 1st."""
    return _STARTS[year - FIRST_YEAR]


class RuleDays:
    """The days of a rule of YEARLY, MONTHLY, WEEKLY or DAILY frequency that has begun on `first`.

    With a finer frequency, those that its BY parts leave. Days before `first` are named, too.
    """

    def __init__(self, parts: Parts, first: int) -> None:
        self.parts = parts
        self._first = first
        self._start = date.fromordinal(first + _EPOCH_DAY)
        self._masks: dict[int, int] = {}

    def __contains__(self, day: int) -> bool:
        year = year_of(day)
        return bool(self.mask(year) >> (day - start_of(year)) & 1)

    def next(self, day: int) -> int | None:
        """The first from `day` on."""
        year = year_of(day)
        since = max(day - start_of(year), 0)
        mask = self.mask(year) >> since << since
        while not mask:
            year += 1
            if year > LAST_YEAR:
                return None
            mask = self.mask(year)
        return start_of(year) + (mask & -mask).bit_length() - 1

    def previous(self, day: int) -> int | None:
        """The last up to `day`."""
        year = year_of(day)
        mask = self.mask(year) & ((2 << max(day - start_of(year), -1)) - 1)
        while not mask:
            year -= 1
            if year < FIRST_YEAR:
                return None
            mask = self.mask(year)
        return start_of(year) + mask.bit_length() - 1

    def count(self, start: int, end: int) -> int:
        """How many are in [start, end)."""
        return self.between(start, end).bit_count() if end - start < 800 else self._count_years(start, end)

    def _count_years(self, start: int, end: int) -> int:
        low, high = year_of(start), year_of(end)
        whole = sum(self.mask(year).bit_count() for year in range(low, high))
        before = (self.mask(low) & ((1 << max(start - start_of(low), 0)) - 1)).bit_count()
        return whole - before + (self.mask(high) & ((1 << max(end - start_of(high), 0)) - 1)).bit_count()

    def between(self, start: int, end: int) -> int:
        """Those of [start, end) as a mask whose bit 0 is `start`."""
        found = 0
        for year in range(year_of(start), year_of(end - 1) + 1):
            shift = start_of(year) - start
            found |= self.mask(year) << shift if shift >= 0 else self.mask(year) >> -shift
        return found & ((1 << max(end - start, 0)) - 1)

    def mask(self, year: int) -> int:
        """The days of a year."""
        found = self._masks.get(year)
        if found is None:
            found = self._masks[year] = self._make(year)
        return found

    def _make(self, year: int) -> int:
        parts, start = self.parts, self._start
        this = _Year(year, parts.wkst)
        if parts.freq == "YEARLY" and (year - start.year) % parts.interval:
            return 0
        months: tuple[int, ...] = parts.bymonth or tuple(range(1, 13))
        monthdays, days = parts.bymonthday, parts.byday
        bare = not (parts.byday or parts.bymonthday or parts.byyearday)
        if parts.freq == "YEARLY" and parts.byweekno and bare:
            days = ((0, start.weekday()),)
        elif parts.freq == "YEARLY" and bare:
            monthdays = (start.day,)
            months = parts.bymonth or (start.month,)
        elif parts.freq == "MONTHLY" and bare:
            monthdays = (start.day,)
        elif parts.freq == "WEEKLY" and not parts.byday:
            days = ((0, start.weekday()),)
        if parts.freq == "MONTHLY":
            gone = year * 12 - start.year * 12 - start.month
            months = tuple(month for month in months if (gone + month) % parts.interval == 0)
        found = this.months(months)
        if monthdays:
            found = this.monthdays(monthdays, months, parts.skip)
        if parts.byyearday:
            found &= this.yeardays(parts.byyearday)
        if parts.byweekno:
            found &= this.weeks(parts.byweekno)
        if days:
            ordinals_in_months = parts.freq == "MONTHLY" or bool(parts.bymonth)
            found &= this.weekdays(days, months if ordinals_in_months else ())
        return found & self._stepped(this)

    def _stepped(self, this: _Year) -> int:
        """The days that an interval of days or weeks leaves."""
        parts = self.parts
        if parts.interval == 1 or parts.freq not in ("DAILY", "WEEKLY"):
            return this.all
        if parts.freq == "DAILY":
            return _every(parts.interval, (self._first - this.start) % parts.interval, this.length)
        week = self._first - (self._start.weekday() - parts.wkst) % 7
        step = parts.interval * 7
        since = (week - this.start) % step
        return sum(_every(step, (since + n) % step, this.length) for n in range(7))


def _every(step: int, first: int, length: int) -> int:
    return sum(1 << day for day in range(first, length, step))


class _Year:
    """A year's days as masks."""

    def __init__(self, year: int, wkst: int) -> None:
        self.start, self._wkst = start_of(year), wkst
        self.length = start_of(year + 1) - self.start if year < LAST_YEAR else 365
        self.all = (1 << self.length) - 1
        self._year = year
        self._weekday = (self.start + 3) % 7  # 1970-01-01 was a Thursday, 3
        leap = self.length == 366
        lengths = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
        self._lengths = lengths
        self._firsts = [sum(lengths[:n]) for n in range(12)]

    def months(self, months: tuple[int, ...]) -> int:
        if len(months) == 12:
            return self.all
        return sum(((1 << self._lengths[m - 1]) - 1) << self._firsts[m - 1] for m in months)

    def monthdays(self, monthdays: tuple[int, ...], months: tuple[int, ...], skip: str) -> int:
        found = 0
        for month in months:
            first, length = self._firsts[month - 1], self._lengths[month - 1]
            for n in monthdays:
                day = n - 1 if n > 0 else length + n
                if 0 <= day < length:
                    found |= 1 << first + day
                elif skip == "back":  # RFC 7529: the last day before the one that is not there
                    found |= 1 << first + length - 1 if n > 0 else (1 << first - 1 if first else 0)
                elif skip == "next":
                    found |= 1 << first + length if n > 0 else 1 << first
        return found & self.all

    def yeardays(self, yeardays: tuple[int, ...]) -> int:
        days = (n - 1 if n > 0 else self.length + n for n in yeardays)
        return sum(1 << day for day in set(days) if 0 <= day < self.length)

    def weekday(self, weekday: int) -> int:
        """Every Monday, for 0."""
        return _weekdays((weekday - self._weekday) % 7, self.length)

    def weekdays(self, days: tuple[tuple[int, int], ...], months: tuple[int, ...]) -> int:
        """Weekdays, those with a number counted in the months named, or in the year."""
        found = 0
        for ordinal, weekday in days:
            every = self.weekday(weekday)
            if not ordinal:
                found |= every
                continue
            for low, length in [(self._firsts[m - 1], self._lengths[m - 1]) for m in months] or [(0, self.length)]:
                within = bits(every >> low & ((1 << length) - 1))
                if abs(ordinal) <= len(within):
                    found |= 1 << low + within[ordinal - 1 if ordinal > 0 else ordinal]
        return found

    def weeks(self, numbers: tuple[int, ...]) -> int:
        """The days whose week, of the year that has most of it, has one of these numbers."""
        found = 0
        for of in (self._year - 1, self._year, self._year + 1):
            first, count = _weeks(of, self._wkst)
            for number in {n if n > 0 else count + 1 + n for n in numbers}:
                if 1 <= number <= count:
                    low = first + (number - 1) * 7 - self.start
                    found |= 0b1111111 << low if low >= 0 else 0b1111111 >> -low
        return found & self.all


@lru_cache(maxsize=16)
def _weekdays(first: int, length: int) -> int:
    return _every(7, first, length)


@lru_cache(maxsize=2048)
def _weeks(year: int, wkst: int) -> tuple[int, int]:
    """When the first week of a year begins, the first with four days in it, and how many weeks it has."""

    def first(of: int) -> int:
        fourth = date(of, 1, 4).toordinal() - _EPOCH_DAY
        return fourth - (fourth + 3 - wkst) % 7

    return first(year), (first(year + 1) - first(year)) // 7


def picked(days: RuleDays, times: TimesOfDay) -> Walls:
    """BYSETPOS: the times of these days that it picks."""
    positions, per_day = days.parts.bysetpos, times.per_day
    if days.parts.freq == "DAILY":  # the same ones every day
        places = sorted({n - 1 if n > 0 else per_day + n for n in positions if abs(n) <= per_day})
        return DailyWalls(days, TimesList(tuple(times.at(place) for place in places))) if places else Nothing()
    most = {"WEEKLY": max(1, len(days.parts.byday)), "MONTHLY": 31, "YEARLY": 366}[days.parts.freq] * per_day
    return PickedWalls(days, times) if any(abs(n) <= most for n in positions) else Nothing()


class Nothing(Walls):
    """No local time at all."""

    def next(self, local: int) -> int | None:
        return None

    def previous(self, local: int) -> int | None:
        return None

    def count(self, low: int, high: int) -> int:
        return 0


class PickedWalls(Walls):
    """BYSETPOS: some of the times of each year, month or week, chosen by their place among them.

    Of days, `picked` makes a plain list of times.
    """

    def __init__(self, days: RuleDays, times: TimesOfDay) -> None:
        self._days, self._times = days, times
        self._positions = days.parts.bysetpos
        self._picked = lru_cache(maxsize=1024)(self._pick)

    def next(self, local: int) -> int | None:
        start, end = self._period(local // DAY_S)
        while start < start_of(LAST_YEAR):
            for wall in self._picked(start, end):
                if wall >= local:
                    return wall
            following = self._days.next(end)
            if following is None:
                return None
            start, end = self._period(following)
        return None

    def previous(self, local: int) -> int | None:
        start, end = self._period((local - 1) // DAY_S)
        while True:
            for wall in reversed(self._picked(start, end)):
                if wall < local:
                    return wall
            earlier = self._days.previous(start - 1)
            if earlier is None or earlier < start_of(FIRST_YEAR):
                return None
            start, end = self._period(earlier)

    def count(self, low: int, high: int) -> int:
        total, day = 0, low // DAY_S
        while day * DAY_S < high:
            start, end = self._period(day)
            total += sum(low <= wall < high for wall in self._picked(start, end))
            following = self._days.next(end)
            if following is None:
                break
            day = following
        return total

    def _period(self, day: int) -> tuple[int, int]:
        """The days [from, to) of the period that a day is in."""
        freq = self._days.parts.freq
        if freq == "WEEKLY":
            start = day - (day + 3 - self._days.parts.wkst) % 7
            return start, start + 7
        year = year_of(day)
        if freq == "YEARLY":
            return start_of(year), start_of(year + 1)
        at = date.fromordinal(day + _EPOCH_DAY).replace(day=1)
        start = at.toordinal() - _EPOCH_DAY
        following = date(at.year + at.month // 12, at.month % 12 + 1, 1)
        return start, following.toordinal() - _EPOCH_DAY

    def _pick(self, start: int, end: int) -> tuple[int, ...]:
        days = bits(self._days.between(start, end))
        per_day = self._times.per_day
        total = len(days) * per_day
        places = {n - 1 if n > 0 else total + n for n in self._positions}
        return tuple(
            (start + days[place // per_day]) * DAY_S + self._times.at(place % per_day)
            for place in sorted(places)
            if 0 <= place < total
        )
