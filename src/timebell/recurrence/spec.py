"""Specs: recurrences as users write them, without a zone.

`Spec` is the base of the notations (cron, intervals, RRULE and lists of dates). The specs in this module consist of
other specs: `Union`, `Except`, `Within` and `OnCalendar`, the results of the operators of `Spec`. A new kind of
recurrence is a module with a `Spec` and a `Rule`, plus an entry in `codec.KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.calendar.business_days import omit_days_off, roll_days_off
from timebell.recurrence.calendar.calendar import Calendar
from timebell.recurrence.hours import Hours, refuse_hours
from timebell.recurrence.instants import from_us, to_us
from timebell.recurrence.recurrence import Recurrence, clamp
from timebell.recurrence.rules.combined import ExceptRule, UnionRule
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.rules.time_windows import WindowedRule
from timebell.recurrence.zones import Zone, zone

MAX_DEPTH = 8
MAX_PARTS = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Since = Literal["last_end", "last_start"]
Roll = Literal["skip", "next", "previous"]
JSON = Mapping[str, Any]


class Delay(NamedTuple):
    """A fixed delay: `length_us` microseconds after the end or the start of each run."""

    length_us: int
    since: Since


class Spec(ABC):
    """A recurrence without a zone, as the user writes it. Immutable and validated on creation."""

    __slots__ = ()
    kind: ClassVar[str]
    allow_never: bool = False
    """True if a schedule may use this spec although it never fires."""

    @abstractmethod
    def compile(self, zone: Zone) -> Rule:
        """Return the rule of this spec in a zone, without bounds."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the spec in plain English, without the zone."""

    @abstractmethod
    def to_fields(self) -> dict[str, Any]:
        """Return the JSON fields of this spec."""

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        """Create a spec from the result of `to_fields`. Raises InvalidRecurrence.

        `parse_part` creates the specs of which this one consists, if any: `codec.spec_from_json`.
        """

    def to_json(self) -> dict[str, Any]:
        """Return JSON fields, with the `kind`, from which `codec.spec_from_json` creates an equal spec."""
        return {"kind": self.kind, **self.to_fields()}

    @property
    def delay(self) -> Delay | None:
        """The delay of a fixed-delay spec, else None: its first instant is known, and each run sets the next one."""
        return None

    def on(self, calendar: Calendar, roll: Roll = "skip") -> Spec:
        """Restrict this spec to the business days of a calendar.

        `roll` decides about occurrences on other days: "skip" omits them, "next" and "previous" move them to the next
        or previous business day at the same local time. Raises InvalidRecurrence (INVALID_ROLL) if `roll` would move
        occurrences of a rule that follows real time.
        """
        return OnCalendar(self, calendar, roll)

    def __or__(self, other: Spec) -> Spec:
        """Return the union of two specs."""
        return Union((self, other)) if isinstance(other, Spec) else NotImplemented

    def __sub__(self, other: Spec) -> Spec:
        """Return this spec without the instants of `other`."""
        return Except(self, other) if isinstance(other, Spec) else NotImplemented

    def __and__(self, hours: Hours) -> Spec:
        """Return this spec limited to some hours of the day."""
        return Within(self, hours) if isinstance(hours, Hours) else NotImplemented

    def with_anchor(self, created_at: datetime) -> Spec:
        """Return this spec with a missing anchor set from the creation time."""
        to_us(created_at, "created_at")
        return self

    def with_hash_key(self, key: str) -> Spec:
        """Return this spec with its hashed values (`H` in cron) chosen by `key`, the name of the schedule."""
        return self

    def exhausted_message(self) -> str:
        """Return the explanation to show when the spec has no instant left."""
        return "it never fires again"

    def warnings(self) -> list[str]:
        """Return a sentence for each property that is valid but rarely intended."""
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
        """Bind this spec to an IANA zone, limited to nominal instants in [start, end). Datetimes must be aware.

        `created_at` is the anchor of an interval that has none. `max_runs` limits the recurrence to its first
        `max_runs` instants from `start`, or after `created_at` if there is no `start`. `key`, the name of the schedule,
        chooses the values of each `H` in cron. Raises InvalidTimezone, InvalidRecurrence.
        """
        spec = self.with_anchor(created_at).with_hash_key(key)
        if max_runs is not None and start is None:
            start = from_us(clamp(to_us(created_at)) + 1)
        return Recurrence(spec, timezone, start, end, max_runs)


@dataclass(frozen=True, slots=True)
class Union(Spec):
    """The instants of any of several specs, at least two. Raises InvalidRecurrence (RECURRENCE_TOO_LARGE)."""

    kind: ClassVar[str] = "union"
    specs: tuple[Spec, ...]

    def __init__(self, specs: Iterable[Spec]) -> None:
        flat: list[Spec] = []
        for spec in specs:
            flat += spec.specs if isinstance(spec, Union) else [spec]
        if len(flat) < 2:
            raise InvalidRecurrence(
                "A union needs at least two recurrences.", fix="Add a recurrence, or use the single one directly."
            )
        _check_parts(self, *flat)
        object.__setattr__(self, "specs", tuple(flat))

    def compile(self, zone: Zone) -> Rule:
        return reduce(UnionRule, [spec.compile(zone) for spec in self.specs])

    def with_anchor(self, created_at: datetime) -> Union:
        return Union(spec.with_anchor(created_at) for spec in self.specs)

    def with_hash_key(self, key: str) -> Union:
        return Union(spec.with_hash_key(key) for spec in self.specs)

    def describe(self) -> str:
        first, *others = [spec.describe() for spec in self.specs]
        return "; and ".join([first, *map(_lower_first, others)])

    def warnings(self) -> list[str]:
        return [warning for spec in self.specs for warning in spec.warnings()]

    def to_fields(self) -> dict[str, Any]:
        return {"spec": [spec.to_json() for spec in self.specs]}

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        if not isinstance(fields["spec"], list):
            raise InvalidRecurrence("The spec of a union is a list of recurrences.", fix="Specify a list.")
        return cls([parse_part(part) for part in fields["spec"]])


@dataclass(frozen=True, slots=True)
class Except(Spec):
    """The instants of a spec without those of another. Raises InvalidRecurrence (RECURRENCE_TOO_LARGE)."""

    kind: ClassVar[str] = "except"
    spec: Spec
    removed: Spec

    def __post_init__(self) -> None:
        _check_parts(self, self.spec, self.removed)

    def compile(self, zone: Zone) -> Rule:
        reason = f"are removed by “{self.removed.describe()}”"
        return ExceptRule(self.spec.compile(zone), self.removed.compile(zone), reason)

    def with_anchor(self, created_at: datetime) -> Except:
        return Except(self.spec.with_anchor(created_at), self.removed.with_anchor(created_at))

    def with_hash_key(self, key: str) -> Except:
        return Except(self.spec.with_hash_key(key), self.removed.with_hash_key(key))

    def describe(self) -> str:
        return f"{_parenthesized(self.spec)}, except {_lower_first(_parenthesized(self.removed))}"

    def warnings(self) -> list[str]:
        return [*self.spec.warnings(), *self.removed.warnings()]

    def to_fields(self) -> dict[str, Any]:
        return {"spec": self.spec.to_json(), "except": self.removed.to_json()}

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        return cls(parse_part(fields["spec"]), parse_part(fields.get("except", {})))


@dataclass(frozen=True, slots=True)
class Within(Spec):
    """The instants of a spec whose local time lies within some hours.

    Raises InvalidRecurrence (INVALID_HOURS, RECURRENCE_TOO_LARGE).
    """

    kind: ClassVar[str] = "within"
    spec: Spec
    hours: Hours

    def __post_init__(self) -> None:
        _check_parts(self, self.spec)

    def compile(self, zone: Zone) -> Rule:
        return WindowedRule(self.spec.compile(zone), self.hours.to_windows(), f"are not {self.hours.describe()}")

    def with_anchor(self, created_at: datetime) -> Within:
        return replace(self, spec=self.spec.with_anchor(created_at))

    def with_hash_key(self, key: str) -> Within:
        return replace(self, spec=self.spec.with_hash_key(key))

    def describe(self) -> str:
        return f"{_parenthesized(self.spec)}, {self.hours.describe()}"

    def warnings(self) -> list[str]:
        return self.spec.warnings()

    def to_fields(self) -> dict[str, Any]:
        hours = {"start": self.hours.start, "end": self.hours.end, "days": self.hours.days}
        return {"spec": self.spec.to_json(), "hours": hours}

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        hours = fields.get("hours")
        if not isinstance(hours, dict) or not {"start", "end"} <= hours.keys() <= {"start", "end", "days"}:
            refuse_hours(
                f"hours is {hours!r:.60}, which is invalid.",
                'Write it like {"start": "09:00", "end": "17:30", "days": "MON-FRI"}.',
            )
        return cls(parse_part(fields["spec"]), Hours(**hours))


@dataclass(frozen=True, slots=True)
class OnCalendar(Spec):
    """A spec on the business days of a calendar, by local date.

    `roll` decides about occurrences on other days: "skip" omits them; "next" and "previous" move them to the next or
    previous business day at the same local time, by at most 366 days. Occurrences moved to the same local time are
    merged. With `follows`, schedules adopt each new version of the calendar of that name.
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
                f"{self.calendar!r:.60} is not a calendar.",
                code="INVALID_CALENDAR",
                fix='Use one such as Calendar.of("KR").',
            )
        if self.roll not in get_args(Roll):
            _refuse_roll(f"roll={self.roll!r:.60} is unknown.", f"Use one of {', '.join(get_args(Roll))}.")
        if not isinstance(self.follows, bool):
            _refuse_roll(f"follows={self.follows!r:.60} is unknown.", "Use True or False.")
        _check_parts(self, self.spec)
        if self.roll != "skip":
            try:
                self._compile_spec(self.spec.with_anchor(_EPOCH), zone("UTC"))
            except InvalidRecurrence as error:
                if error.code != "INVALID_RRULE":  # an RRULE may specify its own zone; that is checked when it is bound
                    raise

    def compile(self, zone: Zone) -> Rule:
        return self._compile_spec(self.spec, zone)

    def _compile_spec(self, spec: Spec, zone: Zone) -> Rule:
        if isinstance(spec, Union):
            return reduce(UnionRule, [self._compile_spec(part, zone) for part in spec.specs])
        rule = spec.compile(zone)
        if self.roll == "skip":
            return omit_days_off(rule, self.calendar.days, f"fall on no business day of {self.calendar.label()}")
        rolled = roll_days_off(rule, self.calendar.days, self.roll)
        if rolled is None:
            _refuse_roll(
                f"roll={self.roll!r} moves local times, and “{spec.describe()}” has none.",
                'Use roll="skip", or a cron expression with fixed times.',
            )
        return rolled

    def with_anchor(self, created_at: datetime) -> OnCalendar:
        return replace(self, spec=self.spec.with_anchor(created_at))

    def with_hash_key(self, key: str) -> OnCalendar:
        return replace(self, spec=self.spec.with_hash_key(key))

    def describe(self) -> str:
        text = self.spec.describe()
        if self.roll == "skip":
            return f"{text}, only on business days of {self.calendar.label()}"
        direction = "next" if self.roll == "next" else "previous"
        return f"{text}, moved to the {direction} business day of {self.calendar.label()}"

    def warnings(self) -> list[str]:
        return [*self.spec.warnings(), *self.calendar.warnings()]

    def to_fields(self) -> dict[str, Any]:
        fields = {"spec": self.spec.to_json(), "calendar": self.calendar.to_json(), "roll": self.roll}
        return {**fields, "follows": True} if self.follows else fields

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        calendar = Calendar.from_json(fields.get("calendar", {}))
        follows = fields.get("follows", False)
        return cls(parse_part(fields["spec"]), calendar, fields.get("roll", "skip"), follows=follows)


def _check_parts(owner: Spec, *parts: Spec) -> None:
    """Raise InvalidRecurrence for invalid parts of `owner`: no specs, fixed delays, too many, or nested too deep."""
    for part in parts:
        if not isinstance(part, Spec):
            raise InvalidRecurrence(f"{part!r:.60} is not a recurrence.", fix='Use one such as Cron("0 9 * * *").')
        if part.delay is not None:
            raise InvalidRecurrence(
                "A fixed delay depends on each run, so it cannot be combined with other recurrences.",
                fix="Omit since.",
            )
    sizes = [_measure(part) for part in parts]
    if 1 + max(depth for depth, _ in sizes) > MAX_DEPTH or sum(count for _, count in sizes) > MAX_PARTS:
        refuse_too_large(owner.kind)


def refuse_too_large(kind: str) -> NoReturn:
    """Raise InvalidRecurrence (RECURRENCE_TOO_LARGE)."""
    raise InvalidRecurrence(
        f"The {kind} has more than {MAX_PARTS} parts, or is nested more than {MAX_DEPTH} deep.",
        code="RECURRENCE_TOO_LARGE", fix="Split it into several schedules.",
    )  # fmt: skip


def _measure(spec: Spec) -> tuple[int, int]:
    """Return the nesting depth of a spec and its number of parts."""
    children = [*getattr(spec, "specs", ()), *(getattr(spec, name, None) for name in ("spec", "removed"))]
    sizes = [_measure(part) for part in children if isinstance(part, Spec)]
    return 1 + max((depth for depth, _ in sizes), default=0), sum(count for _, count in sizes) or 1


def _parenthesized(spec: Spec) -> str:
    text = spec.describe()
    return f"({text})" if isinstance(spec, Union) else text


def _lower_first(text: str) -> str:
    """Return a description in the form for the middle of a sentence."""
    return text if text.startswith("(") else text[:1].lower() + text[1:]


def _refuse_roll(message: str, fix: str) -> NoReturn:
    raise InvalidRecurrence(message, code="INVALID_ROLL", fix=fix)
