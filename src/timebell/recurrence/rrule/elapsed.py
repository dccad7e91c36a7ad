"""Recurrence rules of hours, minutes and seconds: steps of real time, of which BY parts keep some by local fields.

The steps come round: after the least common multiple of the step and a day (or a week) they meet the same
local times again, as long as the offset from UTC is the same. Which steps of one such round have a wanted
time of day is listed once, so that the next one is found by arithmetic and bisection, however far it is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress
from math import gcd, lcm

from timebell.recurrence.core import Rule
from timebell.recurrence.instants import DAY_S, MAX, MAX_S, MIN, MIN_S, SECOND
from timebell.recurrence.rrule.by_day import YearDays, chosen
from timebell.recurrence.rrule.parser import HOURLY, MINUTELY, UNIT_S, Parts
from timebell.recurrence.zones import Segment, Zone

_WEEK_S = 7 * DAY_S
_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday; Monday is 0


class SteppedRule(Rule):
    """Periods of real time from `start` (an epoch second) on, and before it; the caller bounds them."""

    def __init__(self, parts: Parts, start: int, where: Zone) -> None:
        self.zone = where
        self._step = parts.interval * UNIT_S[parts.freq]
        shown = start + where.offset(start)
        self._wide, late = _opening(parts, shown)
        self._origin = start - late
        # Weekdays and steps meet in the same way every week if the step has a factor 7, else all of them meet.
        self._round = _WEEK_S if self._step % 7 == 0 else DAY_S
        self._every = gcd(self._step, self._round)
        self._length = lcm(self._step, self._round)
        self._wanted = (
            parts.hours,
            parts.minutes,
            parts.seconds if parts.seconds or not parts.minutes or parts.freq != HOURLY else (shown % 60,),
            tuple(day for _, day in parts.days) if self._round == _WEEK_S else (),
            parts.setpos,
        )
        limited = parts.months or parts.yeardays or parts.monthdays or parts.days
        self._days = YearDays(parts, shown // DAY_S) if limited else None
        self._plain = not any(self._wanted)
        self._grids: dict[int, tuple[int, array[int]]] = {}

    def after(self, instant: int) -> int | None:
        found = self._next(max(instant // SECOND + 1, MIN_S))
        return None if found is None else found * SECOND

    def before(self, instant: int) -> int | None:
        found = self._previous(min(-(-instant // SECOND), MAX_S))
        return None if found is None else found * SECOND

    def count(self, start: int, end: int) -> int:
        low, high = (-(-min(max(edge, MIN), MAX) // SECOND) for edge in (start, end))
        if low >= high:
            return 0
        segments = self.zone.segments[self.zone.index(low) : self.zone.index(high - 1) + 1]
        return sum(self._count(segment, max(low, segment.start), min(high, segment.end)) for segment in segments)

    def wall(self, low: int, high: int) -> Iterator[int]:
        return iter(())

    def _next(self, low: int) -> int | None:
        """The first epoch second from `low` on."""
        i, segments = self.zone.index(low), self.zone.segments
        while i < len(segments):
            segment = segments[i]
            found = self._from(segment.offset, max(low, segment.start))
            while self._days is not None and found is not None and found < segment.end:
                day = (found + segment.offset) // DAY_S
                match = self._days.next(day)
                if match == day:
                    break
                if match is None:
                    return None
                found = self._from(segment.offset, match * DAY_S - segment.offset)
            if found is not None and found < segment.end:
                return found if found < MAX_S else None
            i += 1
        return None

    def _previous(self, high: int) -> int | None:
        """The last epoch second before `high`."""
        i, segments = self.zone.index(high - 1), self.zone.segments
        while i >= 0:
            segment = segments[i]
            found = self._until(segment.offset, min(high, segment.end))
            while self._days is not None and found is not None and found >= max(segment.start, MIN_S):
                day = (found + segment.offset) // DAY_S
                match = self._days.previous(day)
                if match == day:
                    break
                if match is None:
                    return None
                found = self._until(segment.offset, (match + 1) * DAY_S - segment.offset)
            if found is not None and found >= segment.start:
                return found if found >= MIN_S else None
            i -= 1
        return None

    def _count(self, segment: Segment, low: int, high: int) -> int:
        """How many in [low, high), which lies within the segment."""
        offset = segment.offset
        if self._days is None:
            return self._passed(offset, high) - self._passed(offset, low)
        total, (day, last) = 0, ((low + offset) // DAY_S, (high + offset - 1) // DAY_S)
        if self._length == DAY_S and last - day > 1:
            whole = self._passed(offset, DAY_S) - self._passed(offset, 0)
            total += self._days.count(day + 1, last) * whole
            edges = [edge for edge in ((day, day + 1), (last, last + 1)) if edge[0] in self._days]
        else:
            edges = list(self._days.runs(day, last + 1))
        for first, end in edges:
            since, until = max(low, first * DAY_S - offset), min(high, end * DAY_S - offset)
            total += self._passed(offset, until) - self._passed(offset, since)
        return total

    def _from(self, offset: int, at: int) -> int | None:
        """The first second from `at` on that has a wanted time of day at this offset."""
        if self._plain:
            return at + (self._origin - at) % self._step
        anchor, places = self._grid(offset)
        if not places:
            return None
        rounds, ahead = divmod(at - anchor, self._length)
        turn, rest = divmod(ahead, self._step)
        i = bisect_left(places, turn * self._wide + min(rest, self._wide))
        if i == len(places):
            rounds, i = rounds + 1, 0
        turn, rest = divmod(places[i], self._wide)
        return anchor + rounds * self._length + turn * self._step + rest

    def _until(self, offset: int, before: int) -> int | None:
        """The last such second before this one."""
        if self._plain:
            return before - 1 - (before - 1 - self._origin) % self._step
        anchor, places = self._grid(offset)
        if not places:
            return None
        rounds, i = divmod(self._passed(offset, before) - 1, len(places))
        turn, rest = divmod(places[i], self._wide)
        return anchor + rounds * self._length + turn * self._step + rest

    def _passed(self, offset: int, at: int) -> int:
        """How many such seconds are before this one, counted from an arbitrary one."""
        if self._plain:
            return -((self._origin - at) // self._step)
        anchor, places = self._grid(offset)
        rounds, ahead = divmod(at - anchor, self._length)
        turn, rest = divmod(ahead, self._step)
        return rounds * len(places) + bisect_left(places, turn * self._wide + min(rest, self._wide))

    def _grid(self, offset: int) -> tuple[int, array[int]]:
        """An epoch second at which a round begins, and the places in it that have a wanted time of day."""
        found = self._grids.get(offset)
        if found is None:
            local = (self._origin + offset + _EPOCH_WEEKDAY * DAY_S) % self._round
            begin = local % self._every
            turns = self._round // self._every
            ahead = (begin - local) // self._every * pow(self._step // self._every, -1, turns) % turns
            places = _places(self._step, self._round, self._wide, begin, self._wanted)
            found = self._grids[offset] = (self._origin + ahead * self._step, places)
        return found


def _opening(parts: Parts, shown: int) -> tuple[int, int]:
    """How wide the part of a period is that BY parts choose from, and how far into it DTSTART is."""
    if parts.freq == HOURLY and parts.minutes:
        return 3600, shown % 3600
    if parts.freq in (HOURLY, MINUTELY) and parts.seconds:
        return 60, shown % 60
    return 1, 0


@lru_cache(maxsize=64)
def _places(step: int, around: int, wide: int, begin: int, wanted: tuple[tuple[int, ...], ...]) -> array[int]:
    """Of the periods of one round, which begins at the local second `begin` of a day or Monday, the seconds that
    have a wanted time of day: period * wide + second."""
    hours, minutes, seconds, weekdays, setpos = wanted
    minute = bytes(not seconds or second in seconds for second in range(60))
    hour = b"".join(minute if not minutes or m in minutes else bytes(60) for m in range(60))
    day = b"".join(hour if not hours or h in hours else bytes(3600) for h in range(24))
    clock = b"".join(day if not weekdays or d in weekdays else bytes(DAY_S) for d in range(around // DAY_S))
    every = gcd(step, around)
    turns = around // every
    if wide == 1:
        # The wanted seconds that any period meets, in the order of the clock, then in the order of the periods.
        back = pow(step // every, -1, turns)
        met = bytearray(turns)
        for place in compress(range(turns), clock[begin::every]):
            met[place * back % turns] = 1
        return array("I", compress(range(turns), met) if not setpos or chosen(setpos, 1) else ())
    clock += clock[:wide]
    places = array("I")
    for turn in range(turns):
        at = (begin + turn * step) % around
        found = list(compress(range(turn * wide, turn * wide + wide), clock[at : at + wide]))
        places.extend([found[i] for i in chosen(setpos, len(found))] if setpos else found)
    return places
