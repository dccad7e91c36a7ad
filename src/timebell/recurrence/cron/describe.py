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
    CronFields,
    HashChoice,
    unpack_month_days,
    unpack_week_days,
)
from timebell.recurrence.describe import day_name, join, join_ranges, month_name, ordinal
from timebell.recurrence.rules.local_times import set_bits

_MAX_LISTED_TIMES = 6
_MIN_SUMMARIZED_VALUES = 5  # from this number on, values at equal distances are summarized
_NTH_WORDS = ("first", "second", "third", "fourth", "fifth", "last")
_OR_LAST_DAY = " (or the last day of a shorter month)"
_BY_NAME = " (chosen by name)"
_MONTH_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_FIRST_YEAR, _LAST_YEAR = 1970, 2199


def describe_cron(fields: CronFields, *, match_either: bool, clamp_to_month_end: bool) -> str:
    """Describe an expression, e.g. "At 09:00 on Monday to Friday".

    `match_either` and `clamp_to_month_end` have the same meaning as in `matching_days`.
    """
    parts = (
        _describe_times(fields),
        _describe_days(fields, match_either=match_either, clamp_to_month_end=clamp_to_month_end),
        _describe_months(fields),
    )
    text = " ".join(part for part in parts if part)
    head, by_name, tail = text.rpartition(_BY_NAME)
    return head.replace(_BY_NAME, "") + by_name + tail


def describe_months_and_years(months: int, years: int) -> str:
    """Describe months and years, e.g. " in February or March of 2027"; "" for all. Bit n of `years` is 1970 + n."""
    month_text = "" if months.bit_count() == 12 else join_ranges(set_bits(months), month_name, "or")
    text = " of ".join(part for part in (month_text, _describe_years(years)) if part)
    return text and f" in {text}"


# time of day


class _TimeUnit:
    """The phrases for one time field of an expression: seconds, minutes or hours."""

    def __init__(self, fields: CronFields, position: int) -> None:
        self.name, *_, self.size, self.hash_high = FIELDS[position]
        self.values = set_bits(fields.unhashed[position])
        self.hash_choices = fields.hash_choices[position]
        star, _, step = fields.texts[position].partition("/")
        is_even = star == "*" and step.isdigit() and self.size % int(step) == 0
        self.step = 1 if len(self.values) == self.size else int(step) if is_even else None

    @property
    def is_zero(self) -> bool:
        return self.values == [0] and not self.hash_choices

    def leading_phrase(self) -> str:
        """Return a phrase for the start of a sentence, e.g. "every 5 minutes", "at minutes 5 and 35"."""
        if self.step:
            return f"every {self.name}" if self.step == 1 else f"every {self.step} {self.name}s"
        return f"at {self._values_phrase()}"

    def of_phrase(self) -> str:
        """Return a phrase that follows another unit, e.g. "of every 5th minute", "of hours 9 to 17"."""
        if self.step:
            return f"of every {self.name}" if self.step == 1 else f"of every {ordinal(self.step)} {self.name}"
        return f"of {self._values_phrase()}"

    def _values_phrase(self) -> str:
        return join(
            [
                *_list_values(self.values, self.name),
                *_describe_hash_choices(self.hash_choices, self.name, self.hash_high),
            ]
        )


def _describe_times(fields: CronFields) -> str:
    second, minute, hour = (_TimeUnit(fields, position) for position in (SECOND, MINUTE, HOUR))
    is_fixed = not (fields.is_wildcard or second.hash_choices or minute.hash_choices or hour.hash_choices)
    if is_fixed and len(hour.values) * len(minute.values) * len(second.values) <= _MAX_LISTED_TIMES:
        clock = [(h, m, s) for h in hour.values for m in minute.values for s in second.values]
        return "At " + join([f"{h:02}:{m:02}" + ("" if second.is_zero else f":{s:02}") for h, m, s in clock])
    if is_fixed and len(minute.values) == 1 and second.is_zero and _common_step(hour.values) == 1:
        minute_value = minute.values[0]
        return f"Every hour from {hour.values[0]:02}:{minute_value:02} to {hour.values[-1]:02}:{minute_value:02}"
    if second.is_zero and minute.is_zero and hour.step == 1:
        return "Every hour"
    inner = minute if second.is_zero else second
    parts = [inner.leading_phrase()]
    if inner is second and not (minute.step == 1 and second.step):
        parts.append(minute.of_phrase())
        inner = minute
    if hour.step != 1:
        parts.append(hour.of_phrase())
    elif not inner.step:
        parts.append("past every hour")
    text = " ".join(parts)
    return text[0].upper() + text[1:]


# days


def _describe_days(fields: CronFields, *, match_either: bool, clamp_to_month_end: bool) -> str:
    dates, weekdays = unpack_month_days(fields.unhashed[MONTH_DAY]), unpack_week_days(fields.unhashed[WEEKDAY])
    hashed_dates, hashed_weekdays = fields.hash_choices[MONTH_DAY], fields.hash_choices[WEEKDAY]
    by_date = [
        *_describe_dates(dates, fields.months if clamp_to_month_end else 0),
        *_describe_hash_choices(hashed_dates, "day", FIELDS[MONTH_DAY].hash_high),
    ]
    by_weekday = [
        *_describe_weekdays(weekdays, "and" if match_either else "or"),
        *_describe_hashed_weekdays(hashed_weekdays),
    ]
    if match_either:
        return f"on {join(by_date)} or on {join(by_weekday)}"
    if weekdays == EVERY_WEEKDAY:
        return "" if dates == EVERY_DATE else f"on {join(by_date)}"
    if dates == EVERY_DATE:
        return f"on {join([*_describe_weekdays(weekdays, 'and'), *_describe_hashed_weekdays(hashed_weekdays)])}"
    plural = sum(mask.bit_count() for mask in dates) + len(hashed_dates) > 1
    condition = ("that falls" if by_date[0].startswith("every") else "that fall") if plural else "when it falls"
    return f"on {join(by_date)} {condition} on {join(by_weekday, 'or')}"


def _describe_dates(dates: MonthDays, clamped_months: int) -> list[str]:
    """Return phrases for the days of a day-of-month field.

    `clamped_months` is the mask of the months in which a missing day is replaced by the last day.
    """
    shortest = min((_MONTH_LENGTHS[month] for month in set_bits(clamped_months)), default=31)
    by_number, before = (
        _list_values(set_bits(dates.numbers), "day"),
        [ordinal(days) for days in set_bits(dates.from_end) if days],
    )
    if dates.numbers >> shortest + 1:
        by_number[-1] += _OR_LAST_DAY
    words = by_number + (["the last day of the month"] if dates.from_end & 1 else [])
    if before:
        words.append(f"the {join(before)} day{'' if len(before) == 1 else 's'} before the last day of the month")
    if dates.nearest & 1:
        words.append("the last weekday of the month")
    if near := [f"the {ordinal(day)}" for day in set_bits(dates.nearest) if day]:
        suffix = _OR_LAST_DAY if dates.nearest >> shortest + 1 else ""
        words.append(f"the weekday{'' if len(near) == 1 else 's'} nearest {join(near)}{suffix}")
    return words


def _describe_weekdays(weekdays: WeekDays, conjunction: str) -> list[str]:
    every = sorted((day - 1) % 7 for day in set_bits(weekdays.every))  # Monday first
    words = [join_ranges(every, lambda day: day_name((day + 1) % 7), conjunction)] if every else []
    for day in (1, 2, 3, 4, 5, 6, 0):
        ordinals = [
            word for word, mask in zip(_NTH_WORDS, (*weekdays.nth, weekdays.last), strict=True) if mask >> day & 1
        ]
        words += [f"the {join(ordinals, conjunction)} {day_name(day)} of the month"] if ordinals else []
    return words


# months and years


def _describe_months(fields: CronFields) -> str:
    year_text = _describe_years(fields.years)
    unhashed, hash_choices = fields.unhashed[MONTH], fields.hash_choices[MONTH]
    if not hash_choices and unhashed.bit_count() == 12:
        return year_text and f"in {year_text}"
    words = [join_ranges(set_bits(unhashed), month_name)] if unhashed else []
    words += [
        (f"every {ordinal(step)} month from a fixed one" if step else "a fixed month")
        + (f" from {month_name(low)} to {month_name(high)}" if (low, high) != (1, 12) else "")
        + _BY_NAME
        for low, high, step in hash_choices
    ]
    return f"in {join(words)}" + (year_text and f" of {year_text}")


def _describe_years(years: int) -> str:
    if years == EVERY_YEAR:
        return ""
    values = [_FIRST_YEAR + n for n in set_bits(years)]
    first, last = values[0], values[-1]
    distance = _common_step(values)
    if len(values) > 1 and distance and last + distance > _LAST_YEAR:
        return f"{first} and later" if distance == 1 else f"every {ordinal(distance)} year from {first}"
    return (
        join(_list_values(values, "year"))
        if distance > 1 and len(values) >= _MIN_SUMMARIZED_VALUES
        else join_ranges(values)
    )


# lists


def _list_values(values: Sequence[int], unit: str) -> list[str]:
    """Describe values, e.g. ["minutes 0 and 30"], ["every 2nd day from 1 to 31"]; [] for no values."""
    distance = _common_step(values)
    if distance > 1 and len(values) >= _MIN_SUMMARIZED_VALUES:
        return [f"every {ordinal(distance)} {unit} from {values[0]} to {values[-1]}"]
    return [f"{unit}{'' if len(values) == 1 else 's'} {join_ranges(values)}"] if values else []


def _common_step(values: Sequence[int]) -> int:
    """Return the common distance of successive values; 0 if it varies or there are no values, 1 for one value."""
    distances = {after - before for before, after in pairwise(values)}
    return distances.pop() if len(distances) == 1 else int(len(values) == 1)


def _describe_hash_choices(choices: Sequence[HashChoice], unit: str, hash_high: int) -> list[str]:
    return [_describe_hash_choice(choice, unit, hash_high) for choice in choices]


def _describe_hashed_weekdays(choices: Sequence[HashChoice]) -> list[str]:
    hash_high = FIELDS[WEEKDAY].hash_high
    return [
        f"a fixed day of the week{_BY_NAME}"
        if choice == (0, hash_high, 0)
        else _describe_hash_choice(choice, "day", hash_high, lambda day: day_name(day % 7))
        for choice in choices
    ]


def _describe_hash_choice(choice: HashChoice, unit: str, hash_high: int, name: Callable[[int], str] = str) -> str:
    low, high, step = choice
    if not step:
        return f"a fixed {unit} between {name(low)} and {name(high)}{_BY_NAME}"
    first = f"a fixed one between {name(low)} and {name(min(low + step - 1, high))}"
    return f"every {ordinal(step)} {unit} from {first}" + ("" if high == hash_high else f" to {name(high)}") + _BY_NAME
