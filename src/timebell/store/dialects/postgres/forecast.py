"""Count the jobs of a lane that are due in each minute."""

from __future__ import annotations

from datetime import datetime

from timebell.store.dialects.operations import Executor, Lane
from timebell.store.dialects.postgres.values import Values
from timebell.store.sql import SQL, Row

# One range of an index per minute: faster than to group by the minute of `run_at`, which has to be computed for each
# job. The LIMIT bounds a minute with millions of jobs.
# Without a tenant, no row of the table is read.
COUNT_ALL = SQL("""
SELECT m.minute, c.jobs, c.jobs AS scanned
FROM generate_series(date_trunc('minute', CAST(:start AS timestamptz)), CAST(:end AS timestamptz), interval '1 minute')
    AS m (minute)
CROSS JOIN LATERAL (SELECT count(*) AS jobs FROM (
    SELECT FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
        AND run_at >= GREATEST(m.minute, :start) AND run_at < LEAST(m.minute + interval '1 minute', :end)
    LIMIT :limit) AS counted) AS c
WHERE c.jobs > 0
""")

# The index timebell_jobs_shared has the jobs that were created while there were several tenants. The others belong to
# the tenant `default`.
COUNT_OF_TENANT = SQL("""
SELECT m.minute, c.jobs, c.jobs AS scanned
FROM generate_series(date_trunc('minute', CAST(:start AS timestamptz)), CAST(:end AS timestamptz), interval '1 minute')
    AS m (minute)
CROSS JOIN LATERAL (SELECT count(*) AS jobs FROM (
    SELECT FROM timebell_jobs
    WHERE state = 'pending' AND hold IS NULL AND shared AND queue = :queue AND priority = :priority
        AND tenant_id = :tenant
        AND run_at >= GREATEST(m.minute, :start) AND run_at < LEAST(m.minute + interval '1 minute', :end)
    LIMIT :limit) AS counted) AS c
WHERE c.jobs > 0
""")

# Reads the rows of all tenants. The LIMIT applies before the tenant is compared.
COUNT_OF_DEFAULT_TENANT = SQL("""
SELECT m.minute, c.jobs, c.scanned
FROM generate_series(date_trunc('minute', CAST(:start AS timestamptz)), CAST(:end AS timestamptz), interval '1 minute')
    AS m (minute)
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE tenant_id = 'default') AS jobs, count(*) AS scanned FROM (
        SELECT tenant_id FROM timebell_jobs
        WHERE state = 'pending' AND hold IS NULL AND queue = :queue AND priority = :priority
            AND run_at >= GREATEST(m.minute, :start) AND run_at < LEAST(m.minute + interval '1 minute', :end)
        LIMIT :limit) AS counted) AS c
WHERE c.scanned > 0
""")


class ForecastOperations(Values):
    """The operations of this module."""

    def count_lane_by_minute(
        self, tx: Executor, lane: Lane, tenant: str | None, start: datetime, end: datetime, limit: int
    ) -> list[Row]:
        params = {"queue": lane[0], "priority": lane[1], "start": start, "end": end, "limit": limit}
        if tenant is None:
            return tx.run_sql(COUNT_ALL, **params)
        if tenant == "default":
            return tx.run_sql(COUNT_OF_DEFAULT_TENANT, **params)
        return tx.run_sql(COUNT_OF_TENANT, tenant=tenant, **params)
