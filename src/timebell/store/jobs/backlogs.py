"""What an outage or a restore left behind and is not to be made up for unasked: it waits, hold `recover`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, text

from timebell.store.schema import jobs, schedules
from timebell.store.transaction import Transaction

MOST = 1_000  # schedules in one answer


@dataclass(frozen=True, slots=True)
class Backlog:
    """So many occurrences of a schedule wait, from the first to the last; `schedule` is its name. Jobs of none are
    one more, with the topic of the first."""

    schedule_id: str | None
    schedule: str | None
    topic: str
    jobs: int
    first: datetime
    last: datetime


def waiting(tx: Transaction, tenant_id: str) -> list[Backlog]:
    """Those of a tenant, the largest first."""
    held = (jobs.c.tenant_id == tenant_id) & text("hold IS NOT NULL AND hold = 'recover'")  # as the index says it
    count, at = func.count().label("jobs"), jobs.c.scheduled_at
    found = select(jobs.c.schedule_id, func.min(jobs.c.topic), count, func.min(at), func.max(at)).where(held)
    found = found.group_by(jobs.c.schedule_id).order_by(count.desc(), jobs.c.schedule_id).limit(MOST)
    rows: Sequence[Any] = tx.execute(found).all()
    named = select(schedules.c.id, schedules.c.name).where(schedules.c.id.in_([row[0] for row in rows if row[0]]))
    names = {row.id: row.name for row in tx.execute(named)}
    return [Backlog(id_, names.get(id_), topic, jobs_, first, last) for id_, topic, jobs_, first, last in rows]
