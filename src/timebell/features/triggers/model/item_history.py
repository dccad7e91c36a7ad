"""The history of an item of a trigger, and why it fired, will fire, or did not, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from timebell.features.triggers.model.trigger import (
    UNREADABLE_KEY,
    ColumnStatus,
    Item,
    Trigger,
)
from timebell.model.condition import lookup_path
from timebell.model.job import Job, JobState
from timebell.recurrence.instants import format_instant

NOT_FIRED = {
    "late": "Its time {detail} became known later than the grace of {grace:g} s allows.",
    "past": "Its time {detail} was more than a day ago when it became known.",
    "skipped": "A user skipped its time {detail}; a new date fires again.",
}
SKIPPED = {
    "condition": "the condition did not hold", "quota": "the tenant had reached its monthly limit",
    "paused": "the trigger was paused", "orphaned": "access to the source was lost", "expired": "it had expired",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FiringRecord:
    """The state of one firing of an item. `reason` is why nothing is planned: see `NotFired`."""

    item: str
    offset: str
    recipient: str
    at: datetime | None
    job_id: str | None
    fired_at: datetime | None
    reason: str | None
    detail: str | None
    noticed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemHistory:
    """An item with its firings, and its latest jobs, newest first."""

    item: Item
    firings: list[FiringRecord]
    jobs: list[Job]


def explain_item(trigger: Trigger, history: ItemHistory, now: datetime) -> list[str]:
    """Return the state of the item, then one sentence for each firing."""
    jobs = {job.id: job for job in history.jobs}
    firings = [_describe_firing(trigger, firing, jobs, now) for firing in history.firings]
    return [*_describe_item(trigger, history.item), *firings]


def _describe_item(trigger: Trigger, item: Item) -> Iterator[str]:
    if trigger.orphaned_reason is not None:
        yield f"The source {trigger.source} is orphaned: {trigger.orphaned_reason}. Due jobs are skipped."
    if not trigger.enabled:
        reason = f" ({trigger.pause_reason})" if trigger.pause_reason else ""
        yield f"The trigger is paused{reason}. Due jobs are skipped."
    if item.problem is not None:
        yield f"Its current row is rejected, so its last known values apply: {item.problem}"
    if item.fields is None:
        yield f"The item was deleted (noticed at {format_instant(item.updated_at)}), so nothing is planned."
        return
    desired, status, _ = trigger.rule.desired_firings(item.fields)
    value: Any = lookup_path(item.fields, trigger.rule.column)
    if status is ColumnStatus.EMPTY:
        yield f"{trigger.rule.column} is empty, so nothing is planned."
    elif status is ColumnStatus.UNREADABLE:
        yield f"It cannot be read, so nothing is planned: {trigger.rule.describe_unreadable(item.fields)}"
    elif not desired:
        yield f"{trigger.rule.column} is {value!r:.60}, but {trigger.rule.recipients} names no recipient."
    else:
        yield f"{trigger.rule.column} is {value!r:.60}."


def _describe_firing(trigger: Trigger, firing: FiringRecord, jobs: Mapping[str, Job], now: datetime) -> str:
    subject = " for ".join(filter(None, (f"Offset {firing.offset}", firing.recipient)))
    if firing.offset == UNREADABLE_KEY:
        subject = "The item"
    if firing.job_id is not None and firing.at is not None:
        job = jobs.get(firing.job_id)
        if job is None:
            return f"{subject}: job {firing.job_id} was due at {format_instant(firing.at)}; it is no longer kept."
        return f"{subject}: {_describe_job(job, now)}"
    if firing.reason in NOT_FIRED:
        reason = NOT_FIRED[firing.reason].format(detail=firing.detail, grace=trigger.rule.grace)
        return f"{subject}: not fired. {reason}"
    if firing.reason is not None:
        return f"{subject}: not fired, {firing.reason}: {firing.detail}"
    if firing.fired_at is not None:
        return f"{subject}: last fired for {format_instant(firing.fired_at)}; nothing is planned."
    return f"{subject}: nothing is planned; its former job was withdrawn."


def _describe_job(job: Job, now: datetime) -> str:
    due = format_instant(job.scheduled_at)
    match job.state:
        case JobState.PENDING if job.run_at > now:
            return f"job {job.id} is planned for {due}."
        case JobState.SKIPPED:
            return f"job {job.id} was due at {due} and skipped: {SKIPPED.get(job.reason or '', job.reason)}."
        case JobState.FAILED:
            return f"job {job.id} was due at {due} and failed: {job.error}"
        case JobState.CANCELLED:
            return f"job {job.id} was due at {due} and cancelled{f': {job.reason}' if job.reason else ''}."
    return f"job {job.id} was due at {due} and is {job.state}."
