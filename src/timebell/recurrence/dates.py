"""Recurrences that are lists of dates and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, NoReturn, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.describe import describe_dates
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.recurrence.rules.dates import DatesRule
from timebell.recurrence.spec import JSON, Spec
from timebell.recurrence.zones import Zone

MAX_DATES = 10_000


@dataclass(frozen=True, slots=True)
class Dates(Spec):
    """A list of datetimes: aware ones are instants, naive ones are local times in the zone.

    Stored in order (instants before local times) and without duplicates; at most 10,000. A local time that
    the clock skips or repeats is resolved by RFC 5545 3.3.5. Raises InvalidRecurrence (INVALID_DATES).
    """

    kind: ClassVar[str] = "dates"
    dates: tuple[datetime, ...]

    def __init__(self, dates: Iterable[datetime]) -> None:
        datetimes = list(dates)
        for value in datetimes:
            if not isinstance(value, datetime) or not 1970 <= value.year < 2200:
                _refuse(f"{value!r} is not a datetime within 1970 to 2199.", "Specify datetimes.")
        if not 1 <= len(datetimes) <= MAX_DATES:
            _refuse(f"There are {len(datetimes)} dates.", f"Specify 1 to {MAX_DATES}.")
        aware = {value.astimezone(UTC) for value in datetimes if value.tzinfo is not None}
        naive = {value.replace(fold=0) for value in datetimes if value.tzinfo is None}
        object.__setattr__(self, "dates", (*sorted(aware), *sorted(naive)))

    def compile(self, zone: Zone) -> DatesRule:
        return DatesRule(self.dates, zone)

    def describe(self) -> str:
        return describe_dates(self.dates)

    def to_fields(self) -> dict[str, Any]:
        return {"spec": [format_instant(value) for value in self.dates]}

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        texts = fields["spec"]
        if not isinstance(texts, list):
            _refuse(f"spec is a {type(texts).__name__}.", "Specify a list of dates and times.")
        return cls(parse_instant(text, "a date") for text in texts)


def _refuse(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_DATES", fix=fix)
