"""The text of a cron expression to sets of numbers, as bit masks.

Grammar: POSIX crontab and crontab(5); seconds, year, `?`, `L`, `W` and `#` as Quartz writes them, `+` as the
Open Cron Pattern Specification, `H` as Jenkins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.cron.day_masks import EVERY_DATE, EVERY_WEEKDAY, MonthDays, WeekDays

MAX_TEXT = 256
MAX_ITEMS = 64
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_VALUE = r"[0-9]{1,4}|[A-Z]{3}"
_TERM = re.compile(
    rf"(?:(?P<star>\*)|(?P<hash>H)(?:\((?P<least>{_VALUE})-(?P<most>{_VALUE})\))?"
    rf"|(?P<low>{_VALUE})(?:-(?P<high>{_VALUE}))?)(?:/(?P<step>[0-9]{{1,4}}))?"
)
_MONTH_DAY = re.compile(r"L(?:-(?P<before>[0-9]{1,2}))?|(?:(?P<near>[0-9]{1,2})|L)W")
_WEEKDAY = re.compile(r"(?P<day>[0-9]|[A-Z]{3})(?:L|#(?P<nth>[0-9]))")
_SPACE = re.compile(r"[ \t\r\n]+")


class Field(NamedTuple):
    """One position of an expression: its name, its least and greatest number, its words from the least on,
    how many different values it has, and the greatest that an `H` without a range takes."""

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    size: int = 0
    most: int = 0


FIELDS = (
    Field("second", 0, 59, size=60, most=59),
    Field("minute", 0, 59, size=60, most=59),
    Field("hour", 0, 23, size=24, most=23),
    Field("day-of-month", 1, 31, size=31, most=28),
    Field("month", 1, 12, MONTHS, size=12, most=12),
    Field("day-of-week", 0, 7, DAYS, size=7, most=6),
    Field("year", 1970, 2199, size=230),
)
SECOND, MINUTE, HOUR, MONTH_DAY, MONTH, WEEKDAY, YEAR = range(7)
_DAY_FIELDS = (FIELDS[MONTH_DAY], FIELDS[WEEKDAY])

# Where what is no plain number has its bits in the mask of its field: L-n, nW (LW is 0W), d#k, dL.
_FROM_END, _NEAREST, _NTH, _LAST = 32, 64, 8, 48


class Chosen(NamedTuple):
    """An `H`: the numbers of which a name chooses one, or with a step the first of several."""

    low: int
    high: int
    step: int

    def mask(self, number: int | None) -> int:
        """What this number chooses; without one, all that any could choose."""
        if number is None:
            return sum(1 << value for value in range(self.low, self.high + 1))
        if not self.step:
            return 1 << self.low + number % (self.high - self.low + 1)
        return sum(1 << value for value in range(self.low + number % self.step, self.high + 1, self.step))


class CronFields(NamedTuple):
    """A parsed expression. Masks have bit n set where n matches; bit n of the years is 1970 + n."""

    seconds: int
    minutes: int
    hours: int
    dates: MonthDays
    months: int
    weekdays: WeekDays
    years: int
    texts: tuple[str, ...]
    """The seven fields as written, in capitals, macros expanded, seconds first and year last."""
    chosen: tuple[tuple[Chosen, ...], ...]
    """What each field leaves to the name; empty once a key has chosen."""
    plain: tuple[int, ...]
    """The mask of each field without what it leaves to the name."""

    @property
    def wildcard(self) -> bool:
        """crontab(5): an entry with `*` in its time of day follows real time when the clock jumps."""
        return any(text.startswith("*") for text in self.texts[:MONTH_DAY])

    def either_day(self, days: str | None = None) -> bool:
        """Whether a day is enough that matches one of the two day fields.

        crontab(5): it is, with neither of them starting with `*`. `?` is no restriction, `+` before
        day-of-week asks for both, and so does "and"; with "or" one is enough, of those that restrict.
        """
        date, weekday = self.texts[MONTH_DAY][0], self.texts[WEEKDAY][0]
        if days is None:
            return date not in "*?" and weekday not in "*?+"
        free = (date in "*?" and self.dates == EVERY_DATE) or (weekday in "*?" and self.weekdays == EVERY_WEEKDAY)
        return days == "or" and not free


def refuse(message: str, fix: str) -> NoReturn:
    """Raises InvalidRecurrence with code INVALID_CRON."""
    raise InvalidRecurrence(message, code="INVALID_CRON", fix=fix)


def split_list(text: str, name: str, refuse: Callable[[str, str], NoReturn]) -> list[str]:
    """The items of a list, of which there are at most 64: no field has more values that differ much."""
    items = text.split(",")
    if len(items) > MAX_ITEMS:
        refuse(f"{name} lists {len(items)} values.", f"List at most {MAX_ITEMS}, or use ranges and steps.")
    return items


@lru_cache(maxsize=4096)
def parse_fields(text: str, key: str | None = None) -> CronFields:
    """The fields of a cron expression. Raises InvalidRecurrence (INVALID_CRON).

    `key` chooses the numbers of each `H`, the same on every machine; without one, an `H` is all numbers
    that a key could choose.
    """
    texts = _split(text)
    found, chosen, plain = [], [], []
    for field, words in zip(FIELDS, texts, strict=True):
        mask, choices = _read(field, words)
        if key is not None and choices:
            number = _number(field, key)
            for choice in choices:
                mask |= choice.mask(number)
            choices = []
        plain.append(mask)
        chosen.append(tuple(choices))
        for choice in choices:
            mask |= choice.mask(None)
        found.append(mask)
    seconds, minutes, hours, dates, months, weekdays, years = found
    return CronFields(
        seconds, minutes, hours, month_days(dates), months, week_days(weekdays), years >> FIELDS[YEAR].low,
        tuple(texts), tuple(chosen), tuple(plain),
    )  # fmt: skip


def month_days(mask: int) -> MonthDays:
    """The mask of a day-of-month field taken apart."""
    return MonthDays(mask & 0xFFFF_FFFE, mask >> _FROM_END & 0x7FFF_FFFF, mask >> _NEAREST)


def week_days(mask: int) -> WeekDays:
    """The mask of a day-of-week field taken apart."""
    nth = tuple(mask >> _NTH + 7 * k & 0x7F for k in range(5))
    return WeekDays((mask | mask >> 7 & 1) & 0x7F, nth, mask >> _LAST)


def _number(field: Field, key: str) -> int:
    digest = sha256(f"{field.name}\0{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8])


def _split(text: str) -> list[str]:
    if not isinstance(text, str):
        refuse(f"A cron expression is text, not {type(text).__name__}.", 'Write it like "0 9 * * 1-5".')
    if len(text) > MAX_TEXT:
        refuse(f"The cron expression has {len(text)} characters.", f"Use at most {MAX_TEXT}.")
    words = [word for word in _SPACE.split(text) if word]
    if words and words[0].startswith("@"):
        words = _macro(words)
    elif words and re.match(r"(?i)(CRON_)?TZ=", words[0]):
        refuse(f"{words[0]} has no place in a cron expression.", "Give the zone as timezone, once.")
    if len(words) == 5:
        words = ["0", *words]
    if len(words) == 6:
        words = [*words, "*"]
    if len(words) != len(FIELDS):
        _refuse_count(text, words)
    return [word.upper() if word.isascii() else word for word in words]


def _macro(words: list[str]) -> list[str]:
    name = words[0].lower()
    if len(words) == 1 and name in MACROS:
        return MACROS[name].split()
    if name == "@every":
        refuse(f"{' '.join(words)} is an interval, not a cron expression.", 'Use Every, e.g. Every("PT90S").')
    if name == "@reboot":
        refuse("@reboot has no meaning for a scheduler that survives restarts.", "Use a start hook instead.")
    refuse(f"{' '.join(words)} is not a known macro.", f"Use one of {', '.join(MACROS)}.")


def _refuse_count(text: str, words: list[str]) -> NoReturn:
    count = len(words)
    message = f"The cron expression {text!r} has {count} field{'' if count == 1 else 's'}, not 5, 6 or 7."
    fix = "Write minute hour day-of-month month day-of-week, with seconds before them, or seconds before and year after"
    if 0 < count < 5:
        fix += f", e.g. {' '.join([*words, *['*'] * (5 - count)])!r}"
    refuse(message, f"{fix}.")


def _read(field: Field, text: str) -> tuple[int, list[Chosen]]:
    """The mask of what a field names, and what it leaves to the name."""
    mask, choices = 0, []
    if text == "?" and field in _DAY_FIELDS:
        text = "*"
    items = split_list(text.removeprefix("+") if field.name == "day-of-week" else text, field.name, refuse)
    for item in items:
        special = _special(field, item)
        if special:
            mask |= special
            continue
        match = _TERM.fullmatch(item)
        if match is None or (match["hash"] and not field.most):
            _refuse_term(field, item)
        low, high = _range(field, match)
        step = _step(field, match, alone=len(items) == 1)
        if match["hash"]:
            if step > high - low + 1:
                refuse(f"{item} in {field.name} steps further than the {high - low + 1} values there are.",
                       f"Use a step of at most {high - low + 1}.")  # fmt: skip
            choices.append(Chosen(low, high, step if match["step"] else 0))
        else:
            mask |= sum(1 << value for value in range(low, high + 1, step))
    return mask, choices


def _special(field: Field, item: str) -> int:
    """The bit of an `L`, `W` or `#`; 0 for anything else."""
    if field.name == "day-of-month" and (match := _MONTH_DAY.fullmatch(item)) is not None:
        if match["before"] is not None:
            return 1 << _FROM_END + _within(item, field, match["before"], 1, 30)
        if match["near"] is not None:
            return 1 << _NEAREST + _within(item, field, match["near"], 1, 31)
        return 1 << (_NEAREST if item == "LW" else _FROM_END)
    if field.name == "day-of-week" and (match := _WEEKDAY.fullmatch(item)) is not None:
        day = _value(field, match["day"]) % 7
        if match["nth"] is None:
            return 1 << _LAST + day
        return 1 << _NTH + 7 * (_within(item, field, match["nth"], 1, 5) - 1) + day
    return 0


def _within(item: str, field: Field, digits: str, low: int, high: int) -> int:
    if not low <= int(digits) <= high:
        refuse(f"{item} in {field.name} is out of range.", f"Its number is {low} to {high}.")
    return int(digits)


def _range(field: Field, match: re.Match[str]) -> tuple[int, int]:
    if match["star"]:
        return field.low, field.high
    if match["hash"] and match["least"] is None:
        return field.low, field.most
    first, last = (match["least"], match["most"]) if match["hash"] else (match["low"], match["high"])
    low = _value(field, first)
    if last is None:
        return low, field.high if match["step"] else low
    high = _value(field, last)
    if high < low and last == DAYS[0] and field.words:
        high = field.high  # FRI-SUN: at the end of a range Sunday is 7
    if high < low:
        end = f"{first}-{field.words[-1] if first in field.words else field.low + field.size - 1}"
        start = f"{field.words[0] if first in field.words else field.low}-{last}"
        end, start = (f"H({end})", f"H({start})") if match["hash"] else (end, start)
        refuse(f"{match[0]} in {field.name} runs backwards.", f"Write {end}{' or ' if match['hash'] else ','}{start}.")
    return low, high


def _value(field: Field, text: str) -> int:
    if text in field.words:
        return field.words.index(text) + field.low
    if not text.isdigit():
        names = f", or {field.words[0]} to {field.words[-1]}" if field.words else ""
        refuse(f"{text} in {field.name} is unknown.", f"Use {field.low} to {field.high}{names}.")
    if not field.low <= int(text) <= field.high:
        refuse(f"{text} in {field.name} is out of range.", f"Use {field.low} to {field.high}.")
    return int(text)


def _step(field: Field, match: re.Match[str], *, alone: bool) -> int:
    step = int(match["step"] or 1)
    if step == 0:
        refuse(f"{match[0]} in {field.name} has a step of 0.", "Use a step of at least 1.")
    # In a list a long step in a day field is the known way to write "and" for day-of-month and day-of-week.
    if step > field.size and (alone or not field.name.startswith("day")):
        refuse(
            f"{match[0]} in {field.name} steps further than the {field.size} values there are.",
            f"Use a step of at most {field.size}, or an interval.",
        )
    return step


# What an item that is no term seems to be meant as: its sign, why it is refused, what to write.
_MISTAKES = (
    ("?", "? stands alone, in day-of-month or day-of-week", "Write * instead."),
    ("#", "# stands between a weekday and 1 to 5, in day-of-week", "Write it like MON#2."),
    ("+", "+ stands before the whole of day-of-week", "Write it like +MON or +MON,FRI."),
    ("W", "W stands after one day or L, in day-of-month", "Write it like 15W or LW."),
    (
        "L",
        "L stands in day-of-month, or after one day of the week",
        "Write L or L-3 in day-of-month, FRIL or 5L in day-of-week.",
    ),
    ("H", "H takes a range and a step", "Write it like H, H/15 or H(0-29)/10."),
)
_NAME = re.compile("|".join((*DAYS, *MONTHS)))


def _refuse_term(field: Field, item: str) -> NoReturn:
    if item == "L" and field.name == "day-of-week":
        refuse(
            "L in day-of-week needs a day before it.",
            "Write SATL for the last Saturday of the month, SAT for every one; L in day-of-month for its last day.",
        )
    if field.name == "year" and item.startswith("H"):
        refuse(f"{item!r} in year: H is for any other field.", "Write years like 2027 or 2027-2030.")
    for sign, why, fix in _MISTAKES:
        if sign in _NAME.sub("", item):
            refuse(f"{item!r} in {field.name}: {why}.", fix)
    refuse(
        f"{item!r} in {field.name} is not a number, a name, a range or a step.",
        "Write it like 5, 1-5, */15 or 0,30.",
    )
