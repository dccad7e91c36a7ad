"""Reports of external workers about attempts dispatched to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import exists, select, update

from timebell.model import attempts
from timebell.model.job import Attempt, Completion, Job, JobState
from timebell.model.payload import decode
from timebell.store.jobs import claim, complete, outcome_notices, repository, serial
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


class Dispatched(NamedTuple):
    """A dispatched attempt, and the id of the remote worker or node that dispatched it."""

    attempt: Attempt
    node_id: str | None


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
    attempt = claim.attempt_from_job(row) if is_current else None
    return LockedJob(repository.job_from_row(row), attempt, bool(row.cancel_requested))


def list_dispatched(tx: Transaction, routes: Sequence[str], after: str, limit: int) -> list[Attempt]:
    """Return dispatched attempts on these routes, by id after `after`, except those that were requested to stop."""
    dispatched = (table.c.state == JobState.DISPATCHED.value) & table.c.route.in_(routes)
    dispatched &= table.c.hold.is_(None) & table.c.cancel_requested.is_(False)
    query = select(table.c.id, table.c.attempt).where(dispatched).order_by(table.c.id).limit(limit)
    rows = tx.execute(query.where(table.c.id > after) if after else query).all()
    loaded = claim.load_live_attempts(tx, [(row.id, row.attempt) for row in rows]) if rows else []
    return sorted((attempt for attempt, _ in loaded), key=lambda attempt: attempt.id)


def find_dispatched(tx: Transaction, tenant_id: str | None, reported: Mapping[str, int]) -> dict[str, Dispatched]:
    """Return those of these attempts (numbers by job id) that are dispatched, by job id."""
    query = select(table).where(table.c.id.in_(reported), table.c.state == JobState.DISPATCHED.value)
    rows = tx.execute(query if tenant_id is None else query.where(table.c.tenant_id == tenant_id))
    return {
        row.id: Dispatched(claim.attempt_from_job(row), row.node_id) for row in rows if row.attempt == reported[row.id]
    }


class ReportedJob(NamedTuple):
    """The state of a job whose attempt has ended, and its attempt records."""

    number: int
    state: JobState
    records: list[dict[str, Any]]


def find_reported(tx: Transaction, tenant_id: str | None, ids: Sequence[str]) -> dict[str, ReportedJob]:
    """Return live and finished jobs by id, to compare reports with the outcomes of their attempts."""
    found = {}
    for source in (finished, table):
        query = select(source.c.id, source.c.attempt, source.c.state, source.c.errors).where(source.c.id.in_(ids))
        for row in tx.execute(query if tenant_id is None else query.where(source.c.tenant_id == tenant_id)):
            found[row.id] = ReportedJob(row.attempt, JobState(row.state), decode(row.errors) or [])
    return found


def apply_reports(tx: Transaction, completions: Sequence[Completion]) -> set[str]:
    """Complete dispatched attempts of any tenant, or schedule their retries; return the ids whose fence held."""
    retries = [completion for completion in completions if completion.state is JobState.PENDING]
    written = complete.schedule_retries(tx, retries) if retries else set()
    plain: list[Completion] = []
    noticed: list[Completion] = []
    for completion in completions:
        if completion.state is JobState.PENDING:
            if completion.id not in written:  # a cancel was requested, or the fence does not hold
                noticed.append(dataclasses.replace(completion, state=JobState.CANCELLED))
        elif completion.schedule_id is None and completion.group_queue is None and not completion.watched:
            (noticed if completion.state is JobState.FAILED else plain).append(completion)
        else:
            noticed.append(completion)
    if plain:
        rows = complete.complete_jobs(tx, plain)
        serial.release_successors(tx, rows, plain)
        written |= {str(row["id"]) for row in rows}
    if noticed:
        written |= outcome_notices.complete_with_notices(tx, noticed)
    limited_queue = exists().where(queues.c.name == finished.c.queue, queues.c.concurrency.is_not(None))
    limited_tenant = exists().where(tenants.c.id == finished.c.tenant_id, tenants.c.starts.is_not(None))
    ended = select(finished.c.id).where(finished.c.id.in_(written), limited_queue | limited_tenant)
    if written and tx.execute(ended.limit(1)).first() is not None:
        tx.notify(JOBS)  # another job may start now
    return written


def apply_report(tx: Transaction, tenant_id: str, completion: Completion) -> Job:
    """Complete a locked attempt, or schedule its retry if the completion is `pending`. Returns the job after it."""
    apply_reports(tx, [completion])
    job = repository.find_job(tx, tenant_id, completion.id)
    assert job is not None
    return job


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
