"""Audit a trigger: compare the desired instants of its items with the recorded firings, in both directions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select

from timebell.features.triggers.model.trigger import Firing, FiringKey, Trigger, epoch_micros
from timebell.features.triggers.store.planned_firings import load_firings
from timebell.features.triggers.store.tables import items
from timebell.model.payload import decode
from timebell.store.schema import jobs
from timebell.store.transaction import Transaction

MAX_DIFFERENCES = 1000
ITEMS_PER_PAGE = 500


@dataclass(frozen=True, slots=True)
class FiringDifference:
    """A firing that differs: `missing`, `overdue` (its job has not started) or `duplicate` (started twice)."""

    kind: str
    item: str
    offset: str
    recipient: str
    at: datetime


@dataclass(slots=True)
class FiringAudit:
    """The result of an audit: counts by outcome, and the differences."""

    expected: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """`fired`, `planned` (for a job that is skipped or done), or the reason of a firing without a job."""
    differences: list[FiringDifference] = field(default_factory=list)
    truncated: bool = False

    def add(self, difference: FiringDifference) -> None:
        """Add a difference, up to MAX_DIFFERENCES."""
        self.truncated |= len(self.differences) >= MAX_DIFFERENCES
        if not self.truncated:
            self.differences.append(difference)


def audit_page(
    tx: Transaction, trigger: Trigger, start: datetime, end: datetime, after: str | None, audit: FiringAudit
) -> str | None:  # fmt: skip
    """Audit the next items of a trigger, for instants in [start, end); return the key to continue after."""
    query = select(items.c.key, items.c.fields).where(items.c.source_id == trigger.source_id)
    if after is not None:
        query = query.where(items.c.key > after)
    rows = tx.execute(query.order_by(items.c.key).limit(ITEMS_PER_PAGE)).all()
    by_item = load_firings(tx, [trigger.id], [row.key for row in rows])
    live = _live_jobs(tx, [firing.job_id for firings in by_item.values() for firing in firings.values()])
    for row in rows:
        recorded = by_item[trigger.id, row.key]
        desired = trigger.rule.desired_firings(decode(row.fields)).instants
        for key, at in desired.items():
            if start <= at < end:
                audit.expected += 1
                _audit_firing(audit, row.key, key, at, recorded.get(key), live)
        for difference in _find_duplicates(row.key, recorded, start, end):
            audit.add(difference)
    return rows[-1].key if len(rows) == ITEMS_PER_PAGE else None


def _audit_firing(
    audit: FiringAudit, item: str, key: FiringKey, at: datetime, firing: Firing | None, live: Mapping[str, str]
) -> None:  # fmt: skip
    if firing is not None and firing.at == at and firing.job_id is not None:
        if live.get(firing.job_id) == "pending":
            audit.add(FiringDifference("overdue", item, key.offset, key.recipient, at))
        else:
            audit.outcomes["planned"] += 1
    elif firing is not None and firing.has_fired(at):
        audit.outcomes["skipped" if firing.not_fired is not None else "fired"] += 1
    elif firing is not None and firing.not_fired is not None:
        audit.outcomes[firing.not_fired.reason] += 1
    else:
        audit.add(FiringDifference("missing", item, key.offset, key.recipient, at))


def _find_duplicates(
    item: str, recorded: Mapping[FiringKey, Firing], start: datetime, end: datetime
) -> Iterator[FiringDifference]:  # fmt: skip
    for key, firing in recorded.items():
        started = Counter(job.at for job in firing.history if job.fired)
        for at in (firing.at, firing.fired_at):
            if at is not None and start <= at < end and started[epoch_micros(at)] + (at == firing.at) > 1:
                yield FiringDifference("duplicate", item, key.offset, key.recipient, at)


def _live_jobs(tx: Transaction, ids: list[Any]) -> dict[str, str]:
    query = select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(sorted(filter(None, ids))))
    return {row.id: row.state for row in tx.execute(query)}
