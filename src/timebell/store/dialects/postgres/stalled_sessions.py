"""Terminate PostgreSQL sessions whose client stopped in the middle of a statement, and which hold locks.

`idle_in_transaction_session_timeout` does not cover them. If a driver first has a statement parsed, as asyncpg does
with a statement that is new to it, the session stays "active" until the client sends more (PostgreSQL manual, 55.2.3
"Extended Query": only Sync ends this state). It also stays "active" while the client does not read the result.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import cache

from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from timebell.store.dialects.operations import Executor

log = logging.getLogger("timebell.heartbeat")
CLIENT_READ_TIMEOUT = timedelta(seconds=4)
"""Maximum wait for the message after Parse.

Plus the heartbeat of 5 s this is less than the 10 s for which a session may be idle in a transaction.
"""
CLIENT_WRITE_TIMEOUT = timedelta(seconds=10)
"""Maximum wait for the client to read the result. Longer, because large results take time."""

# Only Timebell's own sessions with a transaction id, that is, with row locks: others may be slow without harm. COPY is
# excluded, because a stalled one looks like a long one. The age is measured by the server's clock. abs(), because that
# may have been set back: a step by more than the timeout counts as a stall.
_TERMINATE = text(
    "SELECT pid, pg_terminate_backend(pid) AS ended FROM pg_stat_activity WHERE datname = current_database()"
    " AND usename = current_user AND application_name = current_setting('application_name') AND state = 'active'"
    " AND backend_xid IS NOT NULL AND query LIKE '%timebell!_%' ESCAPE '!' AND query NOT LIKE 'COPY %'"
    " AND wait_event IN ('ClientRead', 'ClientWrite') AND abs(extract(epoch FROM clock_timestamp() - state_change)) >"
    " extract(epoch FROM CASE wait_event WHEN 'ClientRead' THEN CAST(:client_read_timeout AS interval)"
    " ELSE CAST(:client_write_timeout AS interval) END)"
)


def terminate_stalled_sessions(tx: Executor) -> list[int]:
    """Terminate stalled sessions; return their process ids. Their transactions are rolled back."""
    try:
        rows = tx.execute(
            _TERMINATE, {"client_read_timeout": CLIENT_READ_TIMEOUT, "client_write_timeout": CLIENT_WRITE_TIMEOUT}
        )
    except ProgrammingError as error:
        _warn_missing_privilege(str(error.orig))
        return []
    return [row.pid for row in rows if row.ended]


@cache  # log once per process
def _warn_missing_privilege(reason: str) -> None:
    log.warning(
        "could not terminate stalled sessions, which keep their row locks: %s."
        " Grant EXECUTE on FUNCTION pg_terminate_backend to the role of this node.",
        reason,
    )
