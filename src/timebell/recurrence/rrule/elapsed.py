"""HOURLY, MINUTELY and SECONDLY recurrence rules: steps of real time, filtered by the local time of day.

The local times of the steps repeat in a cycle, the least common multiple of the step and a day (or a week), as long as
the UTC offset is constant. The matching steps of one cycle are listed once per offset. Searches then need only
arithmetic and bisection, however far away the next match is.

A cycle consists of periods of one step each. A candidate is identified by its index `period * width + second`, where
`width` is the length of the part of a period from which BYMINUTE and BYSECOND select.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress
from math import gcd, lcm

from timebell.recurrence.instants import DAY_S, MAX_S, MAX_US, MIN_S, MIN_US, SECOND_US
from timebell.recurrence.rrule.by_day import YearDays, setpos_indexes
from timebell.recurrence.rrule.parser import HOURLY, MINUTELY, UNIT_S, Parts
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.zones import Segment, Zone

_WEEK_S = 7 * DAY_S
_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday; Monday is 0


class SteppedRule(Rule):
    """Instants at steps of real time in phase with `start` (an epoch second), both before and after it.

    The caller limits them to DTSTART and later.
    """

    def __init__(self, parts: Parts, start: int, zone: Zone) -> None:
        self.zone = zone
        self._step = parts.interval * UNIT_S[parts.freq]
        local = start + zone.offset(start)
        self._width, offset_in_window = _choice_window(parts, local)
        self._origin = start - offset_in_window
        # If the step is a multiple of 7, each position in a daily cycle always has the same weekday. A weekly cycle
        # then applies BYDAY in advance, so that no position is searched that can never match. Otherwise each position
        # falls on every weekday in turn, and `_days` filters them.
        self._clock_cycle = _WEEK_S if self._step % 7 == 0 else DAY_S
        self._common_step = gcd(self._step, self._clock_cycle)
        self._cycle_length = lcm(self._step, self._clock_cycle)
        self._filters = (
            parts.hours,
            parts.minutes,
            parts.seconds if parts.seconds or not parts.minutes or parts.freq != HOURLY else (local % 60,),
            tuple(day for _, day in parts.days) if self._clock_cycle == _WEEK_S else (),
            parts.setpos,
        )
        has_day_filter = parts.months or parts.yeardays or parts.monthdays or parts.days
        self._days = YearDays(parts, local // DAY_S) if has_day_filter else None
        self._unfiltered = not any(self._filters)
        self._cycles_by_utc_offset: dict[int, tuple[int, array[int]]] = {}

    def after(self, instant: int) -> int | None:
        second = self._next(max(instant // SECOND_US + 1, MIN_S))
        return None if second is None else second * SECOND_US

    def before(self, instant: int) -> int | None:
        second = self._previous(min(-(-instant // SECOND_US), MAX_S))
        return None if second is None else second * SECOND_US

    def count(self, start: int, end: int) -> int:
        low, high = (-(-min(max(edge, MIN_US), MAX_US) // SECOND_US) for edge in (start, end))
        if low >= high:
            return 0
        segments = self.zone.segments[self.zone.index(low) : self.zone.index(high - 1) + 1]
        return sum(self._count(segment, max(low, segment.start), min(high, segment.end)) for segment in segments)

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        return iter(())

    def _next(self, low: int) -> int | None:
        """Return the first matching epoch second from `low` (inclusive), or None."""
        i, segments = self.zone.index(low), self.zone.segments
        while i < len(segments):
            segment = segments[i]
            second = self._first_from(segment.offset, max(low, segment.start))
            while self._days is not None and second is not None and second < segment.end:
                day = (second + segment.offset) // DAY_S
                matching_day = self._days.next(day)
                if matching_day == day:
                    break
                if matching_day is None:
                    return None
                second = self._first_from(segment.offset, matching_day * DAY_S - segment.offset)
            if second is not None and second < segment.end:
                return second if second < MAX_S else None
            i += 1
        return None

    def _previous(self, high: int) -> int | None:
        """Return the last matching epoch second before `high`, or None."""
        i, segments = self.zone.index(high - 1), self.zone.segments
        while i >= 0:
            segment = segments[i]
            second = self._last_before(segment.offset, min(high, segment.end))
            while self._days is not None and second is not None and second >= max(segment.start, MIN_S):
                day = (second + segment.offset) // DAY_S
                matching_day = self._days.previous(day)
                if matching_day == day:
                    break
                if matching_day is None:
                    return None
                second = self._last_before(segment.offset, (matching_day + 1) * DAY_S - segment.offset)
            if second is not None and second >= segment.start:
                return second if second >= MIN_S else None
            i -= 1
        return None

    def _count(self, segment: Segment, low: int, high: int) -> int:
        """Return the number of matching epoch seconds in [low, high), a range within the segment."""
        offset = segment.offset
        if self._days is None:
            return self._count_before(offset, high) - self._count_before(offset, low)
        total, (day, last) = 0, ((low + offset) // DAY_S, (high + offset - 1) // DAY_S)
        if self._cycle_length == DAY_S and last - day > 1:
            per_day = self._count_before(offset, DAY_S) - self._count_before(offset, 0)
            total += self._days.count(day + 1, last) * per_day
            edges = [edge for edge in ((day, day + 1), (last, last + 1)) if edge[0] in self._days]
        else:
            edges = list(self._days.iter_runs(day, last + 1))
        for first, end in edges:
            since, until = max(low, first * DAY_S - offset), min(high, end * DAY_S - offset)
            total += self._count_before(offset, until) - self._count_before(offset, since)
        return total

    def _first_from(self, offset: int, at: int) -> int | None:
        """Return the first second from `at` (inclusive) with a matching time of day at this UTC offset, or None."""
        if self._unfiltered:
            return at + (self._origin - at) % self._step
        anchor, indexes = self._cycle_indexes(offset)
        if not indexes:
            return None
        cycles, seconds = divmod(at - anchor, self._cycle_length)
        period, rest = divmod(seconds, self._step)
        i = bisect_left(indexes, period * self._width + min(rest, self._width))
        if i == len(indexes):
            cycles, i = cycles + 1, 0
        period, rest = divmod(indexes[i], self._width)
        return anchor + cycles * self._cycle_length + period * self._step + rest

    def _last_before(self, offset: int, before: int) -> int | None:
        """Return the last second before `before` with a matching time of day at this UTC offset, or None."""
        if self._unfiltered:
            return before - 1 - (before - 1 - self._origin) % self._step
        anchor, indexes = self._cycle_indexes(offset)
        if not indexes:
            return None
        cycles, i = divmod(self._count_before(offset, before) - 1, len(indexes))
        period, rest = divmod(indexes[i], self._width)
        return anchor + cycles * self._cycle_length + period * self._step + rest

    def _count_before(self, offset: int, at: int) -> int:
        """Return the number of matching seconds before `at`, relative to an arbitrary start; use only differences."""
        if self._unfiltered:
            return -((self._origin - at) // self._step)
        anchor, indexes = self._cycle_indexes(offset)
        cycles, seconds = divmod(at - anchor, self._cycle_length)
        period, rest = divmod(seconds, self._step)
        return cycles * len(indexes) + bisect_left(indexes, period * self._width + min(rest, self._width))

    def _cycle_indexes(self, offset: int) -> tuple[int, array[int]]:
        """Return an epoch second at which a cycle begins, and the sorted indexes of its matching candidates."""
        cached = self._cycles_by_utc_offset.get(offset)
        if cached is None:
            local = (self._origin + offset + _EPOCH_WEEKDAY * DAY_S) % self._clock_cycle
            begin = local % self._common_step
            periods = self._clock_cycle // self._common_step
            periods_ahead = (
                (begin - local) // self._common_step * pow(self._step // self._common_step, -1, periods) % periods
            )
            indexes = _matching_indexes(self._step, self._clock_cycle, self._width, begin, self._filters)
            cached = self._cycles_by_utc_offset[offset] = (self._origin + periods_ahead * self._step, indexes)
        return cached


def _choice_window(parts: Parts, local: int) -> tuple[int, int]:
    """Return the width of the part of a period from which BY parts select, and the offset of DTSTART in it; seconds."""
    if parts.freq == HOURLY and parts.minutes:
        return 3600, local % 3600
    if parts.freq in (HOURLY, MINUTELY) and parts.seconds:
        return 60, local % 60
    return 1, 0


@lru_cache(maxsize=64)
def _matching_indexes(
    step: int, clock_cycle: int, width: int, begin: int, filters: tuple[tuple[int, ...], ...]
) -> array[int]:
    """Return the indexes (`period * width + second`) of the matching candidates of one cycle, sorted.

    The cycle begins at the local second `begin` of a day, or of a week from Monday.
    """
    hours, minutes, seconds, weekdays, setpos = filters
    minute = bytes(not seconds or second in seconds for second in range(60))
    hour = b"".join(minute if not minutes or m in minutes else bytes(60) for m in range(60))
    day = b"".join(hour if not hours or h in hours else bytes(3600) for h in range(24))
    clock = b"".join(day if not weekdays or d in weekdays else bytes(DAY_S) for d in range(clock_cycle // DAY_S))
    every = gcd(step, clock_cycle)
    periods = clock_cycle // every
    if width == 1:
        # Select the matching seconds in clock order, then convert them to the order of the periods.
        inverse = pow(step // every, -1, periods)
        matching = bytearray(periods)
        for position in compress(range(periods), clock[begin::every]):
            matching[position * inverse % periods] = 1
        return array("I", compress(range(periods), matching) if not setpos or setpos_indexes(setpos, 1) else ())
    clock += clock[:width]
    indexes = array("I")
    for period in range(periods):
        at = (begin + period * step) % clock_cycle
        candidates = list(compress(range(period * width, period * width + width), clock[at : at + width]))
        indexes.extend([candidates[i] for i in setpos_indexes(setpos, len(candidates))] if setpos else candidates)
    return indexes
