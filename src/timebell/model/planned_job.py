"""The job of an occurrence of a schedule."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from timebell.ids import new_id
from timebell.model.job import Hold, Kind, NewJob
from timebell.model.payload import encode
from timebell.model.policy import Overlap, WhenLate
from timebell.model.preconditions import serialize
from timebell.model.routes import route_for
from timebell.model.schedule import Action, Schedule


def build_job(
    schedule: Schedule, at: datetime, hold: Hold | None, now: datetime, template: dict[str, Any] | None = None
) -> NewJob:
    """Build the job of one occurrence. `template` is the cached `job_template` of its action, if known."""
    policies = schedule.policies
    expires_after = schedule.action.expires_after
    if expires_after is None and policies.when_late is WhenLate.EXPIRE:
        expires_after = policies.missed_after
    return NewJob(
        id=new_id(now), tenant_id=schedule.tenant_id, scheduled_at=at, run_at=at, timezone=schedule.recurrence.timezone,
        created_at=now, kind=Kind.PLANNED, schedule_id=schedule.id, revision=schedule.revision,
        expires_at=None if expires_after is None else at + timedelta(seconds=expires_after), hold=hold,
        serial=policies.overlap is not Overlap.ALLOW,
        **(job_template(schedule.action) if template is None else template),
    )  # fmt: skip


def job_template(action: Action) -> dict[str, Any]:
    """Return the NewJob fields that are common to all jobs of an action."""
    return {
        "topic": action.topic, "payload": encode(action.payload),
        "metadata": encode(action.metadata) if action.metadata else None, "owner_id": action.owner_id,
        "target": encode(action.target) if action.target else None,
        "route": route_for(action.topic, action.target), "queue": action.queue, "priority": action.priority,
        "group": action.group, "conditions": serialize(action.condition, action.unless),
        "retry": encode(action.retry.to_json()) if action.retry else None, "timeout": action.timeout,
    }  # fmt: skip
