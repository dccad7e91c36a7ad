"""Plain English descriptions: shared phrases, intervals and dates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from timebell.recurrence.interval import Step

_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_SINCE_TEXT = {"last_end": "after each run ends", "last_start": "after each run starts"}
_MONTH_END_TEXT = {
    "skip": ", without the months that lack the day",
    "next": ", on the 1st of the next month where a month lacks the day",
}
_MAX_LISTED_DATES = 3


def describe_interval(step: Step, anchor: datetime | None, month_end: str = "back") -> str:
    """Describe an interval, e.g. "Every 15 minutes from 2027-03-14 07:00 UTC"."""
    every = describe_step(step)
    if every.startswith("1 ") and " and " not in every:
        every = every[2:]
    return f"Every {every}" + (f" from {format_moment(anchor)}" if anchor else "") + _MONTH_END_TEXT.get(month_end, "")


def describe_delay(step: Step, since: str, anchor: datetime | None) -> str:
    """Describe a fixed delay, e.g. "10 minutes after each run ends, from 2027-03-14 07:00 UTC"."""
    return f"{describe_step(step)} {_SINCE_TEXT[since]}" + (f", from {format_moment(anchor)}" if anchor else "")


def describe_step(step: Step) -> str:
    """Describe a duration, e.g. "1 hour and 30 minutes"."""
    seconds, fraction = divmod(step.elapsed_us, 1_000_000)
    units = (
        (step.months // 12, "year"),
        (step.months % 12, "month"),
        (step.days // 7 if step.days % 7 == 0 else 0, "week"),
        (step.days if step.days % 7 else 0, "day"),
        (seconds // 3600, "hour"),
        (seconds // 60 % 60, "minute"),
    )
    amounts = [_pluralize(number, unit) for number, unit in units if number]
    if seconds % 60 or fraction:
        seconds_text = f"{seconds % 60}.{fraction:06}".rstrip("0").rstrip(".") if fraction else str(seconds % 60)
        amounts.append(f"{seconds_text} second{'' if seconds_text == '1' else 's'}")
    return join(amounts)


def describe_dates(dates: Sequence[datetime]) -> str:
    """Describe a list of dates, e.g. "At 2027-03-14 07:00 UTC, 2027-04-14 07:00 UTC and 2027-05-14 07:00 UTC"."""
    listed = [format_moment(moment) for moment in dates[:_MAX_LISTED_DATES]]
    more = len(dates) - len(listed)
    return f"At {join([*listed, f'{more} more']) if more else join(listed)}"


def describe_date(day: date) -> str:
    """Format a date like "Sun 14 Mar 2027", independent of the locale."""
    return f"{day_name(day.isoweekday() % 7)[:3]} {day.day} {month_name(day.month)[:3]} {day.year}"


def join(words: Sequence[str], conjunction: str = "and") -> str:
    """Join words like "a, b and c"."""
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}" if len(words) > 1 else "".join(words)


def _pluralize(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def format_moment(moment: datetime) -> str:
    """Format a datetime like "2027-03-14 07:00 UTC"; a local time has no "UTC"."""
    timespec = "auto" if moment.second or moment.microsecond else "minutes"
    text = moment.replace(tzinfo=None).isoformat(sep=" ", timespec=timespec)
    return text if moment.tzinfo is None else f"{text} UTC"


def month_name(number: int) -> str:
    """Return the English name of a month; January is 1."""
    return _MONTHS[number - 1]


def day_name(number: int) -> str:
    """Return the English name of a weekday; Sunday is 0."""
    return _DAYS[number]


def ordinal(number: int) -> str:
    """Format an ordinal number, e.g. 3 as "3rd"."""
    suffix = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def join_ranges(values: Iterable[int], name: Callable[[int], str] = str, conjunction: str = "and") -> str:
    """Join numbers with runs of three or more as ranges, e.g. 1, 2, 3, 7 as "1 to 3 and 7"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words: list[str] = []
    for run in runs:
        names = [name(value) for value in run]
        words += [f"{names[0]} to {names[-1]}"] if len(run) > 2 else names
    return join(words, conjunction)
