"""Self-check for duplicate runs: occurrences that ran as two jobs. Any result is a bug in Timebell."""

from __future__ import annotations

from datetime import datetime
from functools import cache

from sqlalchemy import Select, bindparam, select

from timebell.store.schema import finished
from timebell.store.transaction import Transaction

MAX_FINISHED_ROWS = 5000


def find_duplicates(tx: Transaction, since: datetime) -> set[tuple[str, datetime]]:
    """Return (schedule id, scheduled_at) of duplicates among jobs finished since an instant.

    Examines the MAX_FINISHED_ROWS newest ones.
    """
    return {(row.schedule_id, row.scheduled_at) for row in tx.execute(_select_duplicates(), {"since": since})}


@cache  # building the statement takes longer than executing it
def _select_duplicates() -> Select[str, datetime]:
    # A rescheduled job and its successor belong to the same occurrence, but the former did not start.
    f = finished.c
    recent = (
        select(finished)
        .where(f.finished_at >= bindparam("since"), f.schedule_id.is_not(None), f.started_at.is_not(None))
        .order_by(f.finished_at.desc())
        .limit(MAX_FINISHED_ROWS)
        .subquery()
    ).c
    other = finished.alias().c
    has_twin = (
        select(other.id)
        .where(
            other.schedule_id == recent.schedule_id, other.scheduled_at == recent.scheduled_at,
            other.kind == recent.kind, other.id != recent.id, other.started_at.is_not(None),
        )
        .exists()
    )  # fmt: skip
    return select(recent.schedule_id, recent.scheduled_at).where(has_twin)
