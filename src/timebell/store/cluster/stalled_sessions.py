"""Clients of PostgreSQL that fell silent in the middle of a statement: it would wait for them, with what they locked.

`idle_in_transaction_session_timeout` does not see them. A driver that has a statement parsed first, as asyncpg does
with one that is new to it, leaves the server "active" until it says more (PostgreSQL manual, 55.2.3 "Extended Query":
only Sync ends that). So does an answer that the client does not read.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import cache

from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from timebell.store.transaction import Transaction

log = logging.getLogger("timebell.pulse")
UNSAID = timedelta(seconds=4)
"""What follows a parsed statement may take so long: with a heartbeat of 5 s less than a transaction may be idle."""
UNREAD = timedelta(seconds=10)
"""An answer may take so long to be read: a large one does take its time."""

# Of statements of our own that have locked something: others may well be slow. A COPY that is silent looks like one
# that is long. By the server's clock, which may have been set: by more than so much it is taken for silence.
_END = text(
    "SELECT pid, pg_terminate_backend(pid) AS ended FROM pg_stat_activity WHERE datname = current_database()"
    " AND usename = current_user AND application_name = 'timebell' AND state = 'active' AND backend_xid IS NOT NULL"
    " AND query LIKE '%timebell!_%' ESCAPE '!' AND query NOT LIKE 'COPY %'"
    " AND wait_event IN ('ClientRead', 'ClientWrite') AND abs(extract(epoch FROM clock_timestamp() - state_change)) >"
    " extract(epoch FROM CASE wait_event WHEN 'ClientRead' THEN CAST(:unsaid AS interval)"
    " ELSE CAST(:unread AS interval) END)"
)


def end(tx: Transaction) -> list[int]:
    """End the sessions that have been silent for so long; their process ids. What they had begun is rolled back."""
    if tx.dialect.name != "postgresql":  # MariaDB ends them itself (net_read_timeout, net_write_timeout)
        return []
    try:
        rows = tx.execute(_END, {"unsaid": UNSAID, "unread": UNREAD})
    except ProgrammingError as refused:
        _warn(str(refused.orig))
        return []
    return [row.pid for row in rows if row.ended]


@cache  # once is enough: it does not change while we run
def _warn(why: str) -> None:
    log.warning(
        "Sessions that fall silent in the middle of a statement cannot be ended, and keep what they have locked: %s."
        " GRANT EXECUTE ON FUNCTION pg_terminate_backend to the role of this node.",
        why,
    )
