"""Single occurrences that are skipped or moved, as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from timebell.recurrence.combined_rules import Composed
from timebell.recurrence.core import Override, Recurrence, Rule
from timebell.recurrence.dates import DatesRule
from timebell.recurrence.operators import ExceptRule, UnionRule


class Bounded(Composed):
    """The instants of a rule in [first, stop)."""

    def __init__(self, rule: Rule, first: int, stop: int) -> None:
        super().__init__(rule)
        self._rule, self._first, self._stop = rule, first, stop

    def after(self, instant: int) -> int | None:
        found = self._rule.after(max(instant, self._first - 1))
        return None if found is None or found >= self._stop else found

    def before(self, instant: int) -> int | None:
        found = self._rule.before(min(instant, self._stop))
        return None if found is None or found < self._first else found

    def count(self, start: int, end: int) -> int:
        start, end = max(start, self._first), min(end, self._stop)
        return self._rule.count(start, end) if start < end else 0


class Overridden(UnionRule):
    """A rule's instants within bounds, those that are overridden too, and the instants they are moved to."""

    def __init__(self, rule: Rule, first: int, stop: int, overrides: Sequence[Override]) -> None:
        self._bounded = Bounded(rule, first, stop)
        self._overridden = DatesRule(tuple(one.at for one in overrides), rule.zone)
        self._targets = DatesRule(tuple(one.to for one in overrides if one.to is not None), rule.zone)
        super().__init__(self._bounded, self._targets)

    def fired(self) -> Rule:
        """What fires of it."""
        return UnionRule(ExceptRule(self._bounded, self._overridden, "are skipped or moved"), self._targets)


def carried(
    overrides: Sequence[Override], onto: Recurrence, since: datetime
) -> tuple[tuple[Override, ...], tuple[Override, ...]]:
    """Which overrides hold for a recurrence that replaces another from `since` on, and which do not, because the
    occurrence is none any more or is moved to where there is one already."""
    kept: list[Override] = []
    dropped: list[Override] = []
    for one in overrides:
        taken = one.to is not None and onto.has(one.to)
        if one.at > since:
            (kept if onto.has(one.at) and not taken else dropped).append(one)
        elif one.to is not None and one.to > since and not taken:  # was left out at `at`, and has yet to fire
            kept.append(one)
    return tuple(kept), tuple(dropped)
