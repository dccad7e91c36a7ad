"""RRULE: the recurrence rules of iCalendar, RFC 5545, with RFC 7529's SKIP.

DAILY and coarser rules name local times, and WallRule says what jumps of the clock make of them. HOURLY and
finer ones are steps of real time from DTSTART, kept or left out by what clocks show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.core import JSON, Fold, Gap, Rule, Spec
from timebell.recurrence.describe import join
from timebell.recurrence.instants import SECOND, format_instant, from_us, parse_instant, to_us, wall_us
from timebell.recurrence.interval import MonthEnd
from timebell.recurrence.rrule.describe import describe_rrule
from timebell.recurrence.rrule.parser import HOURLY, MONTHLY, Lines, parse_lines, refuse
from timebell.recurrence.rrule.rule import completed, refuse_never, rule_of
from timebell.recurrence.zones import Zone, zone

MOST = 1000
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True)
class RRule(Spec):
    """A recurrence rule, e.g. "FREQ=MONTHLY;BYDAY=-1FR", or lines DTSTART, RRULE, EXDATE and RDATE of iCalendar.

    `dtstart` is where it begins, unless the text says so: a local time in the zone, or an aware datetime; without
    one, the creation. What the rule leaves open is taken from it, and it is an instant only if it fits the rule.
    `rdates` are instants in addition, `exdates` are left out; at most 1,000 of both. All in whole seconds.

    `month_end` is RFC 7529's SKIP: of a month that lacks a day of BYMONTHDAY nothing ("skip"), its last day
    ("back") or the 1st of the month after ("next"). `gap` ("end", "shift", "skip") and `fold` ("first", "last",
    "both") are as in Cron, by default RFC 5545 3.3.5; HOURLY and finer rules are real time and take neither.
    Raises InvalidRecurrence (INVALID_RRULE); bound to a zone also NEVER_FIRES, without an instant in 100 years.
    """

    kind: ClassVar[str] = "rrule"
    text: str
    dtstart: datetime | None = None
    exdates: tuple[datetime, ...] = ()
    rdates: tuple[datetime, ...] = ()
    _: KW_ONLY
    month_end: MonthEnd = "skip"
    gap: Gap = "shift"
    fold: Fold = "first"

    def __init__(
        self,
        text: str,
        dtstart: datetime | None = None,
        exdates: Iterable[datetime] = (),
        rdates: Iterable[datetime] = (),
        *,
        month_end: MonthEnd = "skip",
        gap: Gap = "shift",
        fold: Fold = "first",
    ) -> None:
        given = {
            "text": text, "dtstart": None if dtstart is None else _moment(dtstart, "dtstart"),
            "exdates": _moments(exdates, "exdates"), "rdates": _moments(rdates, "rdates"),
            "month_end": month_end, "gap": gap, "fold": fold,
        }  # fmt: skip
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name, allowed in (("month_end", MonthEnd), ("gap", Gap), ("fold", Fold)):
            if (value := getattr(self, name)) not in get_args(allowed):
                refuse(f"{name}={value!r:.64} is unknown.", f"Use one of {', '.join(get_args(allowed))}.")
        if not isinstance(self.text, str):
            refuse(f"A recurrence rule is text, not {self.text!r:.64}.", 'E.g. "FREQ=WEEKLY;BYDAY=MO".')
        lines = self.lines
        parts = lines.parts
        if lines.dtstart is not None and self.dtstart is not None:
            refuse("DTSTART is in the text, and dtstart is given too.", "Leave one out.")
        if len(self.exdates) + len(self.rdates) > MOST:
            refuse(f"There are more than {MOST} exdates and rdates.", "Use fewer, or a list of dates.")
        if parts.freq >= HOURLY and (self.gap, self.fold) != ("shift", "first"):
            refuse(f"gap and fold mean nothing with FREQ={parts.name}: it follows real time.", "Leave them out.")
        if parts.skip not in (None, self.month_end) and self.month_end != "skip":
            refuse("month_end and SKIP in the text differ.", "Leave one out.")
        if self.skip != "skip":
            if any(abs(day) == 366 for day in parts.yeardays):
                refuse("SKIP is about days of a month, not BYYEARDAY=366.", "Use BYMONTH and BYMONTHDAY.")
            several = any(len(numbers) > 1 for numbers in (parts.hours, parts.minutes, parts.seconds))
            moves = any(abs(day) > 28 for day in parts.monthdays) if parts.monthdays or parts.days else True
            if self.skip == "next" and parts.freq == MONTHLY and parts.setpos and several and moves:
                refuse("SKIP=FORWARD with BYSETPOS and several times a day is not supported.", "Leave one out.")
        moved = self.skip != "skip" and parts.freq <= MONTHLY
        named = [(month, abs(day)) for month in parts.months for day in parts.monthdays]
        if named and not moved and all(day > _LONGEST[month - 1] for month, day in named):
            refuse_never("no month of BYMONTH has a day of BYMONTHDAY")

    @property
    def lines(self) -> Lines:
        """The text, parsed."""
        return parse_lines(self.text)

    @property
    def start(self) -> datetime | None:
        """DTSTART, from the text or beside it: naive, or in UTC."""
        return self.lines.dtstart if self.dtstart is None else self.dtstart

    @property
    def skip(self) -> MonthEnd:
        """What happens in a month that lacks a day."""
        return self.lines.parts.skip or self.month_end

    def anchored(self, created_at: datetime) -> RRule:
        to_us(created_at, "created_at")
        return self if self.start is not None else replace(self, dtstart=created_at.replace(microsecond=0))

    def compiled(self, where: Zone) -> Rule:
        if self.start is None:
            refuse("The rule has no DTSTART.", "Give one, or bind the rule with created_at.")
        for name in self.lines.timezones - {where.name}:
            refuse(f"TZID={name[:64]} is not the zone of the schedule, {where.name}.", "Use one zone for both.")
        lines = self.lines
        parts = lines.parts._replace(skip=self.skip)
        exdates, rdates = self.exdates + lines.exdates, self.rdates + lines.rdates
        return rule_of(parts, self.start, exdates, rdates, self.gap, self.fold, where)

    def describe(self) -> str:
        return describe_rrule(self.lines, self.start, self.skip, len(self.exdates), len(self.rdates))

    def warnings(self) -> list[str]:
        found = []
        start, parts = self.start, self.lines.parts
        if start is not None and start.tzinfo is None:
            parts = completed(parts, wall_us(start) // SECOND)
            found += self._outside(start)
        short = [day for day in parts.monthdays if abs(day) > 28] if self.skip == "skip" and not parts.setpos else []
        months = [28 if month == 2 else _LONGEST[month - 1] for month in parts.months or range(1, 13)]
        if parts.freq <= MONTHLY and any(abs(day) > length for day in short for length in months):
            fix = "BYMONTHDAY=-1 is the last day, SKIP=BACKWARD the nearest before."
            found.append(f"Months without day {join(list(map(str, short)), 'or')} are left out. {fix}")
        if {53, -53} & {*parts.weeknos} or {366, -366} & {*parts.yeardays}:
            found.append(f"Years without {'week 53' if parts.weeknos else 'day 366'} are left out.")
        return found

    def _outside(self, start: datetime) -> list[str]:
        """A sentence if DTSTART, a local time, is no instant of its own rule."""
        where = zone(next(iter(self.lines.timezones), "UTC"))
        if not where.instants(wall_us(start) // SECOND):
            return []
        try:
            first = replace(self, exdates=(), rdates=()).compiled(where).after(-SECOND)
        except InvalidRecurrence:
            return []
        shown = where.local(from_us(first or 0)).replace(tzinfo=None)
        fits = shown == start or first is None
        return [] if fits else [f"DTSTART {start} does not fit its own rule, which begins at {shown}."]

    def fields(self) -> dict[str, Any]:
        return {
            "spec": self.text,
            "dtstart": format_instant(self.dtstart) if self.dtstart else None,
            "exdates": [format_instant(one) for one in self.exdates],
            "rdates": [format_instant(one) for one in self.rdates],
            "monthEnd": self.month_end,
            "dst": {"gap": self.gap, "fold": self.fold},
        }

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r:.64} is unknown.", 'Write it like {"gap": "shift", "fold": "first"}.')
        exdates, rdates = (_texts(fields, name) for name in ("exdates", "rdates"))
        start = fields.get("dtstart")
        return cls(
            fields["spec"], None if start is None else parse_instant(start, "dtstart"), exdates, rdates,
            month_end=fields.get("monthEnd", "skip"), **dst,
        )  # fmt: skip


def _texts(fields: JSON, name: str) -> list[datetime]:
    texts = fields.get(name) or []
    if not isinstance(texts, list):
        refuse(f"{name} is a {type(texts).__name__}.", "Give a list of dates and times.")
    return [parse_instant(text, name) for text in texts]


def _moment(given: object, what: str) -> datetime:
    """In UTC or naive, in whole seconds."""
    if isinstance(given, datetime) and given.microsecond:
        refuse(f"{what} is {given.isoformat()}.", "Give whole seconds: RFC 5545 knows no others.")
    if not isinstance(given, datetime):
        refuse(f"{what} is {given!r:.64}, which is not a datetime.", "Give a datetime.")
    if not 1970 <= given.year < 2200:
        refuse(f"{what} is in the year {given.year}.", "Give one within 1970 to 2199.")
    found = given if given.tzinfo is None else given.astimezone(UTC)
    return found.replace(fold=0)


def _moments(given: Iterable[datetime], what: str) -> tuple[datetime, ...]:
    found = {_moment(one, what) for one in given}
    return (*sorted(one for one in found if one.tzinfo), *sorted(one for one in found if not one.tzinfo))
