"""A rule with overrides: single occurrences that are skipped or moved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from timebell.recurrence.rules.combined import BoundedRule, ExceptRule, UnionRule
from timebell.recurrence.rules.dates import DatesRule
from timebell.recurrence.rules.rule import Rule


class OverriddenRule(UnionRule):
    """The instants of a rule within bounds, including overridden ones, and the instants to which they are moved.

    `moves` contains, for each override, the instant of the rule and the one to which it is moved (None: skipped).
    """

    def __init__(self, rule: Rule, first: int, stop: int, moves: Sequence[tuple[datetime, datetime | None]]) -> None:
        self._bounded = BoundedRule(rule, first, stop)
        self._overridden = DatesRule(tuple(at for at, _ in moves), rule.zone)
        self._moved_to = DatesRule(tuple(to for _, to in moves if to is not None), rule.zone)
        super().__init__(self._bounded, self._moved_to)

    def effective(self) -> Rule:
        """Return the rule of the instants that fire: without overridden ones, with those they are moved to."""
        return UnionRule(ExceptRule(self._bounded, self._overridden, "are skipped or moved"), self._moved_to)
