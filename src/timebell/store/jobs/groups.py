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
from timebell.store.sql import SQL
from timebell.store.transaction import JOBS, Row, Transaction


def lock_queues(tx: Transaction, completions: Sequence[Completion]) -> None:
    """Lock the queues of grouped jobs before the jobs complete, as a claim does.

    Without the lock a concurrent claim could hold a job for a group whose last running job has just completed.
    """
    if names := sorted({completion.group_queue for completion in completions if completion.group_queue is not None}):
        limited = queues.c.name.in_(names) & queues.c.concurrency_per_group.is_not(None)
        tx.execute(select(queues.c.name).where(limited).order_by(queues.c.name).with_for_update())


def release_next(tx: Transaction, departed: Iterable[Row]) -> int:
    """For each of these jobs with a group release the next job held there; return how many were released.

    Rows need the columns queue, tenant_id and group_name.
    """
    grouped = [(row["queue"], row["tenant_id"], row["group_name"]) for row in departed if row["group_name"] is not None]
    if not grouped:
        return 0
    counts, released = Counter(grouped), 0
    while counts:
        released += tx.dialect.release_next_of_groups(tx, counts)
        counts = Counter({group: count - 1 for group, count in counts.items() if count > 1})
    if released:
        tx.notify(JOBS)
    return released


# A loose index scan of timebell_jobs_group, as for lanes: a few look-ups per group, whatever the number of held jobs.
# Groups with a job that is in flight or may be claimed are not stuck.
STUCK_GROUPS = SQL("""
WITH RECURSIVE waiting (tenant_id, group_name) AS (
    SELECT * FROM (SELECT tenant_id, group_name FROM timebell_jobs WHERE hold = 'group' AND queue = :queue
                   ORDER BY tenant_id, group_name LIMIT 1) AS first
    UNION ALL
    SELECT
        COALESCE(
            (SELECT tenant_id FROM timebell_jobs WHERE hold = 'group' AND queue = :queue
                AND tenant_id = g.tenant_id AND group_name > g.group_name ORDER BY group_name LIMIT 1),
            (SELECT tenant_id FROM timebell_jobs WHERE hold = 'group' AND queue = :queue
                AND tenant_id > g.tenant_id ORDER BY tenant_id, group_name LIMIT 1)),
        COALESCE(
            (SELECT group_name FROM timebell_jobs WHERE hold = 'group' AND queue = :queue
                AND tenant_id = g.tenant_id AND group_name > g.group_name ORDER BY group_name LIMIT 1),
            (SELECT group_name FROM timebell_jobs WHERE hold = 'group' AND queue = :queue
                AND tenant_id > g.tenant_id ORDER BY tenant_id, group_name LIMIT 1))
    FROM waiting g WHERE g.tenant_id IS NOT NULL
)
SELECT g.tenant_id, g.group_name FROM waiting g
WHERE g.tenant_id IS NOT NULL
    AND (g.tenant_id, g.group_name) NOT IN (
        SELECT tenant_id, group_name FROM timebell_jobs
        WHERE state = 'running' AND queue = :queue AND group_name IS NOT NULL
        UNION ALL
        SELECT tenant_id, group_name FROM timebell_jobs
        WHERE state = 'dispatched' AND queue = :queue AND group_name IS NOT NULL)
    AND (g.tenant_id, g.group_name) NOT IN (
        SELECT f.tenant_id, f.group_name
        FROM (SELECT tenant_id, group_name FROM timebell_jobs
              WHERE state = 'pending' AND hold IS NULL AND queue = :queue
              ORDER BY priority, run_at LIMIT 1000) AS f
        WHERE f.group_name IS NOT NULL)
""")


def release_stuck(tx: Transaction) -> int:
    """Release a job in every group in which jobs are held but none is in flight; return how many were released.

    Such groups remain, for example, after a transaction that should have released a job was rolled back.
    """
    released = 0
    grouped_queues = select(queues.c.name).where(queues.c.concurrency_per_group.is_not(None)).order_by(queues.c.name)
    for name in tx.execute(grouped_queues).scalars().all():
        released += release_next(tx, [{**row, "queue": name} for row in tx.run_sql(STUCK_GROUPS, queue=name)])
    return released
