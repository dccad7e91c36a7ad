"""A cursor over a column that rises with each change, in the order in which transactions commit.

A transaction may commit a lower value after a higher one is visible. So a value that was read becomes the start of the
next read only when every transaction that could still commit a lower one has ended: on PostgreSQL, when all
transactions that ran at that read have ended; elsewhere, after OVERLAP_SECONDS. Until then, rows are read again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from timebell.features.triggers.sources.sql_values import decode_key, encode_key

OVERLAP_SECONDS = 60.0
SETTLING_SECONDS = 2.0
"""On PostgreSQL: a transaction may take a value a moment before it has an id."""
MAX_MARKS = 50


@dataclass(slots=True)
class ChangeCursor:
    """`start` is a value below which nothing is missing (None: there was none), `marks` are later values.

    A mark is `[seconds, horizon, value]`: when it was read, and the first transaction id that had not begun.
    """

    start: Any = None
    marks: list[list[Any]] = field(default_factory=list)
    page_end: list[Any] | None = None
    """Value and key of the last row, while there are more rows of one read."""

    @classmethod
    def parse(cls, text: str) -> ChangeCursor:
        """Parse the JSON form."""
        stored = json.loads(text)
        return cls(stored["start"], stored["marks"], stored["end"])

    def to_json(self) -> str:
        """Return the JSON form."""
        return json.dumps({"start": self.start, "marks": self.marks, "end": self.page_end})

    @property
    def start_value(self) -> Any:
        """The value from which to read, None to read everything."""
        return None if self.start is None else decode_key(self.start)

    def add_mark(self, seconds: float, horizon: int, value: Any) -> None:
        """Remember the highest value of a read that began at `seconds`."""
        encoded = encode_key(value)
        if (self.marks[-1][2] if self.marks else self.start) != encoded:
            self.marks = [*self.marks, [seconds, horizon, encoded]]
            if len(self.marks) > MAX_MARKS:
                self.marks = self.marks[::2]  # the read begins a little earlier than it has to

    def advance(self, seconds: float, oldest_running: int | None) -> None:
        """Move the start to the last mark that is safe now. `oldest_running` is None where it is not known."""
        while self.marks:
            read_at, horizon, value = self.marks[0]
            safe_after = OVERLAP_SECONDS if oldest_running is None else SETTLING_SECONDS
            if seconds - read_at < safe_after or (oldest_running is not None and oldest_running < horizon):
                break
            self.start = value
            del self.marks[0]
