"""What a simulation is told: how many nodes, what handlers do, what goes wrong and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Self
from zlib import crc32

from timebell.errors import InvalidInput
from timebell.recurrence.instants import parse_instant
from timebell.settings import duration

OF = ("nodes", "database")


@dataclass(frozen=True, slots=True)
class Handling:
    """How long the handlers of some topics take (seconds), and how many of a hundred attempts fail."""

    takes: float = 0.0
    fails: float = 0.0

    def failing(self, job_id: str, attempt: int) -> bool:
        """Whether this attempt is one of them: by a hash, so the same seed gives the same."""
        return crc32(f"{job_id}.{attempt}".encode()) % 10_000 < self.fails * 100


@dataclass(frozen=True, slots=True)
class Outage:
    """From `start` to `end` (aware UTC) all nodes are down, or the database is away."""

    start: datetime
    end: datetime
    of: str = "nodes"


@dataclass(frozen=True, slots=True)
class Crash:
    """At an instant a node, or with None all of them, is killed; it starts again `down` seconds later."""

    at: datetime
    node: str | None = None
    down: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of it. `handlers` maps topics, or patterns such as `billing.*`, to what their handlers do."""

    nodes: int = 1
    seed: int = 0
    handlers: Mapping[str, Handling] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()
    crashes: tuple[Crash, ...] = ()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From JSON or YAML. Raises InvalidInput (SCENARIO_INVALID)."""
        _known(given, cls, "the simulation")
        nodes, seed = given.get("nodes", 1), given.get("seed", 0)
        if not _whole(nodes, 1, 20) or not _whole(seed, 0, 2**53):
            raise _refused(f"nodes is {nodes!r:.20} and seed {seed!r:.20}", "nodes goes from 1 to 20.")
        handlers = _mapping(given.get("handlers", {}), "handlers")
        return cls(
            nodes, seed, {str(topic): _handling(topic, one) for topic, one in handlers.items()},
            tuple(_outage(one) for one in _list(given.get("outages", []), "outages")),
            tuple(_crash(one) for one in _list(given.get("crashes", []), "crashes")),
        )  # fmt: skip

    def handling(self, topic: str) -> Handling:
        """What the handlers of a topic do: the longest pattern that fits says it."""
        fitting = [pattern for pattern in self.handlers if fnmatchcase(topic, pattern)]
        return self.handlers[max(fitting, key=len)] if fitting else Handling()


def _handling(topic: Any, given: Any) -> Handling:
    found = _mapping(given, f"handlers.{topic}")
    _known(found, Handling, f"handlers.{topic}")
    fails = found.get("fails", 0)
    if isinstance(fails, bool) or not isinstance(fails, int | float) or not 0 <= fails <= 100:
        raise _refused(f"handlers.{topic}.fails is {fails!r:.20}", "It goes from 0 to 100, of a hundred attempts.")
    return Handling(_span(found.get("takes", 0), f"handlers.{topic}.takes"), float(fails))


def _outage(given: Any) -> Outage:
    found = _mapping(given, "an outage")
    if unknown := found.keys() - {"from", "to", "of"}:
        raise _refused(f"an outage has no {min(map(str, unknown))}", "It has from, to and of.")
    start, end, of = _instant(found.get("from"), "from"), _instant(found.get("to"), "to"), found.get("of", "nodes")
    if not start < end or of not in OF:
        raise _refused(f"an outage of {of!r:.20} from {start} to {end}", f"It is of {' or '.join(OF)}, and ends later.")
    return Outage(start, end, of)


def outage(text: str) -> Outage:
    """`FROM/TO`, as a flag has it. Raises InvalidInput (SCENARIO_INVALID)."""
    start, _, end = text.partition("/")
    return _outage({"from": start, "to": end})


def _crash(given: Any) -> Crash:
    found = _mapping(given, "a crash")
    _known(found, Crash, "a crash")
    return Crash(_instant(found.get("at"), "at"), found.get("node"), _span(found.get("down", 1), "down"))


def _instant(text: Any, what: str) -> datetime:
    found = parse_instant(text, what)
    if found.tzinfo is None:
        raise _refused(f"{what} is {text!r:.40}, which has no offset from UTC", "Write it like 2027-03-14T07:00:00Z.")
    return found


def _span(value: Any, what: str) -> float:
    found = None if isinstance(value, bool) else duration(value)
    if found is None:
        raise _refused(f"{what} is {value!r:.40}", "Give seconds, or a duration such as 90s or 15m.")
    return found


def _known(given: Mapping[str, Any], kind: Any, what: str) -> None:
    names = [each.name for each in fields(kind)]
    if unknown := [str(name) for name in given if name not in names]:
        raise _refused(f"{what} has no {unknown[0]:.40}", f"There are {', '.join(names)}.")


def _mapping(given: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _refused(f"{what} is {given!r:.40}", "Give names with values.")
    return given


def _list(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list):
        raise _refused(f"{what} is {given!r:.40}", "Give a list.")
    return given


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _refused(what: str, fix: str) -> InvalidInput:
    return InvalidInput(f"{what[:1].upper()}{what[1:]}.", code="SCENARIO_INVALID", fix=fix)
