"""What is recorded of one occurrence."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select

from timebell.model.job import Job, JobState, Reason
from timebell.model.schedule import Schedule
from timebell.model.why import Act, Facts, Seen
from timebell.store.cluster import nodes
from timebell.store.jobs.repository import read
from timebell.store.schedules import schedules
from timebell.store.schedules.actions import history
from timebell.store.schema import audit_log, finished, jobs, queues
from timebell.store.transaction import Transaction

MOST = 1_000  # changes of one schedule that are looked through, the newest


def facts(tx: Transaction, tenant_id: str, id_: str, at: datetime) -> Facts:
    """Everything there is about the instant of a schedule."""
    schedule: Schedule | None = schedules.find(tx, tenant_id, id_=id_)
    found: list[Job] = []
    for table in (jobs, finished):
        here = select(table).where(
            table.c.schedule_id == id_, table.c.scheduled_at == at, table.c.tenant_id == tenant_id
        )
        found += [read(row) for row in tx.execute(here)]
    found += _range(tx, id_, at)
    skips = [job for job in found if job.reason == Reason.OVERLAP and job.finished_at is not None]
    log = select(audit_log.c.at, audit_log.c.actor, audit_log.c.action)
    log = log.where(audit_log.c.tenant_id == tenant_id, audit_log.c.subject == id_)
    acts = [Act(row.at, row.actor, row.action) for row in tx.execute(log.order_by(audit_log.c.id.desc()).limit(MOST))]
    return Facts(
        schedule_id=id_, schedule=schedule, revisions=history(tx, tenant_id, id_),
        rows=list({job.id: job for job in found}.values()),
        beside=_beside(tx, id_, skips[0]) if skips else [], acts=acts[::-1],
        nodes=[Seen(one.id, one.name, one.started_at, one.seen_at) for one in nodes.listed(tx)],
        around=(_ended(tx, tenant_id, at, before=True), _ended(tx, tenant_id, at, before=False)),
        stopped={row.name: row.pause_reason for row in tx.execute(select(queues).where(queues.c.paused))},
    )  # fmt: skip


def _ended(tx: Transaction, tenant_id: str, at: datetime, *, before: bool) -> datetime | None:
    """When the nearest attempt ended, among so many rows: other rows are of occurrences that were skipped."""
    column = finished.c.finished_at
    rows = select(column, finished.c.node_id, finished.c.tenant_id).where(column <= at if before else column > at)
    near = rows.order_by(column.desc() if before else column).limit(MOST).subquery()
    ended = select(near.c.finished_at).where(near.c.node_id.is_not(None), near.c.tenant_id == tenant_id)
    nearest = near.c.finished_at.desc() if before else near.c.finished_at
    return tx.execute(ended.order_by(nearest).limit(1)).scalar()


def _range(tx: Transaction, id_: str, at: datetime) -> list[Job]:
    """The range row that stands for the instant: the last planned one before it, if it reaches so far."""
    table = finished.c
    before = select(finished).where(table.schedule_id == id_, table.scheduled_at < at, table.kind == "planned")
    before = before.where(table.reason.is_(None) | (table.reason != Reason.OVERRIDE.value))
    last = tx.execute(before.order_by(table.scheduled_at.desc()).limit(1)).first()
    reaches = last is not None and last.skipped_count > 1 and last.skipped_to is not None and last.skipped_to >= at
    return [read(last)] if reaches and last is not None else []


def _beside(tx: Transaction, id_: str, skip: Job) -> list[Job]:
    """Jobs of the schedule that were live when an overlap left one out."""
    then, mine = skip.finished_at, []
    for table in (jobs, finished):
        query = select(table).where(table.c.schedule_id == id_, table.c.created_at <= then, table.c.id != skip.id)
        if table is finished:
            query = query.where(finished.c.finished_at >= then, finished.c.state != JobState.SKIPPED.value)
        mine += [read(row) for row in tx.execute(query.order_by(table.c.scheduled_at.desc()).limit(3))]
    return mine[:3]
