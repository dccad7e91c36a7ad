"""Records of acknowledged calls, which must remain true."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.model.inputs import Grid


@dataclass
class JobRecord:
    """An acknowledged one-time job."""

    job_id: str
    run_at: datetime
    request_id: str | None


@dataclass
class CancelRecord:
    """The result of a cancel: its time, the attempt then, and the number of handler calls before it."""

    outcome: str
    at: datetime
    attempt: int
    calls: int


@dataclass
class ScheduleRecord:
    """An acknowledged schedule: its specs with their start times, its options and its pauses."""

    id: str
    name: str
    made: datetime
    grids: list[tuple[datetime, Grid]]
    overlaps: set[str]
    given: list[dict[str, Any]]
    """All options so far."""
    pauses: list[list[datetime | None]] = field(default_factory=list)
    """Start, end, and the time of a resume with catch-up (None without)."""
    concurrent_until: datetime | None = None
    """The last time at which its jobs were allowed to run concurrently, if ever."""
    deleted: datetime | None = None
    triggers: int = 0
    damaged: bool = False
