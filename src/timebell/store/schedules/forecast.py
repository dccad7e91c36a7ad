"""Queries for the load forecast: schedules that fire before an instant, and pending jobs per minute."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import func, literal_column, select

from timebell.model.schedule import Schedule
from timebell.store.jobs import queues
from timebell.store.jobs.indexes import NOT_RUNNING_CLAUSE
from timebell.store.schedules.rows import try_schedule_from_row
from timebell.store.schema import jobs, schedules
from timebell.store.transaction import Transaction
from timebell.store.types import from_micros

PAGE_SIZE = 500
MINUTE_MICROSECONDS = 60_000_000


def list_firing_before(
    tx: Transaction, tenant_id: str, end: datetime, after: str | None
) -> tuple[list[Schedule], str | None]:
    """Return a page of a tenant's schedules whose next occurrence is before `end`, and the cursor of the next page.

    Empty while all firing is stopped. The cursor is None on the last page.
    """
    if queues.is_everything_paused(tx):
        return [], None
    query = select(schedules).where(
        schedules.c.tenant_id == tenant_id, schedules.c.enabled, schedules.c.error.is_(None),
        schedules.c.next_fire_at < end,
    )  # fmt: skip
    if after is not None:
        query = query.where(schedules.c.id > after)
    rows = tx.execute(query.order_by(schedules.c.id).limit(PAGE_SIZE)).all()
    decoded = (try_schedule_from_row(row) for row in rows)
    cursor = rows[-1].id if len(rows) == PAGE_SIZE else None
    return [schedule for schedule in decoded if schedule is not None], cursor


def count_pending_by_minute(tx: Transaction, tenant_id: str, start: datetime, end: datetime) -> dict[datetime, int]:
    """Return the number of a tenant's pending jobs due in each minute of [start, end)."""
    at = jobs.c.run_at
    where = (
        (jobs.c.tenant_id == tenant_id) & NOT_RUNNING_CLAUSE & (jobs.c.state == "pending") & (at >= start) & (at < end)
    )
    minute: Any = literal_column(tx.dialect.run_at_minute)
    counts: Any = tx.execute(select(minute, func.count()).where(where).group_by(minute)).all()
    return {
        from_micros(start_ * MINUTE_MICROSECONDS) if isinstance(start_, int) else start_: count
        for start_, count in counts
    }
