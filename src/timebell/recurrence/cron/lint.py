"""What is to be said of a cron expression that is legal: what is seldom meant, and why it never fires."""

from __future__ import annotations

import re

from timebell.recurrence.cron.day_masks import EVERY_DATE, EVERY_WEEKDAY, EVERY_YEAR, matching
from timebell.recurrence.cron.describe import in_months
from timebell.recurrence.cron.parser import FIELDS, MONTH_DAY, WEEKDAY, YEAR, CronFields
from timebell.recurrence.describe import join, month_name, runs
from timebell.recurrence.local_times import bits

_FEW_YEARS = 3
_LEAP_DAY = (1 << 29, 1 << 2)
_SHORTEST = {29: 1 << 2, 30: 1 << 2, 31: 1 << 2 | 1 << 4 | 1 << 6 | 1 << 9 | 1 << 11}  # months that lack a day
_RESTART = {
    "second": "minute",
    "minute": "hour",
    "hour": "day",
    "day-of-month": "month",
    "month": "year",
    "day-of-week": "week",
}


def remarks(fields: CronFields, *, back: bool) -> list[str]:
    """A sentence for each thing that is seldom meant. `back` is that of `matching`."""
    return [
        *_left_to_the_name(fields),
        *_uneven_steps(fields),
        *([] if back else _missing_days(fields)),
        *_numbers_of_quartz(fields),
        *_crowd(fields),
    ]


def why_never(fields: CronFields, *, back: bool) -> str:
    """Which parts exclude every day, of fields that match none."""
    dates, months, weekdays, years = fields.dates, fields.months, fields.weekdays, fields.years
    date, weekday = fields.texts[MONTH_DAY], fields.texts[WEEKDAY]
    found = []
    if not matching(dates, months, EVERY_WEEKDAY, EVERY_YEAR, back=back):
        has = f"{runs(bits(months), month_name)} {'has' if months.bit_count() == 1 else 'have'} no"
        plain = not (dates.from_end or dates.nearest)
        found.append(f"{has} day {runs(bits(dates.numbers), last='or')}" if plain else f"{date}: {has} such day")
    elif not matching(dates, months, EVERY_WEEKDAY, years, back=back):
        found.append(
            f"{_no_year(bits(years), fields.texts[YEAR])} has 29 February"
            + ("" if date == "29" else f", which {date} needs")
        )
    if not matching(EVERY_DATE, months, weekdays, years):
        found.append(f"{weekday}: there is none{in_months(months, years)}")
    if not found:
        at_any_time = not matching(dates, months, weekdays, EVERY_YEAR, back=back)
        never = f"day-of-month {date} and day-of-week {weekday} never meet"
        found.append(never + in_months(months, EVERY_YEAR if at_any_time else years))
    return join(found)


def _no_year(years: list[int], text: str) -> str:
    first, last = 1970 + years[0], 1970 + years[-1]
    if last - first == len(years) - 1 > 0:
        return f"no year from {first} to {last}"
    return f"no year of {runs(1970 + n for n in years) if len(years) <= _FEW_YEARS else text}"


def _left_to_the_name(fields: CronFields) -> list[str]:
    names = [field.name for field, choices in zip(FIELDS, fields.chosen, strict=True) if choices]
    depend = "depends" if len(names) == 1 else "depend"
    return (
        [f"The {join(names)} {depend} on the schedule's name (H): times shown without one are an example."]
        if names
        else []
    )


def _uneven_steps(fields: CronFields) -> list[str]:
    """For each step that starts anew before it comes round."""
    found = []
    for field, text in zip(FIELDS[:YEAR], fields.texts, strict=False):
        for start, step in re.findall(r"(\*|H)/(\d+)", text):
            if 1 < int(step) <= field.size and (field.name == "day-of-month" or field.size % int(step)):
                found.append(
                    f"{start}/{step} in {field.name} is uneven: it restarts at every {_RESTART[field.name]}. "
                    "Use an interval for equal distances."
                )
    return found


def _missing_days(fields: CronFields) -> list[str]:
    """For days that some of the months lack, unless a range reaches them."""
    if (fields.dates.numbers, fields.months) == _LEAP_DAY and not (fields.dates.from_end or fields.dates.nearest):
        return ['29 February comes in leap years only; month_end="back" takes 28 February in the others.']
    items = fields.texts[MONTH_DAY].split(",")
    short = [day for day, months in _SHORTEST.items() if fields.months & months]
    found = [
        f"{day}W does not occur in months without day {day}; LW is the last weekday of every month."
        for day in short
        if f"{day}W" in items
    ]
    if skipped := [day for day in short if str(day) in items]:
        found.append(f"Day {join([str(day) for day in skipped], 'or')} is skipped in months without it; "
                     'L is the last day of every month, and so is day 31 with month_end="back".')  # fmt: skip
    return found


def _numbers_of_quartz(fields: CronFields) -> list[str]:
    weekday = fields.texts[WEEKDAY]
    if "?" not in (fields.texts[MONTH_DAY], weekday) or not re.search(r"(?<![#/\d])\d", weekday):
        return []
    return ["? comes from Quartz, where 1 is Sunday; here 1 is Monday. Names such as MON leave no doubt."]


def _crowd(fields: CronFields) -> list[str]:
    """For the two expressions that most people write first."""
    second, minute, hour, *days = fields.texts
    if (second, minute) != ("0", "0") or hour not in ("0", "*") or any(text not in ("*", "?") for text in days):
        return []
    return [f'Many schedules fire at this minute; "H {hour} * * *" spreads them, each by its name.']
