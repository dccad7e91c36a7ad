"""Sets of local times and their conversion to instants across clock changes.

`LocalTimes` is a set of local times without a zone; `LocalTimeRule` turns it into instants of one zone. Gaps, folds and
missing days are handled here for every notation with local times: cron, calendar intervals and RRULE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

from timebell.recurrence.instants import DAY_S, MAX_S, MAX_US, MIN_S, MIN_US, SECOND_US
from timebell.recurrence.rules.rule import Fold, Gap, Rule
from timebell.recurrence.zones import LOCAL_MARGIN_S, Segment, Zone


class LocalTimes(ABC):
    """A set of local times, in whole seconds of the wall clock since its 1970-01-01T00:00."""

    uniform = False
    """True if all days with local times have the same times of day."""

    @abstractmethod
    def next(self, local: int) -> int | None:
        """Return the first local time from `local` (inclusive), or None."""

    @abstractmethod
    def previous(self, local: int) -> int | None:
        """Return the last local time before `local`, or None."""

    @abstractmethod
    def count(self, low: int, high: int) -> int:
        """Return the number of local times in [low, high)."""


class DaySet(Protocol):
    """A set of local dates, in days since 1970-01-01."""

    def __contains__(self, day: int) -> bool: ...

    def next(self, day: int) -> int | None:
        """Return the first day from `day` (inclusive), or None."""

    def previous(self, day: int) -> int | None:
        """Return the last day up to `day` (inclusive), or None."""

    def count(self, start: int, end: int) -> int:
        """Return the number of days in [start, end)."""


class TimesOfDay:
    """A set of seconds of the day, the product of hours, minutes and seconds, each given as a bit mask.

    `minutes` are the starts of the minutes in seconds of the day, `seconds` the seconds within each of these minutes.
    """

    __slots__ = ("first", "last", "minutes", "per_day", "seconds")

    def __init__(self, hours: int, minutes: int, seconds: int) -> None:
        self.minutes = tuple(h * 3600 + m * 60 for h in set_bits(hours) for m in set_bits(minutes))
        self.seconds = tuple(set_bits(seconds))
        self.per_day = len(self.minutes) * len(self.seconds)
        self.first = self.minutes[0] + self.seconds[0]
        self.last = self.minutes[-1] + self.seconds[-1]

    def next(self, second: int) -> int | None:
        """Return the first time of day from `second` (inclusive), or None."""
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
        """Return the last time of day before `second`, or None."""
        count = self.count(second)
        return self.at(count - 1) if count else None

    def count(self, second: int) -> int:
        """Return the number of times of day before `second`."""
        minute = second - second % 60
        i = bisect_left(self.minutes, minute)
        total = i * len(self.seconds)
        if i < len(self.minutes) and self.minutes[i] == minute:
            total += bisect_left(self.seconds, second - minute)
        return total

    def at(self, index: int) -> int:
        """Return the time of day with this index; the first is 0."""
        minute, second = divmod(index, len(self.seconds))
        return self.minutes[minute] + self.seconds[second]


class ListedTimesOfDay(TimesOfDay):
    """A set of seconds of the day given as a sorted list."""

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


class DailyLocalTimes(LocalTimes):
    """The same times of day on each day of a set of days."""

    uniform = True

    def __init__(self, days: DaySet, times: TimesOfDay) -> None:
        self._days, self._times = days, times

    def next(self, local: int) -> int | None:
        day, second = divmod(local, DAY_S)
        matching_day = self._days.next(day)
        if matching_day == day:
            if (time := self._times.next(second)) is not None:
                return day * DAY_S + time
            matching_day = self._days.next(day + 1)
        return None if matching_day is None else matching_day * DAY_S + self._times.first

    def previous(self, local: int) -> int | None:
        day, second = divmod(local, DAY_S)
        matching_day = self._days.previous(day)
        if matching_day == day:
            if (time := self._times.previous(second)) is not None:
                return day * DAY_S + time
            matching_day = self._days.previous(day - 1)
        return None if matching_day is None else matching_day * DAY_S + self._times.last

    def count(self, low: int, high: int) -> int:
        (first, since), (last, until) = divmod(low, DAY_S), divmod(high, DAY_S)
        total = self._days.count(first, last) * self._times.per_day
        total -= self._times.count(since) if first in self._days else 0
        return total + (self._times.count(until) if last in self._days else 0)


class LocalTimeRule(Rule):
    """A set of local times in a zone.

    Within a segment of constant UTC offset, local times convert to instants by addition. `_local_window`, `_moved_next`
    and `_moved_previous` handle the clock changes between segments.

    With `fixed`, each local time fires once on each date that exists: `gap` and `fold` decide when, if the clock skips
    or repeats it. Otherwise a local time fires whenever clocks show it. Nothing fires on dates that the zone skipped
    (Apia, 2011-12-30), unless `fire_on_missing_days` treats them like any other gap. `fraction`, in microseconds, is
    added to every local second.
    """

    def __init__(
        self,
        zone: Zone,
        local_times: LocalTimes,
        *,
        gap: Gap = "shift",
        fold: Fold = "first",
        fixed: bool = True,
        fire_on_missing_days: bool = False,
        fraction: int = 0,
    ) -> None:
        self.zone = zone
        self.local_times = local_times
        self.fixed = fixed
        self.gap = gap if fixed else "skip"
        self.fold = fold if fixed else "both"
        self._missing_days = frozenset() if fire_on_missing_days else zone.missing_days
        self._fraction = fraction

    def all_local_times(self) -> LocalTimes:
        """Return all local times of the rule, including any that a subclass resolves separately."""
        return self.local_times

    def with_local_times(self, local_times: LocalTimes) -> LocalTimeRule:
        """Return a rule with other local times and otherwise the same properties."""
        rule = LocalTimeRule(
            self.zone, local_times, gap=self.gap, fold=self.fold, fixed=self.fixed, fraction=self._fraction
        )
        rule._missing_days = self._missing_days
        return rule

    def after(self, instant: int) -> int | None:
        second = self._next((instant - self._fraction) // SECOND_US)
        return None if second is None else second * SECOND_US + self._fraction

    def before(self, instant: int) -> int | None:
        second = self._previous(-((self._fraction - instant) // SECOND_US))
        return None if second is None else second * SECOND_US + self._fraction

    def count(self, start: int, end: int) -> int:
        low, high = (-((self._fraction - min(max(edge, MIN_US), MAX_US)) // SECOND_US) for edge in (start, end))
        if low >= high:
            return 0
        segments = self.zone.segments[self.zone.index(low) : self.zone.index(high - 1) + 1]
        return sum(self._count(segment, low, high) for segment in segments)

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        if self.fixed:
            end = -((self._fraction - high) // SECOND_US)
            local = self._first_local_time(-((self._fraction - low) // SECOND_US), end)
            while local is not None:
                yield local * SECOND_US + self._fraction
                local = self._first_local_time(local + 1, end)

    def _next(self, second: int) -> int | None:
        """Return the first firing epoch second strictly after `second`, or None."""
        at = max(second + 1, MIN_S)
        i = self.zone.index(at)
        while i < len(self.zone.segments):
            segment = self.zone.segments[i]
            low, high = self._local_window(segment)
            local = self.local_times.next(max(low, at + segment.offset))
            match = local - segment.offset if local is not None and local < high else None
            if segment.offset > segment.before and at < segment.start + segment.offset - segment.before:
                moved = self._moved_next(segment, at)
                match = moved if match is None or (moved is not None and moved < match) else match
            if match is not None:
                return match if match < MAX_S else None
            # Nothing fires before `local`, so the search can skip to its segment. A fold repeats earlier local
            # times in the next segment, which therefore cannot be skipped.
            if segment.after < segment.offset:
                i += 1
            elif local is not None:
                i = max(i + 1, self.zone.index(local - LOCAL_MARGIN_S))
            else:
                return None
        return None

    def _previous(self, second: int) -> int | None:
        """Return the last firing epoch second strictly before `second`, or None."""
        at = min(second, MAX_S) - 1
        i = self.zone.index(at)
        while i >= 0:
            segment = self.zone.segments[i]
            low, high = self._local_window(segment)
            local = self.local_times.previous(min(high, at + 1 + segment.offset))
            match = local - segment.offset if local is not None and local >= low else None
            if segment.offset > segment.before and (
                match is None or match < segment.start + segment.offset - segment.before
            ):
                moved = self._moved_previous(segment, at)
                match = moved if match is None or (moved is not None and moved > match) else match
            if match is not None:
                return match if match >= MIN_S else None
            if segment.before > segment.offset:
                i -= 1
            elif local is not None:
                i = min(i - 1, self.zone.index(local + LOCAL_MARGIN_S))
            else:
                return None
        return None

    def _count(self, segment: Segment, start: int, end: int) -> int:
        """Return the number of firing epoch seconds of [start, end) within a segment."""
        low, high = self._local_window(segment)
        low, high = max(low, start + segment.offset), min(high, end + segment.offset)
        total = self.local_times.count(low, high) if low < high else 0
        moved = self._moved_next(segment, start) if segment.offset > segment.before else None
        while moved is not None and moved < end:
            local = moved + segment.offset
            total += not self.local_times.count(local, local + 1)
            moved = self._moved_next(segment, moved + 1)
        return total

    def _local_window(self, segment: Segment) -> tuple[int, int]:
        """Return the local seconds [from, to) that fire in this segment, with only the chosen pass of a fold."""
        start, end, offset, before, after = segment
        low = start + (before if before > offset and self.fold == "first" else offset)
        return low, end + (after if after < offset and self.fold == "last" else offset)

    def _moved_next(self, segment: Segment, at: int) -> int | None:
        """Return the first epoch second from `at` at which a local time skipped by the segment's initial gap fires."""
        low, high = segment.gap
        if self.gap == "end":
            return segment.start if at <= segment.start and self._first_local_time(low, high) is not None else None
        local = self._first_local_time(max(low, at + segment.before), high) if self.gap == "shift" else None
        return None if local is None else local - segment.before

    def _moved_previous(self, segment: Segment, at: int) -> int | None:
        """Return the last epoch second up to `at` at which a local time skipped by the segment's initial gap fires."""
        low, high = segment.gap
        if self.gap == "end":
            return segment.start if at >= segment.start and self._first_local_time(low, high) is not None else None
        if self.gap == "skip":
            return None
        local = self.local_times.previous(min(high, at + segment.before + 1))
        while local is not None and local >= low and local // DAY_S in self._missing_days:
            local = self.local_times.previous(local // DAY_S * DAY_S)
        return local - segment.before if local is not None and local >= low else None

    def _first_local_time(self, low: int, high: int) -> int | None:
        """Return the first local second in [low, high) whose date is not missing, or None."""
        # Counting first avoids a search beyond `high`, which may be expensive.
        local = self.local_times.next(low) if self.local_times.count(low, high) else None
        while local is not None and local < high and local // DAY_S in self._missing_days:
            local = self.local_times.next((local // DAY_S + 1) * DAY_S)
        return local if local is not None and local < high else None


def set_bits(mask: int) -> list[int]:
    """Return the numbers of the set bits, in order."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
