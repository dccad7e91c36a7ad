"""A spec in one zone with bounds and overrides: the recurrence that the rest of the program uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from timebell.errors import InvalidRecurrence
from timebell.recurrence.instants import MAX_US, MIN_US, format_instant, from_us, parse_instant, to_us
from timebell.recurrence.rules.overridden import OverriddenRule
from timebell.recurrence.rules.rule import Rule, stop_after_runs
from timebell.recurrence.zones import Note, Release, installed_release

if TYPE_CHECKING:
    from timebell.recurrence.spec import Spec

NEXT_CACHE_SIZE = 5  # further results of `next_us` that a recurrence caches besides the latest


@dataclass(frozen=True, slots=True, order=True)
class Override:
    """A change to the occurrence with the nominal instant `at`: it is moved to the instant `to`, or skipped if None.

    Both are aware datetimes. Raises InvalidRecurrence.
    """

    at: datetime
    to: datetime | None = None

    def __post_init__(self) -> None:
        for name in ("at", "to"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, from_us(clamp(to_us(value, name))))

    def to_json(self) -> dict[str, str]:
        """Return JSON fields from which `from_json` creates an equal override."""
        if self.to is None:
            return {"at": format_instant(self.at), "action": "skip"}
        return {"at": format_instant(self.at), "action": "move", "to": format_instant(self.to)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Create an override from the result of `to_json`. Raises InvalidRecurrence."""
        action, to = (data.get("action"), data.get("to")) if isinstance(data, Mapping) else (None, None)
        if action not in ("skip", "move") or (action == "move") != (to is not None):
            raise InvalidRecurrence(
                f"{data!r:.80} is not an override.",
                fix='Write {"at", "action": "skip"}, or {"at", "action": "move", "to"}.',
            )
        return cls(parse_instant(data.get("at"), "at"), None if to is None else parse_instant(to, "to"))


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A spec in a zone with bounds: an immutable set of instants that does not depend on the current time.

    Created by `Spec.bind`. Every returned datetime is aware and in UTC, except where stated. With overrides, the set
    contains both the nominal instants of overridden occurrences and the instants to which they are moved, even outside
    the bounds; `effective` contains only the instants that fire.
    """

    spec: Spec
    timezone: str
    start: datetime | None = None
    end: datetime | None = None
    max_runs: int | None = None
    overrides: tuple[Override, ...] = ()
    release: Release = field(default_factory=installed_release, kw_only=True, repr=False, compare=False)
    """The release of the time zone data that the rule uses."""
    rule: Rule = field(init=False, repr=False, compare=False)
    _first: int = field(init=False, repr=False, compare=False)
    _stop: int = field(init=False, repr=False, compare=False)
    _recent_answers: tuple[tuple[int, int], ...] = field(default=(), init=False, repr=False, compare=False)
    """Cached results of `next_us`, as pairs (argument, result): the planner repeats queries of its previous run."""

    def __post_init__(self) -> None:
        rule = self.spec.compile(self.release.zone(self.timezone))
        first = MIN_US if self.start is None else clamp(to_us(self.start, "start"))
        stop = MAX_US if self.end is None else clamp(to_us(self.end, "end"))
        if self.start is not None and self.end is not None and stop <= first:
            raise InvalidRecurrence(
                f"end ({format_instant(self.end)}) is not after start ({format_instant(self.start)}).",
                fix="Omit one of them, or specify a later end.",
            )
        if self.max_runs is not None:
            if self.spec.delay is not None:
                raise InvalidRecurrence(
                    "max_runs requires instants that are known in advance; those of a fixed delay are not.",
                    fix="Omit it, or limit the schedule with end.",
                )
            stop = stop_after_runs(rule, first, stop, _check_max_runs(self.max_runs))
        if self.overrides:
            object.__setattr__(self, "overrides", tuple(sorted(self.overrides)))
            moves = [(override.at, override.to) for override in self.overrides]
            rule, first, stop = OverriddenRule(rule, first, stop, moves), MIN_US, MAX_US
        for name, value in (("rule", rule), ("_first", first), ("_stop", stop)):
            object.__setattr__(self, name, value)
        for name in ("start", "end"):
            if (bound := getattr(self, name)) is not None:
                object.__setattr__(self, name, from_us(to_us(bound)))

    def next(self, after: datetime) -> datetime | None:
        """Return the first instant strictly after an aware datetime, or None.

        Raises InvalidRecurrence (NEVER_FIRES), like `previous`, if a combined rule excludes too many instants in a row
        and the search is given up.
        """
        instant = self.next_us(to_us(after))
        return None if instant is None else from_us(instant)

    def first_fire(self, after: datetime) -> datetime | None:
        """Return the first instant of a schedule that starts at `after`, or None.

        It is `next(after)`; for a fixed delay whose anchor has passed, it is one delay later than `after`.
        """
        instant = self.next(after)
        return self.next_after_run(None, after) if instant is None and self.spec.delay is not None else instant

    def next_after_run(self, started: datetime | None, ended: datetime) -> datetime | None:
        """Return the next instant of a fixed delay after a run, within the bounds and not before `ended`, or None."""
        delay = self.spec.delay
        assert delay is not None
        end = to_us(ended)
        since = end if started is None or delay.since == "last_end" else to_us(started)
        instant = max(since + delay.length_us, end, self._first)
        return from_us(instant) if instant < self._stop else None

    def previous(self, before: datetime) -> datetime | None:
        """Return the last instant strictly before an aware datetime, or None."""
        end = min(to_us(before), self._stop)
        if end <= self._first:
            return None
        instant = self.rule.before(end)
        return None if instant is None or instant < self._first else from_us(instant)

    def next_us(self, after: int) -> int | None:
        """Like `next`, in integer microseconds since the epoch, for callers that evaluate many instants."""
        for argument, result in self._recent_answers:
            if argument <= after < result:
                return result
        instant = self.rule.after(after if after >= self._first else self._first - 1)
        if instant is None or instant >= self._stop:
            return None
        object.__setattr__(self, "_recent_answers", ((after, instant), *self._recent_answers[:NEXT_CACHE_SIZE]))
        return instant

    def between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Yield the instants in [start, end), in order."""
        stop = min(to_us(end), self._stop)
        instant = self.rule.first_in(max(to_us(start), self._first), stop)
        while instant is not None:
            yield from_us(instant)
            instant = self.rule.first_in(instant + 1, stop)

    def count(self, start: datetime, end: datetime) -> int:
        """Return the number of instants in [start, end), without enumerating them."""
        low, high = max(to_us(start), self._first), min(to_us(end), self._stop)
        return self.rule.count(low, high) if low < high else 0

    def has(self, instant: datetime) -> bool:
        """Return whether the recurrence has this instant, an aware datetime."""
        at = to_us(instant)
        return self._first <= at < self._stop and self.rule.has(at)

    def effective(self) -> Recurrence:
        """Return the recurrence with only the instants that fire, without those that overrides skip or move away."""
        return self.with_rule(self.rule.effective()) if isinstance(self.rule, OverriddenRule) else self

    def with_rule(self, rule: Rule) -> Recurrence:
        """Return a copy of this recurrence that uses another rule."""
        recurrence = copy(self)
        object.__setattr__(recurrence, "rule", rule)
        object.__setattr__(recurrence, "_recent_answers", ())
        return recurrence

    def overridden_instants(self, start: datetime, end: datetime) -> list[datetime]:
        """Return the instants in [start, end) that overrides skip or move away, in order."""
        return [override.at for override in self.overrides if start <= override.at < end]

    def note(self, instant: datetime) -> Note | None:
        """Return how a clock change affects one of the instants.

        "gap" if its local time does not exist and was moved, "fold" if clocks show its local time twice, else None.
        """
        return self.rule.note(clamp(to_us(instant)))

    def local(self, instant: datetime) -> datetime:
        """Convert an aware datetime to the zone, for display only: PEP 495 makes comparisons unsafe in a fold."""
        to_us(instant)
        return self.rule.zone.local(instant)

    def describe(self) -> str:
        """Describe the recurrence in plain English, with zone, bounds and overrides."""
        parts = [f"{self.spec.describe()}, {self.timezone}"]
        parts += [f"from {self._format_local(self.start)}"] if self.start else []
        parts += [f"until {self._format_local(self.end)}"] if self.end else []
        if self.max_runs is not None:
            parts.append("once" if self.max_runs == 1 else f"at most {self.max_runs} times")
        for override in self.overrides:
            change = f"moved to {self._format_local(override.to)}" if override.to else "skipped"
            parts.append(f"{self._format_local(override.at)} {change}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return JSON fields from which `recurrence_from_json` creates an equal recurrence."""
        fields = {
            **self.spec.to_json(),
            "timezone": self.timezone,
            "start": format_instant(self.start) if self.start else None,
            "end": format_instant(self.end) if self.end else None,
            "maxRuns": self.max_runs,
        }
        if self.overrides:
            fields["overrides"] = [override.to_json() for override in self.overrides]
        return fields

    def _format_local(self, instant: datetime) -> str:
        return self.local(instant).isoformat(sep=" ", timespec="minutes")


def clamp(instant: int) -> int:
    """Limit an instant to the supported range, 1970 to 2199."""
    return min(max(instant, MIN_US), MAX_US)


def _check_max_runs(max_runs: object) -> int:
    if isinstance(max_runs, bool) or not isinstance(max_runs, int) or max_runs < 1:
        raise InvalidRecurrence(
            f"max_runs must be a whole number from 1, not {max_runs!r}.", fix="Omit it for no limit."
        )
    return max_runs
