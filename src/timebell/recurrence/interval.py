"""Intervals: anchor + k * duration, k = 0, 1, 2, ... ISO 8601 durations, RFC 5545 3.3.6.

Years, months, weeks and days are steps of the local calendar; hours, minutes and seconds are elapsed time.
Every instant is computed from the anchor, so a short month or a jump of the clock never moves later ones.
With `since` there is no grid: each run puts the next one off, and the anchor is the only instant known ahead.
"""

from __future__ import annotations

import re
from calendar import isleap
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from math import gcd
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.core import JSON, Delay, Fold, Gap, Rule, Since, Spec
from timebell.recurrence.dates import DatesRule
from timebell.recurrence.describe import describe_delay, describe_interval
from timebell.recurrence.instants import (
    DAY_S,
    MAX,
    MAX_S,
    SECOND,
    format_instant,
    from_us,
    parse_instant,
    to_us,
    wall_us,
)
from timebell.recurrence.local_times import WallRule, Walls
from timebell.recurrence.zones import Zone

_ISO = re.compile(
    r"P(?=.)(?:(?P<years>\d{1,9})Y)?(?:(?P<months>\d{1,9})M)?(?:(?P<weeks>\d{1,9})W)?(?:(?P<days>\d{1,9})D)?"
    r"(?:T(?=.)(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?"
    r"(?:(?P<seconds>\d{1,9})(?:\.(?P<fraction>\d{1,6}))?S)?)?",
    re.ASCII,
)
_MEAN_MONTH = 2_629_746  # seconds; 400 Gregorian years are 146,097 days
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_FEBRUARY = 1

MonthEnd = Literal["back", "skip", "next"]


class Step(NamedTuple):
    """A duration: calendar months and days, or elapsed microseconds."""

    months: int
    days: int
    elapsed: int


@dataclass(frozen=True, slots=True)
class Every(Spec):
    """Every so long, counted from an anchor, which is the first instant.

    `duration` is ISO 8601 text, calendar ("P1D", "P3M") or elapsed ("PT15M"), or a timedelta (elapsed).
    `anchor` is an aware datetime, or a naive one for a local time in the zone; without one, the creation.

    `since` makes an elapsed duration a fixed delay: "last_end" counts it from the end of each run, "last_start"
    from its start (but not before its end). The first run is at the anchor; without one, the duration after the
    creation.

    Of calendar steps: `month_end` says what a step of months does in a month that lacks the anchor's day: "back"
    takes the last day, "skip" leaves the month out, "next" takes the 1st of the month after (as RFC 7529 SKIP).
    `gap` ("end", "shift", "skip") and `fold` ("first", "last", "both") are as in Cron, by default RFC 5545 3.3.5.
    Raises InvalidRecurrence (INVALID_INTERVAL).
    """

    kind: ClassVar[str] = "interval"
    duration: str | timedelta
    anchor: datetime | None = None
    _: KW_ONLY
    since: Since | None = None
    month_end: MonthEnd = "back"
    gap: Gap = "shift"
    fold: Fold = "first"

    def __post_init__(self) -> None:
        if isinstance(self.duration, timedelta):
            object.__setattr__(self, "duration", _iso(self.duration))
        elif not isinstance(self.duration, str):
            refuse(f"A duration is text or a timedelta, not {self.duration!r:.64}.", 'E.g. "PT15M".')
        self._check_options(parse_duration(self.duration))
        if self.anchor is not None:
            if not isinstance(self.anchor, datetime):
                refuse(f"anchor must be a datetime, not {self.anchor!r}.", "Give a datetime, or none.")
            if not 1970 <= self.anchor.year < 2200:
                refuse(f"anchor is in the year {self.anchor.year}.", "Give one within 1970 to 2199.")
            if self.anchor.tzinfo is not None:
                object.__setattr__(self, "anchor", self.anchor.astimezone(UTC))

    def _check_options(self, step: Step) -> None:
        options: tuple[tuple[str, object, Any], ...] = (
            ("since", self.since, (None, *get_args(Since))), ("month_end", self.month_end, get_args(MonthEnd)),
            ("gap", self.gap, get_args(Gap)), ("fold", self.fold, get_args(Fold)),
        )  # fmt: skip
        for name, value, allowed in options:
            if value not in allowed:
                refuse(f"{name}={value!r:.64} is unknown.", f"Use one of {', '.join(filter(None, allowed))}.")
        if self.since is not None and not step.elapsed:
            refuse(
                f"since counts elapsed time, and {self.duration} is a step of the calendar.",
                f"Write it in hours or shorter, such as {'PT24H' if not step.months else 'PT720H'}.",
            )
        if self.month_end != "back" and not step.months:
            refuse(f"month_end concerns steps of months, and {self.duration} has none.", "Leave it out.")
        if step.elapsed and (self.gap, self.fold) != ("shift", "first"):
            refuse(
                f"gap and fold concern steps of the calendar, and {self.duration} is elapsed time.",
                "Leave them out, or use days and longer.",
            )

    @property
    def step(self) -> Step:
        """The duration in numbers."""
        return parse_duration(str(self.duration))

    @property
    def delay(self) -> Delay | None:
        return None if self.since is None else Delay(self.step.elapsed, self.since)

    def anchored(self, created_at: datetime) -> Every:
        first = to_us(created_at, "created_at") + (self.step.elapsed if self.since else 0)
        if self.anchor is not None:
            return self
        if first >= MAX:
            raise InvalidRecurrence(
                f"{self.duration} from now is after the year 2199.", code="NEVER_FIRES", fix="Give a shorter duration."
            )
        return replace(self, anchor=from_us(first))

    def compiled(self, where: Zone) -> Rule:
        if self.anchor is None:
            refuse("The interval has no anchor.", "Give one, or bind the interval with created_at.")
        if self.since is not None:
            return DatesRule((self.anchor,), where)
        return ElapsedRule(self.step, self.anchor, where) if self.step.elapsed else CalendarRule(self, where)

    def describe(self) -> str:
        if self.since is not None:
            return describe_delay(self.step, self.since, self.anchor)
        return describe_interval(self.step, self.anchor, self.month_end)

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "spec": self.duration, "anchor": format_instant(self.anchor) if self.anchor else None,
        }  # fmt: skip
        if self.since is not None:
            fields["since"] = self.since
        if self.month_end != "back":
            fields["monthEnd"] = self.month_end
        if (self.gap, self.fold) != ("shift", "first"):
            fields["dst"] = {"gap": self.gap, "fold": self.fold}
        return fields

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        anchor, dst = fields.get("anchor"), fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r:.64} is unknown.", 'Write it like {"gap": "shift", "fold": "first"}.')
        return cls(
            fields["spec"], None if anchor is None else parse_instant(anchor, "anchor"), since=fields.get("since"),
            month_end=fields.get("monthEnd", "back"), **dst,
        )  # fmt: skip


class ElapsedRule(Rule):
    """anchor + k * d in real time, whatever clocks show."""

    def __init__(self, step: Step, anchor: datetime, where: Zone) -> None:
        self.zone = where
        self._step = step.elapsed
        self._anchor = _anchor_us(anchor, where)

    def after(self, instant: int) -> int | None:
        found = self._anchor + self._passed(instant + 1) * self._step
        return found if found < MAX else None

    def before(self, instant: int) -> int | None:
        passed = self._passed(min(instant, MAX))
        return self._anchor + (passed - 1) * self._step if passed else None

    def count(self, start: int, end: int) -> int:
        return self._passed(min(end, MAX)) - self._passed(min(start, end, MAX))

    def wall(self, low: int, high: int) -> Iterator[int]:
        return iter(())

    def _passed(self, instant: int) -> int:
        """How many instants are before this one."""
        return max(0, -((self._anchor - instant) // self._step))


class CalendarRule(WallRule):
    """anchor + k * step on the local calendar; equal instants are one."""

    def __init__(self, spec: Every, where: Zone) -> None:
        anchor = spec.anchor
        assert anchor is not None
        # An aware anchor is an instant already: nothing resolves its local time a second time.
        self._given = None if anchor.tzinfo is None else to_us(anchor)
        local = wall_us(anchor if anchor.tzinfo is None else where.local(anchor).replace(tzinfo=None))
        second, fraction = divmod(local, SECOND)
        self._every = StepWalls(spec.step, second, 0, spec.month_end)
        walls = StepWalls(spec.step, second, self._given is not None, spec.month_end)
        super().__init__(where, walls, gap=spec.gap, fold=spec.fold, missing_days=True, fraction=fraction)

    def all_walls(self) -> Walls:
        return self._every

    def after(self, instant: int) -> int | None:
        return self._given if self._given is not None and instant < self._given else super().after(instant)

    def before(self, instant: int) -> int | None:
        found = super().before(instant)
        return self._given if found is None and self._given is not None and self._given < instant else found

    def count(self, start: int, end: int) -> int:
        return super().count(start, end) + (self._given is not None and start <= self._given < end)


class StepWalls(Walls):
    """start + k * step for k from `least` on; `month_end` says what a month does that lacks the start's day."""

    def __init__(self, step: Step, start: int, least: int, month_end: MonthEnd) -> None:
        self._months, self._days, self._least = step.months, step.days, least
        self._mean = step.months * _MEAN_MONTH + step.days * DAY_S
        self._start = start
        day, self._time = divmod(start, DAY_S)
        self._date = date.fromordinal(day + _EPOCH_DAY)
        self._skips, self._goes_on = month_end == "skip", month_end == "next"

    def next(self, local: int) -> int | None:
        k = self._passed(local)
        while (at := self._at(k)) is not None and self._left_out(k):  # a dozen in a row at most
            k += 1
        return at

    def previous(self, local: int) -> int | None:
        k = self._passed(local) - 1
        while k >= self._least and self._left_out(k):
            k -= 1
        return self._at(k) if k >= self._least else None

    def count(self, low: int, high: int) -> int:
        start, end = self._passed(low), self._passed(high)
        return max(0, end - start - (self._lacking(end) - self._lacking(start) if self._skips else 0))

    def _passed(self, local: int) -> int:
        """The least k whose time is not before `local`. The estimate is never a whole step too high."""
        k = max(self._least, (min(local, MAX_S + DAY_S) - self._start) // self._mean - 1)
        while (at := self._at(k)) is not None and at < local:
            k += 1
        return k

    def _at(self, k: int) -> int | None:
        """The k-th local time, those left out on the month's last day; None from 2201 on."""
        year, month = self._month(k)
        if year > 2200:
            return None
        first = date(year, month + 1, 1).toordinal()
        after = date(year + month // 11, (month + 1) % 12 + 1, 1).toordinal()
        day = first + self._date.day - 1
        if day >= after:
            day = after if self._goes_on else after - 1
        day += k * self._days - _EPOCH_DAY
        return day * DAY_S + self._time if day * DAY_S < MAX_S + DAY_S else None

    def _month(self, k: int) -> tuple[int, int]:
        """The year, and the month from 0 on, that k steps of months lead to."""
        return divmod(self._date.year * 12 + self._date.month - 1 + k * self._months, 12)

    def _left_out(self, k: int) -> bool:
        return self._skips and self._lacks(*self._month(k))

    def _lacks(self, year: int, month: int) -> bool:
        return self._date.day > _LENGTHS[month] + (month == _FEBRUARY and isleap(year))

    def _lacking(self, end: int) -> int:
        """How many k in [0, end) lead to a month that lacks the day. The months come round in a cycle, and within
        a month of the cycle only a 29 February changes, with the leap years."""
        cycle = 12 // gcd(self._months, 12)
        found = 0
        for k in range(min(cycle, end)):
            year, month = self._month(k)
            if month == _FEBRUARY and self._date.day == 29:
                step, steps = cycle * self._months // 12, len(range(k, end, cycle))
                found += steps - _leap_years(range(year, year + steps * step, step))
            elif self._lacks(year, month):
                found += len(range(k, end, cycle))
        return found


def _leap_years(years: range) -> int:
    """How many of these years, up to 2200, are leap years: every fourth one but 2100 and 2200."""
    fourths = sum(len(years[n::4]) for n in range(4) if n < len(years) and years[n] % 4 == 0)
    return fourths - sum(century in years for century in (2100, 2200))


@lru_cache(maxsize=4096)
def parse_duration(text: str) -> Step:
    """An ISO 8601 duration of at least a second. Raises InvalidRecurrence (INVALID_INTERVAL)."""
    match = _ISO.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        shown = repr(text)[:64]
        better = text.strip().upper() if isinstance(text, str) else ""
        known = f"Write {better}." if _ISO.fullmatch(better) else "Write it like PT15M, PT1H30M, P1D or P3M."
        refuse(f"{shown} is not an ISO 8601 duration.", known)
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    months, days = part["years"] * 12 + part["months"], part["weeks"] * 7 + part["days"]
    fraction = int((match["fraction"] or "").ljust(6, "0"))
    elapsed = (part["hours"] * 3600 + part["minutes"] * 60 + part["seconds"]) * SECOND + fraction
    if (months or days) and elapsed:
        refuse(
            f"{text} mixes calendar steps and elapsed time.",
            "Use days and longer, or hours and shorter, e.g. PT36H.",
        )
    if not (months or days) and elapsed < SECOND:
        refuse(f"{text} is shorter than a second.", "The shortest interval is PT1S.")
    return Step(months, days, elapsed)


def refuse(message: str, fix: str) -> NoReturn:
    """Raises InvalidRecurrence with code INVALID_INTERVAL."""
    raise InvalidRecurrence(message, code="INVALID_INTERVAL", fix=fix)


def _iso(duration: timedelta) -> str:
    if duration < timedelta(seconds=1):
        refuse(f"{duration} is shorter than a second.", "The shortest interval is a second.")
    seconds = duration.days * 86_400 + duration.seconds
    fraction = f".{duration.microseconds:06}" if duration.microseconds else ""
    units = ((seconds // 3600, "H"), (seconds // 60 % 60, "M"), (f"{seconds % 60}{fraction}", "S"))
    return "PT" + "".join(f"{amount}{unit}" for amount, unit in units if amount not in (0, "0"))


def _anchor_us(anchor: datetime, where: Zone) -> int:
    if anchor.tzinfo is not None:
        return to_us(anchor)
    second, fraction = divmod(wall_us(anchor), SECOND)
    return where.resolve(second)[0] * SECOND + fraction
