"""Calendars: which local dates are business days. Explicit dates, so that every node agrees on them.

A calendar is a week and the dates that differ from it; union, intersection and difference of calendars are
such calendars again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any, NoReturn, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.weekdays import WEEK, mask_of, names_of, weekday
from timebell.recurrence.core import JSON
from timebell.recurrence.instants import DAY_S, MAX_S

MOST = 10_000
WEEKEND = ("SAT", "SUN")
_EPOCH_DAY = date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = -1, MAX_S // DAY_S + 1  # local dates reach a day beyond the instants 1970..2199


@dataclass(frozen=True, slots=True)
class Calendar:
    """Business days: every day that is neither in the `weekend` nor a holiday, and the `workdays`.

    `weekend` has names from MON to SUN, none to all of them; `holidays` and `workdays` are dates (or texts like
    2027-03-01), together at most 10,000 within 1970 to 2199. A workday counts even where it is a holiday or in
    the weekend. `source` says where the dates come from, `years` (first, last) which years they cover; before
    and after, only the weekend is known. `name` and `version` are those under which it was saved. `a | b` has the
    days that are business days in either, `a & b` in both, `a - b` in the first alone.
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
            _refuse(f"weekend is the text {weekend!r:.60}.", 'Give names, such as ("FRI", "SAT").')
        off = mask_of(weekend)
        # Only what differs from the week is kept, so that equal calendars are equal.
        works = _dates(workdays, "workdays")
        free = _dates(holidays, "holidays") - works
        if len(works) + len(free) > MOST:
            _refuse(f"There are {len(works) + len(free):,} dates.", f"Give at most {MOST:,}.")
        free = {day for day in free if not off >> day.weekday() & 1}
        works = {day for day in works if off >> day.weekday() & 1}
        values = {
            "weekend": names_of(off), "holidays": tuple(sorted(free)), "workdays": tuple(sorted(works)),
            "source": _text(source, "source"), "years": _years(years), "name": _text(name, "name"),
            "version": version, "days": BusinessDays(WEEK ^ off, map(_day, free), map(_day, works)),
        }  # fmt: skip
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @classmethod
    def of(cls, country: str, subdivision: str | None = None, *, years: Iterable[int] | None = None) -> Self:
        """The public holidays of a country (ISO 3166-1 code, such as "KR"), or of a part of it ("BY" of "DE").

        From the `holidays` package, written out as dates for `years` (by default last year to ten years ahead),
        with the weekend and the days made up for as they are there. Raises InvalidRecurrence
        (HOLIDAYS_NOT_INSTALLED, INVALID_CALENDAR).
        """
        from timebell.recurrence.calendar import holidays as calendar_holidays

        return cls(*calendar_holidays.read(country, subdivision, years))

    def __contains__(self, day: date) -> bool:
        """Whether this local date is a business day."""
        return _day(day) in self.days

    def __or__(self, other: Calendar) -> Calendar:
        return self._with(other, "|", lambda mine, theirs: mine or theirs)

    def __and__(self, other: Calendar) -> Calendar:
        return self._with(other, "&", lambda mine, theirs: mine and theirs)

    def __sub__(self, other: Calendar) -> Calendar:
        return self._with(other, "-", lambda mine, theirs: mine and not theirs)

    def label(self) -> str:
        """What to call it in a sentence."""
        if self.name is not None:
            return self.name if self.version is None else f"{self.name} (version {self.version})"
        return self.source or f"a calendar with {len(self.holidays)} holidays"

    def warnings(self, *asked: date) -> list[str]:
        """What is not known of it: a sentence if one of the dates lies in a year whose holidays it does not have;
        asked for no date, the sentence if there is any such year."""
        if self.years is None or (asked and all(self.years[0] <= day.year <= self.years[1] for day in asked)):
            return []
        first, last = self.years
        return [f"The holidays of {self.label()} are known for {first} to {last}; other years count as having none."]

    def named(self, name: str | None, version: int | None = None) -> Calendar:
        """The same calendar under a name."""
        return replace(self, name=name, version=version)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields that `from_json` turns into an equal calendar."""
        found: dict[str, Any] = {"weekend": list(self.weekend)}
        for attribute in ("holidays", "workdays"):
            if days := getattr(self, attribute):
                found[attribute] = [day.isoformat() for day in days]
        for attribute in ("source", "years", "name", "version"):
            if (value := getattr(self, attribute)) is not None:
                found[attribute] = list(value) if attribute == "years" else value
        return found

    @classmethod
    def from_json(cls, data: JSON) -> Self:
        """The inverse of `to_json`. Raises InvalidRecurrence (INVALID_CALENDAR, INVALID_WEEKDAYS)."""
        known = ("weekend", "holidays", "workdays", "source", "years", "name", "version")
        if not isinstance(data, dict) or not data.keys() <= set(known):
            _refuse(f"{data!r:.60} is no calendar.", f"Give an object with {', '.join(known)}.")
        for listed in known[:3]:
            if not isinstance(data.get(listed, []), list):
                _refuse(f"{listed} is {data[listed]!r:.60}.", "Give a list.")
        years = data.get("years")
        return cls(**{**data, "years": tuple(years) if isinstance(years, list) else years})

    def _with(self, other: Calendar, sign: str, works: Callable[[bool, bool], bool]) -> Calendar:
        if not isinstance(other, Calendar):
            return NotImplemented
        mine, theirs = mask_of(self.weekend), mask_of(other.weekend)
        weekend = sum(1 << day for day in range(7) if not works(not mine >> day & 1, not theirs >> day & 1))
        free: list[date] = []
        busy: list[date] = []
        for day in {*self.holidays, *self.workdays, *other.holidays, *other.workdays}:
            (busy if works(day in self, day in other) else free).append(day)
        years = self.years or other.years
        if self.years and other.years:
            years = max(self.years[0], other.years[0]), min(self.years[1], other.years[1])
        return Calendar(names_of(weekend), free, busy, f"({self.label()} {sign} {other.label()})"[:_MOST_TEXT], years)


class BusinessDays:
    """A week and the days that differ from it, as days since 1970-01-01."""

    __slots__ = ("_differs", "_free", "_week", "_works")

    def __init__(self, week: int, free: Iterable[int], works: Iterable[int]) -> None:
        self._week = week  # bit 0 is Monday; a set bit is a business day
        self._free, self._works = sorted(free), sorted(works)
        self._differs = dict.fromkeys(self._free, False) | dict.fromkeys(self._works, True)

    def __contains__(self, day: int) -> bool:
        found = self._differs.get(day)
        return bool(self._week >> weekday(day) & 1) if found is None else found

    def next(self, day: int) -> int | None:
        """The first from `day` on."""
        if not self._week:
            i = bisect_left(self._works, day)
            return self._works[i] if i < len(self._works) else None
        while day not in self:
            day += 1
        return day if day <= LAST_DAY else None

    def previous(self, day: int) -> int | None:
        """The last up to `day`."""
        if not self._week:
            i = bisect_left(self._works, day + 1)
            return self._works[i - 1] if i else None
        while day not in self:
            day -= 1
        return day if day >= FIRST_DAY else None

    def closes(self, day: int) -> int:
        """The first day from `day` on that is none."""
        if self._week == WEEK:
            i = bisect_left(self._free, day)
            return self._free[i] if i < len(self._free) else LAST_DAY + 1
        while day in self:
            day += 1
        return day

    def count(self, start: int, end: int) -> int:
        """How many are in [start, end)."""
        weeks, rest = divmod(max(0, end - start), 7)
        total = weeks * self._week.bit_count() + sum(self._week >> weekday(start + n) & 1 for n in range(rest))
        total -= bisect_left(self._free, end) - bisect_left(self._free, start)
        return total + bisect_left(self._works, end) - bisect_left(self._works, start)


_MOST_TEXT = 200


def _day(day: date) -> int:
    return day.toordinal() - _EPOCH_DAY


def _dates(given: Iterable[date | str], what: str) -> set[date]:
    found: set[date] = set()
    if isinstance(given, str):
        _refuse(f"{what} is the text {given!r:.60}.", "Give a list of dates.")
    for one in given:
        try:
            day = date.fromisoformat(one) if isinstance(one, str) else one
        except ValueError:
            day = None
        if not isinstance(day, date) or isinstance(day, datetime) or not 1970 <= day.year < 2200:
            _refuse(f"{one!r:.60} in {what} is not a date within 1970 to 2199.", "Write it like 2027-03-01.")
        found.add(day)
    return found


def _years(years: object) -> tuple[int, int] | None:
    if years is None:
        return None
    whole = isinstance(years, tuple) and len(years) == 2 and all(type(year) is int for year in years)
    if not whole or not years[0] <= years[1]:  # type: ignore[index]
        _refuse(f"years are {years!r:.60}.", "Give the first and the last year.")
    return years  # type: ignore[return-value]


def _text(value: object, what: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MOST_TEXT):
        _refuse(f"{what} is {value!r:.60}.", f"Give text of at most {_MOST_TEXT} characters.")
    return value


def _refuse(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_CALENDAR", fix=fix)
