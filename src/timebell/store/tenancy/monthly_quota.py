"""What tenants used of their months: a counter that is locked while it is charged, so that nobody passes a limit
together with another. A job is charged once, however often it is tried; skips are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update

from timebell.model.billing_months import first_of_next, forecast, month_of
from timebell.store.schema import jobs, tenants
from timebell.store.tenancy.tenants import read_limits
from timebell.store.transaction import Transaction, insert_unless
from timebell.store.triggers.tables import months


def metered(tx: Transaction) -> frozenset[str]:
    """The tenants that have a limit a month."""
    rows = tx.execute(select(tenants.c.id, tenants.c.limits).where(tenants.c.limits.like("%jobs_per_month%")))
    return frozenset(row.id for row in rows if read_limits(row.limits).jobs_per_month is not None)


@dataclass(frozen=True, slots=True)
class Full:
    """Why a job is not delivered: its tenant has used up its month."""

    used: int
    limit: int

    def __str__(self) -> str:
        return f"Monthly limit reached ({self.used}/{self.limit})"


def charge(tx: Transaction, asked: Mapping[str, Sequence[str]], now: datetime) -> dict[str, Full]:
    """Count the jobs of tenants, in order, as far as their months have room; those that are left out."""
    left: dict[str, Full] = {}
    for tenant_id in sorted(asked):
        row = tx.execute(select(tenants.c.limits, tenants.c.timezone).where(tenants.c.id == tenant_id)).first()
        limit = None if row is None else read_limits(row.limits).jobs_per_month
        if row is None or limit is None:
            continue
        month = month_of(now, row.timezone)
        mine = (months.c.tenant_id == tenant_id) & (months.c.month == month)
        tx.execute(insert_unless(tx.dialect, months).values(tenant_id=tenant_id, month=month, used=0))
        used = tx.execute(select(months.c.used).where(mine).with_for_update()).scalar_one()
        which = jobs.c.id.in_(asked[tenant_id])
        uncharged = set(tx.execute(select(jobs.c.id).where(which, jobs.c.charged.is_(False))).scalars())
        new = [id_ for id_ in asked[tenant_id] if id_ in uncharged]
        room = max(0, limit - used)
        if granted := new[:room]:
            tx.execute(update(jobs).where(jobs.c.id.in_(granted)).values(charged=True))
            tx.execute(update(months).where(mine).values(used=used + len(granted)))
        left |= dict.fromkeys(new[room:], Full(used + len(granted), limit))
    return left


@dataclass(frozen=True, slots=True)
class MonthUsed:
    """A tenant's month: what it used of it, when it ends, and when it will be used up at this pace, if before that."""

    month: str
    timezone: str
    used: int
    ends_at: datetime
    runs_out_at: datetime | None


def of(tx: Transaction, tenant_id: str, now: datetime) -> MonthUsed:
    """The month that a tenant is in."""
    row = tx.execute(select(tenants.c.limits, tenants.c.timezone).where(tenants.c.id == tenant_id)).first()
    timezone = None if row is None else row.timezone
    month, limit = month_of(now, timezone), None if row is None else read_limits(row.limits).jobs_per_month
    mine = (months.c.tenant_id == tenant_id) & (months.c.month == month)
    used = tx.execute(select(months.c.used).where(mine)).scalar() or 0
    ends = first_of_next(now, timezone)
    return MonthUsed(month, timezone or "UTC", used, ends, forecast(used, limit, now, timezone))


def prune(tx: Transaction, now: datetime) -> None:
    """Forget months of more than a year ago."""
    tx.execute(months.delete().where(months.c.month < month_of(now - timedelta(days=400), None)))
