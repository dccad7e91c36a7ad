"""Queue repository: limits and pauses. A queue without a row has no limits and is not paused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, insert, select, union_all, update

from timebell.model.job import Hold, JobState
from timebell.model.limits import Limits
from timebell.store.jobs.indexes import COUNT_LIMIT, split_by_running
from timebell.store.schema import jobs, queues
from timebell.store.transaction import JOBS, SCHEDULES, Transaction, read_only

ALL_QUEUES = "*"  # pausing this row stops all planning and claiming


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with its limits and pause state, and the numbers of pending and running jobs of a tenant."""

    name: str
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen
    paused: bool = False
    pause_reason: str | None = None
    pending: int = 0
    running: int = 0


@read_only
def list_queues(tx: Transaction, tenant_id: str) -> tuple[list[Queue], bool]:
    """Return the queues that have a row (including `*`) or a live job of this tenant, by name.

    The second result is False if there are too many jobs to count: counting stops above COUNT_LIMIT.
    """
    queries = split_by_running(
        select(jobs.c.queue, jobs.c.state).where(jobs.c.tenant_id == tenant_id).limit(COUNT_LIMIT + 1)
    )
    sample = union_all(*(select(query.subquery()) for query in queries)).subquery()
    waiting: dict[str, int] = defaultdict(int)
    running: dict[str, int] = defaultdict(int)
    counted: Any = tx.execute(select(sample, func.count()).group_by(sample.c.queue, sample.c.state))
    for queue, state, count in counted:
        (waiting if state == JobState.PENDING else running)[queue] += count
    rows = {row.name: row for row in tx.execute(select(queues))}
    result = []
    for name in sorted(rows.keys() | waiting.keys() | running.keys()):
        queue = Queue(name, pending=waiting[name], running=running[name])
        if (row := rows.get(name)) is not None:
            limits = Limits(
                concurrency=row.concurrency, rate=row.rate, per=row.per or 1.0,
                concurrency_per_group=row.concurrency_per_group,
            )  # fmt: skip
            queue = replace(queue, limits=limits, paused=bool(row.paused), pause_reason=row.pause_reason)
        result.append(queue)
    return result, sum(waiting.values()) + sum(running.values()) <= COUNT_LIMIT


def lock(tx: Transaction, name: str) -> None:
    """Lock the row of a queue, if it has one, for a change."""
    tx.execute(select(queues.c.name).where(queues.c.name == name).with_for_update())


def set_limits(tx: Transaction, name: str, limits: Limits) -> None:
    """Set the limits of a queue. If its group limit changed, release the held jobs of its groups."""
    rate = {"rate": limits.rate, "per": None if limits.rate is None else limits.per}
    previous = _upsert(
        tx, name, concurrency=limits.concurrency, concurrency_per_group=limits.concurrency_per_group, **rate
    )  # fmt: skip
    if previous is not None and previous != limits.concurrency_per_group:
        held_jobs = (jobs.c.queue == name) & (jobs.c.hold == Hold.GROUP.value)
        tx.execute(update(jobs).where(held_jobs).values(hold=None))
    tx.notify(JOBS)


def pause(tx: Transaction, name: str, reason: str | None) -> None:
    """Stop claiming jobs of a queue. Running jobs are not affected."""
    _upsert(tx, name, paused=True, pause_reason=reason)


def resume(tx: Transaction, name: str) -> None:
    """Resume claiming jobs of a queue."""
    _upsert(tx, name, paused=False, pause_reason=None)
    tx.notify(JOBS)
    if name == ALL_QUEUES:
        tx.notify(SCHEDULES)


def is_everything_paused(tx: Transaction) -> bool:
    """Return whether all queues are paused (queue `*`)."""
    everything = select(queues.c.paused).where(queues.c.name == ALL_QUEUES)
    return bool(tx.execute(everything).scalar())


def _upsert(tx: Transaction, name: str, **values: object) -> int | None:
    """Insert or update the row of a queue; return its previous concurrency per group."""
    row = tx.execute(select(queues).where(queues.c.name == name).with_for_update()).first()
    if row is None:
        tx.execute(insert(queues).values(name=name, **values))
        return None
    tx.execute(update(queues).where(queues.c.name == name).values(**values))
    per_group: int | None = row.concurrency_per_group
    return per_group
