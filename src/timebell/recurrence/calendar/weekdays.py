"""Weekdays as names ("MON-FRI", "SAT,SUN") and as bit masks; Monday is bit 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.describe import join

NAMES = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
ALL_WEEKDAYS = 0x7F
_FULL_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def weekday(day: int) -> int:
    """Return the weekday of a day counted from 1970-01-01, a Thursday; Monday is 0."""
    return (day + 3) % 7


def parse_weekdays(text: str) -> int:
    """Parse `*`, or a list of names and ranges such as "MON-FRI", to a bit mask.

    Ranges may span the end of the week. Raises InvalidRecurrence (INVALID_WEEKDAYS).
    """
    if not isinstance(text, str) or len(text) > 64:
        _refuse(text)
    mask = ALL_WEEKDAYS if text.strip() == "*" else 0
    for term in text.upper().split(",") if not mask else ():
        first, dash, last = (part.strip() for part in term.partition("-"))
        last = last if dash else first
        if first not in NAMES or last not in NAMES:
            _refuse(text)
        low, high = NAMES.index(first), NAMES.index(last)
        mask |= sum(1 << day % 7 for day in range(low, high + (7 if high < low else 0) + 1))
    return mask


def to_mask(names: Iterable[str]) -> int:
    """Return the bit mask of names. Raises InvalidRecurrence (INVALID_WEEKDAYS)."""
    known = {name: day for day, name in enumerate(NAMES)}
    words = [name.upper() if isinstance(name, str) else name for name in names]
    return sum(1 << day for day in {known[name] if name in known else _refuse(name) for name in words})


def to_names(mask: int) -> tuple[str, ...]:
    """Return the names in a bit mask, Monday first."""
    return tuple(name for day, name in enumerate(NAMES) if mask >> day & 1)


def describe_weekdays(mask: int) -> str:
    """Describe a bit mask in English, e.g. "Monday to Friday"."""
    words: list[str] = []
    for run in re.finditer("1+", f"{mask:07b}"[::-1]):
        first, last = run.start(), run.end() - 1
        words += [f"{_FULL_NAMES[first]} to {_FULL_NAMES[last]}"] if last - first > 1 else _FULL_NAMES[first : last + 1]
    return join(words)


def _refuse(text: object) -> NoReturn:
    raise InvalidRecurrence(
        f"{text!r:.64} is not a list of weekdays.", code="INVALID_WEEKDAYS", fix="Write them like MON-FRI or SAT,SUN."
    )
