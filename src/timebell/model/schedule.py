"""A schedule: a durable, named definition that creates a job at each instant of a recurrence."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.model.notebook import render_table
from timebell.model.policy import CatchUp, Overlap, Retry, WhenLate
from timebell.recurrence import Override, Recurrence
from timebell.recurrence.instants import format_instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """Policies for overlapping, missed and late occurrences. Durations are seconds.

    An occurrence is missed if it is more than `missed_after` late. `when_late` `run` lets it run late, subject to
    `catch_up`; `expire` skips it. At most `catch_up_limit` occurrences of the last `catch_up_window` catch up,
    `catch_up_pace` apart; more than `hold_above` at a time are held until the backlog is released. `jitter` spreads
    starts. A start more than `tolerance` late counts as a breach. `notify` names the alert channels that are notified
    when the schedule fails and when it recovers.
    """

    overlap: Overlap = Overlap.SKIP
    catch_up: CatchUp = CatchUp.LATEST
    catch_up_window: float = 24 * 3600.0
    catch_up_limit: int = 100
    missed_after: float = 60.0
    when_late: WhenLate = WhenLate.RUN
    catch_up_pace: float = 0.0
    hold_above: int = 1000
    jitter: float = 0.0
    tolerance: float = 1.0
    notify: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The job settings of a schedule's occurrences, with the schedule's description and labels.

    `condition` and `unless` are the preconditions of a delivery in JSON form: see `model/preconditions.py`.
    """

    topic: str
    payload: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    owner_id: str | None = None
    target: dict[str, Any] | None = None
    queue: str = "default"
    priority: int = 0
    group: str | None = None
    condition: list[dict[str, Any]] = field(default_factory=list)
    unless: dict[str, str] | None = None
    retry: Retry | None = None
    timeout: float | None = None
    expires_after: float | None = None
    description: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Schedule:
    """A stored schedule. `next_fire_at` is its cursor: the first instant not yet decided.

    It fires while `enabled`; a pause disables it from `paused_at` on. Immutable by convention: a planner creates one
    object per due schedule, and creating a frozen dataclass takes three times as long.
    """

    id: str
    tenant_id: str
    name: str
    recurrence: Recurrence
    action: Action
    policies: Policies = field(default_factory=Policies)
    enabled: bool = True
    revision: int = 1
    code_hash: str | None = None
    error: str | None = None
    next_fire_at: datetime | None = None
    last_fired_at: datetime | None = None
    created_at: datetime
    updated_at: datetime
    paused_at: datetime | None = None
    pause_reason: str | None = None
    created_by: str | None = None
    tzdata: str | None = field(default=None, compare=False)
    utc_offset: int | None = field(default=None, compare=False)
    """The tzdata release with which `next_fire_at` was computed, and the UTC offset (seconds east); None: unknown."""
    dropped_overrides: tuple[Override, ...] = ()
    """For a schedule just edited: the overrides that were dropped because their occurrences are gone."""

    def __repr__(self) -> str:
        return f"<Schedule {self.name!r} of {self.topic}: {self.recurrence.describe()}; next {self._next_fire()}>"

    def _repr_html_(self) -> str:
        return render_table([self.summary()])

    def summary(self) -> dict[str, object]:
        """Return the main fields by name, for tables."""
        return {
            "name": self.name, "topic": self.topic, "recurrence": self.recurrence.describe(),
            "enabled": self.enabled, "next": self._next_fire(), "id": self.id,
        }  # fmt: skip

    def _next_fire(self) -> str:
        return "never" if self.next_fire_at is None else format_instant(self.next_fire_at)

    @property
    def timezone(self) -> str:
        """The IANA key of the time zone."""
        return self.recurrence.timezone

    @property
    def effective_next_fire_at(self) -> datetime | None:
        """The next instant at which it fires: the cursor, unless an override skips or moves that occurrence."""
        if self.next_fire_at is None or not self.recurrence.overrides:
            return self.next_fire_at
        return self.recurrence.effective().next(self.next_fire_at - timedelta(microseconds=1))

    @property
    def topic(self) -> str:
        """The topic of its jobs."""
        return self.action.topic

    @property
    def catch_up_span(self) -> timedelta:
        """The maximum age of a missed occurrence that can still fire."""
        return timedelta(seconds=self.policies.catch_up_window)


@dataclass(frozen=True, slots=True, order=True)
class Upcoming:
    """A future occurrence of a schedule; `at` is an aware UTC instant."""

    at: datetime
    schedule_id: str
    name: str = field(compare=False)
    topic: str = field(compare=False)
    timezone: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The definition of a schedule from `effective_at` until the next revision."""

    number: int
    effective_at: datetime
    recurrence: Recurrence
    action: Action
    policies: Policies
