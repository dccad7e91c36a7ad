"""Recurrences made of recurrences: the instants of either, of one but not the other, or within some hours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from typing import Any, ClassVar, Literal, NoReturn, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.weekdays import WEEK, describe_weekdays, parse_weekdays
from timebell.recurrence.combined_rules import Composed
from timebell.recurrence.core import JSON, Rule, Spec
from timebell.recurrence.search_limit import MISSES, Fruitless
from timebell.recurrence.time_windows import HourWindows, WindowedRule
from timebell.recurrence.zones import Zone

DEEPEST = 8
MOST_PARTS = 64
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?|24:00(?::00)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hours:
    """The local times from `start` up to, and without, `end` ("09:00", "17:30"; "24:00" ends a day).

    `days` are the weekdays on which they start ("MON-FRI", "SAT,SUN", "*"). Where `end` is not after `start` they
    end on the next day. Raises InvalidRecurrence (INVALID_HOURS, INVALID_WEEKDAYS).
    """

    start: str
    end: str
    days: str = "*"

    def __post_init__(self) -> None:
        if self._seconds(self.start) == self._seconds(self.end):
            _refuse_hours(f"{self.start} to {self.end} is no time at all.", 'A whole day is "00:00" to "24:00".')
        if self._seconds(self.start) == 86_400:
            _refuse_hours("start is 24:00.", "Write 00:00, on the next weekday.")
        parse_weekdays(self.days)

    def windows(self) -> HourWindows:
        """They as stretches of local time."""
        return HourWindows(self._seconds(self.start), self._seconds(self.end), parse_weekdays(self.days))

    def describe(self) -> str:
        """E.g. "between 09:00 and 17:30 on Monday to Friday"."""
        weekdays = parse_weekdays(self.days)
        on = "" if weekdays == WEEK else f" on {describe_weekdays(weekdays)}"
        return f"between {self.start} and {self.end}{on}"

    def _seconds(self, text: str) -> int:
        match = _CLOCK.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            _refuse_hours(f"{text!r:.60} is no time of day.", "Write it like 09:00 or 17:30:15.")
        return sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) or (
            86_400 if text.startswith("24") else 0
        )


@dataclass(frozen=True, slots=True)
class Union(Spec):
    """The instants of each of some specs, at least two. Raises InvalidRecurrence (RECURRENCE_TOO_LARGE)."""

    kind: ClassVar[str] = "union"
    specs: tuple[Spec, ...]

    def __init__(self, specs: Iterable[Spec]) -> None:
        flat: list[Spec] = []
        for spec in specs:
            flat += spec.specs if isinstance(spec, Union) else [spec]
        if len(flat) < 2:
            raise InvalidRecurrence("A union is of two recurrences or more.", fix="Give them.")
        checked(self, *flat)
        object.__setattr__(self, "specs", tuple(flat))

    def compiled(self, where: Zone) -> Rule:
        return reduce(UnionRule, [spec.compiled(where) for spec in self.specs])

    def anchored(self, created_at: datetime) -> Union:
        return Union(spec.anchored(created_at) for spec in self.specs)

    def keyed(self, key: str) -> Union:
        return Union(spec.keyed(key) for spec in self.specs)

    def describe(self) -> str:
        first, *others = [spec.describe() for spec in self.specs]
        return "; and ".join([first, *map(_inner, others)])

    def warnings(self) -> list[str]:
        return [warning for spec in self.specs for warning in spec.warnings()]

    def fields(self) -> dict[str, Any]:
        return {"spec": [part_to_json(spec) for spec in self.specs]}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        if not isinstance(fields["spec"], list):
            raise InvalidRecurrence("The spec of a union is a list of recurrences.", fix="Give one.")
        return cls([part_from_json(one) for one in fields["spec"]])


@dataclass(frozen=True, slots=True)
class Except(Spec):
    """The instants of a spec that are none of another's. Raises InvalidRecurrence (RECURRENCE_TOO_LARGE)."""

    kind: ClassVar[str] = "except"
    spec: Spec
    removed: Spec

    def __post_init__(self) -> None:
        checked(self, self.spec, self.removed)

    def compiled(self, where: Zone) -> Rule:
        why = f"are removed by “{self.removed.describe()}”"
        return ExceptRule(self.spec.compiled(where), self.removed.compiled(where), why)

    def anchored(self, created_at: datetime) -> Except:
        return Except(self.spec.anchored(created_at), self.removed.anchored(created_at))

    def keyed(self, key: str) -> Except:
        return Except(self.spec.keyed(key), self.removed.keyed(key))

    def describe(self) -> str:
        return f"{_grouped(self.spec)}, except {_inner(_grouped(self.removed))}"

    def warnings(self) -> list[str]:
        return [*self.spec.warnings(), *self.removed.warnings()]

    def fields(self) -> dict[str, Any]:
        return {"spec": part_to_json(self.spec), "except": part_to_json(self.removed)}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        return cls(part_from_json(fields["spec"]), part_from_json(fields.get("except", {})))


@dataclass(frozen=True, slots=True)
class Within(Spec):
    """The instants of a spec whose local time lies within some hours. Raises InvalidRecurrence
    (INVALID_HOURS, RECURRENCE_TOO_LARGE)."""

    kind: ClassVar[str] = "within"
    spec: Spec
    hours: Hours

    def __post_init__(self) -> None:
        checked(self, self.spec)

    def compiled(self, where: Zone) -> Rule:
        return WindowedRule(self.spec.compiled(where), self.hours.windows(), f"are not {self.hours.describe()}")

    def anchored(self, created_at: datetime) -> Within:
        return replace(self, spec=self.spec.anchored(created_at))

    def keyed(self, key: str) -> Within:
        return replace(self, spec=self.spec.keyed(key))

    def describe(self) -> str:
        return f"{_grouped(self.spec)}, {self.hours.describe()}"

    def warnings(self) -> list[str]:
        return self.spec.warnings()

    def fields(self) -> dict[str, Any]:
        hours = {"start": self.hours.start, "end": self.hours.end, "days": self.hours.days}
        return {"spec": part_to_json(self.spec), "hours": hours}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        hours = fields.get("hours")
        if not isinstance(hours, dict) or not {"start", "end"} <= hours.keys() <= {"start", "end", "days"}:
            _refuse_hours(f"hours are {hours!r:.60}.", 'Give {"start": "09:00", "end": "17:30", "days": "MON-FRI"}.')
        return cls(part_from_json(fields["spec"]), Hours(**hours))


class UnionRule(Composed):
    """The instants of either of two rules."""

    def __init__(self, one: Rule, other: Rule) -> None:
        super().__init__(one, other)
        self._one, self._other = one, other

    def after(self, instant: int) -> int | None:
        try:
            found, other = self._one.after(instant), self._other.after(instant)
        except Fruitless:
            return self._nearest("after", instant, 1)
        return other if found is None or (other is not None and other < found) else found

    def before(self, instant: int) -> int | None:
        try:
            found, other = self._one.before(instant), self._other.before(instant)
        except Fruitless:
            return self._nearest("before", instant, -1)
        return other if found is None or (other is not None and other > found) else found

    def _nearest(self, search: Literal["after", "before"], instant: int, sign: Literal[1, -1]) -> int | None:
        """What one of them finds, where the other gave up beyond it."""
        found: list[int] = []
        failed: list[Fruitless] = []
        for rule in (self._one, self._other):
            try:
                found += [at for at in [getattr(rule, search)(instant)] if at is not None]
            except Fruitless as fruitless:
                failed.append(fruitless)
        soonest = min(failed, key=lambda one: one.reached * sign)
        if found and found[0] * sign <= soonest.reached * sign:
            return found[0]
        raise soonest

    def count(self, start: int, end: int) -> int:
        return self._one.count(start, end) + self._other.count(start, end) - common(self._one, self._other, start, end)


class ExceptRule(Composed):
    """The instants of a rule that are none of another's."""

    def __init__(self, rule: Rule, removed: Rule, why: str) -> None:
        super().__init__(rule)
        self._rule, self._removed, self._why = rule, removed, why

    def after(self, instant: int) -> int | None:
        found = self._rule.after(instant)
        for _ in range(MISSES):
            if found is None or not self._removed.has(found):
                return found
            found = self._rule.after(found)
        if found is None:
            return None
        raise Fruitless(self._why, found)

    def before(self, instant: int) -> int | None:
        found = self._rule.before(instant)
        for _ in range(MISSES):
            if found is None or not self._removed.has(found):
                return found
            found = self._rule.before(found)
        if found is None:
            return None
        raise Fruitless(self._why, found)

    def count(self, start: int, end: int) -> int:
        return self._rule.count(start, end) - common(self._rule, self._removed, start, end)


def common(one: Rule, other: Rule, start: int, end: int) -> int:
    """How many instants of [start, end) two rules share; in steps, of which there are not many more than instants
    of the rarer rule."""
    total = 0
    found = one.within(start, end)
    while found is not None and (theirs := other.within(found, end)) is not None:
        total += theirs == found
        found = one.within(found + 1 if theirs == found else theirs, end)
    return total


def checked(whole: Spec, *parts: Spec) -> None:
    """Refuses what is nested too deep or has too many parts (RECURRENCE_TOO_LARGE), or is no spec."""
    for part in parts:
        if not isinstance(part, Spec):
            raise InvalidRecurrence(f"{part!r:.60} is no recurrence.", fix='E.g. Cron("0 9 * * *").')
        if part.delay is not None:
            raise InvalidRecurrence(
                "A fixed delay counts from each run, so that nothing can be combined with it.",
                fix="Leave since out.",
            )
    sizes = [size(part) for part in parts]
    if 1 + max(deep for deep, _ in sizes) > DEEPEST or sum(many for _, many in sizes) > MOST_PARTS:
        refuse_size(whole.kind)


def refuse_size(kind: str) -> NoReturn:
    """Raises InvalidRecurrence (RECURRENCE_TOO_LARGE)."""
    raise InvalidRecurrence(
        f"The {kind} has more than {MOST_PARTS} parts, or is nested more than {DEEPEST} deep.",
        code="RECURRENCE_TOO_LARGE", fix="Make several schedules of it.",
    )  # fmt: skip


def size(spec: Spec) -> tuple[int, int]:
    """How deep a spec is nested, and how many parts it has."""
    inner = [*getattr(spec, "specs", ()), *(getattr(spec, name, None) for name in ("spec", "removed"))]
    sizes = [size(part) for part in inner if isinstance(part, Spec)]
    return 1 + max((deep for deep, _ in sizes), default=0), sum(many for _, many in sizes) or 1


def part_to_json(spec: Spec) -> dict[str, Any]:
    """A part as JSON."""
    from timebell.recurrence import codec

    return codec.spec_to_json(spec)


def part_from_json(data: JSON) -> Spec:
    """The inverse of `part_to_json`. Raises InvalidRecurrence."""
    from timebell.recurrence import codec

    return codec.spec_from_json(data)


def _grouped(spec: Spec) -> str:
    text = spec.describe()
    return f"({text})" if isinstance(spec, Union) else text


def _inner(text: str) -> str:
    """A description within a sentence."""
    return text if text.startswith("(") else text[:1].lower() + text[1:]


def _refuse_hours(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_HOURS", fix=fix)
