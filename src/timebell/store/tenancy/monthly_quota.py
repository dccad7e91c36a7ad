"""Monthly job quotas of tenants.

The counter row is locked while it is charged, so concurrent claims cannot exceed the limit together. A job is charged
once, regardless of retries; skipped jobs are not charged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update

from timebell.model.billing_months import billing_month, forecast_exhaustion, next_month_start
from timebell.store.schema import jobs, months, tenants
from timebell.store.tenancy.tenants import limits_from_json
from timebell.store.transaction import Transaction

_METERED_TENANTS = select(tenants.c.id, tenants.c.limits).where(tenants.c.limits.like("%jobs_per_month%"))


def list_metered_tenants(tx: Transaction) -> frozenset[str]:
    """Return the ids of tenants with a monthly limit."""
    rows = tx.execute(_METERED_TENANTS)
    return frozenset(row.id for row in rows if limits_from_json(row.limits).jobs_per_month is not None)


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Reason a job is not delivered: its tenant has used up its monthly quota."""

    used: int
    limit: int

    def __str__(self) -> str:
        return f"Monthly limit reached ({self.used}/{self.limit})"


def charge_jobs(
    tx: Transaction, job_ids_by_tenant: Mapping[str, Sequence[str]], now: datetime
) -> dict[str, QuotaExceeded]:
    """Charge jobs, in the given order, to the monthly quotas of their tenants; return the rejected jobs by id."""
    rejected: dict[str, QuotaExceeded] = {}
    for tenant_id in sorted(job_ids_by_tenant):  # sorted, so that concurrent claims lock the counters in one order
        row = tx.execute(select(tenants.c.limits, tenants.c.timezone).where(tenants.c.id == tenant_id)).first()
        limit = None if row is None else limits_from_json(row.limits).jobs_per_month
        if row is None or limit is None:
            continue
        month = billing_month(now, row.timezone)
        matches = (months.c.tenant_id == tenant_id) & (months.c.month == month)
        empty = {"tenant_id": tenant_id, "month": month, "used": 0}
        tx.execute(tx.dialect.insert_ignoring_duplicates(months), empty)
        used = tx.execute(select(months.c.used).where(matches).with_for_update()).scalar_one()
        in_jobs = jobs.c.id.in_(job_ids_by_tenant[tenant_id])
        uncharged = set(tx.execute(select(jobs.c.id).where(in_jobs, jobs.c.charged.is_(False))).scalars())
        new = [id_ for id_ in job_ids_by_tenant[tenant_id] if id_ in uncharged]
        remaining = max(0, limit - used)
        if granted := new[:remaining]:
            tx.execute(update(jobs).where(jobs.c.id.in_(granted)).values(charged=True))
            tx.execute(update(months).where(matches).values(used=used + len(granted)))
        rejected |= dict.fromkeys(new[remaining:], QuotaExceeded(used + len(granted), limit))
    return rejected


@dataclass(frozen=True, slots=True)
class MonthlyUsage:
    """Quota use of a tenant in a month. `exhausted_at` is the forecast at the current rate; None if not before the
    end of the month."""

    month: str
    timezone: str
    used: int
    ends_at: datetime
    exhausted_at: datetime | None


def get_monthly_usage(tx: Transaction, tenant_id: str, now: datetime) -> MonthlyUsage:
    """Return a tenant's use in its current month."""
    row = tx.execute(select(tenants.c.limits, tenants.c.timezone).where(tenants.c.id == tenant_id)).first()
    timezone = None if row is None else row.timezone
    month, limit = billing_month(now, timezone), None if row is None else limits_from_json(row.limits).jobs_per_month
    matches = (months.c.tenant_id == tenant_id) & (months.c.month == month)
    used = tx.execute(select(months.c.used).where(matches)).scalar() or 0
    ends = next_month_start(now, timezone)
    return MonthlyUsage(month, timezone or "UTC", used, ends, forecast_exhaustion(used, limit, now, timezone))


def prune(tx: Transaction, now: datetime) -> None:
    """Delete counters of months more than 400 days ago."""
    tx.execute(months.delete().where(months.c.month < billing_month(now - timedelta(days=400), None)))
