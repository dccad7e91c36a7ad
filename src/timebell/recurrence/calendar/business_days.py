"""Recurrences on a calendar: only its business days, or moved to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Any, ClassVar, Literal, NoReturn, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.calendar import FIRST_DAY, LAST_DAY, BusinessDays, Calendar
from timebell.recurrence.core import JSON, Roll, Rule, Spec
from timebell.recurrence.instants import DAY_S, SECOND
from timebell.recurrence.local_times import WallRule, Walls
from timebell.recurrence.operators import Union, UnionRule, checked, part_from_json, part_to_json
from timebell.recurrence.rrule.rule import RRuleRule
from timebell.recurrence.search_limit import Fruitless
from timebell.recurrence.time_windows import DayWindows, WindowedRule
from timebell.recurrence.zones import WIDEST, Zone, zone

DAYS_OFF = 2_000  # in a row, and a search gives up: 38 years of every Saturday
FARTHEST = 366  # days that an occurrence may move
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class OnCalendar(Spec):
    """A spec on the business days of a calendar, by local date.

    `roll` says what becomes of an occurrence on another day: "skip" leaves it out, "next" and "previous" move it
    to the next or last business day, at the same local time, though not by more than 366 days; two at one local
    time are one. With `follows`, a schedule is given each new version of the calendar of that name.
    Raises InvalidRecurrence (INVALID_CALENDAR, INVALID_ROLL, RECURRENCE_TOO_LARGE).
    """

    kind: ClassVar[str] = "on"
    spec: Spec
    calendar: Calendar
    roll: Roll = "skip"
    follows: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.calendar, Calendar):
            raise InvalidRecurrence(
                f"{self.calendar!r:.60} is no calendar.", code="INVALID_CALENDAR", fix='E.g. Calendar.of("KR").'
            )
        if self.roll not in get_args(Roll):
            _refuse(f"roll={self.roll!r:.60} is unknown.", f"Use one of {', '.join(get_args(Roll))}.")
        if not isinstance(self.follows, bool):
            _refuse(f"follows={self.follows!r:.60} is unknown.", "Use True or False.")
        checked(self, self.spec)
        if self.roll != "skip":
            try:
                self._rule(self.spec.anchored(_EPOCH), zone("UTC"))
            except InvalidRecurrence as refused:
                if refused.code != "INVALID_RRULE":  # an RRULE may name a zone of its own: then binding it says
                    raise

    def compiled(self, where: Zone) -> Rule:
        return self._rule(self.spec, where)

    def _rule(self, spec: Spec, where: Zone) -> Rule:
        if isinstance(spec, Union):
            return reduce(UnionRule, [self._rule(part, where) for part in spec.specs])
        rule = spec.compiled(where)
        days, why = self.calendar.days, f"fall on no business day of {self.calendar.label()}"
        if isinstance(rule, RRuleRule) and rule.fixed and self.roll != "skip":
            rule = WallRule(where, RuleWalls(rule), gap=rule.gap, fold=rule.fold, missing_days=True)
        if isinstance(rule, WallRule) and (rule.fixed or self.roll == "skip"):
            if self.roll == "skip":
                return rule.among(OpenWalls(rule.all_walls(), days, why))
            return rule.among(RolledWalls(rule.all_walls(), days, self.roll))
        if self.roll != "skip":
            _refuse(
                f"roll={self.roll!r} moves local times, and “{spec.describe()}” names instants.",
                'Use roll="skip", or a cron expression with fixed times.',
            )
        return WindowedRule(rule, DayWindows(days), why)

    def anchored(self, created_at: datetime) -> OnCalendar:
        return replace(self, spec=self.spec.anchored(created_at))

    def keyed(self, key: str) -> OnCalendar:
        return replace(self, spec=self.spec.keyed(key))

    def describe(self) -> str:
        what = self.spec.describe()
        if self.roll == "skip":
            return f"{what}, only on business days of {self.calendar.label()}"
        last = "next" if self.roll == "next" else "last"
        return f"{what}, moved to the {last} business day of {self.calendar.label()}"

    def warnings(self) -> list[str]:
        return [*self.spec.warnings(), *self.calendar.warnings()]

    def fields(self) -> dict[str, Any]:
        found = {"spec": part_to_json(self.spec), "calendar": self.calendar.to_json(), "roll": self.roll}
        return {**found, "follows": True} if self.follows else found

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        calendar = Calendar.from_json(fields.get("calendar", {}))
        follows = fields.get("follows", False)
        return cls(part_from_json(fields["spec"]), calendar, fields.get("roll", "skip"), follows=follows)


class RuleWalls(Walls):
    """The local times at which a rule fires that names fixed ones."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def next(self, local: int) -> int | None:
        found = self._rule.after(self._first(local) * SECOND - 1)
        while found is not None and self._shown(found) < local:  # the second pass of a fold
            found = self._rule.after(found)
        return None if found is None else self._shown(found)

    def previous(self, local: int) -> int | None:
        found = self._rule.before(self._first(local + WIDEST) * SECOND)
        while found is not None and self._shown(found) >= local:
            found = self._rule.before(found)
        return None if found is None else self._shown(found)

    def count(self, low: int, high: int) -> int:
        return self._rule.count(self._first(low) * SECOND, self._first(high) * SECOND)

    def _first(self, local: int) -> int:
        """The first epoch second at which clocks show this local time, or a later one."""
        ends = self._rule.zone.gap_end(local)
        return self._rule.zone.resolve(local)[0] if ends is None else ends

    def _shown(self, instant: int) -> int:
        second = instant // SECOND
        return second + self._rule.zone.offset(second)


class OpenWalls(Walls):
    """Those of some local times that are on business days."""

    def __init__(self, walls: Walls, days: BusinessDays, why: str) -> None:
        self._walls, self._days, self._why = walls, days, why
        self.uniform = walls.uniform

    def next(self, local: int) -> int | None:
        for _ in range(DAYS_OFF):
            found = self._walls.next(local)
            opens = None if found is None else self._days.next(found // DAY_S)
            if found is None or opens is None or opens == found // DAY_S:
                return None if opens is None else found
            local = opens * DAY_S
        raise Fruitless(self._why, (local - WIDEST) * SECOND, DAYS_OFF)

    def previous(self, local: int) -> int | None:
        for _ in range(DAYS_OFF):
            found = self._walls.previous(local)
            opens = None if found is None else self._days.previous(found // DAY_S)
            if found is None or opens is None or opens == found // DAY_S:
                return None if opens is None else found
            local = (opens + 1) * DAY_S
        raise Fruitless(self._why, (local + WIDEST) * SECOND, DAYS_OFF)

    def count(self, low: int, high: int) -> int:
        total = 0
        day = self._days.next(low // DAY_S)
        while day is not None and day * DAY_S < high:
            closes = self._days.closes(day)
            total += self._walls.count(max(low, day * DAY_S), min(high, closes * DAY_S))
            day = self._days.next(closes)
        return total


class RolledWalls(Walls):
    """Some local times, those on other days moved to a business day.

    What falls on a business day comes from the days of its own, a run: that day, and the days off before it
    (roll "next") or after it ("previous").
    """

    def __init__(self, walls: Walls, days: BusinessDays, roll: Literal["next", "previous"]) -> None:
        self._walls, self._days = walls, days
        self._forward = roll == "next"
        self.uniform = walls.uniform

    def next(self, local: int) -> int | None:
        day = self._days.next(local // DAY_S)
        since = local % DAY_S if day == local // DAY_S else 0
        while day is not None:
            if (found := self._first(day, since)) is not None:
                return day * DAY_S + found
            end = self._run(day)[1]
            following = self._walls.next((end + 1) * DAY_S) if end < LAST_DAY else None
            day = None if following is None else self._target(following // DAY_S)
            since = 0
        return None

    def previous(self, local: int) -> int | None:
        day = self._days.previous(local // DAY_S)
        until = local % DAY_S if day == local // DAY_S else DAY_S
        while day is not None:
            if (found := self._last(day, until)) is not None:
                return day * DAY_S + found
            begin = self._run(day)[0]
            preceding = self._walls.previous(begin * DAY_S) if begin > FIRST_DAY else None
            day = None if preceding is None else self._target(preceding // DAY_S)
            until = DAY_S
        return None

    def count(self, low: int, high: int) -> int:
        total = 0
        day = self._days.next(low // DAY_S)
        while day is not None and day * DAY_S < high:
            first, last = self._run(day)
            if first == last:
                # The days up to the end of this stretch, each with a run of its own.
                last = self._days.closes(day) - (1 if self._forward else 2)
                total += self._walls.count(max(low, day * DAY_S), min(high, (last + 1) * DAY_S))
            else:
                total += self._merged(day, max(low - day * DAY_S, 0), min(high - day * DAY_S, DAY_S))
                last = day
            day = self._days.next(last + 1)
        return total

    def _target(self, day: int) -> int | None:
        return self._days.next(day) if self._forward else self._days.previous(day)

    def _run(self, day: int) -> tuple[int, int]:
        """The first and the last day of the run of a business day."""
        if self._forward:
            before = self._days.previous(day - 1)
            return (FIRST_DAY if before is None else before + 1), day
        after = self._days.next(day + 1)
        return day, (LAST_DAY if after is None else after - 1)

    def _near(self, day: int) -> tuple[int, int]:
        first, last = self._run(day)
        return max(first, day - FARTHEST), min(last, day + FARTHEST)

    def _sources(self, day: int) -> list[int]:
        """The days of the run on which there is anything; the first of them, where all days have the same times."""
        first, last = self._near(day)
        found: list[int] = []
        local = self._walls.next(first * DAY_S)
        while local is not None and local // DAY_S <= last and not (found and self.uniform):
            found.append(local // DAY_S)
            local = self._walls.next((local // DAY_S + 1) * DAY_S)
        return found

    def _first(self, day: int, since: int) -> int | None:
        """The first second of the day from `since` on."""
        found = [
            local - source * DAY_S
            for source in self._sources(day)
            if (local := self._walls.next(source * DAY_S + since)) is not None and local // DAY_S == source
        ]
        return min(found, default=None)

    def _last(self, day: int, until: int) -> int | None:
        """The last second of the day before `until`."""
        found = [
            local - source * DAY_S
            for source in self._sources(day)
            if (local := self._walls.previous(source * DAY_S + until)) is not None and local // DAY_S == source
        ]
        return max(found, default=None)

    def _merged(self, day: int, since: int, until: int) -> int:
        """How many different seconds of the day in [since, until)."""
        sources = self._sources(day)
        if len(sources) == 1:
            return self._walls.count(sources[0] * DAY_S + since, sources[0] * DAY_S + until)
        seconds = set()
        for source in sources:
            local = self._walls.next(source * DAY_S + since)
            while local is not None and local < source * DAY_S + until:
                seconds.add(local - source * DAY_S)
                local = self._walls.next(local + 1)
        return len(seconds)


def _refuse(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_ROLL", fix=fix)
