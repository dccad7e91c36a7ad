"""Parser for cron expressions; the fields become bit masks.

Grammar: POSIX crontab and crontab(5); seconds, year, `?`, `L`, `W` and `#` of Quartz, `+` of the Open Cron Pattern
Specification, and `H` of Jenkins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.cron.day_masks import EVERY_DATE, EVERY_WEEKDAY, MonthDays, WeekDays

MAX_EXPRESSION_LENGTH = 256
MAX_LIST_ITEMS = 64
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
    """One position of an expression.

    Its values are `low` to `high`, also written as `words` starting at `low`. `size` is the number of distinct values,
    and `hash_high` the highest value that an `H` without a range can choose.
    """

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    size: int = 0
    hash_high: int = 0


FIELDS = (
    Field("second", 0, 59, size=60, hash_high=59),
    Field("minute", 0, 59, size=60, hash_high=59),
    Field("hour", 0, 23, size=24, hash_high=23),
    Field("day-of-month", 1, 31, size=31, hash_high=28),
    Field("month", 1, 12, MONTHS, size=12, hash_high=12),
    Field("day-of-week", 0, 7, DAYS, size=7, hash_high=6),
    Field("year", 1970, 2199, size=230),
)
SECOND, MINUTE, HOUR, MONTH_DAY, MONTH, WEEKDAY, YEAR = range(7)
_DAY_FIELDS = (FIELDS[MONTH_DAY], FIELDS[WEEKDAY])

# Bit offsets in the mask of a day field for items other than plain numbers: L-n, nW (LW is 0W), d#k, dL.
_FROM_END, _NEAREST, _NTH, _LAST = 32, 64, 8, 48


class HashChoice(NamedTuple):
    """An `H` item: a range from which the hash of a name chooses a value, or the first of several with a step."""

    low: int
    high: int
    step: int

    def mask(self, number: int | None) -> int:
        """Return the mask of the values chosen by the hash `number`; of all possible values if it is None."""
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
    """The text of the seven fields, seconds first and year last, in capitals and with macros expanded."""
    hash_choices: tuple[tuple[HashChoice, ...], ...]
    """The `H` items of each field; empty after a key has chosen their values."""
    unhashed: tuple[int, ...]
    """The mask of each field without its `H` items."""

    @property
    def is_wildcard(self) -> bool:
        """True if a time field starts with `*`: by crontab(5), such an entry follows real time across clock changes."""
        return any(text.startswith("*") for text in self.texts[:MONTH_DAY])

    def matches_either_day(self, days: str | None = None) -> bool:
        """Return whether a day needs to match only one of the two day fields.

        By crontab(5) one is enough if neither field starts with `*`. `?` does not restrict; `+` before day-of-week
        requires both, and so does `days="and"`. With `days="or"` one of the fields that restrict is enough.
        """
        date, weekday = self.texts[MONTH_DAY][0], self.texts[WEEKDAY][0]
        if days is None:
            return date not in "*?" and weekday not in "*?+"
        unrestricted = (date in "*?" and self.dates == EVERY_DATE) or (
            weekday in "*?" and self.weekdays == EVERY_WEEKDAY
        )
        return days == "or" and not unrestricted


def refuse(message: str, fix: str) -> NoReturn:
    """Raise InvalidRecurrence with code INVALID_CRON."""
    raise InvalidRecurrence(message, code="INVALID_CRON", fix=fix)


def split_list(text: str, name: str, refuse: Callable[[str, str], NoReturn]) -> list[str]:
    """Split a comma-separated list of at most 64 items; calls `refuse` (message, fix) for longer lists."""
    items = text.split(",")
    if len(items) > MAX_LIST_ITEMS:
        refuse(f"{name} lists {len(items)} values.", f"List at most {MAX_LIST_ITEMS}, or use ranges and steps.")
    return items


@lru_cache(maxsize=4096)
def parse_fields(text: str, key: str | None = None) -> CronFields:
    """Parse the fields of a cron expression. Raises InvalidRecurrence (INVALID_CRON).

    `key` chooses the values of each `H`, identically on every machine. Without a key, an `H` matches all values that a
    key could choose.
    """
    texts = _split_fields(text)
    masks, hash_choices, unhashed = [], [], []
    for field, words in zip(FIELDS, texts, strict=True):
        mask, choices = _parse_field(field, words)
        if key is not None and choices:
            number = _hash_number(field, key)
            for choice in choices:
                mask |= choice.mask(number)
            choices = []
        unhashed.append(mask)
        hash_choices.append(tuple(choices))
        for choice in choices:
            mask |= choice.mask(None)
        masks.append(mask)
    seconds, minutes, hours, dates, months, weekdays, years = masks
    return CronFields(
        seconds, minutes, hours, unpack_month_days(dates), months, unpack_week_days(weekdays),
        years >> FIELDS[YEAR].low, tuple(texts), tuple(hash_choices), tuple(unhashed),
    )  # fmt: skip


def unpack_month_days(mask: int) -> MonthDays:
    """Split the mask of a day-of-month field into its parts."""
    return MonthDays(mask & 0xFFFF_FFFE, mask >> _FROM_END & 0x7FFF_FFFF, mask >> _NEAREST)


def unpack_week_days(mask: int) -> WeekDays:
    """Split the mask of a day-of-week field into its parts."""
    nth = tuple(mask >> _NTH + 7 * k & 0x7F for k in range(5))
    return WeekDays((mask | mask >> 7 & 1) & 0x7F, nth, mask >> _LAST)


def _hash_number(field: Field, key: str) -> int:
    digest = sha256(f"{field.name}\0{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8])


def _split_fields(text: str) -> list[str]:
    if not isinstance(text, str):
        refuse(f"A cron expression is text, not {type(text).__name__}.", 'Write it like "0 9 * * 1-5".')
    if len(text) > MAX_EXPRESSION_LENGTH:
        refuse(f"The cron expression has {len(text)} characters.", f"Use at most {MAX_EXPRESSION_LENGTH}.")
    words = [word for word in _SPACE.split(text) if word]
    if words and words[0].startswith("@"):
        words = _expand_macro(words)
    elif words and re.match(r"(?i)(CRON_)?TZ=", words[0]):
        refuse(f"{words[0]} is not allowed in a cron expression.", "Specify the zone as timezone instead.")
    if len(words) == 5:
        words = ["0", *words]
    if len(words) == 6:
        words = [*words, "*"]
    if len(words) != len(FIELDS):
        _refuse_count(text, words)
    return [word.upper() if word.isascii() else word for word in words]


def _expand_macro(words: list[str]) -> list[str]:
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
        fix += f", e.g. {_complete(words)!r}"
    refuse(message, f"{fix}.")


def _complete(words: list[str]) -> str:
    """Return these words, completed to a valid expression; another expression if that is impossible."""
    completed = " ".join([*words, *["*"] * (5 - len(words))])
    try:
        parse_fields(completed)
    except InvalidRecurrence:
        return "0 9 * * *"
    return completed


def _parse_field(field: Field, text: str) -> tuple[int, list[HashChoice]]:
    """Return the mask of a field without its `H` items, and the `H` items."""
    mask, choices = 0, []
    if text == "?" and field in _DAY_FIELDS:
        text = "*"
    items = split_list(text.removeprefix("+") if field.name == "day-of-week" else text, field.name, refuse)
    for item in items:
        special = _parse_special(field, item)
        if special:
            mask |= special
            continue
        match = _TERM.fullmatch(item)
        if match is None or (match["hash"] and not field.hash_high):
            _refuse_term(field, item)
        low, high = _parse_range(field, match)
        step = _parse_step(field, match, alone=len(items) == 1)
        if match["hash"]:
            if step > high - low + 1:
                refuse(f"{item} in {field.name} steps further than the {high - low + 1} values there are.",
                       f"Use a step of at most {high - low + 1}.")  # fmt: skip
            choices.append(HashChoice(low, high, step if match["step"] else 0))
        else:
            mask |= sum(1 << value for value in range(low, high + 1, step))
    return mask, choices


def _parse_special(field: Field, item: str) -> int:
    """Return the bit of an `L`, `W` or `#` item; 0 for any other item."""
    if field.name == "day-of-month" and (match := _MONTH_DAY.fullmatch(item)) is not None:
        if match["before"] is not None:
            return 1 << _FROM_END + _parse_bounded(item, field, match["before"], 1, 30)
        if match["near"] is not None:
            return 1 << _NEAREST + _parse_bounded(item, field, match["near"], 1, 31)
        return 1 << (_NEAREST if item == "LW" else _FROM_END)
    if field.name == "day-of-week" and (match := _WEEKDAY.fullmatch(item)) is not None:
        day = _parse_value(field, match["day"]) % 7
        if match["nth"] is None:
            return 1 << _LAST + day
        return 1 << _NTH + 7 * (_parse_bounded(item, field, match["nth"], 1, 5) - 1) + day
    return 0


def _parse_bounded(item: str, field: Field, digits: str, low: int, high: int) -> int:
    if not low <= int(digits) <= high:
        refuse(f"{item} in {field.name} is out of range.", f"Its number is {low} to {high}.")
    return int(digits)


def _parse_range(field: Field, match: re.Match[str]) -> tuple[int, int]:
    if match["star"]:
        return field.low, field.high
    if match["hash"] and match["least"] is None:
        return field.low, field.hash_high
    first, last = (match["least"], match["most"]) if match["hash"] else (match["low"], match["high"])
    low = _parse_value(field, first)
    if last is None:
        return low, field.high if match["step"] else low
    high = _parse_value(field, last)
    if high < low and last == DAYS[0] and field.words:
        high = field.high  # FRI-SUN: at the end of a range Sunday is 7
    if high < low:
        end = f"{first}-{field.words[-1] if first in field.words else field.low + field.size - 1}"
        start = f"{field.words[0] if first in field.words else field.low}-{last}"
        end, start = (f"H({end})", f"H({start})") if match["hash"] else (end, start)
        refuse(f"{match[0]} in {field.name} runs backwards.", f"Write {end}{' or ' if match['hash'] else ','}{start}.")
    return low, high


def _parse_value(field: Field, text: str) -> int:
    if text in field.words:
        return field.words.index(text) + field.low
    if not text.isdigit():
        names = f", or {field.words[0]} to {field.words[-1]}" if field.words else ""
        refuse(f"{text} in {field.name} is unknown.", f"Use {field.low} to {field.high}{names}.")
    if not field.low <= int(text) <= field.high:
        refuse(f"{text} in {field.name} is out of range.", f"Use {field.low} to {field.high}.")
    return int(text)


def _parse_step(field: Field, match: re.Match[str], *, alone: bool) -> int:
    step = int(match["step"] or 1)
    if step == 0:
        refuse(f"{match[0]} in {field.name} has a step of 0.", "Use a step of at least 1.")
    # A long step as part of a list in a day field is the established way to require both day fields in crontab(5):
    # "*/100,1-7" starts with `*` but only adds the first day.
    if step > field.size and (alone or not field.name.startswith("day")):
        refuse(
            f"{match[0]} in {field.name} steps further than the {field.size} values there are.",
            f"Use a step of at most {field.size}, or an interval.",
        )
    return step


# Common mistakes in invalid items: a character of the item, the reason for refusing it, and the fix.
_COMMON_MISTAKES = (
    ("?", "? must stand alone, in day-of-month or day-of-week", "Write * instead."),
    ("#", "# is allowed between a weekday and 1 to 5, in day-of-week", "Write it like MON#2."),
    ("+", "+ is allowed before the whole day-of-week field", "Write it like +MON or +MON,FRI."),
    ("W", "W is allowed after one day or L, in day-of-month", "Write it like 15W or LW."),
    (
        "L",
        "L is allowed in day-of-month, or after one day of the week",
        "Write L or L-3 in day-of-month, FRIL or 5L in day-of-week.",
    ),
    ("H", "H accepts only a range and a step", "Write it like H, H/15 or H(0-29)/10."),
)
_NAME = re.compile("|".join((*DAYS, *MONTHS)))


def _refuse_term(field: Field, item: str) -> NoReturn:
    if item == "L" and field.name == "day-of-week":
        refuse(
            "L in day-of-week needs a day before it.",
            "Write SATL for the last Saturday of the month, SAT for every one, or L in day-of-month for the last day.",
        )
    if field.name == "year" and item.startswith("H"):
        refuse(f"{item!r} in year: H is not allowed there.", "Write years like 2027 or 2027-2030.")
    for character, reason, fix in _COMMON_MISTAKES:
        if character in _NAME.sub("", item):
            refuse(f"{item!r} in {field.name}: {reason}.", fix)
    refuse(
        f"{item!r} in {field.name} is not a number, a name, a range or a step.",
        "Write it like 5, 1-5, */15 or 0,30.",
    )
