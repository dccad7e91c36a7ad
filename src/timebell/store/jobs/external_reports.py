"""Reports of external workers about attempts dispatched to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import exists, select, update

from timebell.model import attempts
from timebell.model.job import Attempt, Completion, Job, JobState
from timebell.model.payload import decode
from timebell.store.jobs import claim, complete, repository, serial
from timebell.store.schema import finished, queues, tenants
from timebell.store.schema import jobs as table
from timebell.store.transaction import JOBS, Transaction
from timebell.store.types import to_micros

IN_FLIGHT_STATES = (JobState.RUNNING.value, JobState.DISPATCHED.value)


class LockedJob(NamedTuple):
    """The job of a report. `attempt` is None if the reported attempt has ended."""

    job: Job
    attempt: Attempt | None
    cancel_requested: bool


def lock_job(tx: Transaction, tenant_id: str, job_id: str, number: int) -> LockedJob | None:
    """Load a job and, if it is live, lock its row; return None for an unknown id.

    An external worker may report before the engine has recorded the dispatch, so the attempt may still be `running`.
    """
    same = (table.c.id == job_id) & (table.c.tenant_id == tenant_id)
    row = tx.execute(select(table).where(same).with_for_update()).first()
    if row is None:
        job = repository.find_job(tx, tenant_id, job_id, finished_only=True)
        return None if job is None else LockedJob(job, None, False)
    is_current = row.attempt == number and row.state in IN_FLIGHT_STATES
    attempt = claim.attempt_from_job(row, row.started_at) if is_current else None
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


def apply_report(tx: Transaction, tenant_id: str, completion: Completion) -> Job:
    """Complete a locked attempt, or schedule its retry if the completion is `pending`. Returns the job after it."""
    if completion.state is JobState.PENDING:
        if complete.schedule_retries(tx, [completion]):
            return repository.job_from_row(tx.execute(select(table).where(table.c.id == completion.id)).one())
        completion = dataclasses.replace(completion, state=JobState.CANCELLED)  # a cancel was requested
    serial.complete_one(tx, completion)
    limited_queue = exists().where(queues.c.name == finished.c.queue, queues.c.concurrency.is_not(None))
    limited_tenant = exists().where(tenants.c.id == finished.c.tenant_id, tenants.c.starts.is_not(None))
    is_limited = (limited_queue | limited_tenant).label("limited")
    same = (finished.c.id == completion.id) & (finished.c.tenant_id == tenant_id)
    row = tx.execute(select(finished, is_limited).where(same)).one()
    if row.limited:  # another job may start now
        tx.notify(JOBS)
    return repository.job_from_row(row)


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
