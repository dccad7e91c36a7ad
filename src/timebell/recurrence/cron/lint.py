"""Warnings about valid cron expressions, and the reasons why an expression never fires."""

from __future__ import annotations

import re

from timebell.recurrence.cron.day_masks import EVERY_DATE, EVERY_WEEKDAY, EVERY_YEAR, matching_days
from timebell.recurrence.cron.describe import describe_months_and_years
from timebell.recurrence.cron.parser import FIELDS, MONTH_DAY, WEEKDAY, YEAR, CronFields
from timebell.recurrence.describe import join, join_ranges, month_name
from timebell.recurrence.rules.local_times import set_bits

_MAX_LISTED_YEARS = 3
_LEAP_DAY = (1 << 29, 1 << 2)
_MONTHS_LACKING_DAY = {
    29: 1 << 2,
    30: 1 << 2,
    31: 1 << 2 | 1 << 4 | 1 << 6 | 1 << 9 | 1 << 11,
}
_STEP_RESTARTS_EVERY = {
    "second": "minute",
    "minute": "hour",
    "hour": "day",
    "day-of-month": "month",
    "month": "year",
    "day-of-week": "week",
}


def find_warnings(fields: CronFields, *, clamp_to_month_end: bool) -> list[str]:
    """Return a sentence for each property of an expression that is rarely intended.

    `clamp_to_month_end` has the same meaning as in `matching_days`.
    """
    return [
        *_hashed_fields(fields),
        *_uneven_steps(fields),
        *([] if clamp_to_month_end else _missing_days(fields)),
        *_quartz_weekday_numbers(fields),
        *_crowded_times(fields),
    ]


def explain_never(fields: CronFields, *, clamp_to_month_end: bool) -> str:
    """Return which parts exclude every day, for fields that match no day."""
    dates, months, weekdays, years = fields.dates, fields.months, fields.weekdays, fields.years
    date, weekday = fields.texts[MONTH_DAY], fields.texts[WEEKDAY]
    reasons = []
    if not matching_days(dates, months, EVERY_WEEKDAY, EVERY_YEAR, clamp_to_month_end=clamp_to_month_end):
        prefix = f"{join_ranges(set_bits(months), month_name)} {'has' if months.bit_count() == 1 else 'have'} no"
        only_numbers = not (dates.from_end or dates.nearest)
        reasons.append(
            f"{prefix} day {join_ranges(set_bits(dates.numbers), conjunction='or')}"
            if only_numbers
            else f"{date}: {prefix} such day"
        )
    elif not matching_days(dates, months, EVERY_WEEKDAY, years, clamp_to_month_end=clamp_to_month_end):
        reasons.append(
            f"{_describe_absent_years(set_bits(years), fields.texts[YEAR])} has 29 February"
            + ("" if date == "29" else f", which {date} needs")
        )
    if not matching_days(EVERY_DATE, months, weekdays, years):
        reasons.append(f"{weekday}: there is none{describe_months_and_years(months, years)}")
    if not reasons:
        in_no_year = not matching_days(dates, months, weekdays, EVERY_YEAR, clamp_to_month_end=clamp_to_month_end)
        reason = f"day-of-month {date} and day-of-week {weekday} never meet"
        reasons.append(reason + describe_months_and_years(months, EVERY_YEAR if in_no_year else years))
    return join(reasons)


def _describe_absent_years(years: list[int], text: str) -> str:
    first, last = 1970 + years[0], 1970 + years[-1]
    if last - first == len(years) - 1 > 0:
        return f"no year from {first} to {last}"
    return f"no year of {join_ranges(1970 + n for n in years) if len(years) <= _MAX_LISTED_YEARS else text}"


def _hashed_fields(fields: CronFields) -> list[str]:
    names = [field.name for field, choices in zip(FIELDS, fields.hash_choices, strict=True) if choices]
    depend = "depends" if len(names) == 1 else "depend"
    return (
        [f"The {join(names)} {depend} on the schedule's name (H): the times shown without a name are an example."]
        if names
        else []
    )


def _uneven_steps(fields: CronFields) -> list[str]:
    """Return a warning for each step that does not divide the range of its field."""
    warnings = []
    for field, text in zip(FIELDS[:YEAR], fields.texts, strict=False):
        for start, step in re.findall(r"(\*|H)/(\d+)", text):
            if 1 < int(step) <= field.size and (field.name == "day-of-month" or field.size % int(step)):
                warnings.append(
                    f"{start}/{step} in {field.name} is uneven: it restarts at every "
                    f"{_STEP_RESTARTS_EVERY[field.name]}. Use an interval for equal distances."
                )
    return warnings


def _missing_days(fields: CronFields) -> list[str]:
    """Return warnings for listed days that some of the months lack; ranges that include such days are ignored."""
    if (fields.dates.numbers, fields.months) == _LEAP_DAY and not (fields.dates.from_end or fields.dates.nearest):
        return ['29 February comes in leap years only; month_end="back" uses 28 February in the others.']
    items = fields.texts[MONTH_DAY].split(",")
    missing = [day for day, months in _MONTHS_LACKING_DAY.items() if fields.months & months]
    warnings = [
        f"{day}W does not occur in months without day {day}; LW is the last weekday of every month."
        for day in missing
        if f"{day}W" in items
    ]
    if skipped := [day for day in missing if str(day) in items]:
        warnings.append(f"Day {join([str(day) for day in skipped], 'or')} is skipped in months without it; "
                     'L is the last day of every month, and so is day 31 with month_end="back".')  # fmt: skip
    return warnings


def _quartz_weekday_numbers(fields: CronFields) -> list[str]:
    weekday = fields.texts[WEEKDAY]
    if "?" not in (fields.texts[MONTH_DAY], weekday) or not re.search(r"(?<![#/\d])\d", weekday):
        return []
    return ["? comes from Quartz, where 1 is Sunday; here 1 is Monday. Names such as MON are unambiguous."]


def _crowded_times(fields: CronFields) -> list[str]:
    """Return a warning for the hourly and daily expressions that are used by many schedules."""
    second, minute, hour, *days = fields.texts
    if (second, minute) != ("0", "0") or hour not in ("0", "*") or any(text not in ("*", "?") for text in days):
        return []
    return [f'Many schedules fire at this minute; "H {hour} * * *" spreads them by their names.']
