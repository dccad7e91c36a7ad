"""Cron expressions in plain English."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from timebell.recurrence.cron.day_masks import EVERY_DATE, EVERY_WEEKDAY, EVERY_YEAR, MonthDays, WeekDays
from timebell.recurrence.cron.parser import (
    FIELDS,
    HOUR,
    MINUTE,
    MONTH,
    MONTH_DAY,
    SECOND,
    WEEKDAY,
    Chosen,
    CronFields,
    month_days,
    week_days,
)
from timebell.recurrence.describe import day_name, join, month_name, ordinal, runs
from timebell.recurrence.local_times import bits

_FEW_TIMES = 6
_MANY = 5  # values at equal distances are no longer listed
_NTH = ("first", "second", "third", "fourth", "fifth", "last")
_OR_LAST = " (or the last day of a shorter month)"
_BY_NAME = " (chosen by name)"
_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_FIRST_YEAR, _LAST_YEAR = 1970, 2199


def describe_cron(fields: CronFields, *, either: bool, back: bool) -> str:
    """E.g. "At 09:00 on Monday to Friday". `either` and `back` are those of `days.matching`."""
    parts = (_times(fields), _days(fields, either=either, back=back), _months(fields))
    text = " ".join(part for part in parts if part)
    head, by_name, tail = text.rpartition(_BY_NAME)
    return head.replace(_BY_NAME, "") + by_name + tail


def in_months(months: int, years: int) -> str:
    """E.g. " in February or March of 2027", "" for all of them; bit n of the years is 1970 + n."""
    named = "" if months.bit_count() == 12 else runs(bits(months), month_name, "or")
    found = " of ".join(part for part in (named, _years(years)) if part)
    return found and f" in {found}"


# time of day


class _Unit:
    """What an expression says of seconds, minutes or hours, in words."""

    def __init__(self, fields: CronFields, position: int) -> None:
        self.name, *_, self.size, self.most = FIELDS[position]
        self.values = bits(fields.plain[position])
        self.chosen = fields.chosen[position]
        star, _, step = fields.texts[position].partition("/")
        evenly = star == "*" and step.isdigit() and self.size % int(step) == 0
        self.step = 1 if len(self.values) == self.size else int(step) if evenly else None

    @property
    def nought(self) -> bool:
        return self.values == [0] and not self.chosen

    def leading(self) -> str:
        """E.g. "every 5 minutes", "at minutes 5 and 35"."""
        if self.step:
            return f"every {self.name}" if self.step == 1 else f"every {self.step} {self.name}s"
        return f"at {self._named()}"

    def within(self) -> str:
        """E.g. "of every 5th minute", "of hours 9 to 17"."""
        if self.step:
            return f"of every {self.name}" if self.step == 1 else f"of every {ordinal(self.step)} {self.name}"
        return f"of {self._named()}"

    def _named(self) -> str:
        return join([*_listed(self.values, self.name), *_chosen(self.chosen, self.name, self.most)])


def _times(fields: CronFields) -> str:
    second, minute, hour = (_Unit(fields, position) for position in (SECOND, MINUTE, HOUR))
    known = not (fields.wildcard or second.chosen or minute.chosen or hour.chosen)
    if known and len(hour.values) * len(minute.values) * len(second.values) <= _FEW_TIMES:
        clock = [(h, m, s) for h in hour.values for m in minute.values for s in second.values]
        return "At " + join([f"{h:02}:{m:02}" + ("" if second.nought else f":{s:02}") for h, m, s in clock])
    if known and len(minute.values) == 1 and second.nought and _distance(hour.values) == 1:
        at = minute.values[0]
        return f"Every hour from {hour.values[0]:02}:{at:02} to {hour.values[-1]:02}:{at:02}"
    if second.nought and minute.nought and hour.step == 1:
        return "Every hour"
    inner = minute if second.nought else second
    parts = [inner.leading()]
    if inner is second and not (minute.step == 1 and second.step):
        parts.append(minute.within())
        inner = minute
    if hour.step != 1:
        parts.append(hour.within())
    elif not inner.step:
        parts.append("past every hour")
    text = " ".join(parts)
    return text[0].upper() + text[1:]


# days


def _days(fields: CronFields, *, either: bool, back: bool) -> str:
    dates, weekdays = month_days(fields.plain[MONTH_DAY]), week_days(fields.plain[WEEKDAY])
    chosen_dates, chosen_weekdays = fields.chosen[MONTH_DAY], fields.chosen[WEEKDAY]
    by_date = [*_dates(dates, fields.months if back else 0), *_chosen(chosen_dates, "day", FIELDS[MONTH_DAY].most)]
    by_weekday = [*_weekdays(weekdays, "and" if either else "or"), *_chosen_weekday(chosen_weekdays)]
    if either:
        return f"on {join(by_date)} or on {join(by_weekday)}"
    if weekdays == EVERY_WEEKDAY:
        return "" if dates == EVERY_DATE else f"on {join(by_date)}"
    if dates == EVERY_DATE:
        return f"on {join([*_weekdays(weekdays, 'and'), *_chosen_weekday(chosen_weekdays)])}"
    several = sum(mask.bit_count() for mask in dates) + len(chosen_dates) > 1
    that = ("that falls" if by_date[0].startswith("every") else "that fall") if several else "when it falls"
    return f"on {join(by_date)} {that} on {join(by_weekday, 'or')}"


def _dates(dates: MonthDays, back_in: int) -> list[str]:
    """`back_in`: the months in which a day that they lack is the last one."""
    shortest = min((_LENGTHS[month] for month in bits(back_in)), default=31)
    by_number, before = _listed(bits(dates.numbers), "day"), [ordinal(days) for days in bits(dates.from_end) if days]
    if dates.numbers >> shortest + 1:
        by_number[-1] += _OR_LAST
    words = by_number + (["the last day of the month"] if dates.from_end & 1 else [])
    if before:
        words.append(f"the {join(before)} day{'' if len(before) == 1 else 's'} before the last day of the month")
    if dates.nearest & 1:
        words.append("the last weekday of the month")
    if near := [f"the {ordinal(day)}" for day in bits(dates.nearest) if day]:
        reaches = _OR_LAST if dates.nearest >> shortest + 1 else ""
        words.append(f"the weekday{'' if len(near) == 1 else 's'} nearest {join(near)}{reaches}")
    return words


def _weekdays(weekdays: WeekDays, last: str) -> list[str]:
    every = sorted((day - 1) % 7 for day in bits(weekdays.every))  # Monday first
    words = [runs(every, lambda day: day_name((day + 1) % 7), last)] if every else []
    for day in (1, 2, 3, 4, 5, 6, 0):
        which = [word for word, mask in zip(_NTH, (*weekdays.nth, weekdays.last), strict=True) if mask >> day & 1]
        words += [f"the {join(which, last)} {day_name(day)} of the month"] if which else []
    return words


# months and years


def _months(fields: CronFields) -> str:
    of_years = _years(fields.years)
    plain, chosen = fields.plain[MONTH], fields.chosen[MONTH]
    if not chosen and plain.bit_count() == 12:
        return of_years and f"in {of_years}"
    words = [runs(bits(plain), month_name)] if plain else []
    words += [
        (f"every {ordinal(step)} month from a fixed one" if step else "a fixed month")
        + (f" from {month_name(low)} to {month_name(high)}" if (low, high) != (1, 12) else "")
        + _BY_NAME
        for low, high, step in chosen
    ]
    return f"in {join(words)}" + (of_years and f" of {of_years}")


def _years(years: int) -> str:
    if years == EVERY_YEAR:
        return ""
    values = [_FIRST_YEAR + n for n in bits(years)]
    first, last = values[0], values[-1]
    distance = _distance(values)
    if len(values) > 1 and distance and last + distance > _LAST_YEAR:
        return f"{first} and later" if distance == 1 else f"every {ordinal(distance)} year from {first}"
    return join(_listed(values, "year")) if distance > 1 and len(values) >= _MANY else runs(values)


# lists


def _listed(values: Sequence[int], unit: str) -> list[str]:
    """E.g. "minutes 0 and 30", "every 2nd day from 1 to 31"; nothing for no values."""
    distance = _distance(values)
    if distance > 1 and len(values) >= _MANY:
        return [f"every {ordinal(distance)} {unit} from {values[0]} to {values[-1]}"]
    return [f"{unit}{'' if len(values) == 1 else 's'} {runs(values)}"] if values else []


def _distance(values: Sequence[int]) -> int:
    """How far each value is from the one before; 0 if that differs or there are none, 1 for one value."""
    found = {after - before for before, after in pairwise(values)}
    return found.pop() if len(found) == 1 else int(len(values) == 1)


def _chosen(choices: Sequence[Chosen], unit: str, most: int) -> list[str]:
    return [_choice(choice, unit, most) for choice in choices]


def _chosen_weekday(choices: Sequence[Chosen]) -> list[str]:
    most = FIELDS[WEEKDAY].most
    return [
        f"a fixed day of the week{_BY_NAME}"
        if choice == (0, most, 0)
        else _choice(choice, "day", most, lambda day: day_name(day % 7))
        for choice in choices
    ]


def _choice(choice: Chosen, unit: str, most: int, name: Callable[[int], str] = str) -> str:
    low, high, step = choice
    if not step:
        return f"a fixed {unit} between {name(low)} and {name(high)}{_BY_NAME}"
    first = f"a fixed one between {name(low)} and {name(min(low + step - 1, high))}"
    return f"every {ordinal(step)} {unit} from {first}" + ("" if high == most else f" to {name(high)}") + _BY_NAME
