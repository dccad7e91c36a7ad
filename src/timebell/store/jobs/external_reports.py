"""Reports of external workers about attempts dispatched to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Table, select, update

from timebell.model import attempts
from timebell.model.job import Attempt, Completion, Job, JobState
from timebell.model.payload import decode
from timebell.store.jobs import claim, complete, repository, serial
from timebell.store.schema import finished
from timebell.store.schema import jobs as table
from timebell.store.statement import Statement
from timebell.store.transaction import JOBS, Transaction
from timebell.store.types import to_micros

IN_FLIGHT_STATES = (JobState.RUNNING.value, JobState.DISPATCHED.value)


def column_names(from_table: Table) -> str:
    """Return the column names of a table as a SELECT list."""
    return ", ".join(column.name for column in from_table.columns)


LOCK_JOB = Statement(
    f"SELECT {column_names(table)} FROM timebell_jobs WHERE id = :id AND tenant_id = :tenant_id $for_update"  # noqa: S608
)


class LockedJob(NamedTuple):
    """The job of a report. `attempt` is None if the reported attempt has ended."""

    job: Job
    attempt: Attempt | None
    cancel_requested: bool


def lock_job(tx: Transaction, tenant_id: str, job_id: str, number: int) -> LockedJob | None:
    """Load a job and, if it is live, lock its row; return None for an unknown id.

    An external worker may report before the engine has recorded the dispatch, so the attempt may still be `running`.
    """
    rows = tx.fetch(LOCK_JOB, id=job_id, tenant_id=tenant_id)
    if not rows:
        job = repository.find_job(tx, tenant_id, job_id, finished_only=True)
        return None if job is None else LockedJob(job, None, False)
    row, attempt = repository.typed_row(tx, table, rows[0]), None
    if row.attempt == number and row.state in IN_FLIGHT_STATES:
        attempt = Attempt(
            row.id, row.tenant_id, row.topic, row.schedule_id, row.scheduled_at, row.kind, row.timezone, row.payload,
            row.metadata, row.target, row.queue, row.retry, row.timeout, row.expires_at, row.attempt, row.attempts_used,
            bool(row.serial), row.errors, row.revision, row.run_at, row.started_at, JobState(row.state), row.group_name,
            priority=row.priority, manual_retries=row.manual_retries, conditions=row.conditions,
        )  # fmt: skip
    return LockedJob(repository.job_from_row(row), attempt, bool(row.cancel_requested))


def list_dispatched(tx: Transaction, routes: Sequence[str], after: str, limit: int) -> list[Attempt]:
    """Return dispatched attempts on these routes, by id after `after`, except those that were requested to stop."""
    dispatched = (table.c.state == JobState.DISPATCHED.value) & table.c.route.in_(routes)
    dispatched &= table.c.hold.is_(None) & table.c.cancel_requested.is_(False)
    query = select(table.c.id, table.c.attempt, table.c.started_at).where(dispatched).order_by(table.c.id).limit(limit)
    rows = tx.execute(query.where(table.c.id > after) if after else query).all()
    if not rows:
        return []
    started = {row.id: row.started_at for row in rows}
    loaded = claim.load_live_attempts(tx, [(row.id, row.attempt) for row in rows], rows[0].started_at)
    for attempt in loaded:
        attempt.started_at = started[attempt.id]
    return sorted(loaded, key=lambda attempt: attempt.id)


FINISHED_JOB = Statement(
    f"SELECT {column_names(finished)}, EXISTS (SELECT 1 FROM timebell_queues q WHERE q.name = timebell_finished.queue"  # noqa: S608
    " AND q.concurrency IS NOT NULL) OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id ="
    " timebell_finished.tenant_id AND t.starts IS NOT NULL) AS limited FROM timebell_finished"
    " WHERE id = :id AND tenant_id = :tenant_id"
)


def apply_report(tx: Transaction, tenant_id: str, completion: Completion) -> Job:
    """Complete a locked attempt, or schedule its retry if the completion is `pending`. Returns the job after it."""
    if completion.state is JobState.PENDING:
        if complete.schedule_retries(tx, [completion]):
            (locked,) = tx.fetch(LOCK_JOB, id=completion.id, tenant_id=tenant_id)
            return repository.job_from_row(repository.typed_row(tx, table, locked))
        completion = dataclasses.replace(completion, state=JobState.CANCELLED)  # a cancel was requested
    serial.complete_one(tx, completion)
    (row,) = tx.fetch(FINISHED_JOB, id=completion.id, tenant_id=tenant_id)
    if row["limited"]:  # another job may start now
        tx.notify(JOBS)
    return repository.job_from_row(repository.typed_row(tx, finished, row))


def extend_deadline(tx: Transaction, attempt: Attempt, deadline: datetime) -> None:
    """Set the deadline for the next report on a dispatched attempt."""
    same = (table.c.id == attempt.id) & (table.c.state == JobState.DISPATCHED.value)
    tx.execute(update(table).where(same).values(heartbeat=to_micros(deadline)))


def record_delivery(tx: Transaction, completion: Completion) -> None:
    """Add the delivery of an attempt to the attempt history of its job, without completing anything.

    For a delivery whose report arrived before it was recorded. `completion.errors` ends with the line of the delivery.
    """
    (*_, delivery) = decode(completion.errors)
    for source in (table, finished):
        same = (source.c.id == completion.id) & (source.c.attempt >= completion.attempt)
        row = tx.execute(select(source.c.errors).where(same).with_for_update()).first()
        if row is not None:
            lines = attempts.merge_delivery(decode(row.errors) or [], delivery)
            tx.execute(update(source).where(same).values(errors=attempts.encode_recent(lines)))
            return
