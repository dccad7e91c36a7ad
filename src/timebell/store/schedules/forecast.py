"""Queries for the load forecast: schedules that fire before an instant, and pending jobs per minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select

from timebell.model.routes import ALL_ROUTES
from timebell.model.schedule import Schedule
from timebell.store.jobs import queues
from timebell.store.jobs.claim import fetch_lane_rows
from timebell.store.schedules.rows import try_schedule_from_row
from timebell.store.schema import schedules
from timebell.store.transaction import Transaction, read_only
from timebell.store.types import EPOCH

PAGE_SIZE = 500
DEFAULT_TENANT = "default"


@read_only
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


class PendingByMinute(NamedTuple):
    """Numbers of pending jobs due in each minute, and the number of index entries that were read."""

    counts: Mapping[datetime, int]
    scanned: int


@read_only
def count_pending_by_minute(
    tx: Transaction, tenant_id: str, start: datetime, end: datetime, limit: int
) -> PendingByMinute:
    """Count a tenant's jobs that will start in each minute of [start, end); none of paused queues, and no held ones.

    Reads ranges of the claim index, lane by lane, and up to `limit` entries of each minute.
    """
    is_only_tenant = tenant_id == DEFAULT_TENANT and not tx.dialect.find_tenants(tx, [tenant_id]) - {DEFAULT_TENANT}
    tenant = None if is_only_tenant else tenant_id
    counts: Counter[datetime] = Counter()
    scanned, from_db = 0, tx.dialect.from_db
    for lane in fetch_lane_rows(tx, ALL_ROUTES, EPOCH):
        if not lane["paused"]:
            key = lane["queue"], lane["priority"]
            for row in tx.dialect.count_lane_by_minute(tx, key, tenant, start, end, limit):
                counts[from_db(row["minute"])] += row["jobs"]
                scanned += row["scanned"]
    return PendingByMinute(counts, scanned)
