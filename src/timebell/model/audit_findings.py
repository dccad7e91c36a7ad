"""What an audit is given and what it finds, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from timebell.model.job import JobState
from timebell.recurrence import Recurrence
from timebell.recurrence.instants import format_instant

STARTED = (JobState.RUNNING, JobState.DISPATCHED, JobState.COMPLETED, JobState.FAILED)


class Finding(StrEnum):
    """What an audit finds."""

    MISSING = "missing"
    DOUBLED = "doubled"
    UNEXPECTED = "unexpected"
    MISCOUNTED = "miscounted"
    EARLY = "early"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it should be: `count` occurrences from `at` to `to`, with the ids of the rows in it."""

    finding: Finding
    schedule_id: str
    schedule: str
    at: datetime
    to: datetime
    count: int = 1
    detail: str
    jobs: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "finding": self.finding.value, "scheduleId": self.schedule_id, "schedule": self.schedule,
            "at": format_instant(self.at), "to": format_instant(self.to), "count": self.count, "detail": self.detail,
            "jobs": list(self.jobs),
        }  # fmt: skip


@dataclass(slots=True)
class Counts:
    """What was compared. `fired` have started, `skipped` is by reason; `due` are not decided yet and need not be:
    too recent, or of a paused schedule. `moved` are where other zone data had them."""

    schedules: int = 0
    expected: int = 0
    fired: int = 0
    pending: int = 0
    cancelled: int = 0
    due: int = 0
    manual: int = 0
    backfilled: int = 0
    moved: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> Mapping[str, int]:
        """Those that are single numbers, in the order in which they are shown."""
        names = ("schedules", "expected", "fired", "pending", "cancelled", "due", "manual", "backfilled", "moved")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row of a schedule, live or finished. A range row stands for `count` skipped ones up to `to`."""

    id: str
    kind: str
    scheduled_at: datetime
    run_at: datetime
    state: str
    attempt: int
    revision: int | None
    created_at: datetime
    started_at: datetime | None = None
    reason: str | None = None
    count: int = 1
    to: datetime | None = None

    @property
    def last(self) -> datetime:
        """The last instant it stands for."""
        return self.scheduled_at if self.to is None else max(self.to, self.scheduled_at)

    @property
    def ranges(self) -> bool:
        """Whether it stands for several."""
        return self.count != 1 or self.last != self.scheduled_at

    @property
    def ran(self) -> bool:
        """Whether it is an occurrence that ran or is to run."""
        if self.state == JobState.CANCELLED:
            return self.attempt > 0
        return self.state != JobState.SKIPPED

    @property
    def early(self) -> bool:
        """Whether it began before its time. Of a job that waits again, run_at is that of an attempt to come."""
        if self.started_at is None:
            return False
        return self.started_at < self.scheduled_at or (self.state in STARTED and self.started_at < self.run_at)


@dataclass(frozen=True, slots=True)
class Revised:
    """A revision: its number, and from when on it holds."""

    number: int
    effective_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A schedule as an audit needs it. `recurrence` reads that of a revision and raises what makes it unreadable;
    `exists` is false once it was deleted."""

    id: str
    name: str
    exists: bool = True
    enabled: bool = True
    fault: str | None = None
    next_fire_at: datetime | None = None
    revisions: Sequence[Revised]
    recurrence: Callable[[int], Recurrence]


@dataclass(frozen=True, slots=True)
class ZoneMove:
    """New zone data moved what lies in a zone `by` so much, from `since` (or before: it may have come late) on; rows
    written up to `until` may be where the data before had them."""

    timezone: str
    since: datetime
    until: datetime
    by: timedelta
