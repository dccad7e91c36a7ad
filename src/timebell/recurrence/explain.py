"""Recurrences in plain English."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING

from timebell.recurrence.fields import CronFields

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
_FEW_TIMES = 6
_FEW_DATES = 3


def describe_cron(fields: CronFields) -> str:
    """E.g. "At 09:00 on Monday to Friday"."""
    return " ".join(part for part in (_times(fields), _days(fields), _months(fields)) if part)


def describe_interval(step: Step, anchor: datetime | None, month_end: str = "back") -> str:
    """E.g. "Every 15 minutes from 2027-03-14 07:00 UTC"."""
    every = describe_step(step)
    if every.startswith("1 ") and " and " not in every:
        every = every[2:]
    return f"Every {every}" + (f" from {_moment(anchor)}" if anchor else "") + _MONTH_ENDS.get(month_end, "")


def describe_delay(step: Step, since: str, anchor: datetime | None) -> str:
    """E.g. "10 minutes after each run ends, from 2027-03-14 07:00 UTC"."""
    return f"{describe_step(step)} {_SINCE[since]}" + (f", from {_moment(anchor)}" if anchor else "")


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
    shown = [_moment(one) for one in dates[:_FEW_DATES]]
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


def _moment(when: datetime) -> str:
    spec = "auto" if when.second or when.microsecond else "minutes"
    text = when.replace(tzinfo=None).isoformat(sep=" ", timespec=spec)
    return text if when.tzinfo is None else f"{text} UTC"


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _step(text: str) -> int | None:
    """n of `*` (1) or `*/n`, None for any other field."""
    star, _, step = text.partition("/")
    return int(step or 1) if text == "*" or (star == "*" and step.isdigit()) else None


def _times(fields: CronFields) -> str:
    second, minute, hour = fields.texts[:3]
    hours, minutes, seconds = _bits(fields.hours), _bits(fields.minutes), _bits(fields.seconds)
    if not fields.wildcard and len(hours) * len(minutes) * len(seconds) <= _FEW_TIMES:
        clock = [(h, m, s) for h in hours for m in minutes for s in seconds]
        return "At " + join([f"{h:02}:{m:02}" + (f":{s:02}" if seconds != [0] else "") for h, m, s in clock])
    if not fields.wildcard and len(minutes) == 1 and seconds == [0] and hours[-1] - hours[0] < len(hours):
        return f"Every hour from {hours[0]:02}:{minutes[0]:02} to {hours[-1]:02}:{minutes[0]:02}"
    parts = []
    if seconds != [0]:
        parts.append(_every(second, "second", seconds))
    if parts and minute != "*":
        parts.append(_within(minute, "minute", minutes))
    elif not parts and (hour != "*" or minutes != [0]):
        parts.append(_every(minute, "minute", minutes))
    if not parts:
        parts.append("every hour")
    elif hour != "*":
        parts.append(_within(hour, "hour", hours))
    elif _step(minute) is None:
        parts.append("past every hour")
    text = " ".join(parts)
    return text[0].upper() + text[1:]


def _every(text: str, unit: str, values: list[int]) -> str:
    step = _step(text)
    if step is None:
        return f"at {unit}{'' if len(values) == 1 else 's'} {_runs(values)}"
    return f"every {unit}" if step == 1 else f"every {step} {unit}s"


def _within(text: str, unit: str, values: list[int]) -> str:
    step = _step(text)
    if step is not None and step > 1:
        return f"of every {_ordinal(step)} {unit}"
    return f"of {unit}{'' if len(values) == 1 else 's'} {_runs(values)}"


def _days(fields: CronFields) -> str:
    day, weekday = fields.texts[3], fields.texts[5]
    by_day = "" if day == "*" else f"on day{'' if _one(fields.days) else 's'} {_runs(_bits(fields.days))}"
    by_weekday = "" if weekday == "*" else f"on {_weekdays(fields.weekdays)}"
    if by_day and by_weekday:
        return f"{by_day} or {by_weekday}" if fields.either_day else f"{by_day} that fall {by_weekday}"
    return by_day or by_weekday


def _months(fields: CronFields) -> str:
    return "" if fields.months.bit_count() == 12 else f"in {_runs(_bits(fields.months), month_name)}"


def month_name(number: int) -> str:
    """January is 1."""
    return _MONTHS[number - 1]


def day_name(number: int) -> str:
    """Sunday is 0."""
    return _DAYS[number]


def _weekdays(mask: int) -> str:
    monday_first = sorted((day - 1) % 7 for day in _bits(mask))
    return _runs(monday_first, lambda day: day_name((day + 1) % 7))


def _one(mask: int) -> bool:
    return mask.bit_count() == 1


def _ordinal(number: int) -> str:
    tail = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"


def _runs(values: Iterable[int], name: Callable[[int], str] = str) -> str:
    """E.g. 1, 2, 3, 7 as "1 to 3 and 7"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words: list[str] = []
    for run in runs:
        named = [name(value) for value in run]
        words += [f"{named[0]} to {named[-1]}"] if len(run) > 2 else named
    return join(words)
