"""Self-check for duplicate runs: occurrences that ran as two jobs. Any result is a bug in Timebell."""

from __future__ import annotations

from datetime import datetime

from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

MAX_FINISHED_ROWS = 5000
# `started_at IS NOT NULL`: a rescheduled job and its successor belong to the same occurrence, but it did not start.
SELECT_DUPLICATES = Statement(
    """
    SELECT f.schedule_id, f.scheduled_at FROM
        (SELECT id, schedule_id, scheduled_at, kind FROM timebell_finished WHERE finished_at >= :since
         AND schedule_id IS NOT NULL AND started_at IS NOT NULL ORDER BY finished_at DESC LIMIT :most) AS f
    WHERE EXISTS (SELECT 1 FROM timebell_finished o WHERE o.schedule_id = f.schedule_id
                  AND o.scheduled_at = f.scheduled_at AND o.kind = f.kind AND o.id <> f.id
                  AND o.started_at IS NOT NULL)
    """
)


def find_duplicates(tx: Transaction, since: datetime) -> set[tuple[str, datetime]]:
    """Return (schedule id, scheduled_at) of duplicates among jobs finished since an instant.

    Examines the MAX_FINISHED_ROWS newest ones.
    """
    rows = tx.fetch(SELECT_DUPLICATES, since=tx.dialect.to_db(since), most=MAX_FINISHED_ROWS)
    return {(str(row["schedule_id"]), tx.dialect.from_db(row["scheduled_at"])) for row in rows}
