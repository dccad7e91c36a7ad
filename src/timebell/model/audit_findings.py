"""Input and result types of the schedule audit."""

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
    """The kind of a difference between expected and recorded occurrences."""

    MISSING = "missing"
    DUPLICATED = "doubled"
    UNEXPECTED = "unexpected"
    MISCOUNTED = "miscounted"
    EARLY = "early"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference: `count` occurrences from `at` to `to`, with the ids of the job rows involved."""

    finding: Finding
    schedule_id: str
    schedule: str
    at: datetime
    to: datetime
    count: int
    detail: str
    jobs: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "finding": self.finding.value, "scheduleId": self.schedule_id, "schedule": self.schedule,
            "at": format_instant(self.at), "to": format_instant(self.to), "count": self.count, "detail": self.detail,
            "jobs": list(self.jobs),
        }  # fmt: skip


@dataclass(slots=True)
class AuditCounts:
    """Totals of an audit.

    `fired` occurrences have started; `skipped` counts by reason. `due` ones are not decided yet and need not be: too
    recent, or of a paused schedule. `moved` ones lie where another tzdata release put them. `found` counts the
    differences by kind.
    """

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

    def totals(self) -> Mapping[str, int]:
        """Return the scalar counters, in display order."""
        names = ("schedules", "expected", "fired", "pending", "cancelled", "due", "manual", "backfilled", "moved")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job row of a schedule, live or finished. A range row represents `count` skipped ones up to `range_end`."""

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
    range_end: datetime | None = None

    @property
    def last_instant(self) -> datetime:
        """The last instant that this row represents."""
        return self.scheduled_at if self.range_end is None else max(self.range_end, self.scheduled_at)

    @property
    def is_range(self) -> bool:
        """True if this row represents several occurrences."""
        return self.count != 1 or self.last_instant != self.scheduled_at

    @property
    def has_run_or_will(self) -> bool:
        """True if the occurrence ran or will run."""
        if self.state == JobState.CANCELLED:
            return self.attempt > 0
        return self.state != JobState.SKIPPED

    @property
    def started_early(self) -> bool:
        """True if the job started before it was due. While a job waits for a retry, run_at is that of the retry."""
        if self.started_at is None:
            return False
        return self.started_at < self.scheduled_at or (self.state in STARTED and self.started_at < self.run_at)


@dataclass(frozen=True, slots=True)
class RevisionStart:
    """A revision number and the instant from which it applies."""

    number: int
    effective_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleHistory:
    """The facts of a schedule that an audit needs.

    `exists` is false once the schedule was deleted. `load_recurrence` returns the recurrence of a revision, or raises
    the error that makes it unreadable.
    """

    id: str
    name: str
    exists: bool = True
    enabled: bool = True
    error: str | None = None
    next_fire_at: datetime | None = None
    revisions: Sequence[RevisionStart]
    load_recurrence: Callable[[int], Recurrence]


@dataclass(frozen=True, slots=True)
class ZoneShift:
    """A tzdata change moved the instants of a zone by `shift`, from `since` on, or earlier if it was installed late.

    Rows scheduled up to `until` may lie where the previous release put them.
    """

    timezone: str
    since: datetime
    until: datetime
    shift: timedelta
