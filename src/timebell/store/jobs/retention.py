"""Prune finished jobs after their retention, by whole partitions if the table is partitioned (PostgreSQL)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select, text

from timebell.store.schema import finished
from timebell.store.transaction import Transaction

WEEK = timedelta(weeks=1)
PARTITION_WEEKS_AHEAD = 3  # weeks for which partitions are created, the current one included
_FIRST_MONDAY = datetime(2024, 1, 1, tzinfo=UTC)

PARTITIONS = text(
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
    " WHERE i.inhparent = CAST('timebell_finished' AS regclass)"
)


def prune(tx: Transaction, before: datetime, limit: int = 10_000) -> int:
    """Delete jobs that finished before an instant; return the number of deleted rows.

    Deletes up to `limit` rows, in addition to weekly partitions that are expired completely. To drop a partition takes
    the same time for any number of rows, and counts as one row in the result.
    """
    dropped = 0
    if tx.dialect.partitioned:
        for name in _weekly_partitions(tx):
            if _partition_start(name) + WEEK <= before:
                tx.execute(text(f"DROP TABLE {name}"))
                dropped += 1
    return dropped + tx.dialect.prune_finished(tx, before, limit)


def create_partitions(tx: Transaction, now: datetime) -> list[str]:
    """Create the missing partitions of this week and the next few; return their names."""
    if not tx.dialect.partitioned:
        return []
    existing = set(_weekly_partitions(tx))
    created: list[str] = []
    for weeks_ahead in range(PARTITION_WEEKS_AHEAD):
        start = _FIRST_MONDAY + ((now - _FIRST_MONDAY) // WEEK + weeks_ahead) * WEEK
        name = f"timebell_finished_{start:%Y%m%d}"
        of_week = (finished.c.finished_at >= start) & (finished.c.finished_at < start + WEEK)
        row_in_default = select(finished.c.id).where(of_week).limit(1)
        # A week that already has rows in the default partition stays there completely.
        if name in existing or tx.execute(row_in_default).first():
            continue
        # The locks that creating a partition takes, in the order of an INSERT: parent before partition. Another order
        # could deadlock with writers.
        tx.execute(text("LOCK TABLE ONLY timebell_finished, timebell_finished_rest IN ACCESS EXCLUSIVE MODE"))
        if tx.execute(row_in_default).first():  # a row was inserted before we got the lock
            continue
        span = f"FROM ('{start:%Y-%m-%d}+00') TO ('{start + WEEK:%Y-%m-%d}+00')"
        tx.execute(text(f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF timebell_finished FOR VALUES {span}"))
        created.append(name)
    return created


def _weekly_partitions(tx: Transaction) -> list[str]:
    prefix = "timebell_finished_"
    return [name for name in tx.execute(PARTITIONS).scalars() if name.removeprefix(prefix).isdigit()]


def _partition_start(name: str) -> datetime:
    return datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC)
