"""Queues: named lanes with a limit and a pause. A queue without a row has neither."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, insert, select, update

from timebell.model.job import JobState
from timebell.store.schema import jobs, queues
from timebell.store.transaction import Transaction

EVERYTHING = "*"  # the row whose pause stops planning and claiming altogether

COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with its limit and pause, and how many jobs of a tenant wait and run there."""

    name: str
    concurrency: int | None = None
    paused: bool = False
    pause_reason: str | None = None
    pending: int = 0
    running: int = 0


def listed(tx: Transaction, tenant_id: str) -> tuple[list[Queue], bool]:
    """Every queue that has a limit or a pause, `*` too, or a live job of this tenant; by name.

    And whether all jobs were counted: counting stops above `COUNTED`, as millions may wait.
    """
    some = select(jobs.c.queue, jobs.c.state).where(jobs.c.tenant_id == tenant_id).limit(COUNTED + 1).subquery()
    waiting: dict[str, int] = defaultdict(int)
    running: dict[str, int] = defaultdict(int)
    counted: Any = tx.execute(select(some, func.count()).group_by(some.c.queue, some.c.state))
    for queue, state, count in counted:
        (waiting if state == JobState.PENDING else running)[queue] += count
    rows = {row.name: row for row in tx.execute(select(queues))}
    found = []
    for name in sorted(rows.keys() | waiting.keys() | running.keys()):
        queue = Queue(name, pending=waiting[name], running=running[name])
        if (row := rows.get(name)) is not None:
            limits = {"concurrency": row.concurrency, "paused": bool(row.paused), "pause_reason": row.pause_reason}
            queue = replace(queue, **limits)
        found.append(queue)
    return found, sum(waiting.values()) + sum(running.values()) <= COUNTED


def put(tx: Transaction, name: str, concurrency: int | None) -> None:
    """Set how many jobs of a queue may run at once over all nodes (None: no limit)."""
    _write(tx, name, concurrency=concurrency)


def pause(tx: Transaction, name: str, reason: str | None) -> None:
    """Claim no more jobs of a queue; those that run go on."""
    _write(tx, name, paused=True, pause_reason=reason)


def resume(tx: Transaction, name: str) -> None:
    """Claim its jobs again."""
    _write(tx, name, paused=False, pause_reason=None)
    tx.notify()


def stopped(tx: Transaction) -> bool:
    """Whether the switch that stops everything is set."""
    everything = select(queues.c.paused).where(queues.c.name == EVERYTHING)
    return bool(tx.execute(everything).scalar())


def _write(tx: Transaction, name: str, **values: object) -> None:
    tx.execute(select(queues).where(queues.c.name == name).with_for_update())
    if tx.execute(update(queues).where(queues.c.name == name).values(**values)).rowcount == 0:
        tx.execute(insert(queues).values(name=name, **values))
