"""What tenants use: counted as they go where there is nothing to count later, and held against their limits.

What a day adds up to is kept in a few rows a tenant, so that requests at once do not wait for each other. Schedules
and pending jobs are counted in an index, up to the limit and no further, and only for a tenant that has the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from zlib import crc32

from sqlalchemy import Select, delete, func, select

from timebell.store.jobs.indexes import RESTING
from timebell.store.schema import jobs, schedules, tenants, usage
from timebell.store.statement import Statement
from timebell.store.tenancy.tenants import limits as limits_of
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import LimitReached, Limits

SLOTS = 16
COUNTED = 100_000
KEPT = timedelta(days=92)


@dataclass(frozen=True, slots=True)
class Used:
    """What a tenant uses now, and has used today."""

    schedules: int
    pending_jobs: int
    payload_bytes: int
    requests: int


ADD = Statement(
    "WITH $rows INSERT INTO timebell_usage (tenant_id, day, slot, payload_bytes, requests)"
    " SELECT tenant_id, day, slot, payload_bytes, requests FROM d WHERE true"
    " ON CONFLICT (tenant_id, day, slot) DO UPDATE SET"
    " payload_bytes = timebell_usage.payload_bytes + excluded.payload_bytes,"
    " requests = timebell_usage.requests + excluded.requests",
    tenant_id="text",
    day="text",
    slot="int",
    payload_bytes="int",
    requests="int",
)


def day_of(now: datetime) -> str:
    """The day of UTC."""
    return now.date().isoformat()


def add(
    tx: Transaction, tenant_id: str, now: datetime, *, payload_bytes: int = 0, requests: int = 0, by: str = ""
) -> None:
    """Count what was used; `by` spreads those that count at once."""
    tx.fetch(ADD, [{
        "tenant_id": tenant_id, "day": day_of(now), "slot": crc32(by.encode()) % SLOTS,
        "payload_bytes": payload_bytes, "requests": requests,
    }])  # fmt: skip


def of(tx: Transaction, tenant_id: str, now: datetime) -> Used:
    """What a tenant uses."""
    totals = select(func.sum(usage.c.payload_bytes).label("sent"), func.sum(usage.c.requests).label("asked"))
    found = tx.execute(totals.where(usage.c.tenant_id == tenant_id, usage.c.day == day_of(now))).one()
    return Used(
        _count(tx, _schedules(tenant_id), COUNTED), _count(tx, _pending(tenant_id), COUNTED),
        int(found.sent or 0), int(found.asked or 0),
    )  # fmt: skip


def look(tx: Transaction, tenant_id: str, now: datetime, requests: int, by: str) -> Limits:
    """The limits of a tenant, whose requests since the last look are counted."""
    if requests:
        add(tx, tenant_id, now, requests=requests, by=by)
    return limits_of(tx, tenant_id)


def check(tx: Transaction, tenant_id: str, limits: Limits, now: datetime, made: str | None) -> None:
    """Hold a tenant to its limits, after what this transaction `made` (schedules, jobs) and before it commits.

    Those who make something for one limited tenant go one after the other from here, so that none passes the limit
    together with another. Raises LimitReached.
    """
    counted = []
    if limits.schedules is not None and made == "schedules":
        counted.append(("schedules", limits.schedules, _schedules(tenant_id)))
    if limits.pending_jobs is not None and made == "jobs":
        counted.append(("pendingJobs", limits.pending_jobs, _pending(tenant_id)))
    if counted or limits.payload_bytes_per_day is not None:
        tx.execute(select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update())
    for name, most, rows in counted:
        if _count(tx, rows, most + 1) > most:
            raise _reached(tenant_id, name, most)
    if limits.payload_bytes_per_day is not None:
        today = (usage.c.tenant_id == tenant_id) & (usage.c.day == day_of(now))
        sent = tx.execute(select(func.sum(usage.c.payload_bytes)).where(today)).scalar() or 0
        if sent > limits.payload_bytes_per_day:
            midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            raise _reached(
                tenant_id, "payloadBytesPerDay", limits.payload_bytes_per_day, (midnight - now).total_seconds()
            )


def prune(tx: Transaction, now: datetime) -> None:
    """Forget the days of more than three months ago."""
    tx.execute(delete(usage).where(usage.c.day < day_of(now - KEPT)))


def _schedules(tenant_id: str) -> Select[tuple[str]]:
    return select(schedules.c.name).where(schedules.c.tenant_id == tenant_id)


def _pending(tenant_id: str) -> Select[tuple[str]]:
    return select(jobs.c.id).where(jobs.c.tenant_id == tenant_id, jobs.c.state == "pending", RESTING)


def _count(tx: Transaction, rows: Select[tuple[str]], most: int) -> int:
    found: int = tx.execute(select(func.count()).select_from(rows.limit(most).subquery())).scalar_one()
    return found


def _reached(tenant_id: str, name: str, most: int, retry_after: float | None = None) -> LimitReached:
    return LimitReached(
        f"The tenant {tenant_id} may have {name} {most:,}, and this would be more.", retry_after=retry_after,
        fix="Free some, wait, or ask for a higher limit.", limit={"name": name, "most": most},
    )  # fmt: skip
