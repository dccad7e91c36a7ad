"""Faults to inject into the nodes of a simulation, and the events that were recorded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from timebell.sim.database import FAULT_POINTS


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault of one node (`name` None: of all nodes, or of the database).

    `kind` is `crash`, `freeze`, `thaw`, `cut` or `mend` (connection lost or restored), `disconnect`, `away` or `back`
    (database unreachable or reachable again).
    """

    at: datetime
    name: str | None
    kind: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject once at a point, into the named node or (None) the first node that reaches the point.

    The node crashes for `down_seconds`, or is frozen for `frozen_seconds`; with neither, its connection breaks.
    """

    name: str | None
    point: str
    down_seconds: float | None = None
    frozen_seconds: float | None = None


def validate_point(point: str) -> str:
    """Return a fault point if it exists. Raises ValueError."""
    operation, _, step = point.partition(".")
    count = FAULT_POINTS.get(operation, 0)
    steps = ["done", *(["commit"] if count > 1 else []), *map(str, range(1, 1 + count))]
    if operation not in FAULT_POINTS or step not in steps:
        raise ValueError(
            f"{point!r} is not a fault point. Operations are {', '.join(FAULT_POINTS)}; points of each are .1, .2 and"
            " so on (before a statement), .commit (before the commit, if there are several statements) and .done"
            " (afterwards)."
        )
    return point
