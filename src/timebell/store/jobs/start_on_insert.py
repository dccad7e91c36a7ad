"""Jobs that start as they are made: the planner's node has hands free for them, and nobody waits in their lane.

The transaction that makes them is then what starts them: they were never pending, so there is nothing to claim and
nothing to prevent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from timebell.model.job import Attempt, NewJob
from timebell.model.routes import Routes
from timebell.store.jobs import claim
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

# Of these lanes those whose queue has no limit, and in which nothing is due that would come first.
OPEN = Statement(
    "WITH $rows SELECT d.queue, d.priority FROM d WHERE NOT EXISTS (SELECT 1 FROM timebell_queues q"  # noqa: S608
    " WHERE q.name = d.queue AND (q.paused OR q.concurrency IS NOT NULL OR q.concurrency_per_group IS NOT NULL"
    f" OR q.rate IS NOT NULL)) AND NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE {claim.CLAIMABLE}"
    " AND j.queue = d.queue AND j.priority = d.priority AND j.run_at <= :now)",
    queue="text",
    priority="int",
)


@dataclass(frozen=True, slots=True)
class Room:
    """Up to `most` free places of a node for jobs that its routes take."""

    node: str
    routes: Routes
    most: int

    def fit(self, tx: Transaction, new: Sequence[NewJob], now: datetime) -> list[NewJob]:
        """Those that may start at once, the most urgent first."""
        hears = {route: self.routes.hears(route) for route in {job.route for job in new}}
        found = [job for job in new if job.hold is None and job.run_at <= now and hears[job.route]]
        if not found:
            return found
        lanes = {(job.queue, job.priority) for job in found}
        asked = [{"queue": queue, "priority": priority} for queue, priority in sorted(lanes)]
        free = {(row["queue"], row["priority"]) for row in tx.fetch(OPEN, asked, now=tx.dialect.to_db(now))}
        if free != lanes:
            found = [job for job in found if (job.queue, job.priority) in free]
        if len(free) > 1:
            found.sort(key=lambda job: job.priority)
        return found[: self.most]


def add(tx: Transaction, new: Sequence[NewJob], room: Room | None, now: datetime) -> list[Attempt]:
    """As `jobs.add`; the attempts of those that there was room for. Of the others all nodes are told."""
    begun = room.fit(tx, new, now) if room is not None and room.most > 0 else []
    started = claim.start(tx, begun, room.node, now) if room is not None and begun else set()
    if len(started) < len(new):  # what is not due by the server's clock is among them
        claim.add(tx, [job for job in new if job.id not in started] if started else new)
        tx.notify()
    return [_attempt(job, now) for job in begun if job.id in started]


def _attempt(job: NewJob, now: datetime) -> Attempt:
    return Attempt(
        job.id, job.tenant_id, job.topic, job.schedule_id, job.scheduled_at, str(job.kind), job.timezone, job.payload,
        job.metadata, job.target, job.queue, job.retry, job.timeout, job.expires_at, 1, 0, job.serial, None,
        job.revision, job.run_at, now, group=job.group, priority=job.priority, conditions=job.conditions,
    )  # fmt: skip
