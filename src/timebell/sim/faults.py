"""What is to befall the nodes of a simulation, and what did."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from timebell.sim.database import POINTS


@dataclass(frozen=True, slots=True)
class Befell:
    """Something that befell a node, or with no name all of them: `what` is crash, freeze, thaw, cut, mend, disconnect,
    away or back."""

    at: datetime
    name: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to befall the node of a name, or any, at a point: it is down, or frozen, for so many seconds; with
    neither, its connection breaks."""

    name: str | None
    at: str
    down: float | None = None
    frozen: float | None = None


def point(at: str) -> str:
    """A point, checked. Raises ValueError."""
    operation, _, place = at.partition(".")
    count = POINTS.get(operation, 0)
    known = ["done", *(["commit"] if count > 1 else []), *map(str, range(1, 1 + count))]
    if operation not in POINTS or place not in known:
        raise ValueError(
            f"{at!r} is no point to crash at. Operations are {', '.join(POINTS)}; points of each are .1, .2 and so on"
            " (before a statement), .commit (before the commit of several) and .done (after it)."
        )
    return at
