"""Jobs with hold `backlog`: due during an outage or before a restore, and run only after an operator releases them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, text

from timebell.store.schema import jobs, schedules
from timebell.store.transaction import Transaction

MAX_BACKLOGS = 1_000  # schedules returned at most


@dataclass(frozen=True, slots=True)
class Backlog:
    """The held jobs of one schedule: their number, and the instants of the first and the last.

    `schedule` is the name of the schedule. Jobs without a schedule form one more backlog, which has the first topic in
    alphabetical order.
    """

    schedule_id: str | None
    schedule: str | None
    topic: str
    jobs: int
    first: datetime
    last: datetime


def list_backlogs(tx: Transaction, tenant_id: str) -> list[Backlog]:
    """Return the backlogs of a tenant, largest first."""
    held = (jobs.c.tenant_id == tenant_id) & text("hold IS NOT NULL AND hold = 'backlog'")  # as in the index
    count, scheduled_at = func.count().label("jobs"), jobs.c.scheduled_at
    query = select(
        jobs.c.schedule_id, func.min(jobs.c.topic), count, func.min(scheduled_at), func.max(scheduled_at)
    ).where(held)
    query = query.group_by(jobs.c.schedule_id).order_by(count.desc(), jobs.c.schedule_id).limit(MAX_BACKLOGS)
    rows: Sequence[Any] = tx.execute(query).all()
    name_query = select(schedules.c.id, schedules.c.name).where(schedules.c.id.in_([row[0] for row in rows if row[0]]))
    names = {row.id: row.name for row in tx.execute(name_query)}
    return [Backlog(id_, names.get(id_), topic, job_count, first, last) for id_, topic, job_count, first, last in rows]
