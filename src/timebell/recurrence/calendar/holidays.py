"""Public holidays from the `holidays` package, as lists of dates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, timedelta
from importlib.metadata import version
from typing import Any

from timebell.clock import system_now
from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.weekdays import to_names

DEFAULT_YEARS_AHEAD = 10
HolidayData = tuple[tuple[str, ...], list[date], list[date], str, tuple[int, int]]


def load(country: str, subdivision: str | None, years: Iterable[int] | None) -> HolidayData:
    """Return weekend, holidays, workdays, source and years of a country: the positional arguments of Calendar.

    Raises InvalidRecurrence (HOLIDAYS_NOT_INSTALLED, INVALID_CALENDAR).
    """
    try:
        import holidays
    except ImportError:
        raise InvalidRecurrence(
            "Public holidays require the package holidays, which is not installed.", code="HOLIDAYS_NOT_INSTALLED",
            fix="Run: pip install timebell[holidays]",
        ) from None  # fmt: skip
    current_year = system_now().year
    requested_years = (
        sorted(set(years)) if years is not None else range(current_year - 1, current_year + DEFAULT_YEARS_AHEAD + 1)
    )
    if not requested_years or not all(isinstance(year, int) and 1970 <= year < 2200 for year in requested_years):
        raise InvalidRecurrence(
            f"years {requested_years!r:.60} are invalid.", code="INVALID_CALENDAR", fix="Use years within 1970 to 2199."
        )
    first, last = requested_years[0], requested_years[-1]
    try:
        country_data: Any = holidays.country_holidays(country, subdiv=subdivision, years=range(first, last + 1))
    except NotImplementedError as error:  # how the library reports an unknown country or subdivision
        raise InvalidRecurrence(
            f"{error}.", code="INVALID_CALENDAR", fix='Use ISO 3166 codes, such as "KR", or "DE" and "BY".'
        ) from None
    weekend = sum(1 << day for day in country_data.weekend)
    days_off: list[date] = []
    workdays: list[date] = []
    day = date(first, 1, 1)
    while day.year <= last:
        # `is_working_day` also considers changes of the weekend and Saturdays worked in exchange for a holiday.
        (workdays if country_data.is_working_day(day) else days_off).append(day)
        day += timedelta(days=1)
    place = country if subdivision is None else f"{country}-{subdivision}"
    return to_names(weekend), days_off, workdays, f"{place} (holidays {version('holidays')})", (first, last)
