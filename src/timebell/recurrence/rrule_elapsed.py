"""RRULEs of hours, minutes or seconds: steps of real time from DTSTART, of which BY parts leave some.

A period is an hour, minute or second of real time, in step with DTSTART's local clock. Instants of every
INTERVAL-th period count when clocks show a time that the BY parts name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from math import gcd

from timebell.recurrence.base import Rule
from timebell.recurrence.instants import DAY_S, MAX, MAX_S, MIN, MIN_S, SECOND
from timebell.recurrence.rrule_days import RuleDays
from timebell.recurrence.rrule_text import FREQUENCIES, Parts, refuse
from timebell.recurrence.walls import DailyWalls, TimesList, TimesOfDay, bits
from timebell.recurrence.zones import WIDEST, Zone

UNITS = {"HOURLY": 3600, "MINUTELY": 60, "SECONDLY": 1}
_FEW = 1000
_SPARSEST = 1000  # days between two hits that are still looked for one by one


class ElapsedPicks(Rule):
    """The rule in a zone, from `start` (an epoch second) on."""

    gap = "skip"
    fold = "both"

    def __init__(self, parts: Parts, days: RuleDays, start: int, where: Zone) -> None:
        self.zone = where
        self._parts, self._days, self._start = parts, days, start
        self._unit = UNITS[parts.freq]
        self._step = self._unit * parts.interval
        self._offset = where.offset(start)
        local = start + self._offset
        self._base = start - local % self._unit  # when DTSTART's own period began
        self._minute, self._second = local % 3600 // 60, local % 60
        self._times = lru_cache(maxsize=64)(self._times_at)
        self._day_counts: dict[tuple[int, int], int] = {}
        self._check_density()

    def after(self, instant: int) -> int | None:
        at = max(instant // SECOND + 1, self._start, MIN_S)
        i = self.zone.index(at)
        while i < len(self.zone.segments):
            segment = self.zone.segments[i]
            local = self._next(max(at, segment.start) + segment.offset, segment.end + segment.offset, segment.offset)
            if local is not None and local - segment.offset < segment.end:
                found = local - segment.offset
                return found * SECOND if found < MAX_S else None
            i = i + 1 if local is None else max(i + 1, self.zone.index(local - WIDEST))
        return None

    def before(self, instant: int) -> int | None:
        at = min(-(-instant // SECOND), MAX_S) - 1
        i = self.zone.index(at)
        while i >= 0 and at >= self._start:
            segment = self.zone.segments[i]
            low = max(segment.start, self._start, MIN_S)
            if segment.end <= self._start:
                return None
            local = self._previous(min(at, segment.end - 1) + segment.offset, low + segment.offset, segment.offset)
            if local is not None:
                return (local - segment.offset) * SECOND
            i -= 1
        return None

    def count(self, start: int, end: int) -> int:
        low, high = (-(-min(max(edge, MIN), MAX) // SECOND) for edge in (start, end))
        low = max(low, self._start)
        total = 0
        if low < high:
            for segment in self.zone.segments[self.zone.index(low) : self.zone.index(high - 1) + 1]:
                since, until = max(low, segment.start), min(high, segment.end)
                total += self._count(since + segment.offset, until + segment.offset, segment.offset)
        return total

    def wall(self, low: int, high: int) -> Iterator[int]:
        return iter(())

    def _times_at(self, offset: int) -> TimesOfDay | None:
        """The times of day that are named while this offset holds; None when no period ever meets one.

        What DTSTART gives, its minute and second, goes on in real time: a jump of half an hour moves it.
        """
        parts = self._parts
        minute = (self._minute + (offset - self._offset) // 60) % 60
        hours = _mask(parts.byhour) or (1 << 24) - 1
        minutes = _mask(parts.byminute) or (1 << minute if parts.freq == "HOURLY" else (1 << 60) - 1)
        seconds = _mask(parts.bysecond) or (1 << self._second if parts.freq != "SECONDLY" else (1 << 60) - 1)
        times: TimesOfDay | None = TimesOfDay(hours, minutes, seconds)
        if parts.bysetpos:
            times = _picked(parts, hours, minutes, seconds)
        return times if times is not None and self._hits(times, offset, 1) else None

    def _hits(self, times: TimesOfDay, offset: int, most: int) -> int:
        """How many of these times some period of the step can meet; counted up to `most`."""
        common = gcd(self._step, DAY_S)
        if common <= self._unit:
            return min(times.per_day, most)
        phase = self._base + offset
        met = ((phase + at + n) % DAY_S for at in range(0, DAY_S, common) for n in range(self._unit))
        return sum(1 for _ in islice((second for second in met if times.next(second) == second), most))

    def _check_density(self) -> None:
        times = self._times(self._offset)
        cycle = self._step // gcd(self._step, DAY_S)  # days until the steps fall on the same times again
        need = cycle // _SPARSEST
        if times is not None and need and self._hits(times, self._offset, need) < need:
            refuse(
                f"INTERVAL={self._parts.interval} meets the BY parts about once in {cycle // 365} years.",
                "Use a coarser FREQ, or an INTERVAL that divides a day.",
            )

    def _next(self, local: int, limit: int, offset: int) -> int | None:
        """The first local second from `local` on that counts; None beyond `limit`."""
        times = self._times(offset)
        if times is None:
            return None
        walls, phase = DailyWalls(self._days, times), self._base + offset
        while local < limit:
            found = walls.next(local)
            if found is None:
                return None
            into = (found - phase) % self._step
            if into < self._unit:
                return found
            local = found + self._step - into
        return local

    def _previous(self, local: int, limit: int, offset: int) -> int | None:
        """The last local second up to `local` that counts; None before `limit`."""
        times = self._times(offset)
        if times is None:
            return None
        walls, phase = DailyWalls(self._days, times), self._base + offset
        while local >= limit:
            found = walls.previous(local + 1)
            if found is None or found < limit:
                return None
            into = (found - phase) % self._step
            if into < self._unit:
                return found
            local = found - into + self._unit - 1
        return None

    def _count(self, low: int, high: int, offset: int) -> int:
        """How many local seconds of [low, high) count."""
        times = self._times(offset)
        if times is None:
            return 0
        if self._step == self._unit:
            return DailyWalls(self._days, times).count(low, high)
        return sum(self._count_of(chunk, offset) for chunk in self._chunks(low, high))

    def _chunks(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """[low, high) by days, those that cannot count left out."""
        day = self._days.next(low // DAY_S)
        while day is not None and day * DAY_S < high:
            yield max(low, day * DAY_S), min(high, (day + 1) * DAY_S)
            day = self._days.next(day + 1)

    def _count_of(self, chunk: tuple[int, int], offset: int) -> int:
        """How many local seconds of a day, or of a part of one, count; days alike are counted once."""
        low, high = chunk
        if self._step == self._unit:
            return self._count(low, high, offset)
        if high - low < DAY_S:
            return sum(1 for _ in self._walk(low, high, offset))
        key = (offset, (low - self._base - offset) % self._step)
        if key not in self._day_counts:
            self._day_counts[key] = sum(1 for _ in self._walk(low, high, offset))
        return self._day_counts[key]

    def _walk(self, low: int, high: int, offset: int) -> Iterator[int]:
        found = self._next(low, high, offset)
        while found is not None and found < high:
            yield found
            found = self._next(found + 1, high, offset)

    def stop_after(self, runs: int) -> int:
        """The instant just after the so-manieth one; the end of time when there are fewer."""
        if runs <= _FEW:
            found = self.after(self._start * SECOND - 1)
            for _ in range(runs - 1):
                found = None if found is None else self.after(found)
            return MAX if found is None else found + 1
        for segment in self.zone.segments[self.zone.index(self._start) :]:
            low, high = max(self._start, segment.start) + segment.offset, segment.end + segment.offset
            if self._times(segment.offset) is None:
                continue
            for chunk in self._chunks(low, min(high, MAX_S + segment.offset)):
                if (count := self._count_of(chunk, segment.offset)) >= runs:
                    last = next(islice(self._walk(*chunk, segment.offset), runs - 1, None))
                    return (last - segment.offset) * SECOND + 1
                runs -= count
        return MAX


def _picked(parts: Parts, hours: int, minutes: int, seconds: int) -> TimesOfDay | None:
    """BYSETPOS within each hour, minute or second; None when it leaves nothing."""
    units = {"HOURLY": (minutes, seconds), "MINUTELY": (1, seconds), "SECONDLY": (1, 1)}[parts.freq]
    period = [minute * 60 + second for minute in bits(units[0]) for second in bits(units[1])]
    kept = sorted({period[n - 1 if n > 0 else n] for n in parts.bysetpos if abs(n) <= len(period)})
    if not kept:
        return None
    if parts.freq == "HOURLY":
        return TimesList(tuple(hour * 3600 + at for hour in bits(hours) for at in kept))
    return TimesOfDay(hours, minutes, _mask(tuple(kept)) if parts.freq == "MINUTELY" else seconds)


def _mask(values: tuple[int, ...]) -> int:
    return sum(1 << value for value in values)


def is_elapsed(freq: str) -> bool:
    """Whether a frequency counts real time."""
    return FREQUENCIES.index(freq) < FREQUENCIES.index("DAILY")
