"""Insert due jobs directly as `running`, skipping the claim.

Used by the planner when its own node has free slots. A job inserted this way was never pending, so no other node can
claim it and no cancel can prevent its start. Restricted to queues without limits and to lanes with no other due job,
because only a claim enforces limits and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from timebell.model.job import Attempt, NewJob
from timebell.model.routes import Routes
from timebell.store.jobs import claim
from timebell.store.jobs.target_queues import assign_queues
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class SlotReservation:
    """Free slots of a node that may be filled: at most `max_jobs`, with jobs on `routes`."""

    node_id: str
    routes: Routes
    max_jobs: int

    def select_startable(self, tx: Transaction, new_jobs: Sequence[NewJob], now: datetime) -> list[NewJob]:
        """Return the jobs that may start immediately, highest priority first."""
        handled = {route: self.routes.handles(route) for route in {job.route for job in new_jobs}}
        startable = [job for job in new_jobs if job.hold is None and job.run_at <= now and handled[job.route]]
        if not startable:
            return startable
        lanes = {(job.queue, job.priority) for job in startable}
        open_lanes = tx.dialect.find_open_lanes(tx, lanes, now)
        if open_lanes != lanes:
            startable = [job for job in startable if (job.queue, job.priority) in open_lanes]
        if len(open_lanes) > 1:
            startable.sort(key=lambda job: job.priority)
        return startable[: self.max_jobs]


def insert_and_start(
    tx: Transaction, new_jobs: Sequence[NewJob], reservation: SlotReservation | None, now: datetime
) -> list[Attempt]:
    """Insert jobs; return the attempts that were started."""
    assign_queues(tx, new_jobs)  # before the lanes are compared
    startable = (
        reservation.select_startable(tx, new_jobs, now) if reservation is not None and reservation.max_jobs > 0 else []
    )
    started_ids = (
        claim.insert_running(tx, startable, reservation.node_id, now)
        if reservation is not None and startable
        else set()
    )
    if len(started_ids) < len(new_jobs):  # includes jobs that are not due by the server's clock
        claim.insert_jobs(tx, [job for job in new_jobs if job.id not in started_ids] if started_ids else new_jobs)
    return [_first_attempt(job, now) for job in startable if job.id in started_ids]


def _first_attempt(job: NewJob, now: datetime) -> Attempt:
    return Attempt(
        job.id, job.tenant_id, job.topic, job.schedule_id, job.scheduled_at, str(job.kind), job.timezone, job.payload,
        job.metadata, job.target, job.queue, job.retry, job.timeout, job.expires_at, 1, 0, job.serial, None,
        job.revision, job.run_at, now, group=job.group, priority=job.priority, conditions=job.conditions,
    )  # fmt: skip
