"""A job: one durable unit of work with a `run_at`, and its state transitions.

    pending -> running -> completed                     the usual path
    running | dispatched -> pending                     a retry, later run_at
    running -> dispatched -> completed                  given to an external worker, which reports the result
    running | dispatched -> failed                      attempts used up, or not retryable: a dead letter
    pending | running | dispatched -> cancelled
    pending | running -> skipped                        with a reason; nothing was delivered

Live jobs (pending, running, dispatched) and finished ones are rows of two tables; see `store/schema.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from timebell.ids import occurrence_key
from timebell.model.notebook import render_table
from timebell.model.progress import Progress
from timebell.model.routes import COMPLETE_UNHANDLED_JSON
from timebell.recurrence.instants import format_instant


class JobState(StrEnum):
    """The state of a job. The last four are final, except that a failed job can be retried manually."""

    PENDING = "pending"
    RUNNING = "running"
    DISPATCHED = "dispatched"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


LIVE = (JobState.PENDING, JobState.RUNNING, JobState.DISPATCHED)
FINISHED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED)

# State filters: the states themselves, and aliases.
STATE_WORDS: dict[str, tuple[JobState, ...]] = {
    **{state.value: (state,) for state in JobState},
    "active": (JobState.RUNNING, JobState.DISPATCHED),
    "processing": (JobState.RUNNING, JobState.DISPATCHED),
    "success": (JobState.COMPLETED,),
    "failure": (JobState.FAILED,),
    "retrying": (JobState.PENDING,),
    "held": (JobState.PENDING,),
}
NARROW_STATE_WORDS = ("retrying", "held")
"""Aliases that match only a part of the jobs in their state."""
METADATA_NAMES = {
    "ownerId": "owner_id", "tenantId": "tenant_id", "correlationId": "correlation_id",
    "clientRequestId": "client_request_id",
}  # fmt: skip
"""Metadata fields: JSON name -> stored name."""


class Kind(StrEnum):
    """The origin of a job: a one-shot, an occurrence of a schedule, or a trigger."""

    ONCE = "once"
    PLANNED = "planned"
    MANUAL = "manual"
    BACKFILL = "backfill"
    TRIGGER = "trigger"


class Reason(StrEnum):
    """The reason why an occurrence was skipped, as stored in rows and used in metrics and pages."""

    OVERLAP = "overlap"
    MISSED = "missed"
    COALESCED = "coalesced"
    PAUSED = "paused"
    OVERRIDE = "override"
    EXPIRED = "expired"
    CONDITION = "condition"
    QUOTA = "quota"
    ORPHANED = "orphaned"


class Hold(StrEnum):
    """The reason why a job is excluded from the claim index."""

    OVERLAP = "overlap"
    UNHANDLED = "unhandled"
    BACKLOG = "backlog"
    GROUP = "group"
    TENANT = "tenant"
    STOPPING = "stopping"
    """Set on a running job: a later occurrence supersedes it and waits until it has stopped."""
    CANCELLING = "cancelling"
    """Set on a running job: a caller cancelled it with `stop=True`."""


class CancelOutcome(StrEnum):
    """The result of a cancel request; repeating the request returns the same result."""

    PREVENTED = "prevented"
    IN_FLIGHT = "in_flight"
    ALREADY_DONE = "already_done"


@dataclass(slots=True, kw_only=True)
class Job:
    """A job as returned to callers. Instants are aware UTC datetimes, durations seconds."""

    id: str
    tenant_id: str
    topic: str
    state: JobState
    scheduled_at: datetime
    run_at: datetime
    timezone: str
    payload: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    owner_id: str | None = None
    key: str | None = None
    kind: Kind = Kind.ONCE
    schedule_id: str | None = None
    target: dict[str, Any] | None = None
    queue: str = "default"
    priority: int = 0
    group: str | None = None
    condition: list[dict[str, Any]] = field(default_factory=list)
    unless: dict[str, str] | None = None
    retry: dict[str, Any] | None = None
    timeout: float | None = None
    expires_at: datetime | None = None
    hold: Hold | None = None
    attempt: int = 0
    attempts_used: int = 0
    node_id: str | None = None
    created_at: datetime
    local_time: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    result: Any = None
    progress: Progress | None = None
    """The last progress that the handler reported in the latest attempt."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    replaces: str | None = None
    replaced_by: str | None = None
    skipped_to: datetime | None = None
    skipped_count: int = 1
    adjusted: str | None = None
    """For a job just created at a local time: `gap` or `fold` if the clock skips or repeats that time."""

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self.topic}: {self.state}, due {format_instant(self.run_at)}>"

    def _repr_html_(self) -> str:
        return render_table([self.summary()])

    def summary(self) -> dict[str, object]:
        """Return the main fields by name, for tables."""
        reason = self.error or self.reason or self.hold or ""
        return {
            "id": self.id, "topic": self.topic, "state": self.state, "due": format_instant(self.run_at),
            "attempt": self.attempt, "payload": f"{self.payload!r:.100}", "reason": f"{reason:.100}",
        }  # fmt: skip

    @property
    def status(self) -> JobState:
        """An alias of `state`, named as in the filters."""
        return self.state

    @property
    def due_at(self) -> datetime:
        """The original due time. Retries move `run_at`, not this."""
        due = self.attempts[0].get("due") if self.attempts else None
        return self.run_at if due is None else datetime.fromisoformat(due)

    @property
    def first_started_at(self) -> datetime | None:
        """The start of the first attempt."""
        started = self.attempts[0].get("startedAt") if self.attempts else None
        return self.started_at if started is None else datetime.fromisoformat(started)

    @property
    def lag(self) -> timedelta | None:
        """The time from the due time to the first start; None if the job has not started."""
        started = self.first_started_at
        return None if started is None else max(started - self.due_at, timedelta())

    @property
    def correlation_id(self) -> str | None:
        """The `correlation_id` of the metadata."""
        return self.metadata.get("correlation_id")

    @property
    def client_request_id(self) -> str | None:
        """The `client_request_id` of the metadata."""
        return self.metadata.get("client_request_id")

    @property
    def occurrence_key(self) -> str:
        """The key by which receivers deduplicate: the same after a retry, a takeover and a restore."""
        return job_occurrence_key(self.id, self.schedule_id, self.scheduled_at, self.kind)


def job_occurrence_key(job_id: str, schedule_id: str | None, scheduled_at: datetime, kind: str) -> str:
    """Return the occurrence key of a job: its own id for a one-shot, otherwise derived from its occurrence."""
    return job_id if schedule_id is None else occurrence_key(schedule_id, scheduled_at, kind)


@dataclass(slots=True, kw_only=True)
class NewJob:
    """A job to insert. JSON fields are validated and encoded as text; `route` is derived from topic and target."""

    id: str
    tenant_id: str
    topic: str
    scheduled_at: datetime
    run_at: datetime
    timezone: str
    created_at: datetime
    payload: str = "null"
    metadata: str | None = None
    owner_id: str | None = None
    key: str | None = None
    request_id: str | None = None
    kind: Kind = Kind.ONCE
    schedule_id: str | None = None
    revision: int | None = None
    target: str | None = None
    target_name: str | None = None
    """The name of its target, whose kind is looked up when the job is inserted."""
    route: str = ""
    queue: str = "default"
    priority: int = 0
    group: str | None = None
    conditions: str | None = None
    retry: str | None = None
    timeout: float | None = None
    expires_at: datetime | None = None
    hold: Hold | None = None
    serial: bool = False
    replaces: str | None = None
    local_time: str | None = None
    tzdata: str | None = None
    adjusted: str | None = None


class UniformJobs:
    """Jobs to insert that differ only in id, run time and payload; avoids one `NewJob` object per job.

    They are one-shots without key, target or expiry. `template` is the first of them.
    """

    __slots__ = ("template", "varying")

    def __init__(self, template: NewJob, ids: list[str], run_times: list[datetime], payloads: list[str]) -> None:
        self.template = template
        self.varying: dict[str, list[Any]] = {
            "id": ids, "scheduled_at": run_times, "run_at": run_times, "payload": payloads,
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self.varying["id"])

    def __iter__(self) -> Iterator[NewJob]:
        return map(self.job, range(len(self)))

    def job(self, index: int) -> NewJob:
        """Return the job at `index`."""
        return replace(self.template, **{name: values[index] for name, values in self.varying.items()})

    @property
    def earliest_run_at(self) -> datetime:
        """The earliest run time."""
        earliest: datetime = min(self.varying["run_at"])
        return earliest


@dataclass(slots=True)
class Attempt:
    """One attempt at a job by this node.

    `number` is the fence: every later write requires that the job's row still has this attempt number.
    """

    id: str
    tenant_id: str
    topic: str
    schedule_id: str | None
    scheduled_at: datetime
    kind: str
    timezone: str
    payload: str
    metadata: str | None
    target: str | None
    queue: str
    retry: str | None
    timeout: float | None
    expires_at: datetime | None
    number: int
    attempts_used: int
    serial: bool
    errors: str | None
    revision: int | None
    run_at: datetime
    started_at: datetime
    state: JobState = JobState.RUNNING
    group: str | None = None
    target_used: dict[str, Any] | None = None
    """For a named target: its name, kind and revision at delivery."""
    priority: int = 0
    manual_retries: int = 0
    """How often the job was retried manually after it had failed."""
    conditions: str | None = None
    """JSON of the preconditions checked before delivery: see `model/preconditions.py`."""
    verdict: dict[str, Any] | None = None
    """For a job with a condition: the verdict and the compared values."""
    source_read: dict[str, Any] | None = None
    """For a job delayed by its source: the source, the seconds, and the problem if there was one."""
    progress: Progress | None = None
    """The progress that the handler reported last."""
    trace_id: str | None = None
    """The trace id of the delivery, if deliveries are traced."""

    @property
    def is_for_handlers(self) -> bool:
        """True if handlers of the topic run the job, rather than another target."""
        return self.target is None or self.target == COMPLETE_UNHANDLED_JSON

    @property
    def occurrence_key(self) -> str:
        """The key by which receivers deduplicate, equal to `Job.occurrence_key`."""
        return job_occurrence_key(self.id, self.schedule_id, self.scheduled_at, self.kind)


@dataclass(slots=True)
class Completion:
    """The outcome of an attempt: a final state, `pending` again at `run_at`, or `dispatched` until `run_at`.

    `attempt` and `expected_state` are the fence: the completion has no effect unless the job's row still has both.
    `uses_attempt` is false if the attempt does not count against the retry policy. `errors` is the JSON list of the
    job's recorded attempts. With `watched`, alert channels are notified when the schedule recovers.
    """

    id: str
    attempt: int
    state: JobState
    at: datetime
    run_at: datetime | None = None
    reason: str | None = None
    error: str | None = None
    code: str | None = None
    result: str | None = None
    uses_attempt: bool = True
    expected_state: JobState = JobState.RUNNING
    errors: str | None = None
    cancel: str | None = None
    replaced_by: str | None = None
    schedule_id: str | None = None
    watched: bool = False
    group_queue: str | None = None
    """The queue of a running job that belongs to a group."""
    progress: Any = None
    """JSON progress of the attempt, available to the next attempt."""
    delivery_record: dict[str, Any] | None = None
    """The attempt record of a delivery to a target outside Python."""
    traceback: str | None = None
    """The masked traceback of a failed handler."""
    attempts_allowed: int | None = None
    """The limit of the retry policy, of an attempt that failed and used one."""
