"""Groups: jobs of a queue with a limit on how many run simultaneously. The others are held (hold `group`).

Whenever a job of a group completes or returns to pending, in whatever state it was, `release_next` must be called. It
may release one job too many; the claim holds that job again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sqlalchemy import select

from timebell.model.job import Completion
from timebell.store.schema import queues
from timebell.store.statement import Statement
from timebell.store.transaction import JOBS, Row, Transaction

LOCK_QUEUES = Statement(
    "WITH $rows SELECT name FROM timebell_queues WHERE name $in SELECT name FROM d $end_in"
    " AND concurrency_per_group IS NOT NULL ORDER BY name $for_update",
    name="text",
)
NEXT_IN_GROUP = Statement(
    """
    WITH $rows UPDATE timebell_jobs SET hold = NULL WHERE id $in
        SELECT (SELECT j.id FROM timebell_jobs j WHERE j.hold = 'group' AND j.queue = d.queue
                AND j.tenant_id = d.tenant_id AND j.group_name = d.group_name
                ORDER BY j.priority, j.run_at LIMIT 1 $skip_locked) FROM d
    $end_in RETURNING id
    """,
    queue="text",
    tenant_id="text",
    group_name="text",
)


def lock_queues(tx: Transaction, completions: Sequence[Completion]) -> None:
    """Lock the queues of grouped jobs before the jobs complete, as a claim does.

    Without the lock a concurrent claim could hold a job for a group whose last running job has just completed.
    """
    if names := sorted({completion.group_queue for completion in completions if completion.group_queue is not None}):
        tx.fetch(LOCK_QUEUES, [{"name": name} for name in names])


def release_next(tx: Transaction, departed: Iterable[Row]) -> int:
    """For each of these jobs with a group release the next job held there; return how many were released.

    Rows need the columns queue, tenant_id and group_name.
    """
    grouped = [(row["queue"], row["tenant_id"], row["group_name"]) for row in departed if row["group_name"] is not None]
    if not grouped:
        return 0
    counts, released = Counter(grouped), 0
    while counts:
        rows = [{"queue": queue, "tenant_id": tenant, "group_name": name} for queue, tenant, name in counts]
        released += len(tx.fetch(NEXT_IN_GROUP, rows))
        counts = Counter({group: count - 1 for group, count in counts.items() if count > 1})
    if released:
        tx.notify(JOBS)
    return released


_FROM_WAITING = "FROM timebell_jobs WHERE hold = 'group' AND queue = :queue"
# A loose index scan, as for lanes: a few look-ups per group, whatever the number of held jobs. Groups with a job that
# is in flight or may be claimed are not stuck.
_NEXT_GROUP = (
    f"COALESCE((SELECT {{column}} {_FROM_WAITING} AND tenant_id = g.tenant_id AND group_name > g.group_name"
    f" ORDER BY group_name LIMIT 1), (SELECT {{column}} {_FROM_WAITING} AND tenant_id > g.tenant_id"
    " ORDER BY tenant_id, group_name LIMIT 1))"
)
# Jobs of groups that are running or dispatched to an external worker: each state has its own partial index.
IN_FLIGHT_GROUPS = " UNION ALL ".join(
    f"SELECT tenant_id, group_name FROM timebell_jobs WHERE state = '{state}' AND queue = :queue"  # noqa: S608
    " AND group_name IS NOT NULL"
    for state in ("running", "dispatched")
)
STUCK_GROUPS = Statement(
    f"""
    WITH RECURSIVE waiting(tenant_id, group_name) AS (
        SELECT * FROM (SELECT tenant_id, group_name {_FROM_WAITING} ORDER BY tenant_id, group_name LIMIT 1) AS first
        UNION ALL
        SELECT {_NEXT_GROUP.format(column="tenant_id")}, {_NEXT_GROUP.format(column="group_name")}
        FROM waiting g WHERE g.tenant_id IS NOT NULL
    )
    SELECT g.tenant_id, g.group_name FROM waiting g
    WHERE g.tenant_id IS NOT NULL AND (g.tenant_id, g.group_name) NOT IN ({IN_FLIGHT_GROUPS})
        AND (g.tenant_id, g.group_name) NOT IN (SELECT f.tenant_id, f.group_name
            FROM (SELECT tenant_id, group_name FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                  AND queue = :queue ORDER BY priority, run_at LIMIT 1000) AS f WHERE f.group_name IS NOT NULL)
    """  # noqa: S608 - constants only
)


def release_stuck(tx: Transaction) -> int:
    """Release a job in every group in which jobs are held but none is in flight; return how many were released.

    Such groups remain, for example, after a transaction that should have released a job was rolled back.
    """
    released = 0
    grouped_queues = select(queues.c.name).where(queues.c.concurrency_per_group.is_not(None)).order_by(queues.c.name)
    for name in tx.execute(grouped_queues).scalars().all():
        released += release_next(tx, [{**row, "queue": name} for row in tx.fetch(STUCK_GROUPS, queue=name)])
    return released
