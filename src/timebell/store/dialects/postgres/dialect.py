"""The PostgreSQL dialect."""

from __future__ import annotations

from collections.abc import Mapping

from timebell.store.dialects.operations import Executor
from timebell.store.dialects.postgres import stalled_sessions
from timebell.store.dialects.postgres.claim import ClaimOperations
from timebell.store.dialects.postgres.complete import CompleteOperations
from timebell.store.dialects.postgres.fire import FireOperations
from timebell.store.dialects.postgres.forecast import ForecastOperations
from timebell.store.dialects.postgres.insert import InsertOperations
from timebell.store.dialects.postgres.release import ReleaseOperations


class PostgresDialect(
    InsertOperations, ClaimOperations, CompleteOperations, ReleaseOperations, FireOperations, ForecastOperations
):
    """The hot operations on PostgreSQL.

    With `server_clock=False` (virtual time) only the node's clock decides which jobs are due.
    """

    name = "postgresql"
    product = "PostgreSQL"
    version_query = "SHOW server_version"
    durability_queries: Mapping[str, str] = {
        name: f"SHOW {name}" for name in ("fsync", "synchronous_commit", "full_page_writes")
    }
    notifies = True
    complete_in_one_statement = True
    partitioned = True

    def __init__(self, *, server_clock: bool = True) -> None:
        self.virtual_time = not server_clock

    def terminate_stalled_sessions(self, tx: Executor) -> list[int]:
        return stalled_sessions.terminate_stalled_sessions(tx)
