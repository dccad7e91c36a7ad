"""The keyword options of the methods that create jobs and schedules, each defined once for all of these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict
from zoneinfo import ZoneInfo

from timebell.durations import Duration
from timebell.model.job import JobState
from timebell.model.policy import CatchUp, OnUnhandled, Overlap, Retry, WhenLate
from timebell.recurrence import Calendar, Roll

OnConflict = Literal["error", "keep", "replace"]
"""The treatment of a new job whose `key` or `client_request_id` is in use: refuse it, return the existing job, or
replace that."""

Status = (
    JobState
    | Literal["pending", "running", "dispatched", "completed", "failed", "cancelled", "skipped"]
    | Literal["active", "processing", "success", "failure", "retrying", "held"]
)
"""A state, or an alias: `active` and `processing` are running or dispatched; `retrying` jobs are pending after an
attempt, `held` ones wait for something else than their time."""


class _CommonOptions(TypedDict, total=False):
    """Options of both jobs and schedules."""

    timezone: str | ZoneInfo | None
    """IANA time zone; the default is that of `run_at` or of the app."""
    owner_id: str | None
    """A label: whose job it is."""
    tenant_id: str | None
    """The tenant, by default `default`; created on first use."""
    correlation_id: str | None
    """A label that connects the job with what caused it."""
    client_request_id: str | None
    """Unique per tenant forever: a repeated request is recognized."""
    metadata: Mapping[str, Any] | None
    """Other labels, as JSON."""
    retry: Retry | Mapping[str, Any] | None
    """Attempts and pauses; the default is the handler's policy, then 4 attempts."""
    timeout: Duration | None
    """The time limit of an attempt; numbers are seconds. The default is the handler's, then 60 s (schedules: 1 h)."""
    group: str | None
    """Jobs of a group share the queue's `concurrency_per_group`."""
    condition: Any
    """Comparisons that must hold when the job is due, such as `{"plan": "pro"}`."""
    unless: Mapping[str, str] | None
    """A query that must return no row when the job is due."""
    expires_after: Duration | None
    """A job that has not started this long after it was due is skipped as `expired`; numbers are seconds."""
    target: Mapping[str, Any] | str | None
    """Where the job is delivered, by default to the handlers of its topic: the name of a target, or its options."""


class JobOptions(_CommonOptions, total=False):
    """Keyword options of `schedule_at`, `schedule_in` and `JobSpec`."""

    key: str | None
    """Unique among the live jobs of the tenant."""
    queue: str | None
    """The queue, by default the handler's, then `default`."""
    priority: int | None
    """Lower values run first; the default is the handler's, then 0."""
    on_gap: Literal["shift", "error"]
    """The treatment of a local time that the clock skips."""
    on_fold: Literal["first", "error"]
    """The treatment of a local time that occurs twice."""


class RescheduleOptions(TypedDict, total=False):
    """Fields that `reschedule` changes. Numbers as durations are seconds."""

    payload: Any
    metadata: Mapping[str, Any] | None
    """All labels, including `owner_id` and `correlation_id`; the following two change one label each."""
    owner_id: str | None
    correlation_id: str | None
    queue: str | None
    priority: int | None
    group: str | None
    retry: Retry | Mapping[str, Any] | None
    timeout: Duration | None
    expires_after: Duration | None
    condition: Any
    unless: Mapping[str, str] | None


class ScheduleOptions(_CommonOptions, total=False):
    """Keyword options of `schedule_repeat` and `@app.schedule`. Numbers as durations are seconds."""

    queue: str | None
    """The queue of the jobs, by default the handler's, then `default`."""
    priority: int | None
    """Lower values run first; the default is the handler's, then 0."""
    overlap: Overlap | Literal["skip", "queue", "cancel_previous", "allow"]
    """The treatment of an occurrence while an earlier job of the schedule is live (default: skip)."""
    catch_up: CatchUp | Literal["latest", "all", "skip"]
    """The treatment of missed occurrences (default: latest)."""
    catch_up_window: Duration
    """Occurrences missed longer ago than this do not run (default: 24 h)."""
    catch_up_limit: int
    """The number of missed occurrences that run (default: 100)."""
    catch_up_pace: Duration
    """The pause between catch-up jobs (default: none)."""
    hold_above: int
    """A backlog of more jobs waits for `release` (default: 1,000)."""
    missed_after: Duration
    """An occurrence is missed if it is later than this (default: 60 s)."""
    when_late: WhenLate | Literal["run", "expire"]
    """Whether a missed occurrence still runs (default: run)."""
    jitter: Duration
    """Starts are spread over this time (default: 0)."""
    tolerance: Duration
    """A later start counts as a breach (default: 1 s)."""
    notify: str | Sequence[str]
    """Alert channels for failure and recovery."""
    on_unhandled: OnUnhandled | Literal["hold", "complete"] | None
    """The treatment of due jobs that no node handles; the default is the app's."""
    start: datetime | None
    """The first instant, aware."""
    end: datetime | None
    """The end of the schedule, exclusive, aware."""
    max_runs: int | None
    """The number of occurrences after which the schedule ends."""
    enabled: bool
    """False creates the schedule paused."""
    description: str | None
    labels: Mapping[str, str] | None
    """Names and values for filters."""
    created_by: str | None
    calendar: Calendar | str | None
    """Business days: a Calendar, the name of a saved one, or a name and a version (`kr@3`)."""
    roll: Roll | None
    """Whether occurrences on days off are omitted or moved (default: skip)."""


class RunOptions(TypedDict, total=False):
    """Keyword options of `running`; the defaults come from the settings. Numbers as durations are seconds."""

    slots: int
    """Async jobs that run at the same time."""
    threads: int
    """Plain functions that run at the same time."""
    batch_size: int
    """Jobs per claim."""
    lease: Duration
    """The time without a heartbeat after which other nodes take over."""
    heartbeat: Duration
    poll: Duration
    """The time between scans without notifications."""
    drain: Duration
    """The time that running jobs have to end when the engine stops."""
    retention: Duration
    """The age at which finished jobs are deleted."""
    name: str
    """The node's name in logs and pages."""
