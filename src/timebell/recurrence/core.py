"""What every recurrence offers: `Spec` is what people write, `Rule` the spec compiled for one zone,
`Recurrence` the rule with its bounds, which is what the rest of the program holds.

A new kind is a new file with a `Spec` and a `Rule`, and its name in `parse.KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.instants import DAY, MAX, MIN, SECOND, format_instant, from_us, parse_instant, to_us
from timebell.recurrence.search_limit import Fruitless
from timebell.recurrence.zones import Note, Release, Segment, Zone, installed

if TYPE_CHECKING:
    from timebell.recurrence.calendar.calendar import Calendar
    from timebell.recurrence.operators import Hours

Gap = Literal["end", "shift", "skip"]
Fold = Literal["first", "last", "both"]
Since = Literal["last_end", "last_start"]
Roll = Literal["skip", "next", "previous"]
JSON = Mapping[str, Any]


REMEMBERED = 5  # of its answers, by a recurrence


class Delay(NamedTuple):
    """A fixed delay: `length` microseconds after the end, or the start, of each run."""

    length: int
    since: Since


class Rule(ABC):
    """An increasing set of instants within 1970..2199, all as integer microseconds since the epoch."""

    zone: Zone
    gap: Gap = "shift"
    fold: Fold = "first"

    @abstractmethod
    def after(self, instant: int) -> int | None:
        """The first instant strictly after this one."""

    @abstractmethod
    def before(self, instant: int) -> int | None:
        """The last instant strictly before this one."""

    @abstractmethod
    def count(self, start: int, end: int) -> int:
        """How many instants lie in [start, end), in time that does not grow with the answer."""

    @abstractmethod
    def wall(self, low: int, high: int) -> Iterator[int]:
        """The local times it names in [low, high), as microseconds of the wall clock, in order.

        None for a rule that follows real time, because it names no local times.
        """

    def within(self, start: int, end: int) -> int | None:
        """The first instant in [start, end), also where `after` would give up a search that goes on beyond."""
        try:
            found = self.after(start - 1)
        except Fruitless as fruitless:
            if fruitless.reached < end and self.count(start, end):
                raise
            return None
        return None if found is None or found >= end else found

    def has(self, instant: int) -> bool:
        """Whether this is one of its instants."""
        try:
            return self.after(instant - 1) == instant
        except Fruitless:
            return False

    def leaves(self) -> Iterator[Rule]:
        """The rules that name its local times, each with its own `gap` and `fold`."""
        yield self

    def note(self, instant: int) -> Note | None:
        """What the clock did to this instant of the rule."""
        second = instant // SECOND
        segment = self.zone.segments[self.zone.index(second)]
        if second < segment.start + segment.offset - segment.before and self._moved(segment, instant):
            return "gap"
        return "fold" if self.zone.ambiguous(second) else None

    def _moved(self, segment: Segment, instant: int) -> bool:
        low, high = (edge * SECOND for edge in segment.gap)
        if self.gap == "end":
            return instant // SECOND == segment.start and any(True for _ in self.wall(low, high))
        wanted = instant + segment.before * SECOND
        return self.gap == "shift" and any(True for _ in self.wall(wanted, wanted + 1))


class Spec(ABC):
    """What a person writes: when, without a zone. Immutable; valid once made."""

    __slots__ = ()
    kind: ClassVar[str]
    allow_never: bool = False
    """Whether a schedule may have it though it never fires."""

    @abstractmethod
    def compiled(self, where: Zone) -> Rule:
        """The instants of this spec in a zone, without bounds."""

    @abstractmethod
    def describe(self) -> str:
        """It in plain English, without the zone."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Its JSON fields."""

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: JSON) -> Self:
        """The inverse of `fields`. Raises InvalidRecurrence."""

    @property
    def delay(self) -> Delay | None:
        """Set for a fixed delay, of which only the first instant is known ahead: each run decides the next."""
        return None

    def on(self, calendar: Calendar, roll: Roll = "skip") -> Spec:
        """This spec on a calendar's business days: "skip" leaves the other days' occurrences out, "next" and
        "previous" move them to the next or last business day, at the same local time.

        Raises InvalidRecurrence (INVALID_ROLL) where a rule that follows real time would be moved.
        """
        from timebell.recurrence.calendar.business_days import OnCalendar

        return OnCalendar(self, calendar, roll)

    def __or__(self, other: Spec) -> Spec:
        """The instants of either."""
        from timebell.recurrence.operators import Union

        return Union((self, other)) if isinstance(other, Spec) else NotImplemented

    def __sub__(self, other: Spec) -> Spec:
        """The instants of this one that are none of the other."""
        from timebell.recurrence.operators import Except

        return Except(self, other) if isinstance(other, Spec) else NotImplemented

    def __and__(self, hours: Hours) -> Spec:
        """The instants of this one within some hours."""
        from timebell.recurrence.operators import Hours, Within

        return Within(self, hours) if isinstance(hours, Hours) else NotImplemented

    def anchored(self, created_at: datetime) -> Spec:
        """This spec with what it leaves to its creation filled in."""
        to_us(created_at, "created_at")
        return self

    def keyed(self, key: str) -> Spec:
        """This spec with what it leaves to the schedule's name chosen by this key."""
        return self

    def over(self) -> str:
        """What to say of it once it has no instant left."""
        return "it never fires again"

    def warnings(self) -> list[str]:
        """What is legal but seldom meant, one sentence each."""
        return []

    def bind(
        self,
        timezone: str,
        *,
        created_at: datetime,
        start: datetime | None = None,
        end: datetime | None = None,
        max_runs: int | None = None,
        key: str = "",
    ) -> Recurrence:
        """This spec in an IANA zone, limited to nominal instants in [start, end).

        `created_at` is the anchor of an interval that has none. `key`, the name of a schedule, chooses the
        numbers of an `H` in cron. `max_runs` keeps the first so many
        instants from `start`, or after `created_at` without one. Datetimes must be aware.
        Raises InvalidTimezone, InvalidRecurrence.
        """
        spec = self.anchored(created_at).keyed(key)
        if max_runs is not None and start is None:
            start = from_us(_within(to_us(created_at)) + 1)
        return Recurrence(spec, timezone, start, end, max_runs)


@dataclass(frozen=True, slots=True, order=True)
class Override:
    """What happens to one occurrence, named by its nominal instant, instead of firing then: it is skipped, or moved
    to another instant. Both are aware datetimes. Raises InvalidRecurrence."""

    at: datetime
    to: datetime | None = None

    def __post_init__(self) -> None:
        for name in ("at", "to"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, from_us(_within(to_us(value, name))))

    def to_json(self) -> dict[str, str]:
        """JSON-ready fields that `from_json` turns into an equal override."""
        if self.to is None:
            return {"at": format_instant(self.at), "action": "skip"}
        return {"at": format_instant(self.at), "action": "move", "to": format_instant(self.to)}

    @classmethod
    def from_json(cls, data: JSON) -> Self:
        """The inverse of `to_json`. Raises InvalidRecurrence."""
        action, to = (data.get("action"), data.get("to")) if isinstance(data, Mapping) else (None, None)
        if action not in ("skip", "move") or (action == "move") != (to is not None):
            raise InvalidRecurrence(
                f"{data!r:.80} is no override.",
                fix='Write {"at", "action": "skip"}, or {"at", "action": "move", "to"}.',
            )
        return cls(parse_instant(data.get("at"), "at"), None if to is None else parse_instant(to, "to"))


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A spec in a zone with bounds: a pure, immutable set of instants that knows no clock.

    Made by `Spec.bind`. Every datetime it returns is aware and in UTC. With overrides it has the nominal instants of
    those that are skipped or moved, and also where they are moved to, whatever the bounds; `fired` has what fires.
    """

    spec: Spec
    timezone: str
    start: datetime | None = None
    end: datetime | None = None
    max_runs: int | None = None
    overrides: tuple[Override, ...] = ()
    release: Release = field(default_factory=installed, kw_only=True, repr=False, compare=False)
    """The zone data it goes by."""
    rule: Rule = field(init=False, repr=False, compare=False)
    _first: int = field(init=False, repr=False, compare=False)
    _stop: int = field(init=False, repr=False, compare=False)
    _found: tuple[tuple[int, int], ...] = field(default=(), init=False, repr=False, compare=False)
    """The last few answers: (after, the first instant after it). The planner asks again what a run has shown."""

    def __post_init__(self) -> None:
        rule = self.spec.compiled(self.release.zone(self.timezone))
        first = MIN if self.start is None else _within(to_us(self.start, "start"))
        stop = MAX if self.end is None else _within(to_us(self.end, "end"))
        if self.start is not None and self.end is not None and stop <= first:
            raise InvalidRecurrence(
                f"end ({format_instant(self.end)}) is not after start ({format_instant(self.start)}).",
                fix="Leave one out, or give a later end.",
            )
        if self.max_runs is not None:
            if self.spec.delay is not None:
                raise InvalidRecurrence(
                    "max_runs counts instants that are known ahead; those of a fixed delay are not.",
                    fix="Leave it out, or bound the schedule with end.",
                )
            stop = stop_after(rule, first, stop, _checked_runs(self.max_runs))
        if self.overrides:
            from timebell.recurrence.overrides import Overridden

            object.__setattr__(self, "overrides", tuple(sorted(self.overrides)))
            rule, first, stop = Overridden(rule, first, stop, self.overrides), MIN, MAX
        for name, value in (("rule", rule), ("_first", first), ("_stop", stop)):
            object.__setattr__(self, name, value)
        for name in ("start", "end"):
            if (bound := getattr(self, name)) is not None:
                object.__setattr__(self, name, from_us(to_us(bound)))

    def next(self, after: datetime) -> datetime | None:
        """The first instant strictly after an aware datetime; None when there is none.

        Raises InvalidRecurrence (NEVER_FIRES) where a combination rules out all it finds and the search is given up;
        so does `previous`.
        """
        found = self.next_us(to_us(after))
        return None if found is None else from_us(found)

    def first(self, after: datetime) -> datetime | None:
        """The instant at which a schedule that begins now fires first: `next`, or for a fixed delay whose anchor
        has passed, the delay from now."""
        found = self.next(after)
        return self.following(None, after) if found is None and self.spec.delay is not None else found

    def following(self, started: datetime | None, ended: datetime) -> datetime | None:
        """When a fixed delay fires after a run: within the bounds, and not before the run's end."""
        delay = self.spec.delay
        assert delay is not None
        end = to_us(ended)
        since = end if started is None or delay.since == "last_end" else to_us(started)
        found = max(since + delay.length, end, self._first)
        return from_us(found) if found < self._stop else None

    def previous(self, before: datetime) -> datetime | None:
        """The last instant strictly before an aware datetime; None when there is none."""
        end = min(to_us(before), self._stop)
        if end <= self._first:
            return None
        found = self.rule.before(end)
        return None if found is None or found < self._first else from_us(found)

    def next_us(self, after: int) -> int | None:
        """`next` in integer microseconds since the epoch, for those who evaluate many."""
        for low, known in self._found:
            if low <= after < known:
                return known
        found = self.rule.after(after if after >= self._first else self._first - 1)
        if found is None or found >= self._stop:
            return None
        object.__setattr__(self, "_found", ((after, found), *self._found[:REMEMBERED]))
        return found

    def between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """The instants in [start, end), in order."""
        stop = min(to_us(end), self._stop)
        found = self.rule.within(max(to_us(start), self._first), stop)
        while found is not None:
            yield from_us(found)
            found = self.rule.within(found + 1, stop)

    def count(self, start: datetime, end: datetime) -> int:
        """How many instants lie in [start, end), without walking them."""
        low, high = max(to_us(start), self._first), min(to_us(end), self._stop)
        return self.rule.count(low, high) if low < high else 0

    def has(self, instant: datetime) -> bool:
        """Whether this aware datetime is one of its instants."""
        at = to_us(instant)
        return self._first <= at < self._stop and self.rule.has(at)

    def fired(self) -> Recurrence:
        """The same recurrence with what fires alone: without the instants that overrides skip, or move away."""
        if not self.overrides:
            return self
        from timebell.recurrence.overrides import Overridden

        if not isinstance(self.rule, Overridden):
            return self
        return self.ruled(self.rule.fired())

    def ruled(self, rule: Rule) -> Recurrence:
        """The same recurrence by another rule."""
        made = copy(self)
        object.__setattr__(made, "rule", rule)
        object.__setattr__(made, "_found", ())
        return made

    def overridden(self, start: datetime, end: datetime) -> list[datetime]:
        """The instants in [start, end) that overrides skip or move away, in order."""
        return [one.at for one in self.overrides if start <= one.at < end]

    def note(self, instant: datetime) -> Note | None:
        """Of one of its instants: "gap" if its local time did not exist and it was moved, "fold" if clocks
        show its local time twice."""
        return self.rule.note(_within(to_us(instant)))

    def local(self, instant: datetime) -> datetime:
        """An aware datetime as it reads in the zone, to show; PEP 495 makes comparing it unsafe in a fold."""
        to_us(instant)
        return self.rule.zone.local(instant)

    def describe(self) -> str:
        """It in plain English, with zone and bounds."""
        parts = [f"{self.spec.describe()}, {self.timezone}"]
        parts += [f"from {self._shown(self.start)}"] if self.start else []
        parts += [f"until {self._shown(self.end)}"] if self.end else []
        if self.max_runs is not None:
            parts.append("once" if self.max_runs == 1 else f"at most {self.max_runs} times")
        for one in self.overrides:
            parts.append(f"{self._shown(one.at)} {f'moved to {self._shown(one.to)}' if one.to else 'skipped'}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields that `from_json` turns into an equal recurrence."""
        from timebell.recurrence import codec  # it knows the kinds, which know this module

        return codec.recurrence_to_json(self)

    @classmethod
    def from_json(cls, data: JSON) -> Recurrence:
        """The inverse of `to_json`. Raises InvalidRecurrence, InvalidTimezone."""
        from timebell.recurrence import codec

        return codec.recurrence_from_json(data)

    def _shown(self, bound: datetime) -> str:
        return self.local(bound).isoformat(sep=" ", timespec="minutes")


def _within(instant: int) -> int:
    return min(max(instant, MIN), MAX)


def _checked_runs(runs: object) -> int:
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise InvalidRecurrence(
            f"max_runs must be a whole number from 1, not {runs!r}.", fix="Leave it out for no limit."
        )
    return runs


def stop_after(rule: Rule, first: int, stop: int, runs: int) -> int:
    """The instant just after the so-manieth one from `first`, found by counting rather than walking."""
    low, step = first, DAY
    while rule.after(low - 1) is not None:
        high = min(low + step, stop)
        if (found := rule.count(low, high)) >= runs:
            break
        if high == stop:
            return stop
        low, step, runs = high, step * 2, runs - found
    else:
        return stop
    while high - low > 1:
        middle = (low + high) // 2
        found = rule.count(low, middle)
        if found < runs:
            low, runs = middle, runs - found
        else:
            high = middle
    return high
