"""Intervals: anchor + k * duration, k = 0, 1, 2, ... ISO 8601 durations, RFC 5545 3.3.6.

Years, months, weeks and days are steps of the local calendar; hours, minutes and seconds are elapsed time.
Every instant is computed from the anchor, so a short month or a jump of the clock never moves later ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.base import JSON, Rule, Spec
from timebell.recurrence.explain import describe_interval
from timebell.recurrence.instants import (
    DAY_S,
    MAX,
    MAX_S,
    SECOND,
    format_instant,
    parse_instant,
    to_us,
    wall_us,
)
from timebell.recurrence.walls import WallRule, Walls
from timebell.recurrence.zones import Zone

_ISO = re.compile(
    r"P(?=.)(?:(?P<years>\d{1,9})Y)?(?:(?P<months>\d{1,9})M)?(?:(?P<weeks>\d{1,9})W)?(?:(?P<days>\d{1,9})D)?"
    r"(?:T(?=.)(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?"
    r"(?:(?P<seconds>\d{1,9})(?:\.(?P<fraction>\d{1,6}))?S)?)?",
    re.ASCII,
)
_MEAN_MONTH = 2_629_746  # seconds; 400 Gregorian years are 146,097 days
_EPOCH_DAY = date(1970, 1, 1).toordinal()


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
    A monthly step onto a day that a month lacks falls on its last day. Raises InvalidRecurrence.
    """

    kind: ClassVar[str] = "interval"
    duration: str | timedelta
    anchor: datetime | None = None

    def __post_init__(self) -> None:
        if isinstance(self.duration, timedelta):
            object.__setattr__(self, "duration", _iso(self.duration))
        elif not isinstance(self.duration, str):
            refuse(f"A duration is text or a timedelta, not {self.duration!r:.64}.", 'E.g. "PT15M".')
        parse_duration(self.duration)
        if self.anchor is not None:
            if not isinstance(self.anchor, datetime):
                refuse(f"anchor must be a datetime, not {self.anchor!r}.", "Give a datetime, or none.")
            if not 1970 <= self.anchor.year < 2200:
                refuse(f"anchor is in the year {self.anchor.year}.", "Give one within 1970 to 2199.")
            if self.anchor.tzinfo is not None:
                object.__setattr__(self, "anchor", self.anchor.astimezone(UTC))

    @property
    def step(self) -> Step:
        """The duration in numbers."""
        return parse_duration(str(self.duration))

    def anchored(self, created_at: datetime) -> Every:
        to_us(created_at, "created_at")
        return self if self.anchor is not None else replace(self, anchor=created_at)

    def compiled(self, where: Zone) -> Rule:
        if self.anchor is None:
            refuse("The interval has no anchor.", "Give one, or bind the interval with created_at.")
        rule = ElapsedRule if self.step.elapsed else CalendarRule
        return rule(self.step, self.anchor, where)

    def describe(self) -> str:
        return describe_interval(self.step, self.anchor)

    def fields(self) -> dict[str, Any]:
        return {"spec": self.duration, "anchor": format_instant(self.anchor) if self.anchor else None}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        anchor = fields.get("anchor")
        return cls(fields["spec"], None if anchor is None else parse_instant(anchor, "anchor"))


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
    """anchor + k * step on the local calendar; a local time that a jump of the clock skipped or repeated
    is resolved by RFC 5545 3.3.5, and equal instants are one."""

    def __init__(self, step: Step, anchor: datetime, where: Zone) -> None:
        # An aware anchor is an instant already: nothing resolves its local time a second time.
        self._given = None if anchor.tzinfo is None else to_us(anchor)
        local = wall_us(anchor if anchor.tzinfo is None else where.local(anchor).replace(tzinfo=None))
        second, fraction = divmod(local, SECOND)
        super().__init__(where, StepWalls(step, second, self._given is not None), missing_days=True, fraction=fraction)

    def after(self, instant: int) -> int | None:
        return self._given if self._given is not None and instant < self._given else super().after(instant)

    def before(self, instant: int) -> int | None:
        found = super().before(instant)
        return self._given if found is None and self._given is not None and self._given < instant else found

    def count(self, start: int, end: int) -> int:
        return super().count(start, end) + (self._given is not None and start <= self._given < end)


class StepWalls(Walls):
    """start + k * step for k from `least` on; a day that a month lacks is its last one."""

    def __init__(self, step: Step, start: int, least: int) -> None:
        self._months, self._days, self._least = step.months, step.days, least
        self._mean = step.months * _MEAN_MONTH + step.days * DAY_S
        self._start = start
        day, self._time = divmod(start, DAY_S)
        self._date = date.fromordinal(day + _EPOCH_DAY)

    def next(self, local: int) -> int | None:
        return self._at(self._passed(local))

    def previous(self, local: int) -> int | None:
        passed = self._passed(local)
        return self._at(passed - 1) if passed > self._least else None

    def count(self, low: int, high: int) -> int:
        return max(0, self._passed(high) - self._passed(low))

    def _passed(self, local: int) -> int:
        """The least k whose time is not before `local`. The estimate is never a whole step too high."""
        k = max(self._least, (min(local, MAX_S + DAY_S) - self._start) // self._mean - 1)
        while (at := self._at(k)) is not None and at < local:
            k += 1
        return k

    def _at(self, k: int) -> int | None:
        """The k-th local time; None from 2201 on."""
        year, month = divmod(self._date.year * 12 + self._date.month - 1 + k * self._months, 12)
        if year > 2200:
            return None
        first = date(year, month + 1, 1).toordinal()
        after = date(year + month // 11, (month + 1) % 12 + 1, 1).toordinal()
        day = first + min(self._date.day, after - first) - 1 - _EPOCH_DAY + k * self._days
        return day * DAY_S + self._time if day * DAY_S < MAX_S + DAY_S else None


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
