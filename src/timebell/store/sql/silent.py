"""Clients of PostgreSQL that fell silent in the middle of a statement: it would wait for them, with what they locked.

`idle_in_transaction_session_timeout` does not see them. A driver that has a statement parsed first, as asyncpg does
with one that is new to it, leaves the server "active" until it says more (PostgreSQL manual, 55.2.3 "Extended Query":
only Sync ends that). So does an answer that the client does not read.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import text

from timebell.store.transaction import Transaction

UNSAID = timedelta(seconds=4)
"""What follows a parsed statement may take so long: with a heartbeat of 5 s less than a transaction may be idle."""
UNREAD = timedelta(seconds=10)
"""An answer may take so long to be read: a large one does take its time."""

# Of statements of our own that have locked something: others may well be slow. A COPY that is silent looks like one
# that is long, and locks nothing but rows that nobody else knows of. The server's clock may have been set back.
_END = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND usename = current_user AND application_name = 'timebell' AND state = 'active' AND backend_xid IS NOT NULL"
    " AND query LIKE '%timebell!_%' ESCAPE '!' AND query NOT LIKE 'COPY %'"
    " AND wait_event IN ('ClientRead', 'ClientWrite') AND state_change NOT BETWEEN clock_timestamp() -"
    " CASE wait_event WHEN 'ClientRead' THEN CAST(:unsaid AS interval) ELSE CAST(:unread AS interval) END"
    " AND clock_timestamp()"
)


def end(tx: Transaction) -> int:
    """End the sessions that have been silent for so long; how many. What they had begun is rolled back."""
    if tx.dialect.name != "postgresql":  # MariaDB ends them itself (net_read_timeout, net_write_timeout)
        return 0
    return tx.execute(_END, {"unsaid": UNSAID, "unread": UNREAD}).rowcount
