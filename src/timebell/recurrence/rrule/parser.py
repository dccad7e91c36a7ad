"""The text of a recurrence rule to numbers. Grammar: RFC 5545, 3.3.10 and 3.8.5, and RFC 7529 for SKIP."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.cron.parser import split_list
from timebell.recurrence.instants import parse_instant
from timebell.recurrence.interval import MonthEnd

MAX_TEXT = 4096
"""Characters of a rule with its DTSTART, EXDATE and RDATE."""
MAX_RULE = 1024
YEARLY, MONTHLY, WEEKLY, DAILY, HOURLY, MINUTELY, SECONDLY = range(7)
FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")
UNIT_S = (31_556_952, 2_629_746, 604_800, 86_400, 3600, 60, 1)
"""The mean length of each frequency's period in seconds."""
WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
HORIZON_S = 100 * UNIT_S[YEARLY]
_SKIPS: dict[str, MonthEnd] = {"OMIT": "skip", "BACKWARD": "back", "FORWARD": "next"}

_LINE = re.compile(r"(?P<name>[A-Za-z-]+)(?P<params>(?:;[A-Za-z-]+=(?:\"[^\"]*\"|[^\";:]*))*):(?P<value>.*)", re.DOTALL)
_BARE = re.compile(r"\s*[A-Za-z-]+=")
_BASIC = re.compile(r"(\d{4})(\d\d)(\d\d)(?:[Tt](\d\d)(\d\d)(\d\d)?([Zz])?)?", re.ASCII)
_DAY_ONLY = re.compile(r"\d{8}|\d{4}-\d\d-\d\d", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,3}", re.ASCII)
_ORDINAL_DAY = re.compile(r"([+-]?\d{1,2})?([A-Z]{2})", re.ASCII)


class Parts(NamedTuple):
    """A rule's parts. Numbers are sorted and without duplicates; an empty tuple is a part not given."""

    freq: int
    interval: int = 1
    limit: int | None = None
    """COUNT."""
    until: datetime | None = None
    """The last instant or, naive, local time that may be one; of a date its last second."""
    until_date: bool = False
    wkst: int = 0
    months: tuple[int, ...] = ()
    weeknos: tuple[int, ...] = ()
    yeardays: tuple[int, ...] = ()
    monthdays: tuple[int, ...] = ()
    days: tuple[tuple[int, int], ...] = ()
    """(n, weekday): the n-th of its period, 0 for every one; Monday is 0."""
    hours: tuple[int, ...] = ()
    minutes: tuple[int, ...] = ()
    seconds: tuple[int, ...] = ()
    setpos: tuple[int, ...] = ()
    skip: MonthEnd | None = None

    @property
    def name(self) -> str:
        """The frequency as written."""
        return FREQUENCIES[self.freq]


class Lines(NamedTuple):
    """What a text block says: naive datetimes are local times, aware ones UTC."""

    parts: Parts
    dtstart: datetime | None
    exdates: tuple[datetime, ...]
    rdates: tuple[datetime, ...]
    timezones: frozenset[str]


def refuse(message: str, fix: str) -> NoReturn:
    """Raises InvalidRecurrence with code INVALID_RRULE."""
    raise InvalidRecurrence(message, code="INVALID_RRULE", fix=fix)


@lru_cache(maxsize=4096)
def parse_lines(text: str) -> Lines:
    """A rule alone, or lines DTSTART, RRULE, EXDATE and RDATE. Raises InvalidRecurrence (INVALID_RRULE)."""
    if len(text) > MAX_TEXT:
        refuse(f"The rule has {len(text)} characters.", f"Use at most {MAX_TEXT}; give dates as exdates and rdates.")
    unfolded = re.sub(r"\r?\n[ \t]", "", text.strip())
    dates: dict[str, list[datetime]] = {"DTSTART": [], "EXDATE": [], "RDATE": []}
    rules: list[str] = []
    zones: set[str] = set()
    for line in filter(None, map(str.strip, unfolded.splitlines())):
        match = None if _BARE.match(line) else _LINE.fullmatch(line)
        name = "RRULE" if _BARE.match(line) else match["name"].upper() if match else line
        value = match["value"] if match else line
        params = match["params"] if match else ""
        if name == "RRULE":
            rules.append(value)
            if params:
                refuse(f"{params[1:41]} has no place in RRULE.", "Leave it out.")
        elif name in dates:
            dates[name] += _dates(name, value, _params(name, params, zones))
        else:
            fix = "Use the lines DTSTART, RRULE, EXDATE and RDATE."
            refuse(
                f"{name[:40]!r} is no line of a recurrence.", fix if name != "EXRULE" else f"RFC 5545 has none. {fix}"
            )
    if len(rules) != 1:
        refuse(f"There are {len(rules)} rules.", "Give one, e.g. FREQ=DAILY." if rules else "Write it like FREQ=DAILY.")
    if len(dates["DTSTART"]) > 1:
        refuse("DTSTART is given more than once.", "Give one.")
    start = next(iter(dates["DTSTART"]), None)
    return Lines(_rule(rules[0]), start, tuple(dates["EXDATE"]), tuple(dates["RDATE"]), frozenset(zones))


def _params(name: str, text: str, zones: set[str]) -> bool:
    """Whether the values are dates; a TZID goes to `zones`."""
    local = date = False
    for param in filter(None, text.split(";")):
        key, _, value = param.upper().partition("=")
        if key == "TZID":
            zones.add(param.partition("=")[2].strip('"'))
            local = True
        elif key == "VALUE" and value in ("DATE", "DATE-TIME"):
            date = value == "DATE"
        else:
            refuse(f"{param[:40]} of {name} is not supported.", "Use TZID, VALUE=DATE or VALUE=DATE-TIME.")
    if local and date:
        refuse(f"{name} has a TZID and VALUE=DATE.", "A date has no zone of its own: leave TZID out.")
    return date


def _dates(name: str, text: str, date: bool) -> list[datetime]:
    found = []
    for value in text.split(","):
        if date and not _DAY_ONLY.fullmatch(value.strip()):
            refuse(f"{value.strip()[:40]!r} in {name} is not a date.", "Write it like 20270101.")
        found.append(_moment(value.strip(), name))
    return found


def _moment(text: str, what: str) -> datetime:
    """Basic (20270101T090000) or extended (2027-01-01T09:00:00) ISO 8601, with Z for UTC; a date is its midnight."""
    match = _BASIC.fullmatch(text)
    if match:
        year, month, day, hour, minute, second, utc = match.groups()
        text = f"{year}-{month}-{day}" + (f"T{hour}:{minute}:{second or '00'}{utc or ''}" if hour else "")
    try:
        found = parse_instant(text, what)
    except InvalidRecurrence:
        refuse(f"{text[:40]!r} in {what} is not a date and time.", "Write it like 20270101T090000, with Z for UTC.")
    if not 1970 <= found.year < 2200:
        refuse(f"{text} in {what} is outside the years 1970 to 2199.", "Give a year in that range.")
    return found.replace(microsecond=0)


def _rule(text: str) -> Parts:
    if len(text) > MAX_RULE:
        refuse(f"RRULE has {len(text)} characters.", f"Use at most {MAX_RULE}, or several rules, joined by |.")
    given: dict[str, str] = {}
    for item in text.strip().upper().split(";"):
        name, equals, value = (side.strip() for side in item.partition("="))
        if name not in _READ or not equals:
            refuse(f"{item[:40]!r} is no part of a rule.", f"The parts are {', '.join(_READ)}, each NAME=VALUE.")
        if name in given:
            refuse(f"{name} is given twice.", "Give it once, with a list where it takes one.")
        given[name] = value
    if "FREQ" not in given:
        refuse("The rule has no FREQ.", f"Add one of {', '.join(FREQUENCIES)}.")
    read: dict[str, Any] = {}
    for name, value in given.items():
        field, parse = _READ[name]
        if field:
            read[field] = parse(name, value)
        else:
            parse(name, value)
    if "until" in read and _DAY_ONLY.fullmatch(given["UNTIL"]):
        read.update(until=read["until"].replace(hour=23, minute=59, second=59), until_date=True)
    parts = Parts(**read)
    _check(parts, "RSCALE" in given)
    return parts


def _check(parts: Parts, rscale: bool) -> None:
    """The table of RFC 5545, 3.3.10, and its notes: what may stand together."""
    freq, name = parts.freq, parts.name
    if parts.limit is not None and parts.until is not None:
        refuse("COUNT and UNTIL are both given.", "Leave one out: RFC 5545 allows only one of them.")
    if parts.interval * UNIT_S[freq] > HORIZON_S:
        refuse(f"INTERVAL={parts.interval} with {name} is more than 100 years.", "Use a shorter one.")
    if parts.weeknos and freq != YEARLY:
        refuse(f"BYWEEKNO has no meaning with FREQ={name}.", "Use it with FREQ=YEARLY.")
    if parts.yeardays and freq in (MONTHLY, WEEKLY, DAILY):
        refuse(f"BYYEARDAY has no meaning with FREQ={name}.", "Use it with FREQ=YEARLY, or BYMONTH and BYMONTHDAY.")
    if parts.monthdays and freq == WEEKLY:
        refuse("BYMONTHDAY has no meaning with FREQ=WEEKLY.", "Use FREQ=MONTHLY or FREQ=DAILY.")
    if any(n for n, _ in parts.days):
        if freq not in (YEARLY, MONTHLY):
            refuse(f"BYDAY has a number, which means nothing with FREQ={name}.", "Use FREQ=MONTHLY or FREQ=YEARLY.")
        if parts.weeknos:
            refuse("BYDAY has a number, which means nothing with BYWEEKNO.", "Leave the number out.")
    by = (parts.months, parts.weeknos, parts.yeardays, parts.monthdays, parts.days)
    if parts.setpos and not any((*by, parts.hours, parts.minutes, parts.seconds)):
        refuse("BYSETPOS chooses among what other BY parts give, and there are none.", "Add one, e.g. BYDAY=MO,TU.")
    if parts.skip is not None and not rscale:
        refuse("SKIP is given without RSCALE.", "Add RSCALE=GREGORIAN (RFC 7529).")


def _choice(options: dict[str, Any]) -> Callable[[str, str], Any]:
    def parse(name: str, text: str) -> Any:
        if text not in options:
            refuse(f"{name}={text[:40]} is unknown.", f"Use one of {', '.join(options)}.")
        return options[text]

    return parse


def _positive(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) == 0:
        refuse(f"{name}={text[:40]} is not a whole number from 1.", "Write it like 2, or leave it out.")
    return int(text)


def _numbers(low: int, high: int, signed: bool = False) -> Callable[[str, str], tuple[int, ...]]:
    def parse(name: str, text: str) -> tuple[int, ...]:
        found = set()
        for item in split_list(text, name, refuse):
            good = _NUMBER.fullmatch(item.strip())
            number = int(item) if good else -1
            if not good or not low <= (abs(number) if signed else number) <= high:
                limits = f"{low} to {high}" + (f" or -{high} to -{low}" if signed else "")
                what = "is not a number" if not good else "is out of range"
                refuse(f"{item.strip()[:40]!r} in {name} {what}.", f"Use {limits}.")
            found.add(number)
        return tuple(sorted(found))

    return parse


def _weekdays(name: str, text: str) -> tuple[tuple[int, int], ...]:
    found = set()
    for item in split_list(text, name, refuse):
        match = _ORDINAL_DAY.fullmatch(item.strip())
        if not match or match[2] not in WEEKDAYS or not (match[1] is None or 1 <= abs(int(match[1])) <= 53):
            refuse(f"{item.strip()[:40]!r} in {name} is not a weekday.", "Write it like MO, 1MO or -1FR (the last).")
        found.add((int(match[1] or 0), WEEKDAYS.index(match[2])))
    return tuple(sorted(found))


def _until(name: str, text: str) -> datetime:
    return _moment(text, name)


_READ: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "FREQ": ("freq", _choice({name: i for i, name in enumerate(FREQUENCIES)})),
    "INTERVAL": ("interval", _positive),
    "COUNT": ("limit", _positive),
    "UNTIL": ("until", _until),
    "WKST": ("wkst", _choice({name: i for i, name in enumerate(WEEKDAYS)})),
    "BYMONTH": ("months", _numbers(1, 12)),
    "BYWEEKNO": ("weeknos", _numbers(1, 53, signed=True)),
    "BYYEARDAY": ("yeardays", _numbers(1, 366, signed=True)),
    "BYMONTHDAY": ("monthdays", _numbers(1, 31, signed=True)),
    "BYDAY": ("days", _weekdays),
    "BYHOUR": ("hours", _numbers(0, 23)),
    "BYMINUTE": ("minutes", _numbers(0, 59)),
    "BYSECOND": ("seconds", _numbers(0, 59)),
    "BYSETPOS": ("setpos", _numbers(1, 366, signed=True)),
    "RSCALE": ("", _choice({"GREGORIAN": None})),
    "SKIP": ("skip", _choice(_SKIPS)),
}
