"""Store the progress that handlers report."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, select, update

from timebell.model.job import JobState
from timebell.store.schema import jobs
from timebell.store.transaction import Transaction


def write_progress(tx: Transaction, reports: Sequence[tuple[str, int, str]], *, skip_locked: bool) -> set[str]:
    """Store progress (id, attempt number, JSON) of running attempts; return the ids whose fence held.

    With `skip_locked`, rows that another transaction has locked are left unchanged: a handler may be completing its job
    in a transaction, and a frozen session must not stop the reports of all other jobs.
    """
    ids = [id_ for id_, _, _ in reports]
    running = jobs.c.id.in_(ids) & (jobs.c.state == JobState.RUNNING.value)
    query = select(jobs.c.id, jobs.c.attempt).where(running).order_by(jobs.c.id)
    locked = {(row.id, row.attempt) for row in tx.execute(query.with_for_update(skip_locked=skip_locked))}
    rows = [{"job": id_, "number": number, "value": value} for id_, number, value in reports if (id_, number) in locked]
    if rows:
        same_attempt = (jobs.c.id == bindparam("job")) & (jobs.c.attempt == bindparam("number"))
        tx.execute(update(jobs).where(same_attempt).values(progress=bindparam("value")), rows)
    return {id_ for id_, number, _ in reports if (id_, number) in locked}
