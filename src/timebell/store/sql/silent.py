"""Clients of PostgreSQL that fell silent in the middle of a statement: it would wait for them, with what they locked.

`idle_in_transaction_session_timeout` does not see them. A driver that has a statement parsed first, as asyncpg does
with one that is new to it, leaves the server "active" until it says more (PostgreSQL manual, 55.2.3 "Extended Query":
only Sync ends that). So does a COPY, and an answer that the client does not read.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import text

from timebell.store.transaction import Transaction

# Of statements of our own that have locked something: others may well take their time.
_SILENT = text(
    "SELECT pid, state_change FROM pg_stat_activity WHERE datname = current_database() AND usename = current_user"
    " AND application_name = 'timebell' AND state = 'active' AND wait_event IN ('ClientRead', 'ClientWrite')"
    " AND backend_xid IS NOT NULL AND query LIKE '%timebell!_%' ESCAPE '!'"
)
_END = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND state_change = :since")


class Waiting(NamedTuple):
    """A session that the server waits for, and since when by its clock."""

    pid: int
    since: datetime


def waiting(tx: Transaction) -> set[Waiting]:
    """Those that the server waits for in the middle of a statement."""
    if tx.dialect.name != "postgresql":  # MariaDB ends them itself (net_read_timeout, net_write_timeout)
        return set()
    return {Waiting(row.pid, row.state_change) for row in tx.execute(_SILENT)}


def end(tx: Transaction, those: Collection[Waiting]) -> int:
    """End these sessions, where they wait still; how many. What they had begun is rolled back."""
    return sum(tx.execute(_END, {"pid": one.pid, "since": one.since}).rowcount for one in those)
