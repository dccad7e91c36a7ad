"""What outside workers report of attempts that were handed to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Table, select, update

from timebell.model import attempts
from timebell.model.job import Attempt, Ending, Job, JobState
from timebell.model.payload import decode
from timebell.store.jobs import claim, complete, repository, serial
from timebell.store.schema import finished
from timebell.store.schema import jobs as table
from timebell.store.statement import Statement
from timebell.store.transaction import JOBS, SCHEDULES, Transaction
from timebell.store.types import to_micros

OUT = (JobState.RUNNING.value, JobState.DISPATCHED.value)


def names_of(columns_of: Table) -> str:
    """Its columns, for a SELECT."""
    return ", ".join(column.name for column in columns_of.columns)


HOLD = Statement(
    f"SELECT {names_of(table)} FROM timebell_jobs WHERE id = :id AND tenant_id = :tenant_id $for_update"  # noqa: S608
)


class Held(NamedTuple):
    """A job that a report is of; its attempt is None when that is over."""

    job: Job
    attempt: Attempt | None
    cancel_asked: bool


def held(tx: Transaction, tenant_id: str, job_id: str, number: int) -> Held | None:
    """A job as it is, locked while it lives; None for an unknown one.

    A receiver may be quicker than the engine that handed it the job, so the attempt may still be `running`.
    """
    rows = tx.fetch(HOLD, id=job_id, tenant_id=tenant_id)
    if not rows:
        over = repository.find(tx, tenant_id, job_id, over=True)
        return None if over is None else Held(over, None, False)
    row, attempt = repository.typed(tx, table, rows[0]), None
    if row.attempt == number and row.state in OUT:
        attempt = Attempt(
            row.id, row.tenant_id, row.topic, row.schedule_id, row.scheduled_at, row.kind, row.timezone, row.payload,
            row.metadata, row.target, row.queue, row.retry, row.timeout, row.expires_at, row.attempt, row.tries,
            bool(row.serial), row.errors, row.revision, row.run_at, row.started_at, JobState(row.state), row.group_name,
            priority=row.priority, replays=row.replays, conditions=row.conditions,
        )  # fmt: skip
    return Held(repository.read(row), attempt, bool(row.cancel_asked))


def outside(tx: Transaction, routes: Sequence[str], after: str, most: int) -> list[Attempt]:
    """Attempts on these routes that outside workers have, by id from one on; not those that are to stop."""
    there = (table.c.state == JobState.DISPATCHED.value) & table.c.route.in_(routes)
    there &= table.c.hold.is_(None) & table.c.cancel_asked.is_(False)
    query = select(table.c.id, table.c.attempt, table.c.started_at).where(there).order_by(table.c.id).limit(most)
    rows = tx.execute(query.where(table.c.id > after) if after else query).all()
    if not rows:
        return []
    started = {row.id: row.started_at for row in rows}
    found = claim.abandoned(tx, [(row.id, row.attempt) for row in rows], rows[0].started_at)
    for attempt in found:
        attempt.started_at = started[attempt.id]
    return sorted(found, key=lambda attempt: attempt.id)


class Written(NamedTuple):
    """The job as a report left it; and whether others may start now, or a schedule got its next instant."""

    job: Job
    frees: bool
    put_off: bool


OVER = Statement(
    f"SELECT {names_of(finished)}, EXISTS (SELECT 1 FROM timebell_queues q WHERE q.name = timebell_finished.queue"  # noqa: S608
    " AND q.concurrency IS NOT NULL) AS limited FROM timebell_finished WHERE id = :id AND tenant_id = :tenant_id"
)


def write(tx: Transaction, tenant_id: str, ending: Ending) -> Written:
    """What became of an attempt that is `held`: over, or to be tried again."""
    if ending.state is JobState.PENDING:
        if complete.retry(tx, [ending]):
            tx.notify()  # nobody else knows when it is due
            (again,) = tx.fetch(HOLD, id=ending.id, tenant_id=tenant_id)
            return Written(repository.read(repository.typed(tx, table, again)), True, False)
        ending = dataclasses.replace(ending, state=JobState.CANCELLED)  # its cancel was asked
    ended = serial.complete(tx, ending)
    (row,) = tx.fetch(OVER, id=ending.id, tenant_id=tenant_id)
    job = repository.read(repository.typed(tx, finished, row))
    frees = bool(ended.let_go or row["limited"])
    if frees or ended.put_off:
        tx.notify(SCHEDULES if ended.put_off else JOBS)
    return Written(job, frees, ended.put_off)


def beat(tx: Transaction, attempt: Attempt, until: datetime) -> None:
    """Give an attempt that was handed over until then."""
    mine = (table.c.id == attempt.id) & (table.c.state == JobState.DISPATCHED.value)
    tx.execute(update(table).where(mine).values(beat=to_micros(until)))


def record(tx: Transaction, handed: Ending) -> None:
    """Put the delivery of an attempt, which `handed` has the line of, into the record of its job: the report of it came
    before it could be written down, so it ends nothing."""
    (*_, delivery) = decode(handed.errors)
    for place in (table, finished):
        mine = (place.c.id == handed.id) & (place.c.attempt >= handed.attempt)
        row = tx.execute(select(place.c.errors).where(mine).with_for_update()).first()
        if row is not None:
            lines = attempts.with_delivery(decode(row.errors) or [], delivery)
            tx.execute(update(place).where(mine).values(errors=attempts.kept(lines)))
            return
