"""Recurrence rules in plain English."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from timebell.recurrence.describe import day_name, join, moment, month_name, ordinal, runs
from timebell.recurrence.rrule.parser import DAILY, HOURLY, MONTHLY, SECONDLY, WEEKLY, YEARLY, Lines, Parts

_UNITS = ("year", "month", "week", "day", "hour", "minute", "second")
_FEW_TIMES = 6
_FEW = ("first", "second", "third", "fourth", "fifth")
_SKIPS = {
    "back": ", on the last day of a month that lacks the day",
    "next": ", on the 1st of the next month where a month lacks the day",
}


def describe_rrule(lines: Lines, start: datetime | None, skip: str, exdates: int, rdates: int) -> str:
    """E.g. "Every 2 weeks on Monday and Friday at 09:00, 10 times"."""
    parts = lines.parts
    local = start if start is not None and start.tzinfo is None else None
    text = _finer(parts) if parts.freq >= HOURLY else _coarser(parts, local)
    if start is not None and local is None:
        text += f" from {moment(start)}"
    if parts.setpos:
        text += f", only the {join([_place(n) for n in _by_size(parts.setpos)])} of these in each {_UNITS[parts.freq]}"
    text += _SKIPS.get(skip, "") if parts.freq <= MONTHLY else ""
    if parts.limit is not None:
        text += ", once" if parts.limit == 1 else f", {parts.limit} times"
    if parts.until is not None:
        text += f", until {parts.until.date().isoformat() if parts.until_date else moment(parts.until)}"
    added, removed = rdates + len(lines.rdates), exdates + len(lines.exdates)
    text += f", and at {_amount(added, 'more date')}" if added else ""
    return text + (f", except at {_amount(removed, 'date')}" if removed else "")


def _coarser(parts: Parts, local: datetime | None) -> str:
    every = f"every {_UNITS[parts.freq]}" if parts.interval == 1 else f"every {parts.interval} {_UNITS[parts.freq]}s"
    on = _only(parts) if parts.freq == DAILY else _ON[parts.freq](parts, local)
    if parts.freq == MONTHLY and on:
        months = _months(parts)
        every = f"{every} {on}" + (f" in {months}" if months else "")
        text = every if parts.interval > 1 else f"{on} of {months or 'every month'}"
    else:
        text = f"{every} {on}".strip()
    text = text[0].upper() + text[1:]
    return f"{text} {at}" if (at := _times(parts, local)) else text


def _of_year(parts: Parts, local: datetime | None) -> str:
    months = _months(parts)
    scope = months or "the year"
    named = [
        f"in {_plural('week', parts.weeknos)}" if parts.weeknos else "",
        f"on {_plural('day', parts.yeardays)} of the year" if parts.yeardays else "",
    ]
    if parts.monthdays:
        named.append(f"on {_plural('day', parts.monthdays)} of {months or 'every month'}")
    if parts.days and (parts.monthdays or parts.yeardays):
        named.append(f"that {'are' if len(parts.monthdays + parts.yeardays) > 1 else 'is'} {_weekdays(parts)}")
    elif parts.days:
        numbered = any(n for n, _ in parts.days)
        named.insert(0, f"on {_weekdays(parts)}" + (f" of {scope}" if numbered else f" in {months}" if months else ""))
    elif not parts.monthdays and not parts.yeardays and local is not None:
        if parts.weeknos:
            named.insert(0, f"on {_weekday(local.weekday())}")
        else:
            named.append(f"on day {local.day} of {months or month_name(local.month)}")
            return _sentence(named)
    if months and not any(months in one for one in named):
        named.append(f"in {months}")
    return _sentence(named)


def _of_month(parts: Parts, local: datetime | None) -> str:
    if parts.monthdays:
        on = f"on {_plural('day', parts.monthdays)}" if parts.monthdays != (-1,) else "on the last day"
        return on + (f" that {'are' if len(parts.monthdays) > 1 else 'is'} {_weekdays(parts)}" if parts.days else "")
    if parts.days:
        return f"on {_weekdays(parts)}"
    return f"on day {local.day}" if local is not None else ""


def _of_week(parts: Parts, local: datetime | None) -> str:
    on = f"on {_weekdays(parts)}" if parts.days else f"on {_weekday(local.weekday())}" if local is not None else ""
    return _sentence([on, f"in {_months(parts)}" if parts.months else ""])


_ON = {YEARLY: _of_year, MONTHLY: _of_month, WEEKLY: _of_week}


def _only(parts: Parts) -> str:
    """The parts that leave days out."""
    limits = [
        f"on {_weekdays(parts)}" if parts.days else "",
        f"on {_plural('day', parts.monthdays)} of the month" if parts.monthdays else "",
        f"on {_plural('day', parts.yeardays)} of the year" if parts.yeardays else "",
        f"in {_months(parts)}" if parts.months else "",
    ]
    found = ", ".join(limit for limit in limits if limit)
    return f"only {found}" if found else ""


def _finer(parts: Parts) -> str:
    unit = _UNITS[parts.freq]
    text = f"Every {unit}" if parts.interval == 1 else f"Every {parts.interval} {unit}s"
    shown = [("minute", parts.minutes, parts.freq == HOURLY), ("second", parts.seconds, parts.freq < SECONDLY)]
    expand = [f"{_plural(name, values)}" for name, values, expands in shown if values and expands]
    text += f" at {join(expand)}" if expand else ""
    limits = [f"in {_plural(name, values)}" for name, values, expands in reversed(shown) if values and not expands]
    limits += [f"in {_plural('hour', parts.hours)}"] if parts.hours else []
    days = _only(parts).removeprefix("only ")
    limits += [days] if days else []
    return text + (f" only {', '.join(limits)}" if limits else "")


def _times(parts: Parts, local: datetime | None) -> str:
    if local is None and not parts.hours:
        return ""
    hours, minutes, seconds = (
        given or ((getattr(local, name),) if local is not None else (0,))
        for given, name in ((parts.hours, "hour"), (parts.minutes, "minute"), (parts.seconds, "second"))
    )
    if len(hours) * len(minutes) * len(seconds) > _FEW_TIMES or (local is None and not parts.minutes):
        named = [("second", seconds), ("minute", minutes), ("hour", hours)]
        shown = [(name, values) for name, values in named if name == "hour" or getattr(parts, name + "s")]
        return "at " + " of ".join(_plural(name, values) for name, values in shown)
    clock = [(h, m, s) for h in hours for m in minutes for s in seconds]
    return "at " + join([f"{h:02}:{m:02}" + (f":{s:02}" if seconds != (0,) else "") for h, m, s in clock])


def _weekdays(parts: Parts) -> str:
    plain = sorted(day for n, day in parts.days if n == 0)
    named = [runs(plain, _weekday)] if plain else []
    numbered = sorted(((n, day) for n, day in parts.days if n), key=lambda pair: (pair[0] < 0, pair))
    return join([*named, *(f"the {_place(n)} {_weekday(day)}" for n, day in numbered)])


def _weekday(day: int) -> str:
    return day_name((day + 1) % 7)


def _months(parts: Parts) -> str:
    return runs(parts.months, month_name)


def _place(n: int) -> str:
    """1 is "first", -1 "last", -2 "second to last"."""
    name = _FEW[abs(n) - 1] if abs(n) <= len(_FEW) else ordinal(abs(n))
    return name if n > 0 else "last" if n == -1 else f"{name} to last"


def _plural(unit: str, values: Iterable[int]) -> str:
    """E.g. "days 1, 15 and the last", counted from the end where negative."""
    positive = [value for value in values if value >= 0]
    negative = [value for value in _by_size(values) if value < 0]
    named = [f"{unit}{'s' if len(positive) > 1 else ''} {runs(positive)}"] if positive else []
    if negative:
        named.append(f"the {join([_place(value) for value in negative])} {unit}")
    return join(named)


def _by_size(values: Iterable[int]) -> list[int]:
    return sorted(values, key=lambda value: (value < 0, abs(value)))


def _amount(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _sentence(parts: list[str]) -> str:
    return " ".join(part for part in parts if part)
