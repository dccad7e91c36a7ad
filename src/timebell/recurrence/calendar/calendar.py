"""Calendars: the local dates that are business days, stored as explicit dates so that all nodes agree on them.

A calendar is a weekly pattern and the dates that differ from it. Union, intersection and difference of calendars are
calendars, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any, NoReturn, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.weekdays import ALL_WEEKDAYS, to_mask, to_names, weekday
from timebell.recurrence.instants import DAY_S, MAX_S

MAX_DATES = 10_000
WEEKEND = ("SAT", "SUN")
_EPOCH_DAY = date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = -1, MAX_S // DAY_S + 1  # local dates extend a day beyond the instants 1970..2199


@dataclass(frozen=True, slots=True)
class Calendar:
    """Business days: all days that are neither in the `weekend` nor holidays, plus the `workdays`.

    `weekend` contains any of the names MON to SUN. `holidays` and `workdays` are dates, or text like 2027-03-01;
    together at most 10,000, within 1970 to 2199. A workday is a business day even if it is a holiday or in the weekend.
    `source` describes where the dates come from, and `years` (first, last) the years they cover; in other years only
    the weekend is known. `name` and `version` identify a saved calendar. `a | b` contains the business days of either
    calendar, `a & b` those of both, `a - b` those of `a` only.
    Raises InvalidRecurrence (INVALID_CALENDAR, INVALID_WEEKDAYS).
    """

    weekend: tuple[str, ...] = WEEKEND
    holidays: tuple[date, ...] = ()
    workdays: tuple[date, ...] = ()
    source: str | None = None
    years: tuple[int, int] | None = None
    name: str | None = field(default=None, kw_only=True)
    version: int | None = field(default=None, kw_only=True)
    days: BusinessDays = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        weekend: Iterable[str] = WEEKEND,
        holidays: Iterable[date | str] = (),
        workdays: Iterable[date | str] = (),
        source: str | None = None,
        years: tuple[int, int] | None = None,
        *,
        name: str | None = None,
        version: int | None = None,
    ) -> None:
        if isinstance(weekend, str):
            _refuse(f"weekend must be a list of names, not {weekend!r:.60}.", 'Write it like ("FRI", "SAT").')
        weekend_mask = to_mask(weekend)
        # Only dates that differ from the weekly pattern are stored, so that calendars with the same days are equal.
        extra_workdays = _parse_dates(workdays, "workdays")
        days_off = _parse_dates(holidays, "holidays") - extra_workdays
        if len(extra_workdays) + len(days_off) > MAX_DATES:
            _refuse(f"There are {len(extra_workdays) + len(days_off):,} dates.", f"Use at most {MAX_DATES:,}.")
        days_off = {day for day in days_off if not weekend_mask >> day.weekday() & 1}
        extra_workdays = {day for day in extra_workdays if weekend_mask >> day.weekday() & 1}
        values = {
            "weekend": to_names(weekend_mask),
            "holidays": tuple(sorted(days_off)),
            "workdays": tuple(sorted(extra_workdays)),
            "source": _check_text(source, "source"),
            "years": _check_years(years),
            "name": _check_text(name, "name"),
            "version": version,
            "days": BusinessDays(
                ALL_WEEKDAYS ^ weekend_mask, map(_day_number, days_off), map(_day_number, extra_workdays)
            ),
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @classmethod
    def of(cls, country: str, subdivision: str | None = None, *, years: Iterable[int] | None = None) -> Self:
        """Create the calendar of a country (ISO 3166-1 code, such as "KR") or of a subdivision ("BY" of "DE").

        The dates come from the `holidays` package: public holidays, the weekend of the country and its substitute
        workdays, for `years` (by default from last year to ten years ahead). Raises InvalidRecurrence
        (HOLIDAYS_NOT_INSTALLED, INVALID_CALENDAR).
        """
        from timebell.recurrence.calendar import holidays as calendar_holidays

        return cls(*calendar_holidays.load(country, subdivision, years))

    def __contains__(self, day: date) -> bool:
        """Return whether this local date is a business day."""
        return _day_number(day) in self.days

    def __or__(self, other: Calendar) -> Calendar:
        return self._combine(other, "|", lambda a, b: a or b)

    def __and__(self, other: Calendar) -> Calendar:
        return self._combine(other, "&", lambda a, b: a and b)

    def __sub__(self, other: Calendar) -> Calendar:
        return self._combine(other, "-", lambda a, b: a and not b)

    def label(self) -> str:
        """Return the name of this calendar for use in sentences."""
        if self.name is not None:
            return self.name if self.version is None else f"{self.name} (version {self.version})"
        return self.source or f"a calendar with {len(self.holidays)} holidays"

    def warnings(self, *dates: date) -> list[str]:
        """Return a sentence if the holidays of the year of any of `dates` are unknown.

        Without dates, return it if the calendar is limited to some years.
        """
        if self.years is None or (dates and all(self.years[0] <= day.year <= self.years[1] for day in dates)):
            return []
        first, last = self.years
        return [f"The holidays of {self.label()} are known for {first} to {last}; other years count as having none."]

    def with_name(self, name: str | None, version: int | None = None) -> Calendar:
        """Return a copy of this calendar with a name and version."""
        return replace(self, name=name, version=version)

    def to_json(self) -> dict[str, Any]:
        """Return JSON fields from which `from_json` creates an equal calendar."""
        fields: dict[str, Any] = {"weekend": list(self.weekend)}
        for attribute in ("holidays", "workdays"):
            if days := getattr(self, attribute):
                fields[attribute] = [day.isoformat() for day in days]
        for attribute in ("source", "years", "name", "version"):
            if (value := getattr(self, attribute)) is not None:
                fields[attribute] = list(value) if attribute == "years" else value
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Create a calendar from the result of `to_json`.

        Raises InvalidRecurrence (INVALID_CALENDAR, INVALID_WEEKDAYS).
        """
        names = ("weekend", "holidays", "workdays", "source", "years", "name", "version")
        if not isinstance(data, dict) or not data.keys() <= set(names):
            _refuse(f"{data!r:.60} is not a calendar.", f"Specify an object with {', '.join(names)}.")
        for name in names[:3]:
            if not isinstance(data.get(name, []), list):
                _refuse(f"{name} must be a list, not {data[name]!r:.60}.", "Specify a list.")
        years = data.get("years")
        return cls(**{**data, "years": tuple(years) if isinstance(years, list) else years})

    def _combine(self, other: Calendar, sign: str, is_business_day: Callable[[bool, bool], bool]) -> Calendar:
        if not isinstance(other, Calendar):
            return NotImplemented
        weekend_mask, other_weekend_mask = to_mask(self.weekend), to_mask(other.weekend)
        weekend = sum(
            1 << day
            for day in range(7)
            if not is_business_day(not weekend_mask >> day & 1, not other_weekend_mask >> day & 1)
        )
        days_off: list[date] = []
        extra_workdays: list[date] = []
        for day in {*self.holidays, *self.workdays, *other.holidays, *other.workdays}:
            (extra_workdays if is_business_day(day in self, day in other) else days_off).append(day)
        years = self.years or other.years
        if self.years and other.years:
            years = max(self.years[0], other.years[0]), min(self.years[1], other.years[1])
        return Calendar(
            to_names(weekend),
            days_off,
            extra_workdays,
            f"({self.label()} {sign} {other.label()})"[:_MAX_TEXT_LENGTH],
            years,
        )


class BusinessDays:
    """A weekly pattern and the days that differ from it, in days since 1970-01-01."""

    __slots__ = ("_days_off", "_exceptions", "_extra_workdays", "_week")

    def __init__(self, week: int, days_off: Iterable[int], extra_workdays: Iterable[int]) -> None:
        self._week = week  # bit 0 is Monday; a set bit is a business day
        self._days_off, self._extra_workdays = sorted(days_off), sorted(extra_workdays)
        self._exceptions = dict.fromkeys(self._days_off, False) | dict.fromkeys(self._extra_workdays, True)

    def __contains__(self, day: int) -> bool:
        exception = self._exceptions.get(day)
        return bool(self._week >> weekday(day) & 1) if exception is None else exception

    def next(self, day: int) -> int | None:
        """Return the first business day from `day` (inclusive), or None."""
        if not self._week:
            i = bisect_left(self._extra_workdays, day)
            return self._extra_workdays[i] if i < len(self._extra_workdays) else None
        while day not in self:
            day += 1
        return day if day <= LAST_DAY else None

    def previous(self, day: int) -> int | None:
        """Return the last business day up to `day` (inclusive), or None."""
        if not self._week:
            i = bisect_left(self._extra_workdays, day + 1)
            return self._extra_workdays[i - 1] if i else None
        while day not in self:
            day -= 1
        return day if day >= FIRST_DAY else None

    def next_day_off(self, day: int) -> int:
        """Return the first day from `day` (inclusive) that is not a business day."""
        if self._week == ALL_WEEKDAYS:
            i = bisect_left(self._days_off, day)
            return self._days_off[i] if i < len(self._days_off) else LAST_DAY + 1
        while day in self:
            day += 1
        return day

    def count(self, start: int, end: int) -> int:
        """Return the number of business days in [start, end)."""
        weeks, rest = divmod(max(0, end - start), 7)
        total = weeks * self._week.bit_count() + sum(self._week >> weekday(start + n) & 1 for n in range(rest))
        total -= bisect_left(self._days_off, end) - bisect_left(self._days_off, start)
        return total + bisect_left(self._extra_workdays, end) - bisect_left(self._extra_workdays, start)


_MAX_TEXT_LENGTH = 200


def _day_number(day: date) -> int:
    return day.toordinal() - _EPOCH_DAY


def _parse_dates(dates: Iterable[date | str], name: str) -> set[date]:
    days: set[date] = set()
    if isinstance(dates, str):
        _refuse(f"{name} must be a list of dates, not {dates!r:.60}.", "Specify a list.")
    for value in dates:
        try:
            day = date.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            day = None
        if not isinstance(day, date) or isinstance(day, datetime) or not 1970 <= day.year < 2200:
            _refuse(f"{value!r:.60} in {name} is not a date within 1970 to 2199.", "Write it like 2027-03-01.")
        days.add(day)
    return days


def _check_years(years: object) -> tuple[int, int] | None:
    if years is None:
        return None
    is_pair = isinstance(years, tuple) and len(years) == 2 and all(type(year) is int for year in years)
    if not is_pair or not years[0] <= years[1]:  # type: ignore[index]
        _refuse(f"years must be two years, not {years!r:.60}.", "Specify the first and the last year.")
    return years  # type: ignore[return-value]


def _check_text(value: object, name: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT_LENGTH):
        _refuse(f"{name} must be text, not {value!r:.60}.", f"Use 1 to {_MAX_TEXT_LENGTH} characters.")
    return value


def _refuse(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_CALENDAR", fix=fix)
