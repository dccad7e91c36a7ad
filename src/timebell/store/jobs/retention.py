"""Forgetting: finished jobs go after their time, by whole partitions where the database has them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select, text

from timebell.store.jobs import repository
from timebell.store.schema import finished
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

WEEK = timedelta(weeks=1)
AHEAD = 3  # weeks for which partitions stand ready
_MONDAY = datetime(2024, 1, 1, tzinfo=UTC)

PARTITIONS = Statement(
    "SELECT c.relname AS name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
    " WHERE i.inhparent = CAST('timebell_finished' AS regclass)"
)


def prune(tx: Transaction, before: datetime, most: int = 10_000) -> int:
    """Forget what finished before an instant, up to about `most` rows beyond whole partitions; how many rows.

    Where `finished` is partitioned by week, whole weeks are dropped, which costs the same however many rows
    they hold (and counts as one here).
    """
    dropped = 0
    if tx.dialect.partitioned:
        for name in _weeks(tx):
            if _monday(name) + WEEK <= before:
                tx.execute(text(f"DROP TABLE {name}"))
                dropped += 1
    return dropped + repository.prune(tx, before, most)


def prepare(tx: Transaction, now: datetime) -> list[str]:
    """Make the partitions of this week and the next few; the names of those that were made."""
    if not tx.dialect.partitioned:
        return []
    there = set(_weeks(tx))
    made: list[str] = []
    for ahead in range(AHEAD):
        start = _MONDAY + ((now - _MONDAY) // WEEK + ahead) * WEEK
        name = f"timebell_finished_{start:%Y%m%d}"
        rest = (finished.c.finished_at >= start) & (finished.c.finished_at < start + WEEK)
        early = select(finished.c.id).where(rest).limit(1)
        # Rows that came before their partition stay in the rest, and their week with them.
        if name in there or tx.execute(early).first():
            continue
        # As making one does, and in the order of whoever writes a row, who would wait for us while we wait for them.
        tx.execute(text("LOCK TABLE ONLY timebell_finished, timebell_finished_rest IN ACCESS EXCLUSIVE MODE"))
        if tx.execute(early).first():  # one came meanwhile
            continue
        span = f"FROM ('{start:%Y-%m-%d}+00') TO ('{start + WEEK:%Y-%m-%d}+00')"
        tx.execute(text(f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF timebell_finished FOR VALUES {span}"))
        made.append(name)
    return made


def _weeks(tx: Transaction) -> list[str]:
    prefix = "timebell_finished_"
    names = [row["name"] for row in tx.fetch(PARTITIONS)]
    return [name for name in names if name.removeprefix(prefix).isdigit()]


def _monday(name: str) -> datetime:
    return datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC)
