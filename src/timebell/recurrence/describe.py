"""Recurrences in plain English."""

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
_SINCE = {"last_end": "after each run ends", "last_start": "after each run starts"}
_MONTH_ENDS = {
    "skip": ", without the months that lack the day",
    "next": ", on the 1st of the next month where a month lacks the day",
}
_FEW_DATES = 3


def describe_interval(step: Step, anchor: datetime | None, month_end: str = "back") -> str:
    """E.g. "Every 15 minutes from 2027-03-14 07:00 UTC"."""
    every = describe_step(step)
    if every.startswith("1 ") and " and " not in every:
        every = every[2:]
    return f"Every {every}" + (f" from {moment(anchor)}" if anchor else "") + _MONTH_ENDS.get(month_end, "")


def describe_delay(step: Step, since: str, anchor: datetime | None) -> str:
    """E.g. "10 minutes after each run ends, from 2027-03-14 07:00 UTC"."""
    return f"{describe_step(step)} {_SINCE[since]}" + (f", from {moment(anchor)}" if anchor else "")


def describe_step(step: Step) -> str:
    """E.g. "1 hour and 30 minutes"."""
    seconds, fraction = divmod(step.elapsed, 1_000_000)
    units = (
        (step.months // 12, "year"),
        (step.months % 12, "month"),
        (step.days // 7 if step.days % 7 == 0 else 0, "week"),
        (step.days if step.days % 7 else 0, "day"),
        (seconds // 3600, "hour"),
        (seconds // 60 % 60, "minute"),
    )
    amounts = [_amount(number, unit) for number, unit in units if number]
    if seconds % 60 or fraction:
        exact = f"{seconds % 60}.{fraction:06}".rstrip("0").rstrip(".") if fraction else str(seconds % 60)
        amounts.append(f"{exact} second{'' if exact == '1' else 's'}")
    return join(amounts)


def describe_dates(dates: Sequence[datetime]) -> str:
    """E.g. "At 2027-03-14 07:00 UTC, 2027-04-14 07:00 UTC and 2027-05-14 07:00 UTC"."""
    shown = [moment(one) for one in dates[:_FEW_DATES]]
    more = len(dates) - len(shown)
    return f"At {join([*shown, f'{more} more']) if more else join(shown)}"


def describe_date(day: date) -> str:
    """E.g. "Sun 14 Mar 2027", in any locale."""
    return f"{day_name(day.isoweekday() % 7)[:3]} {day.day} {month_name(day.month)[:3]} {day.year}"


def join(words: Sequence[str], last: str = "and") -> str:
    """E.g. "a, b and c"."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def _amount(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def moment(when: datetime) -> str:
    """E.g. "2027-03-14 07:00 UTC", without UTC for a local time."""
    spec = "auto" if when.second or when.microsecond else "minutes"
    text = when.replace(tzinfo=None).isoformat(sep=" ", timespec=spec)
    return text if when.tzinfo is None else f"{text} UTC"


def month_name(number: int) -> str:
    """January is 1."""
    return _MONTHS[number - 1]


def day_name(number: int) -> str:
    """Sunday is 0."""
    return _DAYS[number]


def ordinal(number: int) -> str:
    """E.g. 3 as "3rd"."""
    tail = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"


def runs(values: Iterable[int], name: Callable[[int], str] = str, last: str = "and") -> str:
    """E.g. 1, 2, 3, 7 as "1 to 3 and 7"."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][-1] == value - 1:
            found[-1].append(value)
        else:
            found.append([value])
    words: list[str] = []
    for run in found:
        named = [name(value) for value in run]
        words += [f"{named[0]} to {named[-1]}"] if len(run) > 2 else named
    return join(words, last)
