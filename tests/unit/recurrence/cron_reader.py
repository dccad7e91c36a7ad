"""Parse the English description of a cron expression back into its times and days."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, timedelta

DAY = timedelta(days=1)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")  # fmt: skip
ORDINAL_WORDS = ("first", "second", "third", "fourth", "fifth")
NUMBER_PATTERN = r"\d+(?: to \d+)?"
LIST = rf"{NUMBER_PATTERN}(?:(?:, | and ){NUMBER_PATTERN})*"
WEEKDAY_PATTERN = "|".join(WEEKDAYS)
SPAN = rf"(?:{WEEKDAY_PATTERN})(?: to (?:{WEEKDAY_PATTERN}))?"
ORDINAL = r"\d+(?:st|nd|rd|th)"
WHICH = "|".join((*ORDINAL_WORDS, "last"))
BACK = r"(?P<back> \(or the last day of a shorter month\))?"
DAYS = re.compile(
    rf"days? (?P<days>{LIST}){BACK}"
    rf"|every (?P<step>{ORDINAL}) day from (?P<low>\d+) to (?P<high>\d+)(?P<back2> \(or the last .*? month\))?"
    rf"|the weekdays? nearest (?P<near>the {ORDINAL}(?:(?:, | and )the {ORDINAL})*)(?P<back3> \(or .*? month\))?"
    r"|(?P<lastweekday>the last weekday of the month)|(?P<last>the last day of the month)"
    rf"|the (?P<before>{ORDINAL}(?:(?:, | and ){ORDINAL})*) days? before the last day of the month"
    rf"|the (?P<which>(?:{WHICH})(?:(?:, | and | or )(?:{WHICH}))*) (?P<nth>{WEEKDAY_PATTERN}) of the month"
    rf"|(?P<names>{SPAN}(?:(?:, | and | or ){SPAN})*)"
)
OnDay = Callable[[date], bool]


def numbers(text: str) -> set[int]:
    found: set[int] = set()
    for low, high in re.findall(r"(\d+)(?: to (\d+))?", text):
        found |= set(range(int(low), int(high or low) + 1))
    return found


def positions(text: str, names: tuple[str, ...]) -> set[int]:
    """Return the positions of names and of ranges of names."""
    found: set[int] = set()
    for low, high in re.findall(rf"({'|'.join(names)})(?: to ({'|'.join(names)}))?", text):
        found |= set(range(names.index(low), names.index(high or low) + 1))
    return found


def split_description(text: str) -> tuple[str, OnDay]:
    """Split a description into the part about the time of day and a predicate for the day."""
    match = re.fullmatch(r"(.*?)(?: on (.*?))?(?: in (.*))?", text)
    assert match is not None
    time, days, months = match.groups()
    return time, lambda day: (not days or _on(days, day)) and (not months or _in(months, day))


def times(text: str) -> set[tuple[int, int, int]] | tuple[set[int], set[int], set[int]]:
    """Return the listed times of day, or the sets of hours, minutes and seconds."""
    every = set(range(60))
    if text == "Every hour":
        return set(range(24)), {0}, {0}
    if match := re.fullmatch(r"Every hour from (\d\d):(\d\d) to (\d\d):\2", text):
        return set(range(int(match[1]), int(match[3]) + 1)), {int(match[2])}, {0}
    if clock := re.findall(r"(\d\d):(\d\d)(?::(\d\d))?", text):
        return {(int(h), int(m), int(s or 0)) for h, m, s in clock}
    sets = {"hour": set(range(24)), "minute": every, "second": every}
    parts = re.split(r" (?=of |past )", text[0].lower() + text[1:])
    finest = re.search("second|minute|hour", parts[0])
    assert finest is not None
    if finest[0] == "minute":
        sets["second"] = {0}
    for part in parts:
        if part == "past every hour":
            continue
        if match := re.fullmatch(r"(?:of )?every (?:(\d+)(?:st|nd|rd|th)? )?(second|minute|hour)s?", part):
            size, step = len(sets["hour"] if match[2] == "hour" else every), int(match[1] or 1)
            assert size % step == 0, f"{part}: not after the last"
            sets[match[2]] = set(range(0, size, step))
        elif match := re.fullmatch(r"(?:of|at) every (\d+).. (second|minute|hour) from (\d+) to (\d+)", part):
            sets[match[2]] = set(range(int(match[3]), int(match[4]) + 1, int(match[1])))
        else:
            match = re.fullmatch(rf"(?:of|at) (second|minute|hour)s? ({LIST})", part)
            assert match is not None, part
            sets[match[1]] = numbers(match[2])
    return sets["hour"], sets["minute"], sets["second"]


def _on(text: str, day: date) -> bool:
    if " or on " in text:
        one, other = text.split(" or on ")
        return _any(one, day) or _any(other, day)
    if match := re.fullmatch(r"(.*) (?:that falls?|when it falls) on (.*)", text):
        return _any(match[1], day) and _any(match[2], day)
    return _any(text, day)


def _any(text: str, day: date) -> bool:
    rest = DAYS.sub("", text)
    assert set(re.split(r", | and | or ", rest)) <= {""}, f"{text}: {rest} is not understood"
    return any(_matches(match, day) for match in DAYS.finditer(text))


def _matches(match: re.Match[str], day: date) -> bool:
    last = (day.replace(day=1) + 31 * DAY).replace(day=1) - DAY
    workday = day.weekday() < 5
    if match["days"] or match["step"]:
        step = int(match["step"][:-2]) if match["step"] else 1
        found = numbers(match["days"]) if match["days"] else set(range(int(match["low"]), int(match["high"]) + 1, step))
        moved = (match["back"] or match["back2"]) and day == last and max(found) > last.day
        return day.day in found or bool(moved)
    if match["near"] or match["lastweekday"]:
        wanted = numbers(match["near"]) if match["near"] else {last.day}
        wanted = {min(n, last.day) for n in wanted} if match["back3"] else {n for n in wanted if n <= last.day}
        distance = {n: sorted((abs(d - n), d) for d in range(1, last.day + 1) if day.replace(day=d).weekday() < 5)
                    for n in wanted}  # fmt: skip
        return workday and any(near[0][1] == day.day for near in distance.values())
    if match["last"]:
        return day == last
    if match["before"]:
        return (last - day).days in numbers(match["before"])
    if match["nth"]:
        if WEEKDAYS[day.weekday()] != match["nth"]:
            return False
        here = {ORDINAL_WORDS[(day.day - 1) // 7], *(["last"] if (day + 7 * DAY).month != day.month else [])}
        return bool(here & set(re.split(r", | and | or ", match["which"])))
    return day.weekday() in positions(match["names"], WEEKDAYS)


def _in(text: str, day: date) -> bool:
    months, _, years = text.rpartition(" of ") if re.match("|".join(MONTHS), text) else ("", "", text)
    if not months and not re.search(r"\d", years):
        months, years = years, ""
    if months and day.month - 1 not in positions(months, MONTHS):
        return False
    if match := re.fullmatch(r"every (\d+)\w\w year from (\d+)(?: to (\d+))?", years):
        return day.year in range(int(match[2]), int(match[3] or 9999) + 1, int(match[1]))
    if match := re.fullmatch(r"(\d+) and later", years):
        return day.year >= int(match[1])
    return not years or day.year in numbers(years)
