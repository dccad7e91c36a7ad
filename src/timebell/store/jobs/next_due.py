"""The next due jobs of a tenant."""

from __future__ import annotations

from sqlalchemy import or_

from timebell.model.job import Job
from timebell.model.page import Page
from timebell.model.routes import ALL_ROUTES
from timebell.store.jobs.claim import fetch_lane_rows
from timebell.store.jobs.indexes import select_due
from timebell.store.jobs.repository import job_from_row
from timebell.store.schema import jobs
from timebell.store.time_cursor import decode_time_cursor, encode_time_cursor
from timebell.store.transaction import Transaction, read_only
from timebell.store.types import EPOCH


@read_only
def list_next_due(tx: Transaction, tenant_id: str, queue: str | None, limit: int, cursor: str | None) -> Page[Job]:
    """Return a page of a tenant's pending jobs that are not held, all or those of a queue, earliest due time first.

    Raises InvalidInput (INVALID_CURSOR).
    """
    j, candidates = jobs.c, list[Job]()
    for lane in fetch_lane_rows(tx, ALL_ROUTES, EPOCH):
        if queue is not None and lane["queue"] != queue:
            continue
        query = select_due([jobs], tenant_id, lane["queue"], lane["priority"])
        if cursor is not None:
            at, id_ = decode_time_cursor(cursor)
            query = query.where(j.run_at >= at, or_(j.run_at > at, j.id > id_))
        candidates += map(job_from_row, tx.execute(query.order_by(j.id).limit(limit + 1)))
    candidates.sort(key=lambda job: (job.run_at, job.id))
    page = candidates[:limit]
    return Page(page, encode_time_cursor(page[-1].run_at, page[-1].id) if len(candidates) > limit else None)
