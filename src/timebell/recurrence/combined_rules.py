"""Rules made of rules: which local times they name, and what a jump of the clock does to them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from timebell.recurrence.core import Rule
from timebell.recurrence.instants import SECOND
from timebell.recurrence.zones import Note


class Composed(Rule):
    """A rule whose instants are all from its parts."""

    def __init__(self, *parts: Rule) -> None:
        self.zone = parts[0].zone
        self._parts = parts

    def wall(self, low: int, high: int) -> Iterator[int]:
        found = None
        for local in merge(*(leaf.wall(low, high) for leaf in self.leaves())):
            if local != found:
                yield local
            found = local

    def leaves(self) -> Iterator[Rule]:
        for part in self._parts:
            yield from (Kept(leaf, self) for leaf in part.leaves())

    def note(self, instant: int) -> Note | None:
        return next((part.note(instant) for part in self._parts if part.has(instant)), None)


class Kept(Rule):
    """Of the local times that a rule names, those that matter to a whole it is part of."""

    def __init__(self, leaf: Rule, whole: Rule) -> None:
        self.zone, self.gap, self.fold = leaf.zone, leaf.gap, leaf.fold
        self._leaf, self._whole = leaf, whole

    def after(self, instant: int) -> int | None:
        return self._leaf.after(instant)

    def before(self, instant: int) -> int | None:
        return self._leaf.before(instant)

    def count(self, start: int, end: int) -> int:
        return self._leaf.count(start, end)

    def wall(self, low: int, high: int) -> Iterator[int]:
        return (local for local in self._leaf.wall(low, high) if self._matters(local))

    def _matters(self, local: int) -> bool:
        second, fraction = divmod(local, SECOND)
        instants = self.zone.instants(second)
        if not instants:
            end = self.zone.gap_end(second)
            if self.gap == "skip" or end is None:
                return True
            instants = (end if self.gap == "end" else self.zone.resolve(second)[0],)
        return any(self._whole.has(at * SECOND + fraction) for at in instants)
