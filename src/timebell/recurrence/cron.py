"""Cron: POSIX crontab and crontab(5), with seconds and documented behaviour when the clock jumps.

An entry with `*` at the start of its second, minute or hour field is a wildcard entry and follows real
time. Any other is fixed: each local time it names happens once on each day that exists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.base import JSON, Fold, Gap, Rule, Spec
from timebell.recurrence.days import Days
from timebell.recurrence.explain import describe_cron
from timebell.recurrence.fields import MONTHS, parse_fields, refuse, uneven_steps
from timebell.recurrence.instants import DAY_S, MAX, MAX_S, MIN, MIN_S, SECOND
from timebell.recurrence.zones import WIDEST, Segment, Zone


@dataclass(frozen=True, slots=True)
class Cron(Spec):
    """A cron expression of 5 fields, or 6 with seconds first, or a macro such as @daily.

    What a fixed time does when the clock jumps over it (`gap`): "end" fires once as the gap ends, "shift"
    as late as the clock jumped, "skip" not at all; and when the clock repeats it (`fold`): "first",
    "last" or "both". Raises InvalidRecurrence: INVALID_CRON, or NEVER_FIRES for days that do not exist.
    """

    kind: ClassVar[str] = "cron"
    expression: str
    gap: Gap = "end"
    fold: Fold = "first"

    def __post_init__(self) -> None:
        for name, value, allowed in (("gap", self.gap, get_args(Gap)), ("fold", self.fold, get_args(Fold))):
            if value not in allowed:
                refuse(f"{name}={value!r} is unknown.", f"Use one of {', '.join(allowed)}.")
        if not isinstance(self.expression, str):
            refuse(f"A cron expression is text, not {self.expression!r:.64}.", 'E.g. "0 9 * * 1-5".')
        _compiled(self.expression)

    def compiled(self, where: Zone) -> CronRule:
        return CronRule(self, where)

    def describe(self) -> str:
        return describe_cron(parse_fields(self.expression))

    def warnings(self) -> list[str]:
        fields = parse_fields(self.expression)
        found = uneven_steps(fields)
        if fields.either_day:
            found.append("day-of-month and day-of-week are both restricted: it fires on days that match either.")
        return found

    def fields(self) -> dict[str, Any]:
        return {"spec": self.expression, "dst": {"gap": self.gap, "fold": self.fold}}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r} is unknown.", 'Write it like {"gap": "end", "fold": "first"}.')
        return cls(fields["spec"], **dst)


class TimesOfDay:
    """The matching seconds of a day, as minutes and the seconds within each."""

    __slots__ = ("first", "last", "minutes", "per_day", "seconds")

    def __init__(self, hours: int, minutes: int, seconds: int) -> None:
        self.minutes = tuple(h * 3600 + m * 60 for h in _bits(hours) for m in _bits(minutes))
        self.seconds = tuple(_bits(seconds))
        self.per_day = len(self.minutes) * len(self.seconds)
        self.first = self.minutes[0] + self.seconds[0]
        self.last = self.minutes[-1] + self.seconds[-1]

    def next(self, second: int) -> int | None:
        """The first from `second` on."""
        minute = second - second % 60
        i = bisect_left(self.minutes, minute)
        if i == len(self.minutes):
            return None
        if self.minutes[i] == minute:
            if second - minute <= self.seconds[-1]:
                return minute + self.seconds[bisect_left(self.seconds, second - minute)]
            i += 1
            if i == len(self.minutes):
                return None
        return self.minutes[i] + self.seconds[0]

    def previous(self, second: int) -> int | None:
        """The last before `second`."""
        passed = self.count(second)
        if passed == 0:
            return None
        minute, second = divmod(passed - 1, len(self.seconds))
        return self.minutes[minute] + self.seconds[second]

    def count(self, second: int) -> int:
        """How many are before `second`."""
        minute = second - second % 60
        i = bisect_left(self.minutes, minute)
        found = i * len(self.seconds)
        if i < len(self.minutes) and self.minutes[i] == minute:
            found += bisect_left(self.seconds, second - minute)
        return found


class CronRule(Rule):
    """A cron expression in a zone. Within one stretch of constant offset local time is plain arithmetic;
    what happens at the jumps between stretches is decided in `_window` and `_from_gap`."""

    def __init__(self, spec: Cron, where: Zone) -> None:
        self.zone = where
        self.fixed, self._days, self._times = _compiled(spec.expression)
        self.gap: Gap = spec.gap if self.fixed else "skip"
        self.fold: Fold = spec.fold if self.fixed else "both"

    def after(self, instant: int) -> int | None:
        found = self.next_s(instant // SECOND)
        return None if found is None else found * SECOND

    def before(self, instant: int) -> int | None:
        found = self.previous_s(-(-instant // SECOND))
        return None if found is None else found * SECOND

    def next_s(self, second: int) -> int | None:
        """The first epoch second strictly after this one."""
        at = max(second + 1, MIN_S)
        i = self.zone.index(at)
        while i < len(self.zone.segments):
            segment = self.zone.segments[i]
            low, high = self._window(segment)
            local = self._local_next(max(low, at + segment.offset))
            found = local - segment.offset if local is not None and local < high else None
            if at < segment.start + segment.offset - segment.before:
                moved = next((fire for fire in self._from_gap(segment) if fire >= at), None)
                found = moved if found is None or (moved is not None and moved < found) else found
            if found is not None or local is None:
                return found if found is not None and found < MAX_S else None
            # Nothing fires before `local`, except that a fold shows earlier local times again.
            i = i + 1 if segment.after < segment.offset else max(i + 1, self.zone.index(local - WIDEST))
        return None

    def previous_s(self, second: int) -> int | None:
        """The last epoch second strictly before this one."""
        at = min(second, MAX_S) - 1
        i = self.zone.index(at)
        while i >= 0:
            segment = self.zone.segments[i]
            low, high = self._window(segment)
            local = self._local_previous(min(high, at + 1 + segment.offset))
            found = local - segment.offset if local is not None and local >= low else None
            if found is None or found < segment.start + segment.offset - segment.before:
                moved = max((fire for fire in self._from_gap(segment) if fire <= at), default=None)
                found = moved if found is None or (moved is not None and moved > found) else found
            if found is not None or local is None:
                return found if found is not None and found >= MIN_S else None
            i = i - 1 if segment.before > segment.offset else min(i - 1, self.zone.index(local + WIDEST))
        return None

    def count(self, start: int, end: int) -> int:
        low, high = (-(-min(max(edge, MIN), MAX) // SECOND) for edge in (start, end))
        segments = self.zone.segments[self.zone.index(low) : self.zone.index(high - 1) + 1]
        return sum(self._count_in(segment, low, high) for segment in segments) if low < high else 0

    def wall(self, low: int, high: int) -> Iterator[int]:
        if self.fixed:
            for local in self._named(-(-low // SECOND), -(-high // SECOND)):
                yield local * SECOND

    def _window(self, segment: Segment) -> tuple[int, int]:
        """The local seconds [from, to) that fire in this stretch: of the two passes of a fold only one."""
        start, end, offset, before, after = segment
        low = start + (before if before > offset and self.fold == "first" else offset)
        return low, end + (after if after < offset and self.fold == "last" else offset)

    def _from_gap(self, segment: Segment) -> Iterator[int]:
        """The epoch seconds at which local times that the stretch's first jump skipped fire after all."""
        if segment.offset <= segment.before or self.gap == "skip":
            return
        named = self._named(*segment.gap)
        if self.gap == "shift":
            yield from (local - segment.before for local in named)
        elif next(named, None) is not None:
            yield segment.start

    def _named(self, low: int, high: int) -> Iterator[int]:
        """The matching local seconds in [low, high), except on dates that never were."""
        local = self._local_next(low)
        while local is not None and local < high:
            if local // DAY_S in self.zone.missing_days:
                local = (local // DAY_S + 1) * DAY_S - 1
            else:
                yield local
            local = self._local_next(local + 1)

    def _local_next(self, local: int) -> int | None:
        day, second = divmod(local, DAY_S)
        match = self._days.next(day)
        if match == day:
            if (time := self._times.next(second)) is not None:
                return day * DAY_S + time
            match = self._days.next(day + 1)
        return None if match is None else match * DAY_S + self._times.first

    def _local_previous(self, local: int) -> int | None:
        day, second = divmod(local, DAY_S)
        match = self._days.previous(day)
        if match == day:
            if (time := self._times.previous(second)) is not None:
                return day * DAY_S + time
            match = self._days.previous(day - 1)
        return None if match is None else match * DAY_S + self._times.last

    def _count_in(self, segment: Segment, start: int, end: int) -> int:
        low, high = self._window(segment)
        low, high = max(low, start + segment.offset), min(high, end + segment.offset)
        moved = (fire for fire in self._from_gap(segment) if start <= fire < end)
        merged = (fire for fire in moved if self._local_next(fire + segment.offset) != fire + segment.offset)
        return (self._local_count(low, high) if low < high else 0) + sum(1 for _ in merged)

    def _local_count(self, low: int, high: int) -> int:
        (first, since), (last, until) = divmod(low, DAY_S), divmod(high, DAY_S)
        total = self._days.count(first, last) * self._times.per_day
        total -= self._times.count(since) if first in self._days else 0
        return total + (self._times.count(until) if last in self._days else 0)


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> tuple[bool, Days, TimesOfDay]:
    fields = parse_fields(expression)
    days = _days(fields.days, fields.months, fields.weekdays, fields.either_day)
    if not days:
        months = " or ".join(MONTHS[month - 1].capitalize() for month in _bits(fields.months))
        raise InvalidRecurrence(
            f"{expression!r} never fires: {months} has no day {fields.texts[3]}.",
            code="NEVER_FIRES",
            fix="Change day-of-month or month.",
        )
    return not fields.wildcard, days, _times(fields.hours, fields.minutes, fields.seconds)


_days = lru_cache(maxsize=1024)(Days)
_times = lru_cache(maxsize=1024)(TimesOfDay)


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
