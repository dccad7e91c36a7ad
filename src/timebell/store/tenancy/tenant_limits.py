"""What a tenant may run at once and start in a minute, over all queues and nodes, held at the claim.

A claim takes what is due; what its tenant may not start now is put back in the same transaction, so nobody saw it
run, and waits with the hold `tenant` outside the claim index: a tenant's million due jobs are in nobody's way. The
rows of the tenants are locked meanwhile. Who has no such limit pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, func, select, union_all, update

from timebell.model.job import Attempt, JobState
from timebell.model.limits import allowed, started
from timebell.model.payload import decode, encode
from timebell.store.jobs.indexes import apart
from timebell.store.schema import jobs, tenants
from timebell.store.statement import Statement
from timebell.store.tenancy.tenants import read_limits
from timebell.store.transaction import Transaction
from timebell.store.types import to_micros

MINUTE = 60_000_000  # microseconds
UNLIMITED = 10**9

PUT_BACK = Statement(
    "WITH $rows UPDATE timebell_jobs SET state = 'pending', attempt = attempt - 1, node_id = NULL, hold = 'tenant'"
    " WHERE id $pick SELECT id FROM d $picked",
    id="id",
)
LET_GO = Statement(
    "UPDATE timebell_jobs SET hold = NULL WHERE id $pick SELECT id FROM timebell_jobs WHERE hold = 'tenant'"
    " AND tenant_id = :tenant ORDER BY priority, run_at LIMIT :most $picked RETURNING id"
)


class Claimed(NamedTuple):
    """What a claim started, and how many it put back."""

    attempts: list[Attempt]
    put_back: int


def limited(tx: Transaction) -> frozenset[str]:
    """The tenants that have a limit of this sort."""
    return frozenset(tx.execute(select(tenants.c.id).where(tenants.c.starts.is_not(None))).scalars())


def claim_admitted(
    tx: Transaction, of: Collection[str], now: datetime, take: Callable[..., list[Attempt]], *what: Any
) -> Claimed:
    """Claim by `take`, and put back what the tenants `of` may not start now."""
    taken = take(tx, *what)
    mine = Counter(attempt.tenant_id for attempt in taken if attempt.tenant_id in of)
    if not mine:
        return Claimed(taken, 0)
    rows = _locked(tx, mine)
    rooms = _rooms(tx, rows, now, mine)
    kept, back, began = [], [], Counter[str]()
    for attempt in taken:
        if began[attempt.tenant_id] < rooms.get(attempt.tenant_id, UNLIMITED):
            began[attempt.tenant_id] += 1
            kept.append(attempt)
        else:
            back.append({"id": attempt.id})
    if back:
        tx.fetch(PUT_BACK, back)
    for row in rows:
        if began[row.id] and (rate := read_limits(row.limits).starts_per_minute) is not None:
            starts = started(decode(row.starts), rate, MINUTE, to_micros(now), began[row.id])
            tx.execute(update(tenants).where(tenants.c.id == row.id).values(starts=encode(starts)))
    return Claimed(kept, len(back))


def let_go(tx: Transaction, now: datetime) -> int:
    """Let jobs start again whose tenants have room for them; how many."""
    waits = select(jobs.c.id).where(jobs.c.hold == "tenant", jobs.c.tenant_id == tenants.c.id).exists()
    waiting = tx.execute(select(tenants.c.id).where(tenants.c.starts.is_not(None), waits)).scalars().all()
    if not waiting:
        return 0
    rooms = _rooms(tx, _locked(tx, waiting), now, Counter())
    return sum(len(tx.fetch(LET_GO, tenant=id_, most=room)) for id_, room in rooms.items() if room > 0)


def _locked(tx: Transaction, ids: Collection[str]) -> list[Row[Any]]:
    mine = tenants.c.id.in_(sorted(ids)) & tenants.c.starts.is_not(None)
    return list(tx.execute(select(tenants).where(mine).order_by(tenants.c.id).with_for_update()))


def _rooms(tx: Transaction, rows: list[Row[Any]], now: datetime, taken: Counter[str]) -> dict[str, int]:
    """How many more each may start; those `taken` run already, and are not counted."""
    resting, running = apart(select(jobs.c.tenant_id).where(jobs.c.tenant_id.in_([row.id for row in rows])))
    outside = resting.where(jobs.c.state == JobState.DISPATCHED.value)
    all_of_it = union_all(running, outside).subquery()
    counted = select(all_of_it.c.tenant_id, func.count().label("running")).group_by(all_of_it.c.tenant_id)
    busy = {row.tenant_id: row.running for row in tx.execute(counted)}
    rooms = {}
    for row in rows:
        limits, room = read_limits(row.limits), UNLIMITED
        if limits.jobs_at_once is not None:
            room = limits.jobs_at_once - (busy.get(row.id, 0) - taken[row.id])
        if (rate := limits.starts_per_minute) is not None:
            room = min(room, allowed(decode(row.starts), rate, MINUTE, to_micros(now)))
        rooms[row.id] = max(0, room)
    return rooms
