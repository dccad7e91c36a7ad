"""The MariaDB dialect."""

from __future__ import annotations

from collections.abc import Mapping

from timebell.store.dialects.mariadb.claim import ClaimOperations
from timebell.store.dialects.mariadb.complete import CompleteOperations
from timebell.store.dialects.mariadb.fire import FireOperations
from timebell.store.dialects.mariadb.forecast import ForecastOperations
from timebell.store.dialects.mariadb.insert import InsertOperations
from timebell.store.dialects.mariadb.release import ReleaseOperations


class MariaDialect(
    InsertOperations, ClaimOperations, CompleteOperations, ReleaseOperations, FireOperations, ForecastOperations
):
    """The hot operations on MariaDB.

    With `server_clock=False` (virtual time) only the node's clock decides which jobs are due.
    """

    name = "mysql"
    product = "MariaDB"
    version_query = "SELECT VERSION()"
    durability_queries: Mapping[str, str] = {
        name: f"SELECT @@GLOBAL.{name}" for name in ("innodb_flush_log_at_trx_commit", "innodb_doublewrite")
    }
    notifies = False
    complete_in_one_statement = False
    partitioned = False

    def __init__(self, *, server_clock: bool = True) -> None:
        self.virtual_time = not server_clock
