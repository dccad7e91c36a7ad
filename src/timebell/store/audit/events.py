"""Event stream of a tenant in chronological order: finished jobs, and changes to schedules and targets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import and_, or_, select

from timebell.model.job import Job
from timebell.store.audit.audit_log import DONE
from timebell.store.jobs.repository import job_from_row
from timebell.store.schema import audit_log, finished
from timebell.store.transaction import Transaction
from timebell.store.types import to_micros

TERMINAL_STATES = ("completed", "failed", "cancelled", "skipped")
EventPosition = tuple[datetime, str]
"""Position of an event in the stream: its time and id."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event: a finished `job`, or a change of `subject` (schedule id or target name) by `actor`."""

    at: datetime
    id: str
    type: str
    job: Job | None = None
    subject: str | None = None
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Event filter; the fields are combined with AND."""

    tenant_id: str
    topic: str | None = None
    types: Collection[str] | None = None
    schedule_id: str | None = None

    def matches(self, event_type: str) -> bool:
        """Return whether `types` includes this type; `job.*` includes all types with this prefix."""
        return self.types is None or any(
            event_type.startswith(pattern[:-1]) if pattern.endswith("*") else event_type == pattern
            for pattern in self.types
        )


def list_events_after(tx: Transaction, event_filter: EventFilter, after: EventPosition, limit: int) -> list[Event]:
    """Return the first `limit` events after a position, in order."""
    events = [*_job_events(tx, event_filter, after, limit), *_audit_events(tx, event_filter, after, limit)]
    return sorted(events, key=lambda event: (event.at, event.id))[:limit]


def _job_events(tx: Transaction, event_filter: EventFilter, after: EventPosition, limit: int) -> list[Event]:
    states = [state for state in TERMINAL_STATES if event_filter.matches(f"job.{state}")]
    if not states:
        return []
    query = select(finished).where(
        finished.c.finished_at >= after[0], _is_after(finished.c.finished_at, finished.c.id, after),
        finished.c.tenant_id == event_filter.tenant_id, finished.c.state.in_(states),
    )  # fmt: skip
    if event_filter.schedule_id is not None:
        query = query.where(finished.c.schedule_id == event_filter.schedule_id)
    if event_filter.topic is not None and event_filter.topic.endswith(".*"):
        query = query.where(finished.c.topic.startswith(event_filter.topic[:-1], autoescape=True))
    elif event_filter.topic is not None:
        query = query.where(finished.c.topic == event_filter.topic)
    jobs = map(job_from_row, tx.execute(query.order_by(finished.c.finished_at, finished.c.id).limit(limit)))
    return [Event(job.finished_at, job.id, f"job.{job.state}", job) for job in jobs if job.finished_at is not None]


def _audit_events(tx: Transaction, event_filter: EventFilter, after: EventPosition, limit: int) -> list[Event]:
    if event_filter.topic is not None or (
        event_filter.types is not None
        and not any(pattern.startswith(("schedule.", "target.", "*")) for pattern in event_filter.types)
    ):
        return []
    # UUIDv7 ids begin with the millisecond: the lowest id of that millisecond bounds the index scan.
    lowest_id = str(UUID(int=(to_micros(after[0]) // 1000) << 80))
    changed = or_(audit_log.c.action.like("schedule.%"), audit_log.c.action.like("target.%"))
    query = select(audit_log).where(
        audit_log.c.tenant_id == event_filter.tenant_id, audit_log.c.id >= lowest_id, changed,
        audit_log.c.outcome == DONE, _is_after(audit_log.c.at, audit_log.c.id, after),
    )  # fmt: skip
    if event_filter.schedule_id is not None:
        query = query.where(audit_log.c.subject == event_filter.schedule_id)
    rows = tx.execute(query.order_by(audit_log.c.at, audit_log.c.id).limit(limit))
    return [
        Event(row.at, row.id, row.action, subject=row.subject, actor=row.actor)
        for row in rows
        if event_filter.matches(row.action)
    ]


def _is_after(at: Any, id_: Any, position: EventPosition) -> Any:
    return or_(at > position[0], and_(at == position[0], id_ > position[1]))
