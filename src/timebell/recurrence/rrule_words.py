"""RRULEs in plain English."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from timebell.recurrence.explain import join, month_name
from timebell.recurrence.rrule_text import Parts

_UNITS = {
    "YEARLY": "year", "MONTHLY": "month", "WEEKLY": "week", "DAILY": "day", "HOURLY": "hour", "MINUTELY": "minute",
    "SECONDLY": "second",
}  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FEW = 6


def describe_rrule(parts: Parts, dtstart: datetime | None, removed: int, added: Sequence[datetime]) -> str:
    """E.g. "Every 2 weeks on Monday and Friday at 09:00, 10 times, from 2027-03-01 09:00"."""
    unit = _UNITS[parts.freq]
    words = [f"Every {unit}" if parts.interval == 1 else f"Every {parts.interval} {unit}s"]
    if parts.bymonth:
        words.append(f"in {join([month_name(month) for month in parts.bymonth])}")
    elif parts.freq == "YEARLY" and dtstart is not None and _bare(parts) and not parts.byweekno:
        words.append(f"in {month_name(dtstart.month)}")
    if parts.byweekno:
        words.append(f"in week{_s(parts.byweekno)} {join([_place(n, '') for n in parts.byweekno])}")
    if parts.byyearday:
        words.append(f"on {join([_nth(n) for n in parts.byyearday])} day of the year")
    words += _days(parts, dtstart)
    words += _times(parts, dtstart)
    text = " ".join(words)
    if parts.bysetpos:
        text += f", of these {join([_nth(n) for n in parts.bysetpos])} in each {unit}"
    if parts.skip != "skip":
        text += f", a day that is not there {'the day before' if parts.skip == 'back' else 'the day after'}"
    if parts.count is not None:
        text += ", once" if parts.count == 1 else f", {parts.count} times"
    if parts.until is not None:
        text += f", until {_moment(parts.until)}"
    if dtstart is not None:
        text += f", from {_moment(dtstart)}"
    if added:
        text += (
            f", and on {join([_moment(one) for one in added[:3]] + ([f'{len(added) - 3} more'] if added[3:] else []))}"
        )
    if removed:
        text += f", without {removed} date{'' if removed == 1 else 's'}"
    return text


def _bare(parts: Parts) -> bool:
    return not (parts.byday or parts.bymonthday or parts.byyearday)


def _days(parts: Parts, dtstart: datetime | None) -> list[str]:
    of = "the year" if parts.freq == "YEARLY" and not parts.bymonth else "the month"
    by_date = f"on {join([_nth(n) for n in parts.bymonthday])} day of the month" if parts.bymonthday else ""
    by_day = ""
    if parts.byday:
        names = [_WEEKDAYS[day] if not n else f"{_nth(n)} {_WEEKDAYS[day]} of {of}" for n, day in _in_week(parts)]
        by_day = f"on {join(names)}"
    if by_date and by_day:
        return [f"{by_date} if it falls {by_day}"]
    if by_date or by_day:
        return [by_date or by_day]
    if dtstart is None or not _bare(parts):
        return []
    if parts.freq == "WEEKLY" or (parts.freq == "YEARLY" and parts.byweekno):
        return [f"on {_WEEKDAYS[dtstart.weekday()]}"]
    return [f"on {_nth(dtstart.day)} day of the month"] if parts.freq in ("YEARLY", "MONTHLY") else []


def _in_week(parts: Parts) -> list[tuple[int, int]]:
    """Weekdays as people say them, Monday first."""
    return sorted(parts.byday, key=lambda day: (day[1], day[0]))


def _times(parts: Parts, dtstart: datetime | None) -> list[str]:
    if parts.freq in ("HOURLY", "MINUTELY", "SECONDLY"):
        return [
            f"while the {name} is {join([str(value) for value in values])}"
            for name, values in (("hour", parts.byhour), ("minute", parts.byminute), ("second", parts.bysecond))
            if values
        ]
    if dtstart is None and not (parts.byhour and parts.byminute):
        return []
    hours = parts.byhour or (dtstart.hour,) if dtstart else parts.byhour
    minutes = parts.byminute or (dtstart.minute,) if dtstart else parts.byminute
    seconds = parts.bysecond or ((dtstart.second,) if dtstart else (0,))
    clock = [f"{h:02}:{m:02}" + (f":{s:02}" if any(seconds) else "") for h in hours for m in minutes for s in seconds]
    shown = clock if len(clock) <= _FEW else [*clock[: _FEW - 1], f"{len(clock) - _FEW + 1} more times"]
    return [f"at {join(shown)}"]


def _nth(n: int) -> str:
    """E.g. "the 2nd", "the last", "the 2nd last"."""
    return "the last" if n == -1 else f"the {_place(n, ' last')}"


def _place(n: int, from_end: str) -> str:
    number = abs(n)
    tail = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    if not from_end:
        return str(n) if n > 0 else f"{number}{tail} last"
    return f"{number}{tail}" + (from_end if n < 0 else "")


def _s(values: Sequence[int]) -> str:
    return "" if len(values) == 1 else "s"


def _moment(when: datetime) -> str:
    text = when.replace(tzinfo=None, microsecond=0).isoformat(sep=" ").removesuffix(":00")
    return text if when.tzinfo is None else f"{text} UTC"
