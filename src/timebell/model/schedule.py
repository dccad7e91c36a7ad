"""A schedule: a durable, named intent to make a job at each instant of a recurrence."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.model.policy import CatchUp, Lateness, Overlap, Retry
from timebell.recurrence import Override, Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What a schedule does beyond firing on time. Durations are seconds.

    A `state` occurrence is worth running late, an `anchored` one is void once it is missed. `catch_up_pace`
    keeps what is made up for apart; more than `hold_above` of it wait for `recover`. `jitter` spreads starts,
    `tolerance` is how late one may start before it is counted as a breach. `notify` names the alert channels that are
    told when it fails and when it works again.
    """

    overlap: Overlap = Overlap.SKIP
    catch_up: CatchUp = CatchUp.LATEST
    catch_up_window: float = 24 * 3600.0
    catch_up_limit: int = 100
    missed_after: float = 60.0
    lateness: Lateness = Lateness.STATE
    catch_up_pace: float = 0.0
    hold_above: int = 1000
    jitter: float = 0.0
    tolerance: float = 1.0
    notify: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What each occurrence of a schedule becomes: the job's own settings; and what people say of it.

    `condition` and `unless` are what is asked before its delivery, as JSON: see `model/preconditions.py`.
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
    """A schedule as it is stored. `next_fire_at` is its cursor: the first instant not yet decided.

    It fires while `enabled`; a pause makes it not so, from `paused_at` on. Nothing changes one; it is not frozen, as a
    planner makes one of each that is due, and that would be three times as dear.
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
    fault: str | None = None
    next_fire_at: datetime | None = None
    last_fired_at: datetime | None = None
    created_at: datetime
    updated_at: datetime
    paused_at: datetime | None = None
    pause_reason: str | None = None
    created_by: str | None = None
    tzdata: str | None = field(default=None, compare=False)
    utc_offset: int | None = field(default=None, compare=False)
    """With what zone data `next_fire_at` was computed, and the seconds east of UTC that gave; None: not known."""
    dropped: tuple[Override, ...] = ()
    """Of a schedule just edited: the overrides that name no occurrence of it any more."""

    @property
    def timezone(self) -> str:
        """The zone's IANA key, as it was given."""
        return self.recurrence.timezone

    @property
    def fires_at(self) -> datetime | None:
        """When it fires next: the cursor, unless an override skips or moves that occurrence."""
        if self.next_fire_at is None or not self.recurrence.overrides:
            return self.next_fire_at
        return self.recurrence.fired().next(self.next_fire_at - timedelta(microseconds=1))

    @property
    def topic(self) -> str:
        """The topic its jobs carry."""
        return self.action.topic

    @property
    def catch_up_from(self) -> timedelta:
        """How far back a missed occurrence may lie and still fire."""
        return timedelta(seconds=self.policies.catch_up_window)


@dataclass(frozen=True, slots=True, order=True)
class Upcoming:
    """An occurrence to come: the aware UTC instant `at` which a schedule fires."""

    at: datetime
    schedule_id: str
    name: str = field(compare=False)
    topic: str = field(compare=False)
    timezone: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What a schedule was from `effective_at` on, until the next revision."""

    number: int
    effective_at: datetime
    recurrence: Recurrence
    action: Action
    policies: Policies
