"""Stretches of local time, and a rule limited to the instants that lie in them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from timebell.recurrence.calendar.weekdays import weekday
from timebell.recurrence.combined_rules import Composed
from timebell.recurrence.core import Rule
from timebell.recurrence.instants import DAY_S, MAX, MIN, SECOND
from timebell.recurrence.local_times import Days
from timebell.recurrence.search_limit import MISSES, Fruitless

Window = tuple[int, int]


class Windows(ABC):
    """Stretches [from, to) of the wall clock that do not overlap, in seconds since its 1970-01-01T00:00."""

    @abstractmethod
    def next(self, local: int) -> Window | None:
        """The first that ends after `local`."""

    @abstractmethod
    def previous(self, local: int) -> Window | None:
        """The last that begins at or before `local`."""


class HourWindows(Windows):
    """From one second of the day to another, on weekdays; passing midnight where the second is not the greater."""

    def __init__(self, low: int, high: int, weekdays: int) -> None:
        self._low, self._high = low, high if high > low else high + DAY_S
        self._weekdays = weekdays

    def next(self, local: int) -> Window | None:
        return self._first(range(first := (local - self._high) // DAY_S + 1, first + 8))

    def previous(self, local: int) -> Window | None:
        return self._first(range(last := (local - self._low) // DAY_S, last - 8, -1))

    def _first(self, days: range) -> Window:
        day = next(day for day in days if self._weekdays >> weekday(day) & 1)
        return day * DAY_S + self._low, day * DAY_S + self._high


class DayWindows(Windows):
    """Whole days."""

    def __init__(self, days: Days) -> None:
        self._days = days

    def next(self, local: int) -> Window | None:
        return self._whole(self._days.next(local // DAY_S))

    def previous(self, local: int) -> Window | None:
        return self._whole(self._days.previous(local // DAY_S))

    def _whole(self, day: int | None) -> Window | None:
        return None if day is None else (day * DAY_S, (day + 1) * DAY_S)


class WindowedRule(Composed):
    """The instants of a rule whose local time lies in windows. `why` ends the sentence that says that none does."""

    def __init__(self, rule: Rule, windows: Windows, why: str) -> None:
        super().__init__(rule)
        self._rule, self._windows, self._why = rule, windows, why

    def after(self, instant: int) -> int | None:
        found = self._rule.after(instant)
        for _ in range(MISSES):
            if found is None:
                return None
            segment = self.zone.segments[self.zone.index(found // SECOND)]
            local = found // SECOND + segment.offset
            window = self._windows.next(local)
            if window is not None and window[0] <= local:
                return found
            # A clock that is set back shows earlier local times again, so a stretch is left only by its end.
            opens = segment.end if window is None else min(window[0] - segment.offset, segment.end)
            found = self._rule.after(opens * SECOND - 1)
        if found is None:
            return None
        raise Fruitless(self._why, found)

    def before(self, instant: int) -> int | None:
        found = self._rule.before(instant)
        for _ in range(MISSES):
            if found is None:
                return None
            segment = self.zone.segments[self.zone.index(found // SECOND)]
            local = found // SECOND + segment.offset
            window = self._windows.previous(local)
            if window is not None and local < window[1]:
                return found
            closes = segment.start if window is None else max(window[1] - segment.offset, segment.start)
            found = self._rule.before(closes * SECOND)
        if found is None:
            return None
        raise Fruitless(self._why, found)

    def count(self, start: int, end: int) -> int:
        start, end = max(start, MIN), min(end, MAX)
        total = 0
        if start >= end:
            return 0
        first, last = self.zone.index(start // SECOND), self.zone.index((end - 1) // SECOND)
        for segment in self.zone.segments[first : last + 1]:
            low, high = max(start, segment.start * SECOND), min(end, segment.end * SECOND)
            window = self._windows.next(low // SECOND + segment.offset)
            while window is not None and (opens := (window[0] - segment.offset) * SECOND) < high:
                total += self._rule.count(max(low, opens), min(high, (window[1] - segment.offset) * SECOND))
                window = self._windows.next(window[1])
        return total
