"""What happened in a tenant, in order: the ends of jobs, and changes of schedules and targets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import and_, or_, select

from timebell.model.job import Job
from timebell.store.jobs.repository import read
from timebell.store.schema import audit_log, finished
from timebell.store.transaction import Transaction
from timebell.store.types import to_micros

ENDS = ("completed", "failed", "cancelled", "skipped")
Place = tuple[datetime, str]
"""Where an event stands: when it happened, and its id."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `job` of ends; else `subject` is the schedule's id, or the target's name, and `actor` who changed
    it."""

    at: datetime
    id: str
    type: str
    job: Job | None = None
    subject: str | None = None
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: all that is given must fit."""

    tenant_id: str
    topic: str | None = None
    types: Collection[str] | None = None
    schedule_id: str | None = None

    def wants(self, kind: str) -> bool:
        """Whether events of this type are among them; `job.*` stands for all that begin so."""
        return self.types is None or any(
            kind.startswith(one[:-1]) if one.endswith("*") else kind == one for one in self.types
        )


def since(tx: Transaction, wanted: Wanted, after: Place, most: int) -> list[Event]:
    """The first `most` events that stand after a place, in order."""
    found = [*_ends(tx, wanted, after, most), *_changes(tx, wanted, after, most)]
    return sorted(found, key=lambda event: (event.at, event.id))[:most]


def _ends(tx: Transaction, wanted: Wanted, after: Place, most: int) -> list[Event]:
    states = [state for state in ENDS if wanted.wants(f"job.{state}")]
    if not states:
        return []
    query = select(finished).where(
        finished.c.finished_at >= after[0], _after(finished.c.finished_at, finished.c.id, after),
        finished.c.tenant_id == wanted.tenant_id, finished.c.state.in_(states),
    )  # fmt: skip
    if wanted.schedule_id is not None:
        query = query.where(finished.c.schedule_id == wanted.schedule_id)
    if wanted.topic is not None and wanted.topic.endswith(".*"):
        query = query.where(finished.c.topic.startswith(wanted.topic[:-1], autoescape=True))
    elif wanted.topic is not None:
        query = query.where(finished.c.topic == wanted.topic)
    jobs = map(read, tx.execute(query.order_by(finished.c.finished_at, finished.c.id).limit(most)))
    return [Event(job.finished_at, job.id, f"job.{job.state}", job) for job in jobs if job.finished_at is not None]


def _changes(tx: Transaction, wanted: Wanted, after: Place, most: int) -> list[Event]:
    if wanted.topic is not None or (
        wanted.types is not None and not any(one.startswith(("schedule.", "target.", "*")) for one in wanted.types)
    ):
        return []
    # Ids begin with the millisecond, so that the index leads to the place.
    least = str(UUID(int=(to_micros(after[0]) // 1000) << 80))
    changed = or_(audit_log.c.action.like("schedule.%"), audit_log.c.action.like("target.%"))
    query = select(audit_log).where(
        audit_log.c.tenant_id == wanted.tenant_id, audit_log.c.id >= least, changed,
        _after(audit_log.c.at, audit_log.c.id, after),
    )  # fmt: skip
    if wanted.schedule_id is not None:
        query = query.where(audit_log.c.subject == wanted.schedule_id)
    rows = tx.execute(query.order_by(audit_log.c.at, audit_log.c.id).limit(most))
    return [
        Event(row.at, row.id, row.action, subject=row.subject, actor=row.actor)
        for row in rows
        if wanted.wants(row.action)
    ]


def _after(at: Any, id_: Any, place: Place) -> Any:
    return or_(at > place[0], and_(at == place[0], id_ > place[1]))
