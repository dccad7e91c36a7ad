"""Hold jobs due after the backup's timestamp until an operator releases them, because they may have run already."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, or_, select, update

from timebell.model.job import Hold, JobState
from timebell.store.schedules.actions import lock_schedule
from timebell.store.schedules.schedules import JobBuilder, decide_due_occurrences
from timebell.store.schema import jobs, nodes, schedules
from timebell.store.transaction import Transaction

BATCH_SIZE = 500
BACKLOG_HOLD = Hold.BACKLOG.value


@dataclass(frozen=True, slots=True)
class HeldAfterRestore:
    """Counts of the jobs that wait for `timebell release`.

    `due`: jobs due by now. `running`: jobs that were running at the time of the backup. `occurrences`: jobs created
    for occurrences since then, of `schedules` schedules.
    """

    due: int = 0
    running: int = 0
    occurrences: int = 0
    schedules: int = 0


def hold_jobs(tx: Transaction, now: datetime) -> HeldAfterRestore:
    """Hold due and running jobs, and delete the nodes registered at the time of the backup."""
    tx.execute(delete(nodes))
    not_in_backlog = or_(jobs.c.hold.is_(None), jobs.c.hold != BACKLOG_HOLD)
    was_running = (jobs.c.state == JobState.RUNNING.value) & jobs.c.cancel_requested.is_(False)
    running = tx.execute(
        update(jobs).where(was_running).values(state=JobState.PENDING.value, hold=BACKLOG_HOLD, node_id=None)
    )
    was_due = (jobs.c.state == JobState.PENDING.value) & (jobs.c.run_at <= now) & not_in_backlog
    due = tx.execute(update(jobs).where(was_due).values(hold=BACKLOG_HOLD))
    return HeldAfterRestore(due=due.rowcount, running=running.rowcount)


def hold_occurrences(tx: Transaction, build: JobBuilder, now: datetime) -> HeldAfterRestore:
    """Decide a batch of due schedules as after an outage, and hold every job that their catch-up creates."""
    due = schedules.c.enabled & schedules.c.error.is_(None) & (schedules.c.next_fire_at <= now)
    rows = tx.execute(
        select(schedules.c.tenant_id, schedules.c.id).where(due).order_by(schedules.c.id).limit(BATCH_SIZE)
    )
    locked = [
        schedule
        for schedule in (lock_schedule(tx, row.tenant_id, row.id) for row in rows.all())
        if schedule is not None
    ]
    ids = [schedule.id for schedule in locked]
    pending = jobs.c.schedule_id.in_(ids) & (jobs.c.state == JobState.PENDING.value)
    count = select(func.count()).select_from(jobs).where(pending)
    before = tx.execute(count).scalar_one()
    for schedule in locked:
        policies = dataclasses.replace(schedule.policies, hold_above=0, missed_after=0.0)
        decide_due_occurrences(tx, dataclasses.replace(schedule, policies=policies), build, now)
    # Fixed delays have no missed occurrences, so their due job is held here.
    tx.execute(update(jobs).where(pending, jobs.c.run_at <= now).values(hold=BACKLOG_HOLD))
    return HeldAfterRestore(occurrences=tx.execute(count).scalar_one() - before, schedules=len(locked))
