"""Parser for recurrence rules. Grammar: RFC 5545, 3.3.10 and 3.8.5, and RFC 7529 for SKIP."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.cron.parser import split_list
from timebell.recurrence.instants import parse_instant
from timebell.recurrence.rules.rule import MonthEnd

MAX_TEXT_LENGTH = 4096
"""Maximum length of a rule with its DTSTART, EXDATE and RDATE, in characters."""
MAX_RULE_LENGTH = 1024
YEARLY, MONTHLY, WEEKLY, DAILY, HOURLY, MINUTELY, SECONDLY = range(7)
FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")
UNIT_S = (31_556_952, 2_629_746, 604_800, 86_400, 3600, 60, 1)
"""The mean length of the period of each frequency, in seconds."""
WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
HORIZON_S = 100 * UNIT_S[YEARLY]
_SKIPS: dict[str, MonthEnd] = {"OMIT": "skip", "BACKWARD": "back", "FORWARD": "next"}

_LINE = re.compile(r"(?P<name>[A-Za-z-]+)(?P<params>(?:;[A-Za-z-]+=(?:\"[^\"]*\"|[^\";:]*))*):(?P<value>.*)", re.DOTALL)
_BARE_RULE = re.compile(r"\s*[A-Za-z-]+=")
_BASIC_FORMAT = re.compile(r"(\d{4})(\d\d)(\d\d)(?:[Tt](\d\d)(\d\d)(\d\d)?([Zz])?)?", re.ASCII)
_DATE_ONLY = re.compile(r"\d{8}|\d{4}-\d\d-\d\d", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,3}", re.ASCII)
_ORDINAL_DAY = re.compile(r"([+-]?\d{1,2})?([A-Z]{2})", re.ASCII)


class Parts(NamedTuple):
    """The parts of a rule. Numbers are sorted and without duplicates; an unspecified part is an empty tuple."""

    freq: int
    interval: int = 1
    max_count: int | None = None
    """COUNT."""
    until: datetime | None = None
    """UNTIL: the last allowed instant, or local time if naive; for a date, its last second."""
    until_date: bool = False
    wkst: int = 0
    months: tuple[int, ...] = ()
    weeknos: tuple[int, ...] = ()
    yeardays: tuple[int, ...] = ()
    monthdays: tuple[int, ...] = ()
    days: tuple[tuple[int, int], ...] = ()
    """(n, weekday): the n-th such weekday of the period, n = 0 for every one; Monday is 0."""
    hours: tuple[int, ...] = ()
    minutes: tuple[int, ...] = ()
    seconds: tuple[int, ...] = ()
    setpos: tuple[int, ...] = ()
    skip: MonthEnd | None = None

    @property
    def frequency_name(self) -> str:
        """The name of the frequency in RRULE."""
        return FREQUENCIES[self.freq]


class Lines(NamedTuple):
    """The parsed lines of a text; naive datetimes are local times, aware ones are in UTC."""

    parts: Parts
    dtstart: datetime | None
    exdates: tuple[datetime, ...]
    rdates: tuple[datetime, ...]
    timezones: frozenset[str]


def refuse(message: str, fix: str) -> NoReturn:
    """Raise InvalidRecurrence with code INVALID_RRULE."""
    raise InvalidRecurrence(message, code="INVALID_RRULE", fix=fix)


@lru_cache(maxsize=4096)
def parse_lines(text: str) -> Lines:
    """Parse a rule, or lines DTSTART, RRULE, EXDATE and RDATE. Raises InvalidRecurrence (INVALID_RRULE)."""
    if len(text) > MAX_TEXT_LENGTH:
        refuse(
            f"The rule has {len(text)} characters.", f"Use at most {MAX_TEXT_LENGTH}; pass dates as exdates and rdates."
        )
    unfolded = re.sub(r"\r?\n[ \t]", "", text.strip())
    dates: dict[str, list[datetime]] = {"DTSTART": [], "EXDATE": [], "RDATE": []}
    rules: list[str] = []
    zones: set[str] = set()
    for line in filter(None, map(str.strip, unfolded.splitlines())):
        match = None if _BARE_RULE.match(line) else _LINE.fullmatch(line)
        name = "RRULE" if _BARE_RULE.match(line) else match["name"].upper() if match else line
        value = match["value"] if match else line
        params = match["params"] if match else ""
        if name == "RRULE":
            rules.append(value)
            if params:
                refuse(f"{params[1:41]} is not allowed in RRULE.", "Omit it.")
        elif name in dates:
            dates[name] += _parse_dates(name, value, _parse_params(name, params, zones))
        else:
            fix = "Use the lines DTSTART, RRULE, EXDATE and RDATE."
            refuse(
                f"{name[:40]!r} is not a line of a recurrence.",
                fix if name != "EXRULE" else f"RFC 5545 does not have it. {fix}",
            )
    if len(rules) != 1:
        refuse(f"There are {len(rules)} rules.", "Use one, e.g. FREQ=DAILY." if rules else "Write it like FREQ=DAILY.")
    if len(dates["DTSTART"]) > 1:
        refuse("DTSTART is specified more than once.", "Specify it once.")
    start = next(iter(dates["DTSTART"]), None)
    return Lines(_parse_rule(rules[0]), start, tuple(dates["EXDATE"]), tuple(dates["RDATE"]), frozenset(zones))


def _parse_params(name: str, text: str, timezones: set[str]) -> bool:
    """Return whether the values are dates, and add a TZID to `timezones`."""
    local = date = False
    for param in filter(None, text.split(";")):
        key, _, value = param.upper().partition("=")
        if key == "TZID":
            timezones.add(param.partition("=")[2].strip('"'))
            local = True
        elif key == "VALUE" and value in ("DATE", "DATE-TIME"):
            date = value == "DATE"
        else:
            refuse(f"{param[:40]} of {name} is not supported.", "Use TZID, VALUE=DATE or VALUE=DATE-TIME.")
    if local and date:
        refuse(f"{name} has a TZID and VALUE=DATE.", "A date has no zone of its own: omit TZID.")
    return date


def _parse_dates(name: str, text: str, date: bool) -> list[datetime]:
    datetimes = []
    for value in text.split(","):
        if date and not _DATE_ONLY.fullmatch(value.strip()):
            refuse(f"{value.strip()[:40]!r} in {name} is not a date.", "Write it like 20270101.")
        datetimes.append(_parse_datetime(value.strip(), name))
    return datetimes


def _parse_datetime(text: str, name: str) -> datetime:
    """Parse basic (20270101T090000) or extended (2027-01-01T09:00:00) ISO 8601, with Z for UTC; dates are midnights."""
    match = _BASIC_FORMAT.fullmatch(text)
    if match:
        year, month, day, hour, minute, second, utc = match.groups()
        text = f"{year}-{month}-{day}" + (f"T{hour}:{minute}:{second or '00'}{utc or ''}" if hour else "")
    try:
        parsed = parse_instant(text, name)
    except InvalidRecurrence:
        refuse(f"{text[:40]!r} in {name} is not a date and time.", "Write it like 20270101T090000, with Z for UTC.")
    if not 1970 <= parsed.year < 2200:
        refuse(f"{text} in {name} is outside the years 1970 to 2199.", "Use a year in that range.")
    return parsed.replace(microsecond=0)


def _parse_rule(text: str) -> Parts:
    if len(text) > MAX_RULE_LENGTH:
        refuse(f"RRULE has {len(text)} characters.", f"Use at most {MAX_RULE_LENGTH}, or several rules, joined by |.")
    texts: dict[str, str] = {}
    for item in text.strip().upper().split(";"):
        name, equals, value = (side.strip() for side in item.partition("="))
        if name not in _PART_PARSERS or not equals:
            refuse(
                f"{item[:40]!r} is not a part of a rule.", f"The parts are {', '.join(_PART_PARSERS)}, each NAME=VALUE."
            )
        if name in texts:
            refuse(f"{name} is specified twice.", "Specify it once, as a list if it accepts one.")
        texts[name] = value
    if "FREQ" not in texts:
        refuse("The rule has no FREQ.", f"Add one of {', '.join(FREQUENCIES)}.")
    fields: dict[str, Any] = {}
    for name, value in texts.items():
        field, parse = _PART_PARSERS[name]
        if field:
            fields[field] = parse(name, value)
        else:
            parse(name, value)
    if "until" in fields and _DATE_ONLY.fullmatch(texts["UNTIL"]):
        fields.update(until=fields["until"].replace(hour=23, minute=59, second=59), until_date=True)
    parts = Parts(**fields)
    _check_combinations(parts, "RSCALE" in texts)
    return parts


def _check_combinations(parts: Parts, rscale: bool) -> None:
    """Refuse combinations of parts that the table of RFC 5545, 3.3.10, and its notes exclude."""
    freq, name = parts.freq, parts.frequency_name
    if parts.max_count is not None and parts.until is not None:
        refuse("COUNT and UNTIL are both specified.", "Omit one: RFC 5545 allows only one of them.")
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
            refuse(f"BYDAY has a number, which has no meaning with FREQ={name}.", "Use FREQ=MONTHLY or FREQ=YEARLY.")
        if parts.weeknos:
            refuse("BYDAY has a number, which has no meaning with BYWEEKNO.", "Omit the number.")
    by = (parts.months, parts.weeknos, parts.yeardays, parts.monthdays, parts.days)
    if parts.setpos and not any((*by, parts.hours, parts.minutes, parts.seconds)):
        refuse("BYSETPOS selects from the results of other BY parts, and there are none.", "Add one, e.g. BYDAY=MO,TU.")
    if parts.skip is not None and not rscale:
        refuse("SKIP is specified without RSCALE.", "Add RSCALE=GREGORIAN (RFC 7529).")


def _choice_parser(options: dict[str, Any]) -> Callable[[str, str], Any]:
    def parse(name: str, text: str) -> Any:
        if text not in options:
            refuse(f"{name}={text[:40]} is unknown.", f"Use one of {', '.join(options)}.")
        return options[text]

    return parse


def _parse_positive(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) == 0:
        refuse(f"{name}={text[:40]} is not a whole number from 1.", "Write it like 2, or omit it.")
    return int(text)


def _numbers_parser(low: int, high: int, signed: bool = False) -> Callable[[str, str], tuple[int, ...]]:
    def parse(name: str, text: str) -> tuple[int, ...]:
        numbers = set()
        for item in split_list(text, name, refuse):
            is_number = _NUMBER.fullmatch(item.strip())
            number = int(item) if is_number else -1
            if not is_number or not low <= (abs(number) if signed else number) <= high:
                limits = f"{low} to {high}" + (f" or -{high} to -{low}" if signed else "")
                reason = "is not a number" if not is_number else "is out of range"
                refuse(f"{item.strip()[:40]!r} in {name} {reason}.", f"Use {limits}.")
            numbers.add(number)
        return tuple(sorted(numbers))

    return parse


def _parse_weekdays(name: str, text: str) -> tuple[tuple[int, int], ...]:
    weekdays = set()
    for item in split_list(text, name, refuse):
        match = _ORDINAL_DAY.fullmatch(item.strip())
        if not match or match[2] not in WEEKDAYS or not (match[1] is None or 1 <= abs(int(match[1])) <= 53):
            refuse(f"{item.strip()[:40]!r} in {name} is not a weekday.", "Write it like MO, 1MO or -1FR (the last).")
        weekdays.add((int(match[1] or 0), WEEKDAYS.index(match[2])))
    return tuple(sorted(weekdays))


def _parse_until(name: str, text: str) -> datetime:
    return _parse_datetime(text, name)


_PART_PARSERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "FREQ": ("freq", _choice_parser({name: i for i, name in enumerate(FREQUENCIES)})),
    "INTERVAL": ("interval", _parse_positive),
    "COUNT": ("max_count", _parse_positive),
    "UNTIL": ("until", _parse_until),
    "WKST": ("wkst", _choice_parser({name: i for i, name in enumerate(WEEKDAYS)})),
    "BYMONTH": ("months", _numbers_parser(1, 12)),
    "BYWEEKNO": ("weeknos", _numbers_parser(1, 53, signed=True)),
    "BYYEARDAY": ("yeardays", _numbers_parser(1, 366, signed=True)),
    "BYMONTHDAY": ("monthdays", _numbers_parser(1, 31, signed=True)),
    "BYDAY": ("days", _parse_weekdays),
    "BYHOUR": ("hours", _numbers_parser(0, 23)),
    "BYMINUTE": ("minutes", _numbers_parser(0, 59)),
    "BYSECOND": ("seconds", _numbers_parser(0, 59)),
    "BYSETPOS": ("setpos", _numbers_parser(1, 366, signed=True)),
    "RSCALE": ("", _choice_parser({"GREGORIAN": None})),
    "SKIP": ("skip", _choice_parser(_SKIPS)),
}
