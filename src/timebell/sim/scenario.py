"""The scenario of a simulation: nodes, handler behavior, outages and crashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Self
from zlib import crc32

from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.recurrence.instants import parse_instant

OUTAGE_SCOPES = ("nodes", "database")


@dataclass(frozen=True, slots=True)
class HandlerBehavior:
    """The duration of a handler call in seconds, and the percentage of attempts that fail."""

    takes: float = 0.0
    fails: float = 0.0

    def should_fail(self, job_id: str, attempt: int) -> bool:
        """Return whether this attempt fails; decided by a hash, so that runs with the same seed agree."""
        return crc32(f"{job_id}.{attempt}".encode()) % 10_000 < self.fails * 100


@dataclass(frozen=True, slots=True)
class Outage:
    """An outage of all nodes or of the database from `start` to `end` (aware UTC)."""

    start: datetime
    end: datetime
    scope: str = "nodes"


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash of one node (None: of all nodes) at an instant; it restarts `down` seconds later."""

    at: datetime
    node: str | None = None
    down: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """The whole scenario. `handlers` maps topics, or patterns such as `billing.*`, to handler behavior."""

    nodes: int = 1
    seed: int = 0
    handlers: Mapping[str, HandlerBehavior] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()
    crashes: tuple[Crash, ...] = ()

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Parse a scenario decoded from JSON or YAML. Raises InvalidInput (INVALID_SCENARIO)."""
        _reject_unknown_fields(data, cls, "the simulation")
        nodes, seed = data.get("nodes", 1), data.get("seed", 0)
        if not _is_integer_between(nodes, 1, 20) or not _is_integer_between(seed, 0, 2**53):
            raise _invalid(f"nodes is {nodes!r:.20} and seed {seed!r:.20}", "nodes must be 1 to 20, seed an integer.")
        handlers = _require_mapping(data.get("handlers", {}), "handlers")
        return cls(
            nodes, seed, {str(topic): _parse_behavior(topic, behavior) for topic, behavior in handlers.items()},
            tuple(_parse_outage_fields(one) for one in _require_list(data.get("outages", []), "outages")),
            tuple(_parse_crash(one) for one in _require_list(data.get("crashes", []), "crashes")),
        )  # fmt: skip

    def behavior_for(self, topic: str) -> HandlerBehavior:
        """Return the handler behavior of a topic: that of the longest matching pattern."""
        matching = [pattern for pattern in self.handlers if fnmatchcase(topic, pattern)]
        return self.handlers[max(matching, key=len)] if matching else HandlerBehavior()


def _parse_behavior(topic: Any, data: Any) -> HandlerBehavior:
    behavior = _require_mapping(data, f"handlers.{topic}")
    _reject_unknown_fields(behavior, HandlerBehavior, f"handlers.{topic}")
    fails = behavior.get("fails", 0)
    if isinstance(fails, bool) or not isinstance(fails, int | float) or not 0 <= fails <= 100:
        raise _invalid(f"handlers.{topic}.fails is {fails!r:.20}", "It must be a percentage from 0 to 100.")
    return HandlerBehavior(_parse_seconds(behavior.get("takes", 0), f"handlers.{topic}.takes"), float(fails))


def _parse_outage_fields(data: Any) -> Outage:
    outage = _require_mapping(data, "an outage")
    if unknown := outage.keys() - {"from", "to", "of"}:
        raise _invalid(f"an outage has no field {min(map(str, unknown))}", "Its fields are from, to and of.")
    start, end, scope = (
        _parse_aware_instant(outage.get("from"), "from"),
        _parse_aware_instant(outage.get("to"), "to"),
        outage.get("of", "nodes"),
    )
    if not start < end or scope not in OUTAGE_SCOPES:
        raise _invalid(
            f"an outage of {scope!r:.20} from {start} to {end} is not valid",
            f"It must be of {' or '.join(OUTAGE_SCOPES)}, and must end after its start.",
        )
    return Outage(start, end, scope)


def parse_outage(text: str) -> Outage:
    """Parse an outage of the form `FROM/TO`, as used by a CLI flag. Raises InvalidInput (INVALID_SCENARIO)."""
    start, _, end = text.partition("/")
    return _parse_outage_fields({"from": start, "to": end})


def _parse_crash(data: Any) -> Crash:
    crash = _require_mapping(data, "a crash")
    _reject_unknown_fields(crash, Crash, "a crash")
    return Crash(
        _parse_aware_instant(crash.get("at"), "at"), crash.get("node"), _parse_seconds(crash.get("down", 1), "down")
    )


def _parse_aware_instant(text: Any, name: str) -> datetime:
    instant = parse_instant(text, name)
    if instant.tzinfo is None:
        raise _invalid(f"{name} is {text!r:.40}, which has no UTC offset", "Write it like 2027-03-14T07:00:00Z.")
    return instant


def _parse_seconds(value: Any, name: str) -> float:
    seconds = None if isinstance(value, bool) else parse_duration(value)
    if seconds is None:
        raise _invalid(f"{name} is {value!r:.40}", "Use seconds, or a duration such as 90s or 15m.")
    return seconds


def _reject_unknown_fields(data: Mapping[str, Any], kind: Any, location: str) -> None:
    names = [each.name for each in fields(kind)]
    if unknown := [str(name) for name in data if name not in names]:
        raise _invalid(f"{location} has no field {unknown[0]:.40}", f"Its fields are {', '.join(names)}.")


def _require_mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid(f"{name} is {value!r:.40}, not a mapping", "Use names with values.")
    return value


def _require_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _invalid(f"{name} is {value!r:.40}", "Use a list.")
    return value


def _is_integer_between(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _invalid(problem: str, fix: str) -> InvalidInput:
    return InvalidInput(f"{problem[:1].upper()}{problem[1:]}.", code="INVALID_SCENARIO", fix=fix)
