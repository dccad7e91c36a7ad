"""Windows of local time, and a rule limited to the instants in them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from timebell.recurrence.instants import DAY_S, MAX_US, MIN_US, SECOND_US
from timebell.recurrence.rules.combined import CombinedRule
from timebell.recurrence.rules.local_times import DaySet
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.rules.search_limit import search

Window = tuple[int, int]


class Windows(ABC):
    """Windows [from, to) of local time that do not overlap, in seconds of the wall clock since its 1970-01-01T00:00."""

    @abstractmethod
    def next(self, local: int) -> Window | None:
        """Return the first window that ends after `local`, or None."""

    @abstractmethod
    def previous(self, local: int) -> Window | None:
        """Return the last window that begins at or before `local`, or None."""


class DayWindows(Windows):
    """Windows of whole days: one for each day of a set."""

    def __init__(self, days: DaySet) -> None:
        self._days = days

    def next(self, local: int) -> Window | None:
        return self._day_window(self._days.next(local // DAY_S))

    def previous(self, local: int) -> Window | None:
        return self._day_window(self._days.previous(local // DAY_S))

    def _day_window(self, day: int | None) -> Window | None:
        return None if day is None else (day * DAY_S, (day + 1) * DAY_S)


class WindowedRule(CombinedRule):
    """The instants of a rule whose local time lies in one of the windows.

    `reason` explains why other instants are excluded, for the error that ends a search without a result.
    """

    def __init__(self, rule: Rule, windows: Windows, reason: str) -> None:
        super().__init__(rule)
        self._rule, self._windows, self._reason = rule, windows, reason

    def after(self, instant: int) -> int | None:
        with search:
            match = self._rule.after(instant)
            while match is not None:
                segment = self.zone.segments[self.zone.index(match // SECOND_US)]
                local = match // SECOND_US + segment.offset
                window = self._windows.next(local)
                if window is not None and window[0] <= local:
                    break
                search.miss(self._reason, match)
                # The next segment may repeat earlier local times, so a search never skips beyond the end of this one.
                opens = segment.end if window is None else min(window[0] - segment.offset, segment.end)
                match = self._rule.after(opens * SECOND_US - 1)
        return match

    def before(self, instant: int) -> int | None:
        with search:
            match = self._rule.before(instant)
            while match is not None:
                segment = self.zone.segments[self.zone.index(match // SECOND_US)]
                local = match // SECOND_US + segment.offset
                window = self._windows.previous(local)
                if window is not None and local < window[1]:
                    break
                search.miss(self._reason, match)
                closes = segment.start if window is None else max(window[1] - segment.offset, segment.start)
                match = self._rule.before(closes * SECOND_US)
        return match

    def has(self, instant: int) -> bool:
        local = instant // SECOND_US + self.zone.offset(instant // SECOND_US)
        window = self._windows.next(local)
        return window is not None and window[0] <= local and self._rule.has(instant)

    def count(self, start: int, end: int) -> int:
        start, end = max(start, MIN_US), min(end, MAX_US)
        total = 0
        if start >= end:
            return 0
        first, last = self.zone.index(start // SECOND_US), self.zone.index((end - 1) // SECOND_US)
        for segment in self.zone.segments[first : last + 1]:
            low, high = max(start, segment.start * SECOND_US), min(end, segment.end * SECOND_US)
            window = self._windows.next(low // SECOND_US + segment.offset)
            while window is not None and (opens := (window[0] - segment.offset) * SECOND_US) < high:
                total += self._rule.count(max(low, opens), min(high, (window[1] - segment.offset) * SECOND_US))
                window = self._windows.next(window[1])
        return total
