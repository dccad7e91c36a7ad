"""Occurrences that ran as two jobs. There are none: this looks for what would be a fault of Timebell."""

from __future__ import annotations

from datetime import datetime

from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

LOOKED_AT = 5000
# A job that was moved has a successor for the same occurrence, and did not start.
DOUBLES = Statement(
    """
    SELECT f.schedule_id, f.scheduled_at FROM
        (SELECT id, schedule_id, scheduled_at, kind FROM timebell_finished WHERE finished_at >= :since
         AND schedule_id IS NOT NULL AND started_at IS NOT NULL ORDER BY finished_at DESC LIMIT :most) AS f
    WHERE EXISTS (SELECT 1 FROM timebell_finished o WHERE o.schedule_id = f.schedule_id
                  AND o.scheduled_at = f.scheduled_at AND o.kind = f.kind AND o.id <> f.id
                  AND o.started_at IS NOT NULL)
    """
)


def found(tx: Transaction, since: datetime) -> set[tuple[str, datetime]]:
    """(schedule id, nominal instant) of each, among the jobs that finished since then."""
    rows = tx.fetch(DOUBLES, since=tx.dialect.to_db(since), most=LOOKED_AT)
    return {(str(row["schedule_id"]), tx.dialect.from_db(row["scheduled_at"])) for row in rows}
