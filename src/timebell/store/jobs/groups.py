"""Groups: jobs of a queue of which only so many run at once. Who has to wait is let go by those that end.

Every way out of a group passes `let_go`: a job that ends, or goes back to pending, in whatever state it was. It may
let go one too many, which the claim puts back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sqlalchemy import select

from timebell.model.job import Ending
from timebell.store.schema import queues
from timebell.store.statement import Statement
from timebell.store.transaction import Row, Transaction

LOCK_QUEUES = Statement(
    "WITH $rows SELECT name FROM timebell_queues WHERE name $pick SELECT name FROM d $picked"
    " AND concurrency_per_group IS NOT NULL ORDER BY name $for_update",
    name="text",
)
NEXT_IN_GROUP = Statement(
    """
    WITH $rows UPDATE timebell_jobs SET hold = NULL WHERE id $pick
        SELECT (SELECT j.id FROM timebell_jobs j WHERE j.hold = 'group' AND j.queue = d.queue
                AND j.tenant_id = d.tenant_id AND j.group_name = d.group_name
                ORDER BY j.priority, j.run_at LIMIT 1 $skip_locked) FROM d
    $picked RETURNING id
    """,
    queue="text",
    tenant_id="text",
    group_name="text",
)


def lock(tx: Transaction, endings: Sequence[Ending]) -> None:
    """Before running jobs of groups end: lock their queues as the claim does, so that none is held behind one gone."""
    if names := sorted({ending.grouped for ending in endings if ending.grouped is not None}):
        tx.fetch(LOCK_QUEUES, [{"name": name} for name in names])


def let_go(tx: Transaction, left: Iterable[Row]) -> int:
    """For each of these rows that is of a group the next one that waits there may start; how many do."""
    grouped = [(row["queue"], row["tenant_id"], row["group_name"]) for row in left if row["group_name"] is not None]
    if not grouped:
        return 0
    counts, freed = Counter(grouped), 0
    while counts:
        rows = [{"queue": queue, "tenant_id": tenant, "group_name": name} for queue, tenant, name in counts]
        freed += len(tx.fetch(NEXT_IN_GROUP, rows))
        counts = Counter({group: count - 1 for group, count in counts.items() if count > 1})
    if freed:
        tx.notify()
    return freed


_HELD = "FROM timebell_jobs WHERE hold = 'group' AND queue = :queue"
# As for lanes: a few look-ups a group, whatever the number of those that wait. Not where one runs or may be claimed.
_NEXT_GROUP = (
    f"COALESCE((SELECT {{column}} {_HELD} AND tenant_id = g.tenant_id AND group_name > g.group_name"
    f" ORDER BY group_name LIMIT 1), (SELECT {{column}} {_HELD} AND tenant_id > g.tenant_id"
    " ORDER BY tenant_id, group_name LIMIT 1))"
)
# What runs in groups, here or with an outside worker: each of the two has an index.
BUSY = " UNION ALL ".join(
    f"SELECT tenant_id, group_name FROM timebell_jobs WHERE state = '{state}' AND queue = :queue"  # noqa: S608
    " AND group_name IS NOT NULL"
    for state in ("running", "dispatched")
)
STUCK = Statement(
    f"""
    WITH RECURSIVE waiting(tenant_id, group_name) AS (
        SELECT * FROM (SELECT tenant_id, group_name {_HELD} ORDER BY tenant_id, group_name LIMIT 1) AS first
        UNION ALL
        SELECT {_NEXT_GROUP.format(column="tenant_id")}, {_NEXT_GROUP.format(column="group_name")}
        FROM waiting g WHERE g.tenant_id IS NOT NULL
    )
    SELECT g.tenant_id, g.group_name FROM waiting g
    WHERE g.tenant_id IS NOT NULL AND (g.tenant_id, g.group_name) NOT IN ({BUSY})
        AND (g.tenant_id, g.group_name) NOT IN (SELECT f.tenant_id, f.group_name
            FROM (SELECT tenant_id, group_name FROM timebell_jobs WHERE state = 'pending' AND hold IS NULL
                  AND queue = :queue ORDER BY priority, run_at LIMIT 1000) AS f WHERE f.group_name IS NOT NULL)
    """  # noqa: S608 - constants only
)


def hand_on(tx: Transaction) -> int:
    """Let go in groups that wait for nobody: of nodes that knew no groups, of a transaction that was rolled back."""
    freed = 0
    limited = select(queues.c.name).where(queues.c.concurrency_per_group.is_not(None)).order_by(queues.c.name)
    for name in tx.execute(limited).scalars().all():
        freed += let_go(tx, [{**row, "queue": name} for row in tx.fetch(STUCK, queue=name)])
    return freed
