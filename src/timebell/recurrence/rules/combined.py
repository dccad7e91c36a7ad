"""Rules that combine other rules: union, difference, and limitation to bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge
from typing import Literal

from timebell.recurrence.instants import SECOND_US
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.rules.search_limit import SearchLimitReached, search
from timebell.recurrence.zones import Note


class CombinedRule(Rule):
    """A rule whose instants are a subset of the instants of its parts."""

    def __init__(self, *parts: Rule) -> None:
        self.zone = parts[0].zone
        self._parts = parts

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        previous = None
        for local in merge(*(rule.iter_local_times(low, high) for rule in self.component_rules())):
            if local != previous:
                yield local
            previous = local

    def component_rules(self) -> Iterator[Rule]:
        for part in self._parts:
            yield from (FilteredRule(rule, self) for rule in part.component_rules())

    def note(self, instant: int) -> Note | None:
        return next((part.note(instant) for part in self._parts if part.has(instant)), None)


class FilteredRule(Rule):
    """A component rule whose local times are limited to those at which a parent rule fires."""

    def __init__(self, rule: Rule, parent: Rule) -> None:
        self.zone, self.gap, self.fold = rule.zone, rule.gap, rule.fold
        self._rule, self._parent = rule, parent

    def after(self, instant: int) -> int | None:
        return self._rule.after(instant)

    def before(self, instant: int) -> int | None:
        return self._rule.before(instant)

    def count(self, start: int, end: int) -> int:
        return self._rule.count(start, end)

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        return (local for local in self._rule.iter_local_times(low, high) if self._is_used_by_parent(local))

    def _is_used_by_parent(self, local: int) -> bool:
        second, fraction = divmod(local, SECOND_US)
        instants = self.zone.instants(second)
        if not instants:
            end = self.zone.gap_end(second)
            if self.gap == "skip" or end is None:
                return True
            instants = (end if self.gap == "end" else self.zone.resolve(second)[0],)
        return any(self._parent.has(at * SECOND_US + fraction) for at in instants)


class UnionRule(CombinedRule):
    """The union of two rules."""

    def __init__(self, first: Rule, second: Rule) -> None:
        super().__init__(first, second)
        self._first, self._second = first, second

    def after(self, instant: int) -> int | None:
        return self._nearest(1, lambda rule: rule.after(instant))

    def before(self, instant: int) -> int | None:
        return self._nearest(-1, lambda rule: rule.before(instant))

    def _nearest(self, sign: Literal[1, -1], find: Callable[[Rule], int | None]) -> int | None:
        """Return the nearer result of the two rules, also if the search of the other was given up beyond it.

        Each rule may use all misses that are left. A search that is given up costs half of them, so that a rule without
        instants does not end the search of an enclosing rule at once, and cannot be searched without end either.
        Raises SearchLimitReached if the abandoned search may have missed a nearer instant.
        """
        nearest: int | None = None
        given_up: SearchLimitReached | None = None
        with search:
            misses_left = remaining = search.misses_left
            for rule in (self._first, self._second):
                search.misses_left = misses_left
                try:
                    match = find(rule)
                    remaining = min(remaining, search.misses_left)
                except SearchLimitReached as error:
                    remaining = min(remaining, misses_left // 2)
                    if given_up is None or error.searched_until * sign < given_up.searched_until * sign:
                        given_up = error
                    continue
                if match is not None and (nearest is None or match * sign < nearest * sign):
                    nearest = match
            search.misses_left = remaining
        if given_up is not None and (nearest is None or nearest * sign > given_up.searched_until * sign):
            raise given_up
        return nearest

    def has(self, instant: int) -> bool:
        return self._first.has(instant) or self._second.has(instant)

    def count(self, start: int, end: int) -> int:
        return (
            self._first.count(start, end)
            + self._second.count(start, end)
            - count_common(self._first, self._second, start, end)
        )


class ExceptRule(CombinedRule):
    """The instants of a rule without those of another; `reason` explains the exclusion in errors."""

    def __init__(self, rule: Rule, removed: Rule, reason: str) -> None:
        super().__init__(rule)
        self._rule, self._removed, self._reason = rule, removed, reason

    def after(self, instant: int) -> int | None:
        with search:
            match = self._rule.after(instant)
            while match is not None and self._removed.has(match):
                search.miss(self._reason, match)
                match = self._rule.after(match)
        return match

    def before(self, instant: int) -> int | None:
        with search:
            match = self._rule.before(instant)
            while match is not None and self._removed.has(match):
                search.miss(self._reason, match)
                match = self._rule.before(match)
        return match

    def has(self, instant: int) -> bool:
        return self._rule.has(instant) and not self._removed.has(instant)

    def count(self, start: int, end: int) -> int:
        return self._rule.count(start, end) - count_common(self._rule, self._removed, start, end)


def count_common(rule: Rule, other_rule: Rule, start: int, end: int) -> int:
    """Return the number of instants in [start, end) that two rules share.

    The search leaps from an instant of one rule to the next instant of the other, so the number of steps depends on the
    rule with fewer instants.
    """
    total = 0
    candidate = rule.first_in(start, end)
    while candidate is not None and (match := other_rule.first_in(candidate, end)) is not None:
        total += match == candidate
        candidate = rule.first_in(candidate + 1 if match == candidate else match, end)
    return total


class BoundedRule(CombinedRule):
    """The instants of a rule in [first, stop)."""

    def __init__(self, rule: Rule, first: int, stop: int) -> None:
        super().__init__(rule)
        self._rule, self._first, self._stop = rule, first, stop

    def after(self, instant: int) -> int | None:
        match = self._rule.after(max(instant, self._first - 1))
        return None if match is None or match >= self._stop else match

    def before(self, instant: int) -> int | None:
        match = self._rule.before(min(instant, self._stop))
        return None if match is None or match < self._first else match

    def has(self, instant: int) -> bool:
        return self._first <= instant < self._stop and self._rule.has(instant)

    def count(self, start: int, end: int) -> int:
        start, end = max(start, self._first), min(end, self._stop)
        return self._rule.count(start, end) if start < end else 0
