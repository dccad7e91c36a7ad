"""After a backup was restored: what fell due since it was made may have run already, so it is not run unasked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, or_, select, update

from timebell.model.job import Hold, JobState
from timebell.store.schedules.actions import locked
from timebell.store.schedules.schedules import Build, settle
from timebell.store.schema import jobs, nodes, schedules
from timebell.store.transaction import Transaction

BATCH = 500
RECOVER = Hold.RECOVER.value


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What waits for `timebell recover`: jobs that were due, were running as the backup was made, or were made of
    occurrences since; and how many schedules had such ones."""

    due: int = 0
    running: int = 0
    occurrences: int = 0
    schedules: int = 0


def hold_jobs(tx: Transaction, now: datetime) -> HeldBack:
    """Hold what is due and what ran, and forget the nodes of then."""
    tx.execute(delete(nodes))
    unheld = or_(jobs.c.hold.is_(None), jobs.c.hold != RECOVER)
    ran = (jobs.c.state == JobState.RUNNING.value) & jobs.c.cancel_asked.is_(False)
    running = tx.execute(update(jobs).where(ran).values(state=JobState.PENDING.value, hold=RECOVER, node_id=None))
    waiting = (jobs.c.state == JobState.PENDING.value) & (jobs.c.run_at <= now) & unheld
    due = tx.execute(update(jobs).where(waiting).values(hold=RECOVER))
    return HeldBack(due=due.rowcount, running=running.rowcount)


def hold_occurrences(tx: Transaction, build: Build, now: datetime) -> HeldBack:
    """Decide the next schedules that are due as after an outage, but let what their catch-up would start wait, however
    little it is."""
    due = schedules.c.enabled & schedules.c.fault.is_(None) & (schedules.c.next_fire_at <= now)
    rows = tx.execute(select(schedules.c.tenant_id, schedules.c.id).where(due).order_by(schedules.c.id).limit(BATCH))
    found = [one for one in (locked(tx, row.tenant_id, row.id) for row in rows.all()) if one is not None]
    ids = [one.id for one in found]
    mine = jobs.c.schedule_id.in_(ids) & (jobs.c.state == JobState.PENDING.value)
    count = select(func.count()).select_from(jobs).where(mine)
    before = tx.execute(count).scalar_one()
    for schedule in found:
        policies = dataclasses.replace(schedule.policies, hold_above=0, missed_after=0.0)
        settle(tx, dataclasses.replace(schedule, policies=policies), build, now)
    tx.execute(update(jobs).where(mine, jobs.c.run_at <= now).values(hold=RECOVER))  # fixed delays are never missed
    return HeldBack(occurrences=tx.execute(count).scalar_one() - before, schedules=len(found))
