"""Count the jobs of a lane that are due in each minute.

MariaDB uses ranges only for constants, so it groups one range of the index instead of reading one range per minute.
"""

from __future__ import annotations

from datetime import datetime

from timebell.store.dialects.mariadb.values import Values
from timebell.store.dialects.operations import Executor, Lane
from timebell.store.sql import SQL, Row

# Without a tenant, no row of the table is read.
COUNT_ALL = SQL("""
SELECT run_at DIV 60000000 * 60000000 AS minute, count(*) AS jobs, count(*) AS scanned
FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at >= :start AND run_at < :end
GROUP BY 1
""")

# The jobs that were created while there were several tenants. The others belong to the tenant `default`.
COUNT_OF_TENANT = SQL("""
SELECT run_at DIV 60000000 * 60000000 AS minute, count(*) AS jobs, count(*) AS scanned
FROM timebell_jobs FORCE INDEX (timebell_jobs_shared)
WHERE state = 'pending' AND hold IS NULL AND shared = true AND queue = :queue AND priority = :priority
    AND tenant_id = :tenant AND run_at >= :start AND run_at < :end
GROUP BY 1
""")

# Reads the rows of all tenants.
COUNT_OF_DEFAULT_TENANT = SQL("""
SELECT run_at DIV 60000000 * 60000000 AS minute, CAST(sum(tenant_id = 'default') AS INTEGER) AS jobs,
    count(*) AS scanned
FROM timebell_jobs FORCE INDEX (timebell_jobs_claim)
WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
    AND run_at >= :start AND run_at < :end
GROUP BY 1
""")


class ForecastOperations(Values):
    """The operations of this module."""

    def count_lane_by_minute(
        self, tx: Executor, lane: Lane, tenant: str | None, start: datetime, end: datetime, limit: int
    ) -> list[Row]:
        params = {"queue": lane[0], "priority": lane[1], "start": self.to_db(start), "end": self.to_db(end)}
        if tenant is None:
            return tx.run_sql(COUNT_ALL, **params)
        if tenant == "default":
            return tx.run_sql(COUNT_OF_DEFAULT_TENANT, **params)
        return tx.run_sql(COUNT_OF_TENANT, tenant=tenant, **params)
