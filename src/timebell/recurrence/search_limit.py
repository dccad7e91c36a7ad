"""Where a search for an instant ends that finds none.

A combination can rule out everything there is. Its searches give up after so many instants in a row that are
ruled out, whatever the machine's speed; then the rule raises, as a rule that ends is something else.
"""

from __future__ import annotations

from timebell.errors import InvalidRecurrence

MISSES = 3_000


class Fruitless(InvalidRecurrence):
    """A search given up, NEVER_FIRES: nothing from where it began up to, and without, the instant `reached`.

    `why` ends the sentence that says what became of the instants looked at.
    """

    code = "NEVER_FIRES"

    def __init__(self, why: str, reached: int, misses: int = MISSES) -> None:
        super().__init__(f"It never fires: {misses:,} instants in a row {why}.", fix="Change one of the parts.")
        self.reached = reached
