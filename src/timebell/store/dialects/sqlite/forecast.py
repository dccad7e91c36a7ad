"""Count the jobs of a lane that are due in each minute. The statements are explained in the PostgreSQL module."""

from __future__ import annotations

from datetime import datetime

from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.sqlite.values import Values
from timebell.store.sql import SQL, Row

COUNT_ALL = SQL("""
WITH RECURSIVE m (at) AS (
    SELECT :start / 60000000 * 60000000
    UNION ALL SELECT at + 60000000 FROM m WHERE at + 60000000 < :end
), counted AS MATERIALIZED (
    SELECT m.at AS minute, (SELECT count(*) FROM (
        SELECT 1 FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
            AND run_at >= max(m.at, :start) AND run_at < min(m.at + 60000000, :end)
        LIMIT :limit)) AS jobs
    FROM m
)
SELECT minute, jobs, jobs AS scanned FROM counted WHERE jobs > 0
""")

COUNT_OF_TENANT = SQL("""
WITH RECURSIVE m (at) AS (
    SELECT :start / 60000000 * 60000000
    UNION ALL SELECT at + 60000000 FROM m WHERE at + 60000000 < :end
), counted AS MATERIALIZED (
    SELECT m.at AS minute, (SELECT count(*) FROM (
        SELECT 1 FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
            AND tenant_id = :tenant AND run_at >= max(m.at, :start) AND run_at < min(m.at + 60000000, :end)
        LIMIT :limit)) AS jobs
    FROM m
)
SELECT minute, jobs, jobs AS scanned FROM counted WHERE jobs > 0
""")

# One number for both counts, because a subquery returns one value.
COUNT_OF_DEFAULT_TENANT = SQL("""
WITH RECURSIVE m (at) AS (
    SELECT :start / 60000000 * 60000000
    UNION ALL SELECT at + 60000000 FROM m WHERE at + 60000000 < :end
), counted AS MATERIALIZED (
    SELECT m.at AS minute, (SELECT count(*) * 1000000000 + coalesce(sum(is_default), 0) FROM (
        SELECT tenant_id = 'default' AS is_default FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
            AND run_at >= max(m.at, :start) AND run_at < min(m.at + 60000000, :end)
        LIMIT :limit)) AS both
    FROM m
)
SELECT minute, both % 1000000000 AS jobs, both / 1000000000 AS scanned FROM counted WHERE both > 0
""")


class ForecastOperations(Values):
    """The operations of this module."""

    def count_lane_by_minute(
        self, tx: Executor, lane: Lane, tenant: str | None, start: datetime, end: datetime, limit: int
    ) -> list[Row]:
        params = {
            "queue": lane[0], "priority": lane[1], "start": self.to_db(start), "end": self.to_db(end), "limit": limit,
        }  # fmt: skip
        if tenant is None:
            return tx.run_sql(COUNT_ALL, **params)
        if tenant == "default":
            return tx.run_sql(COUNT_OF_DEFAULT_TENANT, **params)
        return tx.run_sql(COUNT_OF_TENANT, tenant=tenant, **params)
