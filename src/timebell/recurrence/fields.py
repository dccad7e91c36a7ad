"""The text of a cron expression to sets of numbers, as bit masks. Grammar: POSIX crontab and crontab(5)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple, NoReturn

from timebell.errors import InvalidRecurrence

MAX_TEXT = 256
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
_TERM = re.compile(
    r"(?:(?P<star>\*)|(?P<low>[0-9]{1,4}|[A-Z]{3})(?:-(?P<high>[0-9]{1,4}|[A-Z]{3}))?)(?:/(?P<step>[0-9]{1,4}))?"
)
_LATER = re.compile(r"[?#]|(?<![A-Z])[LWH](?![A-Z])|LW|\d[LW]")


class Field(NamedTuple):
    """One position of an expression: its name, its least and greatest number, its words from the least on."""

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    size: int = 0


_SECOND = Field("second", 0, 59, size=60)
_FIVE = (
    Field("minute", 0, 59, size=60),
    Field("hour", 0, 23, size=24),
    Field("day-of-month", 1, 31, size=31),
    Field("month", 1, 12, MONTHS, size=12),
    Field("day-of-week", 0, 7, DAYS, size=7),
)


class CronFields(NamedTuple):
    """A parsed expression. Masks have bit n set where n matches; day-of-week 0 is Sunday."""

    seconds: int
    minutes: int
    hours: int
    days: int
    months: int
    weekdays: int
    texts: tuple[str, ...]
    """The six fields as written, in capitals, macros expanded, seconds first."""

    @property
    def wildcard(self) -> bool:
        """crontab(5): an entry with `*` in its time of day follows real time when the clock jumps."""
        return any(text.startswith("*") for text in self.texts[:3])

    @property
    def either_day(self) -> bool:
        """crontab(5): with neither day field starting with `*`, a day that matches one of them is enough."""
        return not (self.texts[3].startswith("*") or self.texts[5].startswith("*"))


def refuse(message: str, fix: str) -> NoReturn:
    """Raises InvalidRecurrence with code INVALID_CRON."""
    raise InvalidRecurrence(message, code="INVALID_CRON", fix=fix)


@lru_cache(maxsize=4096)
def parse_fields(text: str) -> CronFields:
    """The fields of a cron expression. Raises InvalidRecurrence (INVALID_CRON)."""
    texts = _split(text)
    masks = [_mask(field, item) for field, item in zip((_SECOND, *_FIVE), texts, strict=True)]
    seconds, minutes, hours, days, months, weekdays = masks
    return CronFields(seconds, minutes, hours, days, months, (weekdays | weekdays >> 7) & 0x7F, tuple(texts))


def uneven_steps(fields: CronFields) -> list[str]:
    """A sentence for each `*/n` that starts anew before it comes round."""
    found = []
    for field, text in zip((_SECOND, *_FIVE), fields.texts, strict=True):
        for step in re.findall(r"\*/(\d+)", text):
            if 1 < int(step) <= field.size and (field.name == "day-of-month" or field.size % int(step)):
                found.append(
                    f"*/{step} in {field.name} is uneven: it restarts at every {_RESTART[field.name]}. "
                    "Use an interval for equal distances."
                )
    return found


_RESTART = {
    "second": "minute",
    "minute": "hour",
    "hour": "day",
    "day-of-month": "month",
    "month": "year",
    "day-of-week": "week",
}


def _split(text: str) -> list[str]:
    if not isinstance(text, str):
        refuse(f"A cron expression is text, not {type(text).__name__}.", 'Write it like "0 9 * * 1-5".')
    if len(text) > MAX_TEXT:
        refuse(f"The cron expression has {len(text)} characters.", f"Use at most {MAX_TEXT}.")
    words = text.split()
    if words and words[0].startswith("@"):
        words = _macro(words)
    elif words and re.match(r"(?i)(CRON_)?TZ=", words[0]):
        refuse(f"{words[0]} has no place in a cron expression.", "Give the zone as timezone, once.")
    if len(words) == len(_FIVE):
        words = ["0", *words]
    if len(words) != len(_FIVE) + 1:
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
    message = f"The cron expression {text!r} has {count} field{'' if count == 1 else 's'}, not 5 or 6."
    fix = "Write minute hour day-of-month month day-of-week, with seconds before them if you like"
    if count and count < len(_FIVE):
        fix += f", e.g. {' '.join([*words, *['*'] * (len(_FIVE) - count)])!r}"
    elif count == len(_FIVE) + 2:
        fix += f", and no year: {' '.join(words[:-1])!r}"
    refuse(message, f"{fix}.")


def _mask(field: Field, text: str) -> int:
    mask = 0
    items = text.split(",")
    for item in items:
        match = _TERM.fullmatch(item)
        if match is None:
            _refuse_term(field, item)
        low, high = _range(field, match)
        step = _step(field, match, alone=len(items) == 1)
        for value in range(low, high + 1, step):
            mask |= 1 << value
    return mask


def _range(field: Field, match: re.Match[str]) -> tuple[int, int]:
    if match["star"]:
        return field.low, field.high
    low = _value(field, match["low"])
    if match["high"] is None:
        return low, field.high if match["step"] else low
    high = _value(field, match["high"])
    if high < low and match["high"] == DAYS[0] and field.words:
        high = field.high  # FRI-SUN: at the end of a range Sunday is 7
    if high < low:
        first, last = field.low, field.low + field.size - 1
        named = match["low"] in field.words
        end = f"{match['low']}-{field.words[-1] if named else last}"
        start = f"{field.words[0] if named else first}-{match['high']}"
        refuse(f"{match[0]} in {field.name} runs backwards.", f"Write {end},{start}.")
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


def _refuse_term(field: Field, item: str) -> NoReturn:
    later = _LATER.search(item)
    if later is not None and item not in DAYS and item not in MONTHS:
        fix = "Write * instead." if later[0] == "?" else "Use numbers, names, lists, ranges and steps."
        refuse(f"{item} in {field.name}: {later[0]} is not supported.", fix)
    refuse(
        f"{item!r} in {field.name} is not a number, a name, a range or a step.",
        "Write it like 5, 1-5, */15 or 0,30.",
    )
