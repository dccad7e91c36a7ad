"""Recurrence rules (RRULE) in plain English."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from timebell.recurrence.describe import day_name, format_moment, join, join_ranges, month_name, ordinal
from timebell.recurrence.rrule.parser import DAILY, HOURLY, MONTHLY, SECONDLY, WEEKLY, YEARLY, Lines, Parts

_UNITS = ("year", "month", "week", "day", "hour", "minute", "second")
_MAX_LISTED_TIMES = 6
_ORDINAL_WORDS = ("first", "second", "third", "fourth", "fifth")
_SKIP_TEXT = {
    "back": ", on the last day of a month that lacks the day",
    "next": ", on the 1st of the next month where a month lacks the day",
}


def describe_rrule(lines: Lines, start: datetime | None, skip: str, exdates: int, rdates: int) -> str:
    """Describe a rule, e.g. "Every 2 weeks on Monday and Friday at 09:00, 10 times".

    `start` is DTSTART and `skip` the effective `month_end`; `exdates` and `rdates` are numbers of dates in addition to
    those of `lines`.
    """
    parts = lines.parts
    local = start if start is not None and start.tzinfo is None else None
    text = _describe_elapsed_rule(parts) if parts.freq >= HOURLY else _describe_calendar_rule(parts, local)
    if start is not None and local is None:
        text += f" from {format_moment(start)}"
    if parts.setpos:
        positions = join([_ordinal_word(n) for n in _positive_first(parts.setpos)])
        text += f", only the {positions} of these in each {_UNITS[parts.freq]}"
    text += _SKIP_TEXT.get(skip, "") if parts.freq <= MONTHLY else ""
    if parts.max_count is not None:
        text += ", once" if parts.max_count == 1 else f", {parts.max_count} times"
    if parts.until is not None:
        text += f", until {parts.until.date().isoformat() if parts.until_date else format_moment(parts.until)}"
    added, removed = rdates + len(lines.rdates), exdates + len(lines.exdates)
    text += f", and at {_pluralize(added, 'more date')}" if added else ""
    return text + (f", except at {_pluralize(removed, 'date')}" if removed else "")


def _describe_calendar_rule(parts: Parts, local: datetime | None) -> str:
    every = f"every {_UNITS[parts.freq]}" if parts.interval == 1 else f"every {parts.interval} {_UNITS[parts.freq]}s"
    days = _describe_filters(parts) if parts.freq == DAILY else _DAY_DESCRIBERS[parts.freq](parts, local)
    if parts.freq == MONTHLY and days:
        months = _describe_months(parts)
        every = f"{every} {days}" + (f" in {months}" if months else "")
        text = every if parts.interval > 1 else f"{days} of {months or 'every month'}"
    else:
        text = f"{every} {days}".strip()
    text = text[0].upper() + text[1:]
    return f"{text} {times}" if (times := _describe_times(parts, local)) else text


def _describe_yearly(parts: Parts, local: datetime | None) -> str:
    months = _describe_months(parts)
    scope = months or "the year"
    phrases = [
        f"in {_describe_values('week', parts.weeknos)}" if parts.weeknos else "",
        f"on {_describe_values('day', parts.yeardays)} of the year" if parts.yeardays else "",
    ]
    if parts.monthdays:
        phrases.append(f"on {_describe_values('day', parts.monthdays)} of {months or 'every month'}")
    if parts.days and (parts.monthdays or parts.yeardays):
        phrases.append(
            f"that {'are' if len(parts.monthdays + parts.yeardays) > 1 else 'is'} {_describe_weekdays(parts)}"
        )
    elif parts.days:
        has_numbers = any(n for n, _ in parts.days)
        phrases.insert(
            0,
            f"on {_describe_weekdays(parts)}" + (f" of {scope}" if has_numbers else f" in {months}" if months else ""),
        )
    elif not parts.monthdays and not parts.yeardays and local is not None:
        if parts.weeknos:
            phrases.insert(0, f"on {_weekday_name(local.weekday())}")
        else:
            phrases.append(f"on day {local.day} of {months or month_name(local.month)}")
            return _join_phrases(phrases)
    if months and not any(months in phrase for phrase in phrases):
        phrases.append(f"in {months}")
    return _join_phrases(phrases)


def _describe_monthly(parts: Parts, local: datetime | None) -> str:
    if parts.monthdays:
        days = f"on {_describe_values('day', parts.monthdays)}" if parts.monthdays != (-1,) else "on the last day"
        return days + (
            f" that {'are' if len(parts.monthdays) > 1 else 'is'} {_describe_weekdays(parts)}" if parts.days else ""
        )
    if parts.days:
        return f"on {_describe_weekdays(parts)}"
    return f"on day {local.day}" if local is not None else ""


def _describe_weekly(parts: Parts, local: datetime | None) -> str:
    days = (
        f"on {_describe_weekdays(parts)}"
        if parts.days
        else f"on {_weekday_name(local.weekday())}"
        if local is not None
        else ""
    )
    return _join_phrases([days, f"in {_describe_months(parts)}" if parts.months else ""])


_DAY_DESCRIBERS = {YEARLY: _describe_yearly, MONTHLY: _describe_monthly, WEEKLY: _describe_weekly}


def _describe_filters(parts: Parts) -> str:
    """Describe the parts that restrict the days, e.g. "only on Monday, in March"."""
    phrases = [
        f"on {_describe_weekdays(parts)}" if parts.days else "",
        f"on {_describe_values('day', parts.monthdays)} of the month" if parts.monthdays else "",
        f"on {_describe_values('day', parts.yeardays)} of the year" if parts.yeardays else "",
        f"in {_describe_months(parts)}" if parts.months else "",
    ]
    text = ", ".join(phrase for phrase in phrases if phrase)
    return f"only {text}" if text else ""


def _describe_elapsed_rule(parts: Parts) -> str:
    unit = _UNITS[parts.freq]
    text = f"Every {unit}" if parts.interval == 1 else f"Every {parts.interval} {unit}s"
    fields = [("minute", parts.minutes, parts.freq == HOURLY), ("second", parts.seconds, parts.freq < SECONDLY)]
    expanding = [f"{_describe_values(name, values)}" for name, values, expands in fields if values and expands]
    text += f" at {join(expanding)}" if expanding else ""
    phrases = [
        f"in {_describe_values(name, values)}" for name, values, expands in reversed(fields) if values and not expands
    ]
    phrases += [f"in {_describe_values('hour', parts.hours)}"] if parts.hours else []
    days = _describe_filters(parts).removeprefix("only ")
    phrases += [days] if days else []
    return text + (f" only {', '.join(phrases)}" if phrases else "")


def _describe_times(parts: Parts, local: datetime | None) -> str:
    if local is None and not parts.hours:
        return ""
    hours, minutes, seconds = (
        values or ((getattr(local, name),) if local is not None else (0,))
        for values, name in ((parts.hours, "hour"), (parts.minutes, "minute"), (parts.seconds, "second"))
    )
    if len(hours) * len(minutes) * len(seconds) > _MAX_LISTED_TIMES or (local is None and not parts.minutes):
        fields = [("second", seconds), ("minute", minutes), ("hour", hours)]
        listed = [(name, values) for name, values in fields if name == "hour" or getattr(parts, name + "s")]
        return "at " + " of ".join(_describe_values(name, values) for name, values in listed)
    clock = [(h, m, s) for h in hours for m in minutes for s in seconds]
    return "at " + join([f"{h:02}:{m:02}" + (f":{s:02}" if seconds != (0,) else "") for h, m, s in clock])


def _describe_weekdays(parts: Parts) -> str:
    unnumbered = sorted(day for n, day in parts.days if n == 0)
    phrases = [join_ranges(unnumbered, _weekday_name)] if unnumbered else []
    numbered = sorted(((n, day) for n, day in parts.days if n), key=lambda pair: (pair[0] < 0, pair))
    return join([*phrases, *(f"the {_ordinal_word(n)} {_weekday_name(day)}" for n, day in numbered)])


def _weekday_name(day: int) -> str:
    return day_name((day + 1) % 7)


def _describe_months(parts: Parts) -> str:
    return join_ranges(parts.months, month_name)


def _ordinal_word(n: int) -> str:
    """Return an ordinal in words: 1 is "first", -1 "last", -2 "second to last"."""
    name = _ORDINAL_WORDS[abs(n) - 1] if abs(n) <= len(_ORDINAL_WORDS) else ordinal(abs(n))
    return name if n > 0 else "last" if n == -1 else f"{name} to last"


def _describe_values(unit: str, values: Iterable[int]) -> str:
    """Describe values, e.g. "days 1 and 15 and the last day"; negative values count from the end."""
    positive = [value for value in values if value >= 0]
    negative = [value for value in _positive_first(values) if value < 0]
    phrases = [f"{unit}{'s' if len(positive) > 1 else ''} {join_ranges(positive)}"] if positive else []
    if negative:
        phrases.append(f"the {join([_ordinal_word(value) for value in negative])} {unit}")
    return join(phrases)


def _positive_first(values: Iterable[int]) -> list[int]:
    return sorted(values, key=lambda value: (value < 0, abs(value)))


def _pluralize(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _join_phrases(parts: list[str]) -> str:
    return " ".join(part for part in parts if part)
