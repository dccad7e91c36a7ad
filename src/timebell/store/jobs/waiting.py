"""Due jobs that do not start: no live node handles their topic, or they wait in their queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import case, func, select

from timebell.model.job import Hold
from timebell.model.routes import ALL_ROUTES, Routes
from timebell.store.cluster import nodes, workers
from timebell.store.jobs.claim import fetch_lane_rows
from timebell.store.jobs.indexes import COUNT_LIMIT, UnindexedFilter, select_due
from timebell.store.schema import jobs
from timebell.store.transaction import Transaction, read_only
from timebell.store.types import EPOCH

MAX_TOPICS = 20


@dataclass(frozen=True, slots=True)
class UnhandledTopic:
    """Due jobs held because no live node handles their topic; `similar` is the nearest topic that a node handles."""

    topic: str
    count: int
    oldest_due_at: datetime
    similar: str | None


@dataclass(frozen=True, slots=True)
class LateQueue:
    """Due jobs of a queue that have not started; `retries` of them wait for another attempt."""

    queue: str
    count: int
    retries: int
    oldest_due_at: datetime
    is_paused: bool


def list_unhandled(tx: Transaction, tenant_id: str) -> list[UnhandledTopic]:
    """Return the topics of unhandled jobs, most jobs first; jobs are counted up to COUNT_LIMIT + 1 in all."""
    held = (
        select(jobs.c.topic, jobs.c.run_at)
        .where(jobs.c.hold == Hold.UNHANDLED.value, UnindexedFilter(jobs.c.tenant_id) == tenant_id)
        .limit(COUNT_LIMIT + 1).subquery()
    )  # fmt: skip
    count = func.count().label("held_count")
    query = select(held.c.topic, count, func.min(held.c.run_at).label("oldest")).group_by(held.c.topic)
    rows = tx.execute(query.order_by(count.desc(), held.c.topic).limit(MAX_TOPICS)).all()
    if not rows:
        return []
    handled = list_handled(tx, tenant_id)
    return [UnhandledTopic(row.topic, row.held_count, row.oldest, handled.nearest(row.topic)) for row in rows]


@read_only
def list_handled(tx: Transaction, tenant_id: str) -> Routes:
    """Return the routes of all nodes and remote workers that have a row and run jobs of a tenant.

    A worker that claims from some queues only may still leave a job of its topics waiting in another queue.
    """
    handled = Routes()
    for node in nodes.list_nodes(tx):
        handled |= node.routes
    for worker in workers.list_workers(tx):
        if worker.tenant_id in (None, tenant_id):
            handled |= worker.routes
    return handled


def list_late_queues(tx: Transaction, tenant_id: str, before: datetime) -> list[LateQueue]:
    """Return queues with jobs that were due `before` and have not started, longest wait first.

    Counts lane by lane in an index ordered by time, up to COUNT_LIMIT + 1 jobs of each, so later jobs are not read.
    """
    late: dict[str, LateQueue] = {}
    for lane in fetch_lane_rows(tx, ALL_ROUTES, EPOCH):
        queue = lane["queue"]
        columns = jobs.c.run_at, jobs.c.attempts_used
        due = select_due(columns, tenant_id, queue, lane["priority"], before).limit(COUNT_LIMIT + 1).subquery()
        retries = func.coalesce(func.sum(case((due.c.attempts_used > 0, 1), else_=0)), 0)
        totals = select(
            func.count().label("due_count"), retries.label("retries"), func.min(due.c.run_at).label("oldest")
        )
        row = tx.execute(totals.select_from(due)).one()
        if row.due_count:
            known = late.get(queue, LateQueue(queue, 0, 0, row.oldest, bool(lane["paused"])))
            late[queue] = replace(
                known, count=known.count + row.due_count, retries=known.retries + int(row.retries),
                oldest_due_at=min(known.oldest_due_at, row.oldest),
            )  # fmt: skip
    return sorted(late.values(), key=lambda each: each.oldest_due_at)
