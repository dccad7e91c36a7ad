"""What callers were told, which has to stay true."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.model.plans import Grid


@dataclass
class Shot:
    """A one-shot that was acknowledged."""

    job_id: str
    run_at: datetime
    request_id: str | None


@dataclass
class Told:
    """The answer to a cancel, and when: before which call of the handler, and under which attempt."""

    outcome: str
    at: datetime
    attempt: int
    calls: int


@dataclass
class Kept:
    """A schedule as its maker knows it: what it was from when on, and its pauses."""

    id: str
    name: str
    made: datetime
    grids: list[tuple[datetime, Grid]]
    overlaps: set[str]
    given: list[dict[str, Any]]
    """The options that it has or had."""
    pauses: list[list[datetime | None]] = field(default_factory=list)
    """From, to, and not None if the catch-up was asked to decide on it."""
    beside_until: datetime | None = None
    """When its jobs last were made to run beside others, if ever."""
    deleted: datetime | None = None
    triggers: int = 0
    wounded: bool = False
