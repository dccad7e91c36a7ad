"""The SQLite dialect."""

from __future__ import annotations

from collections.abc import Mapping

from timebell.store.dialects.sqlite.claim import ClaimOperations
from timebell.store.dialects.sqlite.complete import CompleteOperations
from timebell.store.dialects.sqlite.fire import FireOperations
from timebell.store.dialects.sqlite.forecast import ForecastOperations
from timebell.store.dialects.sqlite.insert import InsertOperations
from timebell.store.dialects.sqlite.release import ReleaseOperations


class SqliteDialect(
    InsertOperations, ClaimOperations, CompleteOperations, ReleaseOperations, FireOperations, ForecastOperations
):
    """The hot operations on SQLite."""

    name = "sqlite"
    product = "SQLite"
    version_query = "SELECT sqlite_version()"
    durability_queries: Mapping[str, str] = {name: f"PRAGMA {name}" for name in ("journal_mode", "synchronous")}
    notifies = False
    complete_in_one_statement = False
    partitioned = False
