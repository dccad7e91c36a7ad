"""Hours of the day on some weekdays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.weekdays import ALL_WEEKDAYS, describe_weekdays, parse_weekdays, weekday
from timebell.recurrence.instants import DAY_S
from timebell.recurrence.rules.time_windows import Window, Windows

_TIME_OF_DAY = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?|24:00(?::00)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hours:
    """Hours of the day from `start` to `end` (exclusive), as local times such as "09:00"; "24:00" is the end of a day.

    `days` are the weekdays on which the hours start ("MON-FRI", "SAT,SUN", "*"). If `end` is not after `start`, the
    hours end on the next day. Raises InvalidRecurrence (INVALID_HOURS, INVALID_WEEKDAYS).
    """

    start: str
    end: str
    days: str = "*"

    def __post_init__(self) -> None:
        if self._parse_seconds(self.start) == self._parse_seconds(self.end):
            refuse_hours(f"{self.start} to {self.end} is empty.", 'A whole day is "00:00" to "24:00".')
        if self._parse_seconds(self.start) == 86_400:
            refuse_hours("start must not be 24:00.", "Use 00:00 of the next weekday.")
        parse_weekdays(self.days)

    def to_windows(self) -> HourWindows:
        """Return these hours as windows of local time."""
        return HourWindows(self._parse_seconds(self.start), self._parse_seconds(self.end), parse_weekdays(self.days))

    def describe(self) -> str:
        """Describe the hours, e.g. "between 09:00 and 17:30 on Monday to Friday"."""
        weekdays = parse_weekdays(self.days)
        suffix = "" if weekdays == ALL_WEEKDAYS else f" on {describe_weekdays(weekdays)}"
        return f"between {self.start} and {self.end}{suffix}"

    def _parse_seconds(self, text: str) -> int:
        match = _TIME_OF_DAY.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            refuse_hours(f"{text!r:.60} is not a time of day.", "Write it like 09:00 or 17:30:15.")
        return sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) or (
            86_400 if text.startswith("24") else 0
        )


class HourWindows(Windows):
    """Windows from the second `low` of the day to the second `high`, starting on the `weekdays` (a bit mask).

    If `high` is not greater than `low`, a window ends on the next day.
    """

    def __init__(self, low: int, high: int, weekdays: int) -> None:
        self._low, self._high = low, high if high > low else high + DAY_S
        self._weekdays = weekdays

    def next(self, local: int) -> Window | None:
        return self._first_matching(range(first_day := (local - self._high) // DAY_S + 1, first_day + 8))

    def previous(self, local: int) -> Window | None:
        return self._first_matching(range(last_day := (local - self._low) // DAY_S, last_day - 8, -1))

    def _first_matching(self, days: range) -> Window:
        day = next(day for day in days if self._weekdays >> weekday(day) & 1)
        return day * DAY_S + self._low, day * DAY_S + self._high


def refuse_hours(message: str, fix: str) -> NoReturn:
    """Raise InvalidRecurrence with code INVALID_HOURS."""
    raise InvalidRecurrence(message, code="INVALID_HOURS", fix=fix)
