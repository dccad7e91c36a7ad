"""Queues: named lanes with a limit and a pause. A queue without a row has neither."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, insert, select, union_all, update

from timebell.model.job import Hold, JobState
from timebell.model.limits import Limits
from timebell.store.jobs.indexes import apart
from timebell.store.schema import jobs, queues
from timebell.store.transaction import JOBS, SCHEDULES, Transaction

EVERYTHING = "*"  # the row whose pause stops planning and claiming altogether

COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with its limit and pause, and how many jobs of a tenant wait and run there."""

    name: str
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen
    paused: bool = False
    pause_reason: str | None = None
    pending: int = 0
    running: int = 0


def listed(tx: Transaction, tenant_id: str) -> tuple[list[Queue], bool]:
    """Every queue that has a limit or a pause, `*` too, or a live job of this tenant; by name.

    And whether all jobs were counted: counting stops above `COUNTED`, as millions may wait.
    """
    mine = apart(select(jobs.c.queue, jobs.c.state).where(jobs.c.tenant_id == tenant_id).limit(COUNTED + 1))
    some = union_all(*(select(each.subquery()) for each in mine)).subquery()
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
            limits = Limits(
                concurrency=row.concurrency, rate=row.rate, per=row.per or 1.0,
                concurrency_per_group=row.concurrency_per_group,
            )  # fmt: skip
            queue = replace(queue, limits=limits, paused=bool(row.paused), pause_reason=row.pause_reason)
        found.append(queue)
    return found, sum(waiting.values()) + sum(running.values()) <= COUNTED


def put(tx: Transaction, name: str, limits: Limits) -> None:
    """Set the limits of a queue. Those that wait in groups are looked at anew where theirs has changed."""
    rate = {"rate": limits.rate, "per": None if limits.rate is None else limits.per}
    was = _write(
        tx, name, concurrency=limits.concurrency, concurrency_per_group=limits.concurrency_per_group, **rate
    )  # fmt: skip
    if was is not None and was != limits.concurrency_per_group:
        held = (jobs.c.queue == name) & (jobs.c.hold == Hold.GROUP.value)
        tx.execute(update(jobs).where(held).values(hold=None))
        tx.notify()


def pause(tx: Transaction, name: str, reason: str | None) -> None:
    """Claim no more jobs of a queue; those that run go on."""
    _write(tx, name, paused=True, pause_reason=reason)


def resume(tx: Transaction, name: str) -> None:
    """Claim its jobs again."""
    _write(tx, name, paused=False, pause_reason=None)
    tx.notify(SCHEDULES if name == EVERYTHING else JOBS)


def stopped(tx: Transaction) -> bool:
    """Whether the switch that stops everything is set."""
    everything = select(queues.c.paused).where(queues.c.name == EVERYTHING)
    return bool(tx.execute(everything).scalar())


def _write(tx: Transaction, name: str, **values: object) -> int | None:
    """Write a queue's row; the limit per group that it had."""
    row = tx.execute(select(queues).where(queues.c.name == name).with_for_update()).first()
    if row is None:
        tx.execute(insert(queues).values(name=name, **values))
        return None
    tx.execute(update(queues).where(queues.c.name == name).values(**values))
    per_group: int | None = row.concurrency_per_group
    return per_group
