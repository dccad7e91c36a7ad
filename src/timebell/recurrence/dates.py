"""A list of dates and times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, NoReturn, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.core import JSON, Rule, Spec
from timebell.recurrence.describe import describe_dates
from timebell.recurrence.instants import SECOND, format_instant, parse_instant, to_us, wall_us
from timebell.recurrence.zones import Zone

MOST = 10_000


@dataclass(frozen=True, slots=True)
class Dates(Spec):
    """At each of these datetimes: aware ones as they are, naive ones as local times in the zone.

    Kept sorted (instants before local times) and without duplicates; at most 10,000. A local time that
    the clock skips or repeats is resolved by RFC 5545 3.3.5. Raises InvalidRecurrence (INVALID_DATES).
    """

    kind: ClassVar[str] = "dates"
    dates: tuple[datetime, ...]

    def __init__(self, dates: Iterable[datetime]) -> None:
        given = list(dates)
        for one in given:
            if not isinstance(one, datetime) or not 1970 <= one.year < 2200:
                _refuse(f"{one!r} is not a datetime within 1970 to 2199.", "Give datetimes.")
        if not 1 <= len(given) <= MOST:
            _refuse(f"There are {len(given)} dates.", f"Give 1 to {MOST}.")
        aware = {one.astimezone(UTC) for one in given if one.tzinfo is not None}
        naive = {one.replace(fold=0) for one in given if one.tzinfo is None}
        object.__setattr__(self, "dates", (*sorted(aware), *sorted(naive)))

    def compiled(self, where: Zone) -> DatesRule:
        return DatesRule(self.dates, where)

    def describe(self) -> str:
        return describe_dates(self.dates)

    def fields(self) -> dict[str, Any]:
        return {"spec": [format_instant(one) for one in self.dates]}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        texts = fields["spec"]
        if not isinstance(texts, list):
            _refuse(f"spec is a {type(texts).__name__}.", "Give a list of dates and times.")
        return cls(parse_instant(text, "a date") for text in texts)


class DatesRule(Rule):
    """The dates in one zone."""

    def __init__(self, dates: tuple[datetime, ...], where: Zone) -> None:
        self.zone = where
        self._walls = [wall_us(one) for one in dates if one.tzinfo is None]
        found = {to_us(one) for one in dates if one.tzinfo is not None}
        for wall in self._walls:
            second, fraction = divmod(wall, SECOND)
            found.add(where.resolve(second)[0] * SECOND + fraction)
        self._instants = sorted(found)

    def after(self, instant: int) -> int | None:
        i = bisect_right(self._instants, instant)
        return self._instants[i] if i < len(self._instants) else None

    def before(self, instant: int) -> int | None:
        i = bisect_left(self._instants, instant)
        return self._instants[i - 1] if i else None

    def count(self, start: int, end: int) -> int:
        return max(0, bisect_left(self._instants, end) - bisect_left(self._instants, start))

    def wall(self, low: int, high: int) -> Iterator[int]:
        return iter(self._walls[bisect_left(self._walls, low) : bisect_left(self._walls, high)])


def _refuse(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_DATES", fix=fix)
