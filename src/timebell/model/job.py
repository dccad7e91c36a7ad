"""A job: one durable unit of work with a `run_at`, and everything that can become of it.

    pending -> running -> completed                     the plain way
    running | dispatched -> pending                     a retry, later run_at
    running -> dispatched -> completed                  handed to an outside worker, which reports back
    running | dispatched -> failed                      tries used up, or not retryable: the dead letter
    pending | running | dispatched -> cancelled
    pending | running -> skipped                        with a reason; nothing was delivered

Live jobs (pending, running, dispatched) and finished ones are rows of two tables; see `store/schema.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from timebell.ids import occurrence_key
from timebell.model.routes import COMPLETES_TEXT


class JobState(StrEnum):
    """Where a job stands. The last four are final, but for the replay of a failed one."""

    PENDING = "pending"
    RUNNING = "running"
    DISPATCHED = "dispatched"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


LIVE = (JobState.PENDING, JobState.RUNNING, JobState.DISPATCHED)
FINISHED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.SKIPPED)

# Words that filters understand besides the states themselves.
STATE_WORDS: dict[str, tuple[JobState, ...]] = {
    **{state.value: (state,) for state in JobState},
    "active": (JobState.RUNNING, JobState.DISPATCHED),
    "processing": (JobState.RUNNING, JobState.DISPATCHED),
    "success": (JobState.COMPLETED,),
    "failure": (JobState.FAILED,),
}


class Kind(StrEnum):
    """Why a job exists: a one-shot, an occurrence of a schedule, or a date elsewhere."""

    ONCE = "once"
    PLANNED = "planned"
    MANUAL = "manual"
    BACKFILL = "backfill"
    TRIGGER = "trigger"


class Reason(StrEnum):
    """Why an occurrence was skipped; the same words in rows, metrics and pages."""

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
    """Why a job stands outside the claim index."""

    OVERLAP = "overlap"
    UNHEARD = "unheard"
    RECOVER = "recover"
    GROUP = "group"
    TENANT = "tenant"
    STOPPING = "stopping"
    """Of a running job: a later occurrence has asked it to stop and waits for it."""


class CancelOutcome(StrEnum):
    """What a cancel achieved; asking again gives the first answer."""

    PREVENTED = "prevented"
    IN_FLIGHT = "in_flight"
    ALREADY_DONE = "already_done"


@dataclass(slots=True, kw_only=True)
class Job:
    """A job as users see it. Instants are aware UTC datetimes, durations seconds."""

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
    tries: int = 0
    node_id: str | None = None
    created_at: datetime
    local_time: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    result: Any = None
    attempts: list[dict[str, Any]] = field(default_factory=list)
    replaces: str | None = None
    replaced_by: str | None = None
    skipped_to: datetime | None = None
    skipped_count: int = 1
    adjusted: str | None = None
    """Of a job just made at a local time: `gap` or `fold` if the clock skips or repeats that time."""

    @property
    def status(self) -> JobState:
        """`state`, under the name that filters use."""
        return self.state

    @property
    def correlation_id(self) -> str | None:
        """From the metadata."""
        return self.metadata.get("correlation_id")

    @property
    def client_request_id(self) -> str | None:
        """From the metadata."""
        return self.metadata.get("client_request_id")

    @property
    def occurrence_key(self) -> str:
        """The key a receiver de-duplicates on: the same after retry, takeover and restore."""
        return key_of(self.id, self.schedule_id, self.scheduled_at, self.kind)


def key_of(job_id: str, schedule_id: str | None, scheduled_at: datetime, kind: str) -> str:
    """The occurrence key of a job: of its occurrence, or of itself when it is a one-shot."""
    return job_id if schedule_id is None else occurrence_key(schedule_id, scheduled_at, kind)


@dataclass(slots=True, kw_only=True)
class NewJob:
    """A job to be written. JSON fields are text already, checked; `route` is derived."""

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
    named: str | None = None
    """The name of its target, of which the kind is not known before it is written."""
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


class Alike:
    """Jobs to be written that differ in nothing but their ids, times and payloads, which spares them one by one.

    They are one-shots with no name, target or end of their own; `like` is the first of them.
    """

    __slots__ = ("differing", "like")

    def __init__(self, like: NewJob, ids: list[str], times: list[datetime], payloads: list[str]) -> None:
        self.like = like
        self.differing: dict[str, list[Any]] = {
            "id": ids, "scheduled_at": times, "run_at": times, "payload": payloads,
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self.differing["id"])

    def __iter__(self) -> Iterator[NewJob]:
        return map(self.job, range(len(self)))

    def job(self, at: int) -> NewJob:
        """One of them."""
        return replace(self.like, **{name: values[at] for name, values in self.differing.items()})

    @property
    def soonest(self) -> datetime:
        """When the first of them is due."""
        found: datetime = min(self.differing["run_at"])
        return found


@dataclass(slots=True)
class Attempt:
    """One try at a job by this node. Its `number` is the fence every later write carries."""

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
    tries: int
    serial: bool
    errors: str | None
    revision: int | None
    run_at: datetime
    started_at: datetime
    state: JobState = JobState.RUNNING
    group: str | None = None
    used: dict[str, Any] | None = None
    """Of a target under a name: which one it was delivered to, as it was then."""
    priority: int = 0
    replays: int = 0
    """How often it was replayed after it had failed for good."""
    conditions: str | None = None
    """What it asks before it is delivered: see `model/preconditions.py`."""
    verdict: dict[str, Any] | None = None
    """Of one with a condition: that it held, and of which values."""
    trace_id: str | None = None
    """Of its delivery, if deliveries are traced."""

    @property
    def is_for_handlers(self) -> bool:
        """Whether handlers of its topic take it, rather than another target."""
        return self.target is None or self.target == COMPLETES_TEXT

    @property
    def occurrence_key(self) -> str:
        """As `Job.occurrence_key`."""
        return key_of(self.id, self.schedule_id, self.scheduled_at, self.kind)


@dataclass(slots=True)
class Ending:
    """What became of a job: a final state, `pending` again at `run_at`, or `dispatched` until `run_at`.

    `attempt` and `was` are its guard. `counts` says whether the attempt uses up a try; `errors` is the job's list of
    attempts that failed, or were delivered outside of Python, as JSON; `watched`, whether somebody is told when its
    schedule works again.
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
    counts: bool = True
    was: JobState = JobState.RUNNING
    errors: str | None = None
    cancel: str | None = None
    replaced_by: str | None = None
    schedule_id: str | None = None
    watched: bool = False
    grouped: str | None = None
    """Of a running job of a group: its queue."""
    progress: Any = None
    """JSON: what was done before it ended, for the next attempt to know."""
    record: dict[str, Any] | None = None
    """What is recorded of a delivery to a target outside Python."""
