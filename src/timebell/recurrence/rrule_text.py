"""The text of RFC 5545 recurrence rules and dates to values. Grammar: RFC 5545 3.3.10, 3.3.5; RFC 7529 SKIP."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple, NoReturn

from timebell.errors import InvalidInput, InvalidRecurrence
from timebell.recurrence.instants import parse_instant
from timebell.recurrence.zones import zone

MOST_TEXT = 65_536
MOST_RULE = 4_096
MOST_DATES = 1_000
MOST_INTERVAL = 1_000_000
MOST_COUNT = 1_000_000
FREQUENCIES = ("SECONDLY", "MINUTELY", "HOURLY", "DAILY", "WEEKLY", "MONTHLY", "YEARLY")
DAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_DATE = re.compile(r"(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)(\d\d)(Z)?)?", re.ASCII)
_DAY = re.compile(r"([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU)", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,7}", re.ASCII)
# Least and greatest value, and whether they count from the end, too.
_RANGES = {
    "BYSECOND": (0, 59, False),
    "BYMINUTE": (0, 59, False),
    "BYHOUR": (0, 23, False),
    "BYMONTHDAY": (1, 31, True),
    "BYYEARDAY": (1, 366, True),
    "BYWEEKNO": (1, 53, True),
    "BYMONTH": (1, 12, False),
    "BYSETPOS": (1, 366, True),
}
_SKIPS = {"OMIT": "skip", "BACKWARD": "back", "FORWARD": "next"}


@dataclass(frozen=True, slots=True)
class Parts:
    """A parsed rule. Lists are sorted and without duplicates; weekdays count from Monday = 0."""

    freq: str
    interval: int = 1
    count: int | None = None
    until: datetime | None = None
    """Inclusive; aware, or naive for a local time."""
    wkst: int = 0
    bysecond: tuple[int, ...] = ()
    byminute: tuple[int, ...] = ()
    byhour: tuple[int, ...] = ()
    byday: tuple[tuple[int, int], ...] = ()
    """(ordinal or 0, weekday)"""
    bymonthday: tuple[int, ...] = ()
    byyearday: tuple[int, ...] = ()
    byweekno: tuple[int, ...] = ()
    bymonth: tuple[int, ...] = ()
    bysetpos: tuple[int, ...] = ()
    skip: str = "skip"


def refuse(message: str, fix: str) -> NoReturn:
    """Raises InvalidRecurrence with code INVALID_RRULE."""
    raise InvalidRecurrence(message, code="INVALID_RRULE", fix=fix)


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Parts:
    """`FREQ=...;...`, with or without `RRULE:` before it. Raises InvalidRecurrence (INVALID_RRULE)."""
    if len(text) > MOST_RULE:
        refuse(f"The rule has {len(text)} characters.", f"Use at most {MOST_RULE}.")
    body = text.strip().upper().removeprefix("RRULE:")
    given: dict[str, str] = {}
    for part in body.removesuffix(";").split(";"):
        name, equals, value = part.partition("=")
        if not equals or not value or not name.isascii():
            refuse(f"{part[:40]!r} is no part of a rule.", "Write it like FREQ=WEEKLY;BYDAY=MO,FR.")
        if name in given:
            refuse(f"{name} is given twice.", "Give it once, with a list of values.")
        given[name] = value
    parts = _read(given)
    _check_parts(parts)
    return parts


def _read(given: dict[str, str]) -> Parts:
    freq = given.pop("FREQ", None)
    if freq not in FREQUENCIES:
        refuse(f"FREQ is {freq!r:.40}." if freq else "FREQ is missing.", f"Use one of {', '.join(FREQUENCIES)}.")
    if given.pop("RSCALE", "GREGORIAN") != "GREGORIAN":
        refuse("RSCALE is not GREGORIAN.", "Other calendars are not supported.")
    values: dict[str, object] = {"freq": freq}
    for name, value in given.items():
        if name in _RANGES:
            values[name.lower()] = _numbers(name, value)
        elif name == "BYDAY":
            values["byday"] = _days(value)
        elif name in ("INTERVAL", "COUNT"):
            values[name.lower()] = _whole(name, value)
        elif name == "UNTIL":
            values["until"] = _until(value)
        elif name == "WKST" and value in DAYS:
            values["wkst"] = DAYS.index(value)
        elif name == "SKIP" and value in _SKIPS:
            values["skip"] = _SKIPS[value]
        elif name in ("WKST", "SKIP"):
            refuse(f"{name} is {value[:40]!r}.", f"Use one of {', '.join(DAYS if name == 'WKST' else _SKIPS)}.")
        else:
            refuse(f"{name[:40]!r} is no part of a rule.", "RFC 5545 3.3.10 lists them.")
    return Parts(**values)  # type: ignore[arg-type]


def _numbers(name: str, text: str) -> tuple[int, ...]:
    low, high, signed = _RANGES[name]
    found = set()
    for item in text.split(","):
        number = int(item) if _NUMBER.fullmatch(item) else None
        if number is None or not low <= (abs(number) if signed else number) <= high:
            least = f"{low} to {high}" + (f" or {-high} to {-low}" if signed else "")
            leap = " Leap seconds are not supported." if name == "BYSECOND" and number == 60 else ""
            refuse(f"{item[:40]!r} in {name} is out of range.", f"Use {least}.{leap}")
        found.add(number)
    return tuple(sorted(found))


def _days(text: str) -> tuple[tuple[int, int], ...]:
    found = set()
    for item in text.split(","):
        match = _DAY.fullmatch(item)
        ordinal = int(match[1] or 0) if match else 0
        if match is None or (match[1] is not None and not 1 <= abs(ordinal) <= 53):
            refuse(f"{item[:40]!r} in BYDAY is no weekday.", "Write MO, 2TU or -1FR, with 1 to 53.")
        found.add((ordinal, DAYS.index(match[2])))
    return tuple(sorted(found))


def _whole(name: str, text: str) -> int:
    most = MOST_INTERVAL if name == "INTERVAL" else MOST_COUNT
    number = int(text) if _NUMBER.fullmatch(text) else 0
    if not 1 <= number <= most:
        refuse(f"{name} is {text[:40]}.", f"Use 1 to {most}.")
    return number


def _until(text: str) -> datetime:
    found = read_date(text, "UNTIL")
    if len(text.strip()) > len("2027-03-14"):
        return found
    return found + timedelta(days=1, microseconds=-1)  # a date covers its whole day


def _check_parts(parts: Parts) -> None:
    """The combinations that RFC 5545 3.3.10 rules out."""
    freq = parts.freq
    if parts.count is not None and parts.until is not None:
        refuse("COUNT and UNTIL exclude each other.", "Give one of them.")
    coarse = {"YEARLY", "MONTHLY"}
    if any(ordinal for ordinal, _ in parts.byday) and (freq not in coarse or parts.byweekno):
        with_weeks = " with BYWEEKNO" if freq in coarse else f" with FREQ={freq}"
        refuse(f"BYDAY has a number{with_weeks}.", "Only YEARLY and MONTHLY rules count weekdays; leave it out.")
    for name, fits in (
        ("byweekno", {"YEARLY"}),
        ("byyearday", {"YEARLY", "HOURLY", "MINUTELY", "SECONDLY"}),
        ("bymonthday", set(FREQUENCIES) - {"WEEKLY"}),
    ):
        if getattr(parts, name) and freq not in fits:
            refuse(f"{name.upper()} does not go with FREQ={freq}.", "See the table in RFC 5545 3.3.10.")
    others = ("bysecond", "byminute", "byhour", "byday", "bymonthday", "byyearday", "byweekno", "bymonth")
    if parts.bysetpos and not any(getattr(parts, name) for name in others):
        refuse("BYSETPOS picks from the other BY parts, and there are none.", "Add one, e.g. BYDAY=MO,TU,WE,TH,FR.")


class Block(NamedTuple):
    """What the lines of a recurrence say."""

    rule: str
    dtstart: datetime | None
    exdates: tuple[datetime, ...]
    rdates: tuple[datetime, ...]
    timezone: str | None


def parse_block(text: str) -> Block:
    """DTSTART, RRULE, EXDATE and RDATE lines, or a rule alone. Raises InvalidRecurrence (INVALID_RRULE)."""
    if len(text) > MOST_TEXT:
        refuse(f"The recurrence has {len(text)} characters.", f"Use at most {MOST_TEXT}.")
    lines = re.sub(r"\r?\n[ \t]", "", text).split("\n")  # RFC 5545 3.1: folded lines
    rule: str | None = None
    dtstart: datetime | None = None
    dates: dict[str, list[datetime]] = {"EXDATE": [], "RDATE": []}
    zones: set[str] = set()
    for line in filter(None, (line.strip() for line in lines)):
        head, colon, value = line.partition(":")
        name, *options = head.upper().split(";")
        if not colon or name == "RRULE" or line.upper().startswith("FREQ="):
            if rule is not None:
                refuse("There are two rules.", "Give one RRULE; a union of schedules does the rest.")
            rule = line
            continue
        zones |= {option.partition("=")[2] for option in head.split(";")[1:] if option.upper().startswith("TZID=")}
        if any(not option.startswith(("TZID=", "VALUE=DATE")) or option == "VALUE=PERIOD" for option in options):
            refuse(f"{head[:60]} has an option that is not known.", "TZID and VALUE=DATE are.")
        if name == "DTSTART" and dtstart is None:
            dtstart = read_date(value, "DTSTART")
        elif name in dates:
            dates[name] += [read_date(one, name) for one in value.split(",")]
        else:
            refuse(f"The line {line[:40]!r} is not known.", "Use one DTSTART, one RRULE, EXDATE and RDATE.")
    if rule is None:
        refuse("There is no RRULE.", "Write it like RRULE:FREQ=WEEKLY;BYDAY=MO.")
    if len(zones) > 1:
        refuse(f"The lines are in different zones: {', '.join(sorted(zones))[:80]}.", "Use one.")
    return Block(rule, dtstart, tuple(dates["EXDATE"]), tuple(dates["RDATE"]), next(iter(zones), None))


def read_date(text: str, what: str) -> datetime:
    """A date and time in the RFC's form, 20270314T020000 or with `Z` for UTC, or in ISO 8601's with dashes.

    Without `Z` it is a local time (naive); a date alone is its midnight. Raises InvalidRecurrence.
    """
    text = text.strip()
    match = _DATE.fullmatch(text.upper())
    try:
        if match is None:
            found = parse_instant(text, what)
        else:
            numbers = [int(one) for one in match.groups()[:6] if one is not None]
            found = datetime(*numbers, tzinfo=UTC if match[7] else None)  # type: ignore[arg-type,misc]
    except (ValueError, InvalidInput):
        refuse(f"{what} is {text[:40]!r}, which is not a date and time.", "Write it like 20270314T090000.")
    if not 1970 <= found.year < 2200:
        refuse(f"{what} is in the year {found.year}.", "Give one within 1970 to 2199.")
    return found


def check_zone(named: str | None, schedule: str) -> None:
    """A TZID must be the zone of the schedule: there is one place for it. Raises InvalidRecurrence."""
    if named is not None and named != schedule:
        zone(named)
        refuse(f"TZID is {named}, and the schedule's zone is {schedule}.", "Use one of them for both.")
