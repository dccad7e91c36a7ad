"""Local times, and what the jumps of the clock make of them.

`Walls` is a set of local times that knows no zone; `WallRule` turns it into instants of one zone. Whatever
notation names local times (cron, calendar intervals, RRULE), gaps, folds and missing days are decided here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

from timebell.recurrence.core import Fold, Gap, Rule
from timebell.recurrence.instants import DAY_S, MAX, MAX_S, MIN, MIN_S, SECOND
from timebell.recurrence.zones import WIDEST, Segment, Zone


class Walls(ABC):
    """A set of local times, as whole seconds of the wall clock since its 1970-01-01T00:00."""

    uniform = False
    """Whether each day that has any has the same times."""

    @abstractmethod
    def next(self, local: int) -> int | None:
        """The first from `local` on."""

    @abstractmethod
    def previous(self, local: int) -> int | None:
        """The last before `local`."""

    @abstractmethod
    def count(self, low: int, high: int) -> int:
        """How many are in [low, high)."""


class Days(Protocol):
    """A set of local dates, as days since 1970-01-01."""

    def __contains__(self, day: int) -> bool: ...

    def next(self, day: int) -> int | None:
        """The first from `day` on."""

    def previous(self, day: int) -> int | None:
        """The last up to `day`, which counts."""

    def count(self, start: int, end: int) -> int:
        """How many are in [start, end)."""


class TimesOfDay:
    """A set of seconds of the day, as minutes and the seconds within each; each a bit mask to begin with."""

    __slots__ = ("first", "last", "minutes", "per_day", "seconds")

    def __init__(self, hours: int, minutes: int, seconds: int) -> None:
        self.minutes = tuple(h * 3600 + m * 60 for h in bits(hours) for m in bits(minutes))
        self.seconds = tuple(bits(seconds))
        self.per_day = len(self.minutes) * len(self.seconds)
        self.first = self.minutes[0] + self.seconds[0]
        self.last = self.minutes[-1] + self.seconds[-1]

    def next(self, second: int) -> int | None:
        """The first from `second` on."""
        minute = second - second % 60
        i = bisect_left(self.minutes, minute)
        if i == len(self.minutes):
            return None
        if self.minutes[i] == minute:
            if second - minute <= self.seconds[-1]:
                return minute + self.seconds[bisect_left(self.seconds, second - minute)]
            i += 1
            if i == len(self.minutes):
                return None
        return self.minutes[i] + self.seconds[0]

    def previous(self, second: int) -> int | None:
        """The last before `second`."""
        passed = self.count(second)
        return self.at(passed - 1) if passed else None

    def count(self, second: int) -> int:
        """How many are before `second`."""
        minute = second - second % 60
        i = bisect_left(self.minutes, minute)
        found = i * len(self.seconds)
        if i < len(self.minutes) and self.minutes[i] == minute:
            found += bisect_left(self.seconds, second - minute)
        return found

    def at(self, index: int) -> int:
        """The one with this index, the first being 0."""
        minute, second = divmod(index, len(self.seconds))
        return self.minutes[minute] + self.seconds[second]


class TimesList(TimesOfDay):
    """Any set of seconds of the day, given in order."""

    __slots__ = ("_all",)

    def __init__(self, times: tuple[int, ...]) -> None:
        self._all = times
        self.per_day = len(times)
        self.first, self.last = times[0], times[-1]

    def next(self, second: int) -> int | None:
        i = bisect_left(self._all, second)
        return self._all[i] if i < len(self._all) else None

    def count(self, second: int) -> int:
        return bisect_left(self._all, second)

    def at(self, index: int) -> int:
        return self._all[index]


class DailyWalls(Walls):
    """The same times on each of some days."""

    uniform = True

    def __init__(self, days: Days, times: TimesOfDay) -> None:
        self._days, self._times = days, times

    def next(self, local: int) -> int | None:
        day, second = divmod(local, DAY_S)
        match = self._days.next(day)
        if match == day:
            if (time := self._times.next(second)) is not None:
                return day * DAY_S + time
            match = self._days.next(day + 1)
        return None if match is None else match * DAY_S + self._times.first

    def previous(self, local: int) -> int | None:
        day, second = divmod(local, DAY_S)
        match = self._days.previous(day)
        if match == day:
            if (time := self._times.previous(second)) is not None:
                return day * DAY_S + time
            match = self._days.previous(day - 1)
        return None if match is None else match * DAY_S + self._times.last

    def count(self, low: int, high: int) -> int:
        (first, since), (last, until) = divmod(low, DAY_S), divmod(high, DAY_S)
        total = self._days.count(first, last) * self._times.per_day
        total -= self._times.count(since) if first in self._days else 0
        return total + (self._times.count(until) if last in self._days else 0)


class WallRule(Rule):
    """Local times in a zone. Within one stretch of constant offset local time is plain arithmetic; what
    happens at the jumps between stretches is decided in `_window` and `_moved_next`.

    A `fixed` local time happens once on each day that exists: `gap` and `fold` say when, if the clock skips
    or repeats it. One that is not fixed happens whenever clocks show it. On a date that never was
    (Apia, 2011-12-30) nothing happens, unless `missing_days` makes it a gap like any other. `fraction` is
    the microseconds that each local second has in addition.
    """

    def __init__(
        self,
        where: Zone,
        walls: Walls,
        *,
        gap: Gap = "shift",
        fold: Fold = "first",
        fixed: bool = True,
        missing_days: bool = False,
        fraction: int = 0,
    ) -> None:
        self.zone = where
        self.walls = walls
        self.fixed = fixed
        self.gap = gap if fixed else "skip"
        self.fold = fold if fixed else "both"
        self._missing = frozenset() if missing_days else where.missing_days
        self._fraction = fraction

    def all_walls(self) -> Walls:
        """Every local time that it names."""
        return self.walls

    def among(self, walls: Walls) -> WallRule:
        """The rule that does the same to other local times."""
        made = WallRule(self.zone, walls, gap=self.gap, fold=self.fold, fixed=self.fixed, fraction=self._fraction)
        made._missing = self._missing
        return made

    def after(self, instant: int) -> int | None:
        found = self._next((instant - self._fraction) // SECOND)
        return None if found is None else found * SECOND + self._fraction

    def before(self, instant: int) -> int | None:
        found = self._previous(-((self._fraction - instant) // SECOND))
        return None if found is None else found * SECOND + self._fraction

    def count(self, start: int, end: int) -> int:
        low, high = (-((self._fraction - min(max(edge, MIN), MAX)) // SECOND) for edge in (start, end))
        if low >= high:
            return 0
        segments = self.zone.segments[self.zone.index(low) : self.zone.index(high - 1) + 1]
        return sum(self._count(segment, low, high) for segment in segments)

    def wall(self, low: int, high: int) -> Iterator[int]:
        if self.fixed:
            end = -((self._fraction - high) // SECOND)
            local = self._named(-((self._fraction - low) // SECOND), end)
            while local is not None:
                yield local * SECOND + self._fraction
                local = self._named(local + 1, end)

    def _next(self, second: int) -> int | None:
        """The first epoch second strictly after this one."""
        at = max(second + 1, MIN_S)
        i = self.zone.index(at)
        while i < len(self.zone.segments):
            segment = self.zone.segments[i]
            low, high = self._window(segment)
            local = self.walls.next(max(low, at + segment.offset))
            found = local - segment.offset if local is not None and local < high else None
            if segment.offset > segment.before and at < segment.start + segment.offset - segment.before:
                moved = self._moved_next(segment, at)
                found = moved if found is None or (moved is not None and moved < found) else found
            if found is not None:
                return found if found < MAX_S else None
            # Nothing fires before `local`, except that a fold shows earlier local times again.
            if segment.after < segment.offset:
                i += 1
            elif local is not None:
                i = max(i + 1, self.zone.index(local - WIDEST))
            else:
                return None
        return None

    def _previous(self, second: int) -> int | None:
        """The last epoch second strictly before this one."""
        at = min(second, MAX_S) - 1
        i = self.zone.index(at)
        while i >= 0:
            segment = self.zone.segments[i]
            low, high = self._window(segment)
            local = self.walls.previous(min(high, at + 1 + segment.offset))
            found = local - segment.offset if local is not None and local >= low else None
            if segment.offset > segment.before and (
                found is None or found < segment.start + segment.offset - segment.before
            ):
                moved = self._moved_previous(segment, at)
                found = moved if found is None or (moved is not None and moved > found) else found
            if found is not None:
                return found if found >= MIN_S else None
            if segment.before > segment.offset:
                i -= 1
            elif local is not None:
                i = min(i - 1, self.zone.index(local + WIDEST))
            else:
                return None
        return None

    def _count(self, segment: Segment, start: int, end: int) -> int:
        """How many epoch seconds of [start, end) within this stretch."""
        low, high = self._window(segment)
        low, high = max(low, start + segment.offset), min(high, end + segment.offset)
        total = self.walls.count(low, high) if low < high else 0
        moved = self._moved_next(segment, start) if segment.offset > segment.before else None
        while moved is not None and moved < end:
            local = moved + segment.offset
            total += not self.walls.count(local, local + 1)
            moved = self._moved_next(segment, moved + 1)
        return total

    def _window(self, segment: Segment) -> tuple[int, int]:
        """The local seconds [from, to) that fire in this stretch: of the two passes of a fold only one."""
        start, end, offset, before, after = segment
        low = start + (before if before > offset and self.fold == "first" else offset)
        return low, end + (after if after < offset and self.fold == "last" else offset)

    def _moved_next(self, segment: Segment, at: int) -> int | None:
        """The first epoch second from `at` on at which a local time that this stretch's first jump skipped
        fires after all."""
        low, high = segment.gap
        if self.gap == "end":
            return segment.start if at <= segment.start and self._named(low, high) is not None else None
        local = self._named(max(low, at + segment.before), high) if self.gap == "shift" else None
        return None if local is None else local - segment.before

    def _moved_previous(self, segment: Segment, at: int) -> int | None:
        """The last such epoch second up to `at`."""
        low, high = segment.gap
        if self.gap == "end":
            return segment.start if at >= segment.start and self._named(low, high) is not None else None
        if self.gap == "skip":
            return None
        local = self.walls.previous(min(high, at + segment.before + 1))
        while local is not None and local >= low and local // DAY_S in self._missing:
            local = self.walls.previous(local // DAY_S * DAY_S)
        return local - segment.before if local is not None and local >= low else None

    def _named(self, low: int, high: int) -> int | None:
        """The first local second in [low, high), except on dates that never were."""
        local = self.walls.next(low) if self.walls.count(low, high) else None  # does not search on after `high`
        while local is not None and local < high and local // DAY_S in self._missing:
            local = self.walls.next((local // DAY_S + 1) * DAY_S)
        return local if local is not None and local < high else None


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set, in order."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
