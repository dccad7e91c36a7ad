"""What outside workers report of attempts that were handed to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select, update

from timebell.model import attempts
from timebell.model.job import Attempt, Ending, JobState
from timebell.model.payload import decode
from timebell.store.schema import finished
from timebell.store.schema import jobs as table
from timebell.store.sql import jobs, turns
from timebell.store.transaction import Transaction
from timebell.store.types import to_micros

OUT = (JobState.RUNNING.value, JobState.DISPATCHED.value)


def held(tx: Transaction, tenant_id: str, job_id: str, number: int) -> tuple[Attempt, bool] | None:
    """The attempt, locked, and whether its cancel was asked; None when it is over.

    A receiver may be quicker than the engine that handed it the job, so the attempt may still be `running`.
    """
    mine = (table.c.id == job_id) & (table.c.tenant_id == tenant_id) & (table.c.attempt == number)
    row = tx.execute(select(table.c.cancel_asked, table.c.started_at).where(mine, table.c.state.in_(OUT))
                     .with_for_update()).first()  # fmt: skip
    if row is None:
        return None
    found = jobs.abandoned(tx, [(job_id, number)], row.started_at)
    return found[0], bool(row.cancel_asked)


def outside(tx: Transaction, routes: Sequence[str], after: str, most: int) -> list[Attempt]:
    """Attempts on these routes that outside workers have, by id from one on; not those that are to stop."""
    there = (table.c.state == JobState.DISPATCHED.value) & table.c.route.in_(routes)
    there &= table.c.hold.is_(None) & table.c.cancel_asked.is_(False)
    query = select(table.c.id, table.c.attempt, table.c.started_at).where(there).order_by(table.c.id).limit(most)
    rows = tx.execute(query.where(table.c.id > after) if after else query).all()
    if not rows:
        return []
    started = {row.id: row.started_at for row in rows}
    found = jobs.abandoned(tx, [(row.id, row.attempt) for row in rows], rows[0].started_at)
    for attempt in found:
        attempt.started_at = started[attempt.id]
    return sorted(found, key=lambda attempt: attempt.id)


def write(tx: Transaction, ending: Ending) -> None:
    """What became of an attempt that is `held`: over, or to be tried again."""
    if ending.state is JobState.PENDING:
        if jobs.retry(tx, [ending]):
            return
        ending = dataclasses.replace(ending, state=JobState.CANCELLED)  # its cancel was asked
    turns.complete(tx, ending)


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
