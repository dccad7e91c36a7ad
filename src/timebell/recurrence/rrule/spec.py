"""RRULE: the recurrence rules of iCalendar (RFC 5545), with SKIP of RFC 7529.

DAILY and coarser rules have local times; LocalTimeRule handles clock changes. HOURLY and finer rules are steps of real
time from DTSTART, filtered by local time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.describe import join
from timebell.recurrence.instants import SECOND_US, format_instant, from_us, local_to_us, parse_instant, to_us
from timebell.recurrence.rrule.describe import describe_rrule
from timebell.recurrence.rrule.parser import HOURLY, MONTHLY, Lines, parse_lines, refuse
from timebell.recurrence.rrule.rule import build_rule, fill_from_dtstart, refuse_never_fires
from timebell.recurrence.rules.rule import Fold, Gap, MonthEnd, Rule
from timebell.recurrence.spec import JSON, Spec
from timebell.recurrence.zones import Zone, zone

MAX_DATES = 1000
_MAX_MONTH_LENGTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True)
class RRule(Spec):
    """A recurrence rule, e.g. "FREQ=MONTHLY;BYDAY=-1FR", or iCalendar lines DTSTART, RRULE, EXDATE and RDATE.

    `dtstart` is the start of the rule unless the text contains one: a local time in the zone, or an aware datetime; the
    default is the time of creation. Missing parts of the rule are taken from it, and it is an instant of the rule only
    if it matches the rule. `rdates` are additional instants and `exdates` are omitted; at most 1,000 of both together.
    All are in whole seconds.

    `month_end` is SKIP of RFC 7529; for a month that lacks a day of BYMONTHDAY, "skip" uses no day, "back" the last day
    and "next" the 1st of the following month. `gap` ("end", "shift", "skip") and `fold` ("first", "last", "both") mean
    the same as in Cron; the defaults are those of RFC 5545 3.3.5. HOURLY and finer rules follow real time and accept
    neither. Raises InvalidRecurrence (INVALID_RRULE); binding it to a zone also raises NEVER_FIRES if the rule has no
    instant within 100 years.
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
        values = {
            "text": text, "dtstart": None if dtstart is None else _check_datetime(dtstart, "dtstart"),
            "exdates": _check_datetimes(exdates, "exdates"), "rdates": _check_datetimes(rdates, "rdates"),
            "month_end": month_end, "gap": gap, "fold": fold,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name, allowed in (("month_end", MonthEnd), ("gap", Gap), ("fold", Fold)):
            if (value := getattr(self, name)) not in get_args(allowed):
                refuse(f"{name}={value!r:.64} is unknown.", f"Use one of {', '.join(get_args(allowed))}.")
        if not isinstance(self.text, str):
            refuse(f"A recurrence rule is text, not {self.text!r:.64}.", 'Write it like "FREQ=WEEKLY;BYDAY=MO".')
        lines = self.lines
        parts = lines.parts
        if lines.dtstart is not None and self.dtstart is not None:
            refuse("DTSTART is in the text, and dtstart is specified, too.", "Omit one of them.")
        if len(self.exdates) + len(self.rdates) > MAX_DATES:
            refuse(f"There are more than {MAX_DATES} exdates and rdates.", "Use fewer, or a list of dates.")
        if parts.freq >= HOURLY and (self.gap, self.fold) != ("shift", "first"):
            refuse(f"gap and fold do not apply to FREQ={parts.frequency_name}: it follows real time.", "Omit them.")
        if parts.skip not in (None, self.month_end) and self.month_end != "skip":
            refuse("month_end and SKIP in the text differ.", "Omit one of them.")
        if self.skip != "skip":
            if any(abs(day) == 366 for day in parts.yeardays):
                refuse("SKIP applies to days of a month, not to BYYEARDAY=366.", "Use BYMONTH and BYMONTHDAY.")
            has_several_times = any(len(numbers) > 1 for numbers in (parts.hours, parts.minutes, parts.seconds))
            can_move = any(abs(day) > 28 for day in parts.monthdays) if parts.monthdays or parts.days else True
            if self.skip == "next" and parts.freq == MONTHLY and parts.setpos and has_several_times and can_move:
                refuse("SKIP=FORWARD with BYSETPOS and several times a day is not supported.", "Omit one of them.")
        is_moved = self.skip != "skip" and parts.freq <= MONTHLY
        month_days = [(month, abs(day)) for month in parts.months for day in parts.monthdays]
        if month_days and not is_moved and all(day > _MAX_MONTH_LENGTHS[month - 1] for month, day in month_days):
            refuse_never_fires("no month of BYMONTH has a day of BYMONTHDAY")

    @property
    def lines(self) -> Lines:
        """The parsed text."""
        return parse_lines(self.text)

    @property
    def start(self) -> datetime | None:
        """DTSTART, from `dtstart` or the text: naive or in UTC, None if unspecified."""
        return self.lines.dtstart if self.dtstart is None else self.dtstart

    @property
    def skip(self) -> MonthEnd:
        """The effective `month_end`: SKIP of the text if specified."""
        return self.lines.parts.skip or self.month_end

    def with_anchor(self, created_at: datetime) -> RRule:
        to_us(created_at, "created_at")
        return self if self.start is not None else replace(self, dtstart=created_at.replace(microsecond=0))

    def compile(self, zone: Zone) -> Rule:
        if self.start is None:
            refuse("The rule has no DTSTART.", "Specify one, or bind the rule with created_at.")
        for name in self.lines.timezones - {zone.name}:
            refuse(f"TZID={name[:64]} is not the zone of the schedule, {zone.name}.", "Use one zone for both.")
        lines = self.lines
        parts = lines.parts._replace(skip=self.skip)
        exdates, rdates = self.exdates + lines.exdates, self.rdates + lines.rdates
        return build_rule(parts, self.start, exdates, rdates, self.gap, self.fold, zone)

    def describe(self) -> str:
        return describe_rrule(self.lines, self.start, self.skip, len(self.exdates), len(self.rdates))

    def warnings(self) -> list[str]:
        warnings = []
        start, parts = self.start, self.lines.parts
        if start is not None and start.tzinfo is None:
            parts = fill_from_dtstart(parts, local_to_us(start) // SECOND_US)
            warnings += self._dtstart_warnings(start)
        missing_days = (
            [day for day in parts.monthdays if abs(day) > 28] if self.skip == "skip" and not parts.setpos else []
        )
        months = [28 if month == 2 else _MAX_MONTH_LENGTHS[month - 1] for month in parts.months or range(1, 13)]
        if parts.freq <= MONTHLY and any(abs(day) > length for day in missing_days for length in months):
            fix = "BYMONTHDAY=-1 is the last day; SKIP=BACKWARD uses the last day instead of a missing one."
            warnings.append(f"Months without day {join(list(map(str, missing_days)), 'or')} are omitted. {fix}")
        if {53, -53} & {*parts.weeknos} or {366, -366} & {*parts.yeardays}:
            warnings.append(f"Years without {'week 53' if parts.weeknos else 'day 366'} are omitted.")
        return warnings

    def _dtstart_warnings(self, start: datetime) -> list[str]:
        """Return a warning if DTSTART, a local time, is not an instant of the rule."""
        local_zone = zone(next(iter(self.lines.timezones), "UTC"))
        if not local_zone.instants(local_to_us(start) // SECOND_US):
            return []
        try:
            first = replace(self, exdates=(), rdates=()).compile(local_zone).after(-SECOND_US)
        except InvalidRecurrence:
            return []
        first_local = local_zone.local(from_us(first or 0)).replace(tzinfo=None)
        matches = first_local == start or first is None
        return [] if matches else [f"DTSTART {start} does not match the rule, which begins at {first_local}."]

    def to_fields(self) -> dict[str, Any]:
        return {
            "spec": self.text,
            "dtstart": format_instant(self.dtstart) if self.dtstart else None,
            "exdates": [format_instant(value) for value in self.exdates],
            "rdates": [format_instant(value) for value in self.rdates],
            "monthEnd": self.month_end,
            "dst": {"gap": self.gap, "fold": self.fold},
        }

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r:.64} is unknown.", 'Write it like {"gap": "shift", "fold": "first"}.')
        exdates, rdates = (_parse_dates(fields, name) for name in ("exdates", "rdates"))
        start = fields.get("dtstart")
        return cls(
            fields["spec"], None if start is None else parse_instant(start, "dtstart"), exdates, rdates,
            month_end=fields.get("monthEnd", "skip"), **dst,
        )  # fmt: skip


def _parse_dates(fields: JSON, name: str) -> list[datetime]:
    texts = fields.get(name) or []
    if not isinstance(texts, list):
        refuse(f"{name} is a {type(texts).__name__}.", "Specify a list of dates and times.")
    return [parse_instant(text, name) for text in texts]


def _check_datetime(value: object, name: str) -> datetime:
    """Return a datetime in UTC or naive. Raises InvalidRecurrence unless it is in whole seconds and in range."""
    if isinstance(value, datetime) and value.microsecond:
        refuse(f"{name} is {value.isoformat()}.", "Use whole seconds: RFC 5545 has no fractions.")
    if not isinstance(value, datetime):
        refuse(f"{name} is {value!r:.64}, which is not a datetime.", "Specify a datetime.")
    if not 1970 <= value.year < 2200:
        refuse(f"{name} is in the year {value.year}.", "Use a year within 1970 to 2199.")
    normalized = value if value.tzinfo is None else value.astimezone(UTC)
    return normalized.replace(fold=0)


def _check_datetimes(values: Iterable[datetime], name: str) -> tuple[datetime, ...]:
    normalized = {_check_datetime(value, name) for value in values}
    return (
        *sorted(value for value in normalized if value.tzinfo),
        *sorted(value for value in normalized if not value.tzinfo),
    )
