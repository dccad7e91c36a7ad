"""Collect the recorded facts of one occurrence, for `timebell why`."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select

from timebell.model.job import Job, JobState, Reason
from timebell.model.schedule import Schedule
from timebell.model.why import AuditEntry, KnownNode, OccurrenceFacts
from timebell.store.audit.audit_log import DONE
from timebell.store.cluster import nodes, workers
from timebell.store.jobs.repository import job_from_row
from timebell.store.schedules import queries
from timebell.store.schedules.actions import list_revisions
from timebell.store.schema import audit_log, finished, jobs, queues
from timebell.store.transaction import Transaction

MAX_ROWS = 1_000  # newest audit records of a schedule, and nearest finished rows, that are examined


def collect_facts(tx: Transaction, tenant_id: str, id_: str, at: datetime) -> OccurrenceFacts:
    """Return everything recorded about the occurrence of a schedule at an instant."""
    schedule: Schedule | None = queries.find_schedule(tx, tenant_id, id_=id_)
    rows: list[Job] = []
    for table in (jobs, finished):
        matching = select(table).where(
            table.c.schedule_id == id_, table.c.scheduled_at == at, table.c.tenant_id == tenant_id
        )
        rows += [job_from_row(row) for row in tx.execute(matching)]
    rows += _covering_range_row(tx, id_, at)
    skips = [job for job in rows if job.reason == Reason.OVERLAP and job.finished_at is not None]
    changes = select(audit_log.c.at, audit_log.c.actor, audit_log.c.action)
    is_change = (audit_log.c.subject == id_) & (audit_log.c.outcome == DONE)
    changes = changes.where(audit_log.c.tenant_id == tenant_id, is_change)
    entries = [
        AuditEntry(row.at, row.actor, row.action)
        for row in tx.execute(changes.order_by(audit_log.c.id.desc()).limit(MAX_ROWS))
    ]
    return OccurrenceFacts(
        schedule_id=id_, schedule=schedule, revisions=list_revisions(tx, tenant_id, id_),
        rows=list({job.id: job for job in rows}.values()),
        overlapping_jobs=_live_at_skip(tx, id_, skips[0]) if skips else [], audit_entries=entries[::-1],
        nodes=[
            *(KnownNode(node.id, node.name, node.started_at, node.seen_at) for node in nodes.list_nodes(tx)),
            *(
                KnownNode(worker.id, worker.name, worker.started_at, worker.seen_at)
                for worker in workers.list_workers(tx)
                if worker.tenant_id in (None, tenant_id)
            ),
        ],
        adjacent_attempts=(
            _nearest_attempt_end(tx, tenant_id, at, before=True), _nearest_attempt_end(tx, tenant_id, at, before=False),
        ),
        pauses={row.name: row.pause_reason for row in tx.execute(select(queues).where(queues.c.paused))},
    )  # fmt: skip


def _nearest_attempt_end(tx: Transaction, tenant_id: str, at: datetime, *, before: bool) -> datetime | None:
    """Return when the nearest attempt ended, among MAX_ROWS rows; rows without a node are skipped occurrences."""
    column = finished.c.finished_at
    rows = select(column, finished.c.node_id, finished.c.tenant_id).where(column <= at if before else column > at)
    nearest_rows = rows.order_by(column.desc() if before else column).limit(MAX_ROWS).subquery()
    ended = select(nearest_rows.c.finished_at).where(
        nearest_rows.c.node_id.is_not(None), nearest_rows.c.tenant_id == tenant_id
    )
    nearest = nearest_rows.c.finished_at.desc() if before else nearest_rows.c.finished_at
    return tx.execute(ended.order_by(nearest).limit(1)).scalar()


def _covering_range_row(tx: Transaction, id_: str, at: datetime) -> list[Job]:
    """Return the range row that covers the instant: the last planned row before it, if it extends that far."""
    table = finished.c
    before = select(finished).where(table.schedule_id == id_, table.scheduled_at < at, table.kind == "planned")
    before = before.where(table.reason.is_(None) | (table.reason != Reason.OVERRIDE.value))
    last = tx.execute(before.order_by(table.scheduled_at.desc()).limit(1)).first()
    reaches = last is not None and last.skipped_count > 1 and last.skipped_to is not None and last.skipped_to >= at
    return [job_from_row(last)] if reaches and last is not None else []


def _live_at_skip(tx: Transaction, id_: str, skip: Job) -> list[Job]:
    """Return up to 3 jobs of the schedule that were live when `skip` was skipped because of an overlap."""
    skipped_at, live = skip.finished_at, []
    for table in (jobs, finished):
        query = select(table).where(table.c.schedule_id == id_, table.c.created_at <= skipped_at, table.c.id != skip.id)
        if table is finished:
            query = query.where(finished.c.finished_at >= skipped_at, finished.c.state != JobState.SKIPPED.value)
        live += [job_from_row(row) for row in tx.execute(query.order_by(table.c.scheduled_at.desc()).limit(3))]
    return live[:3]
