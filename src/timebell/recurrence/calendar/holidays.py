"""Public holidays from the `holidays` package, written out as dates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, timedelta
from importlib.metadata import version
from typing import Any

from timebell.clock import wall
from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.weekdays import names_of

AHEAD = 10
Read = tuple[tuple[str, ...], list[date], list[date], str, tuple[int, int]]


def read(country: str, subdivision: str | None, years: Iterable[int] | None) -> Read:
    """Weekend, holidays, workdays, source and years of a country; the arguments of a Calendar, in order."""
    try:
        import holidays
    except ImportError:
        raise InvalidRecurrence(
            "Public holidays come from the package holidays, which is not installed.", code="HOLIDAYS_NOT_INSTALLED",
            fix="Run: pip install timebell[holidays]",
        ) from None  # fmt: skip
    this = wall().year
    asked = sorted(set(years)) if years is not None else range(this - 1, this + AHEAD + 1)
    if not asked or not all(isinstance(year, int) and 1970 <= year < 2200 for year in asked):
        raise InvalidRecurrence(
            f"years are {asked!r:.60}.", code="INVALID_CALENDAR", fix="Give years within 1970 to 2199."
        )
    first, last = asked[0], asked[-1]
    try:
        found: Any = holidays.country_holidays(country, subdiv=subdivision, years=range(first, last + 1))
    except NotImplementedError as unknown:
        raise InvalidRecurrence(
            f"{unknown}.", code="INVALID_CALENDAR", fix='Give ISO 3166 codes, such as "KR", or "DE" and "BY".'
        ) from None
    weekend = sum(1 << day for day in found.weekend)
    free: list[date] = []
    works: list[date] = []
    day = date(first, 1, 1)
    while day.year <= last:
        # The package knows of weekends that moved and of Saturdays that make up for a holiday.
        (works if found.is_working_day(day) else free).append(day)
        day += timedelta(days=1)
    place = country if subdivision is None else f"{country}-{subdivision}"
    return names_of(weekend), free, works, f"{place} (holidays {version('holidays')})", (first, last)
