"""RRULE: RFC 5545 recurrence rules with EXDATE and RDATE.

Rules of days and longer periods name local times: one that the clock skips is as late as the clock jumped,
of one that it repeats the first counts (RFC 5545 3.3.5). Rules of hours and shorter periods count real time.
Nothing is ever walked from DTSTART: every question starts at the period it is about.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.base import JSON, Fold, Gap, Rule, Spec, stop_after
from timebell.recurrence.instants import DAY_S, MAX, SECOND, format_instant, from_us, parse_instant, to_us, wall_us
from timebell.recurrence.interval import ElapsedRule, Step
from timebell.recurrence.rrule_days import RuleDays, picked
from timebell.recurrence.rrule_elapsed import UNITS, ElapsedPicks, is_elapsed
from timebell.recurrence.rrule_text import MOST_DATES, Parts, check_zone, parse_block, parse_rule, refuse
from timebell.recurrence.rrule_words import describe_rrule
from timebell.recurrence.walls import DailyWalls, TimesOfDay, WallRule, Walls
from timebell.recurrence.zones import Zone

_HORIZON = timedelta(days=36_525)


@dataclass(frozen=True, slots=True)
class RRule(Spec):
    """A recurrence rule: `FREQ=...` with its own `dtstart`, or a block of DTSTART, RRULE, EXDATE, RDATE lines.

    `dtstart` is an aware datetime, or a naive one for a local time in the schedule's zone; without one it is
    the creation. Whole seconds. A DTSTART that the rule does not name is no occurrence. What a local time does
    when the clock skips it (`gap`): "shift" it as far as the clock jumped, fire at the "end" of the gap, or
    "skip" it; and when the clock repeats it (`fold`): "first", "last" or "both". Raises InvalidRecurrence
    (INVALID_RRULE); NEVER_FIRES when bound, if nothing comes within a hundred years.
    """

    kind: ClassVar[str] = "rrule"
    text: str
    dtstart: datetime | None = None
    exdates: tuple[datetime, ...] = ()
    rdates: tuple[datetime, ...] = ()
    gap: Gap = "shift"
    fold: Fold = "first"

    def __init__(
        self,
        text: str,
        dtstart: datetime | None = None,
        exdates: Iterable[datetime] = (),
        rdates: Iterable[datetime] = (),
        gap: Gap = "shift",
        fold: Fold = "first",
    ) -> None:
        if not isinstance(text, str):
            refuse(f"A rule is text, not {text!r:.64}.", 'Write it like "FREQ=WEEKLY;BYDAY=MO,FR".')
        block = parse_block(text)
        if block.dtstart is not None and dtstart is not None and _whole(dtstart) != _whole(block.dtstart):
            refuse("DTSTART is in the text and given beside it.", "Give it once.")
        for name, value, allowed in (("gap", gap, get_args(Gap)), ("fold", fold, get_args(Fold))):
            if value not in allowed:
                refuse(f"{name}={value!r} is unknown.", f"Use one of {', '.join(allowed)}.")
        start = dtstart if dtstart is not None else block.dtstart
        fields: dict[str, Any] = {
            "text": text, "dtstart": None if start is None else _whole(start), "gap": gap, "fold": fold,
            "exdates": _dates(exdates, "exdates"), "rdates": _dates(rdates, "rdates"),
        }  # fmt: skip
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if len(self.exdates) + len(self.rdates) + len(block.exdates) + len(block.rdates) > MOST_DATES:
            refuse("There are too many EXDATEs and RDATEs.", f"Give at most {MOST_DATES}; a calendar holds more.")
        parse_rule(block.rule)

    @property
    def parts(self) -> Parts:
        """The rule's parts."""
        return parse_rule(parse_block(self.text).rule)

    def anchored(self, created_at: datetime) -> RRule:
        to_us(created_at, "created_at")
        return self if self.dtstart is not None else replace(self, dtstart=created_at.replace(microsecond=0))

    def compiled(self, where: Zone) -> RRuleRule:
        if self.dtstart is None:
            refuse("The rule has no DTSTART.", "Give dtstart, or bind the rule with created_at.")
        return _compiled(self, where)

    def describe(self) -> str:
        block = parse_block(self.text)
        return describe_rrule(self.parts, self.dtstart, len(block.exdates + self.exdates), block.rdates + self.rdates)

    def warnings(self) -> list[str]:
        parts = self.parts
        found = []
        if any(abs(n) > 28 for n in parts.bymonthday) and parts.skip == "skip" and parts.freq in ("MONTHLY", "YEARLY"):
            found.append(
                "months without the day are left out: SKIP=BACKWARD takes their last day, BYMONTHDAY=-1 always."
            )
        return found

    def fields(self) -> dict[str, Any]:
        return {
            "spec": self.text,
            "dtstart": format_instant(self.dtstart) if self.dtstart else None,
            "exdates": [format_instant(one) for one in self.exdates],
            "rdates": [format_instant(one) for one in self.rdates],
            "dst": {"gap": self.gap, "fold": self.fold},
        }

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r:.80} is unknown.", 'Write it like {"gap": "shift", "fold": "first"}.')
        lists: dict[str, Any] = {}
        for name in ("exdates", "rdates"):
            texts = fields.get(name) or []
            if not isinstance(texts, list):
                refuse(f"{name} is a {type(texts).__name__}.", "Give a list of dates and times.")
            lists[name] = [parse_instant(text, name) for text in texts]
        start = fields.get("dtstart")
        return cls(fields["spec"], None if start is None else parse_instant(start, "dtstart"), **lists, **dst)


class RRuleRule(Rule):
    """A rule from DTSTART to its COUNT or UNTIL, with the RDATEs and without the EXDATEs."""

    def __init__(self, spec: RRule, where: Zone) -> None:
        assert spec.dtstart is not None
        block, parts = parse_block(spec.text), spec.parts
        check_zone(block.timezone, where.name)
        self.zone = where
        self._inner, first = _unbounded(parts, spec, where)
        self.gap, self.fold = self._inner.gap, self._inner.fold
        self.fixed = isinstance(self._inner, WallRule)
        """Whether it names local times, rather than following real time."""
        self._stop = _stop(parts, self._inner, first, where)
        removed = {_instant(one, where) for one in block.exdates + spec.exdates}
        added = {_instant(one, where) for one in block.rdates + spec.rdates} - removed
        self._removed = sorted(one for one in removed if self._in(one))
        self._gone = frozenset(self._removed)
        self._added = sorted(one for one in added if 0 <= one < MAX and not self._in(one))

    def after(self, instant: int) -> int | None:
        found = self._inner.after(instant)
        while found is not None and found in self._gone:
            found = self._inner.after(found)
        if found is not None and found >= self._stop:
            found = None
        i = bisect_right(self._added, instant)
        if i < len(self._added) and (found is None or self._added[i] < found):
            return self._added[i]
        return found

    def before(self, instant: int) -> int | None:
        found = self._inner.before(min(instant, self._stop))
        while found is not None and found in self._gone:
            found = self._inner.before(found)
        i = bisect_left(self._added, instant)
        if i and (found is None or self._added[i - 1] > found):
            return self._added[i - 1]
        return found

    def count(self, start: int, end: int) -> int:
        if start >= end:
            return 0
        total = self._inner.count(start, min(end, self._stop)) if start < self._stop else 0
        for instants, sign in ((self._removed, -1), (self._added, 1)):
            total += sign * (bisect_left(instants, end) - bisect_left(instants, start))
        return total

    def wall(self, low: int, high: int) -> Iterator[int]:
        return self._inner.wall(low, high)

    def _in(self, instant: int) -> bool:
        return instant < self._stop and self._inner.after(instant - 1) == instant


class _Since(Walls):
    """Local times from a first one on."""

    def __init__(self, walls: Walls, first: int) -> None:
        self._walls, self._first = walls, first

    def next(self, local: int) -> int | None:
        return self._walls.next(max(local, self._first))

    def previous(self, local: int) -> int | None:
        found = self._walls.previous(local) if local > self._first else None
        return found if found is not None and found >= self._first else None

    def count(self, low: int, high: int) -> int:
        low = max(low, self._first)
        return self._walls.count(low, high) if low < high else 0


class _From(WallRule):
    """As WallRule, from a DTSTART on that is an instant. It counts if the rule names its local time, also in
    the second pass of a fold, of which the rule would take the first."""

    def __init__(self, where: Zone, walls: Walls, start: int, gap: Gap, fold: Fold) -> None:
        super().__init__(where, walls, gap=gap, fold=fold, missing_days=True)
        self._start = start
        local = start // SECOND + where.offset(start // SECOND)
        self._counts = walls.next(local) == local
        self._besides = self._counts and super().after(start - 1) != start

    def after(self, instant: int) -> int | None:
        if instant < self._start and self._counts:
            return self._start
        return super().after(max(instant, self._start))

    def before(self, instant: int) -> int | None:
        found = super().before(instant)
        if found is not None and found > self._start:
            return found
        return self._start if self._counts and self._start < instant else None

    def count(self, start: int, end: int) -> int:
        total = super().count(max(start, self._start), end) if end > self._start else 0
        return total + (self._besides and start <= self._start < end)


@lru_cache(maxsize=4096)
def _compiled(spec: RRule, where: Zone) -> RRuleRule:
    rule = RRuleRule(spec, where)
    start = _instant(spec.dtstart, where) if spec.dtstart is not None else 0
    first = rule.after(start - 2 * DAY_S * SECOND)
    if first is None or first > start + _HORIZON // timedelta(microseconds=1):
        raise InvalidRecurrence(
            f"{spec.text[:80]!r} names nothing within a hundred years of its DTSTART.", code="NEVER_FIRES",
            fix="Its BY parts exclude one another, or UNTIL comes too soon.",
        )  # fmt: skip
    return rule


def _unbounded(parts: Parts, spec: RRule, where: Zone) -> tuple[Rule, int]:
    """The rule without COUNT, UNTIL and single dates, and the instant from which COUNT counts."""
    assert spec.dtstart is not None
    aware = spec.dtstart.tzinfo is not None
    local = wall_us(where.local(spec.dtstart).replace(tzinfo=None) if aware else spec.dtstart) // SECOND
    start = _instant(spec.dtstart, where)
    days = RuleDays(parts, local // DAY_S)
    if is_elapsed(parts.freq):
        by = ("bysecond", "byminute", "byhour", "byday", "bymonthday", "byyearday", "bymonth", "bysetpos")
        if not any(getattr(parts, name) for name in by):
            step = Step(0, 0, UNITS[parts.freq] * parts.interval * SECOND)
            return ElapsedRule(step, from_us(start), where), start
        return ElapsedPicks(parts, days, start // SECOND, where), start
    hour, minute, second = local % DAY_S // 3600, local % 3600 // 60, local % 60
    times = TimesOfDay(_mask(parts.byhour, hour), _mask(parts.byminute, minute), _mask(parts.bysecond, second))
    walls: Walls = _Since(picked(days, times) if parts.bysetpos else DailyWalls(days, times), local)
    if aware:
        return _From(where, walls, start, spec.gap, spec.fold), start
    return WallRule(where, walls, gap=spec.gap, fold=spec.fold, missing_days=True), start - 2 * DAY_S * SECOND


def _stop(parts: Parts, rule: Rule, first: int, where: Zone) -> int:
    """The instant before which the rule ends."""
    if parts.count is not None and isinstance(rule, ElapsedPicks):
        return rule.stop_after(parts.count)
    if parts.count is not None:
        return stop_after(rule, max(first, 0), MAX, parts.count)
    if parts.until is None:
        return MAX
    return min(_instant(parts.until, where) + 1, MAX)


def _mask(values: tuple[int, ...], default: int) -> int:
    return sum(1 << value for value in values or (default,))


def _instant(when: datetime, where: Zone) -> int:
    if when.tzinfo is not None:
        return to_us(when)
    second, fraction = divmod(wall_us(when), SECOND)
    return where.resolve(second)[0] * SECOND + fraction


def _whole(when: datetime) -> datetime:
    if not isinstance(when, datetime) or not 1970 <= when.year < 2200:
        refuse(f"dtstart is {when!r:.64}.", "Give a datetime within 1970 to 2199.")
    if when.microsecond:
        refuse(f"dtstart is {when.isoformat()}.", "RFC 5545 knows whole seconds only.")
    return when.replace(fold=0) if when.tzinfo is None else when.astimezone(UTC)


def _dates(dates: Iterable[datetime], what: str) -> tuple[datetime, ...]:
    found = []
    for one in dates:
        if not isinstance(one, datetime) or not 1970 <= one.year < 2200:
            refuse(f"{one!r:.64} in {what} is not a datetime within 1970 to 2199.", "Give datetimes.")
        found.append(one.replace(fold=0) if one.tzinfo is None else one.astimezone(UTC))
    return tuple(found)
