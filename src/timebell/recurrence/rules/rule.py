"""The base of all rules: a set of instants in one zone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

from timebell.recurrence.instants import DAY_US, SECOND_US
from timebell.recurrence.rules.search_limit import SearchLimitReached
from timebell.recurrence.zones import Note, Segment, Zone

Gap = Literal["end", "shift", "skip"]
Fold = Literal["first", "last", "both"]
MonthEnd = Literal["back", "skip", "next"]


class Rule(ABC):
    """An increasing set of instants within 1970..2199, as integer microseconds since the epoch."""

    zone: Zone
    gap: Gap = "shift"
    fold: Fold = "first"
    fixed: bool = False
    """True if the rule has local times that each fire once per date: `gap` and `fold` decide when."""

    @abstractmethod
    def after(self, instant: int) -> int | None:
        """Return the first instant strictly after `instant`, or None."""

    @abstractmethod
    def before(self, instant: int) -> int | None:
        """Return the last instant strictly before `instant`, or None."""

    @abstractmethod
    def count(self, start: int, end: int) -> int:
        """Return the number of instants in [start, end), in time that does not grow with the result."""

    @abstractmethod
    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        """Yield the local times that the rule specifies in [low, high), in order, in microseconds of the wall clock.

        Empty for a rule that follows real time, because it specifies no local times.
        """

    def first_in(self, start: int, end: int) -> int | None:
        """Return the first instant in [start, end), or None, even if a search beyond `end` would be given up."""
        try:
            instant = self.after(start - 1)
        except SearchLimitReached as error:
            if error.searched_until < end and self.count(start, end):
                raise
            return None
        return None if instant is None or instant >= end else instant

    def has(self, instant: int) -> bool:
        """Return whether the rule fires at `instant`."""
        try:
            return self.after(instant - 1) == instant
        except SearchLimitReached:
            return False

    def component_rules(self) -> Iterator[Rule]:
        """Yield the rules that specify the local times, each with its own `gap` and `fold`."""
        yield self

    def note(self, instant: int) -> Note | None:
        """Return "gap" or "fold" if a clock change affects this instant of the rule, else None."""
        second = instant // SECOND_US
        segment = self.zone.segments[self.zone.index(second)]
        if second < segment.start + segment.offset - segment.before and self._is_moved_by_gap(segment, instant):
            return "gap"
        return "fold" if self.zone.is_ambiguous(second) else None

    def _is_moved_by_gap(self, segment: Segment, instant: int) -> bool:
        low, high = (edge * SECOND_US for edge in segment.gap)
        if self.gap == "end":
            return instant // SECOND_US == segment.start and any(True for _ in self.iter_local_times(low, high))
        skipped_time = instant + segment.before * SECOND_US
        return self.gap == "shift" and any(True for _ in self.iter_local_times(skipped_time, skipped_time + 1))


def stop_after_runs(rule: Rule, first: int, stop: int, runs: int) -> int:
    """Return the instant just after the `runs`-th instant from `first`, but at most `stop`.

    Found with `Rule.count` by doubling the searched range and then bisecting it, without enumerating instants.
    """
    low, step = first, DAY_US
    while rule.after(low - 1) is not None:
        high = min(low + step, stop)
        if (count := rule.count(low, high)) >= runs:
            break
        if high == stop:
            return stop
        low, step, runs = high, step * 2, runs - count
    else:
        return stop
    while high - low > 1:
        middle = (low + high) // 2
        count = rule.count(low, middle)
        if count < runs:
            low, runs = middle, runs - count
        else:
            high = middle
    return high
