"""What is to come: the schedules that fire before an instant, and the pending jobs of each minute."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import func, literal_column, select

from timebell.model.schedule import Schedule
from timebell.store.jobs import queues
from timebell.store.jobs.indexes import RESTING
from timebell.store.schedules.schedules import legible
from timebell.store.schema import jobs, schedules
from timebell.store.transaction import Transaction
from timebell.store.types import from_micros

PAGE = 500
MINUTE = 60_000_000


def firing(tx: Transaction, tenant_id: str, end: datetime, after: str | None) -> tuple[list[Schedule], str | None]:
    """A page of the schedules of a tenant whose next occurrence is before `end`, and after which id to go on; none
    while all firing is stopped."""
    if queues.stopped(tx):
        return [], None
    query = select(schedules).where(
        schedules.c.tenant_id == tenant_id, schedules.c.enabled, schedules.c.fault.is_(None),
        schedules.c.next_fire_at < end,
    )  # fmt: skip
    if after is not None:
        query = query.where(schedules.c.id > after)
    found = tx.execute(query.order_by(schedules.c.id).limit(PAGE)).all()
    legibles = (legible(row) for row in found)
    return [schedule for schedule in legibles if schedule is not None], found[-1].id if len(found) == PAGE else None


def pending(tx: Transaction, tenant_id: str, start: datetime, end: datetime) -> dict[datetime, int]:
    """How many pending jobs of a tenant are due in each minute of [start, end)."""
    at = jobs.c.run_at
    where = (jobs.c.tenant_id == tenant_id) & RESTING & (jobs.c.state == "pending") & (at >= start) & (at < end)
    minute: Any = literal_column(tx.dialect.words["minute"])
    found: Any = tx.execute(select(minute, func.count()).where(where).group_by(minute)).all()
    return {from_micros(when * MINUTE) if isinstance(when, int) else when: count for when, count in found}
