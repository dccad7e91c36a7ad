"""State shared by the services of one node: identity, store, clock, options and running attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from timebell.clock import Clock
from timebell.engine.arrival_stream import ArrivalHub
from timebell.engine.running_attempt import RunningAttempt
from timebell.engine.wakeups import Wakeups
from timebell.feature import Feature
from timebell.model.job import Attempt, Completion
from timebell.model.policy import Retry
from timebell.model.repair_report import RepairReport
from timebell.observe.alerts import Channels
from timebell.observe.counters import Counters
from timebell.recurrence import Recurrence
from timebell.store.dialects.base import Store
from timebell.store.schedules.deployments import Deployment
from timebell.targets.base import Target
from timebell.targets.handler import Handlers

if TYPE_CHECKING:
    from timebell.engine.leader.audit_export import AuditDestination


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings of a node. Durations are in seconds."""

    slots: int = 500
    threads: int = 16
    batch_size: int = 500
    lease: float = 15.0
    heartbeat: float = 5.0
    poll: float = 1.0
    drain: float = 30.0
    retention: float = 30 * 86_400.0
    name: str = "node"
    url: str = "http://127.0.0.1:8700"
    """The address of the dashboard, for links in alerts."""


class CachedRevision(NamedTuple):
    """The parts of a schedule revision that a node caches for running its jobs. `tolerance` is in seconds."""

    name: str
    recurrence: Recurrence
    tolerance: float
    notify: tuple[str, ...] = ()


@dataclass(slots=True)
class Node:
    """One running process, or one of several nodes of a simulation."""

    id: str
    store: Store
    clock: Clock
    options: NodeOptions
    handlers: Handlers
    targets: Mapping[str, Target]
    wakeups: Wakeups
    named_targets: Mapping[str, Target] = field(default_factory=dict)
    """Targets for jobs that refer to a target by name, by kind."""
    features: Sequence[Feature] = ()
    secret_key: str | None = field(default=None, repr=False)
    running_attempts: dict[str, RunningAttempt] = field(default_factory=dict)
    revision_cache: dict[tuple[str, int], CachedRevision] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    repair_report: RepairReport = field(default_factory=RepairReport)
    """Sum of all repair reports since the node started."""
    alert_channels: Channels = field(default_factory=Channels)
    audit_destinations: Mapping[str, AuditDestination] = field(default_factory=dict)
    """Where the audit log is delivered to, by name."""
    mask: Callable[[str], str] = str
    """Replaces secrets in errors and tracebacks before they are stored."""
    arrivals: ArrivalHub | None = None
    """Publishes started jobs to `Timebell.arrivals`."""
    limited_tenants: frozenset[str] = frozenset()
    """Tenants with concurrency or rate limits, as of the last heartbeat."""
    metered_tenants: frozenset[str] = frozenset()
    """Tenants with a monthly quota, as of the last heartbeat."""
    deployment: Deployment | None = None
    """The release of the program; None if the program defines no handlers and no schedules."""
    apply_definitions: Callable[[], Awaitable[bool]] | None = None
    """Writes the schedules defined in code; returns False if a newer deployment has a live node."""
    stopping: bool = False
    drain_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an operator asked this node to drain."""
    receives_notifications: bool = False
    """Whether other nodes notify this one, as of the last heartbeat."""

    def next_poll_at(self, now: datetime) -> datetime | None:
        """Return when planner and worker look for work although nothing wakes them.

        Without notifications, work of other processes is found only in this way. With them (None), each heartbeat wakes
        both loops, because a notification may be lost and what is due later than NOTIFY_HORIZON is not notified.
        """
        return None if self.receives_notifications else now + timedelta(seconds=self.options.poll)

    def untrack(self, job_id: str, number: int) -> None:
        """Remove an attempt, unless a later attempt of the same job has started here meanwhile."""
        running = self.running_attempts.get(job_id)
        if running is not None and running.attempt.number == number:
            del self.running_attempts[job_id]

    def untrack_completed(self, completions: Iterable[Completion]) -> None:
        """Remove the attempts of written completions, as `untrack` does."""
        running_attempts = self.running_attempts
        for completion in completions:
            running = running_attempts.get(completion.id)
            if running is not None and running.attempt.number == completion.attempt:
                del running_attempts[completion.id]

    def cached_revision(self, attempt: Attempt) -> CachedRevision | None:
        """Return the schedule revision of an attempt; None if it has no schedule, or if that could not be loaded."""
        return self.revision_cache.get((attempt.schedule_id or "", attempt.revision or 0))

    def retry_policy_for(self, attempt: Attempt, own_policy: Mapping[str, Any] | None) -> Retry:
        """Return the retry policy of a job: its own, else its handler's, else the default."""
        if own_policy is not None:
            return Retry(**own_policy)
        if attempt.is_for_handlers:
            for handler in self.handlers.handlers_for(attempt.topic)[:1]:
                if handler.retry is not None:
                    return handler.retry
        return DEFAULT_RETRY

    def can_cancel(self, attempt: Attempt) -> bool:
        """True if cancelling the task stops the work; a handler in a thread continues."""
        return not attempt.is_for_handlers or all(
            handler.runs_in != "thread" for handler in self.handlers.handlers_for(attempt.topic)
        )

    def timeout_for(self, attempt: Attempt) -> float:
        """Return the timeout of an attempt in seconds: the job's own, else its handler's, else the default."""
        if attempt.timeout is not None:
            return attempt.timeout
        if attempt.is_for_handlers:
            for handler in self.handlers.handlers_for(attempt.topic)[:1]:
                if handler.timeout is not None:
                    return handler.timeout
        return DEFAULT_TIMEOUT_SECONDS if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT_SECONDS


DEFAULT_RETRY = Retry()
DEFAULT_TIMEOUT_SECONDS = 60.0
DEFAULT_SCHEDULE_TIMEOUT_SECONDS = 3600.0
