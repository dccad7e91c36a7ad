"""Limit of a search for the next instant of a combined rule.

A combination can exclude every instant of its parts. A search then gives up after a fixed number of excluded instants
in a row, so the result does not depend on the machine's speed. It raises instead of returning None, because None means
that the rule has ended.
"""

from __future__ import annotations

import threading

from timebell.errors import InvalidRecurrence

MAX_MISSES = 3_000


class SearchLimitReached(InvalidRecurrence):
    """Raised when a search is given up (NEVER_FIRES): nothing fires between its start and `searched_until` (exclusive).

    `reason` is the predicate of the error's sentence "… instants in a row …": it explains why they are excluded;
    `misses` is their number.
    """

    code = "NEVER_FIRES"

    def __init__(self, reason: str, searched_until: int, misses: int = MAX_MISSES) -> None:
        super().__init__(f"It never fires: {misses:,} instants in a row {reason}.", fix="Change one of the parts.")
        self.searched_until = searched_until


class Search(threading.local):
    """The search in progress in this thread: a context that the rules of a combination enter for their parts.

    All of them share its misses. With a limit of its own for each rule, the steps of nested rules would multiply.
    """

    def __init__(self) -> None:
        self.misses_left = MAX_MISSES
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self.misses_left = MAX_MISSES
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def miss(self, reason: str, instant: int) -> None:
        """Count an excluded instant. Raises SearchLimitReached."""
        if not self.misses_left:
            raise SearchLimitReached(reason, instant)
        self.misses_left -= 1


search = Search()
