"""Usage counters of tenants, and enforcement of their limits.

Daily totals of requests and payload bytes are spread over a few rows per tenant, so that concurrent requests do not
wait for each other. Schedules and pending jobs are counted in an index, only up to the limit, and only for tenants
with that limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from zlib import crc32

from sqlalchemy import Select, delete, func, select

from timebell.store.audit.audit_log import AuditRecord, record_values
from timebell.store.jobs.indexes import NOT_RUNNING_CLAUSE
from timebell.store.schema import jobs, schedules, tenants, usage
from timebell.store.tenancy.tenants import get_limits
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import LimitReached, Limits

COUNTER_SHARDS = 16
MAX_COUNT = 100_000
USAGE_RETENTION = timedelta(days=92)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Current schedules and pending jobs of a tenant, and its payload bytes and requests of today (UTC)."""

    schedules: int
    pending_jobs: int
    payload_bytes: int
    requests: int


def utc_day(now: datetime) -> str:
    """Return the UTC date as an ISO string."""
    return now.date().isoformat()


def add_usage(
    tx: Transaction, tenant_id: str, now: datetime, *, payload_bytes: int = 0, requests: int = 0, shard_key: str = ""
) -> None:
    """Add to today's counters; different `shard_key`s use different rows, to avoid lock contention."""
    counter = {"tenant_id": tenant_id, "day": utc_day(now), "slot": _slot(shard_key)}
    amounts = {"payload_bytes": payload_bytes, "requests": requests}
    tx.execute(tx.dialect.upsert(usage, add=("payload_bytes", "requests")), counter | amounts)


def record_change(tx: Transaction, record: AuditRecord, day: str, payload_bytes: int) -> None:
    """Insert the audit record of a request, and add the size of its body to the counters of the tenant."""
    tx.dialect.insert_change(tx, *change_rows(tx, record, day, payload_bytes))


def change_rows(
    tx: Transaction, record: AuditRecord, day: str, payload_bytes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of `record_change`: of the counters, and of the audit log."""
    counter = {"day": day, "slot": _slot(record.request_id or ""), "payload_bytes": payload_bytes}
    return counter, record_values(record) | {"at": tx.dialect.to_db(record.at)}


def _slot(shard_key: str) -> int:
    return crc32(shard_key.encode()) % COUNTER_SHARDS


def get_usage(tx: Transaction, tenant_id: str, now: datetime) -> TenantUsage:
    """Return the usage of a tenant. Schedules and pending jobs are counted up to MAX_COUNT."""
    totals = select(func.sum(usage.c.payload_bytes).label("sent"), func.sum(usage.c.requests).label("asked"))
    today = tx.execute(totals.where(usage.c.tenant_id == tenant_id, usage.c.day == utc_day(now))).one()
    return TenantUsage(
        _count_up_to(tx, _select_schedules(tenant_id), MAX_COUNT),
        _count_up_to(tx, _select_pending_jobs(tenant_id), MAX_COUNT), int(today.sent or 0), int(today.asked or 0),
    )  # fmt: skip


def count_requests_and_get_limits(
    tx: Transaction, tenant_id: str, now: datetime, requests: int, shard_key: str
) -> Limits:
    """Add `requests` to today's counters and return the limits of a tenant."""
    if requests:
        add_usage(tx, tenant_id, now, requests=requests, shard_key=shard_key)
    return get_limits(tx, tenant_id)


def check_limits(
    tx: Transaction, tenant_id: str, limits: Limits, now: datetime, created_kind: str | None, payload_bytes: int
) -> None:
    """Enforce a tenant's limits after this transaction created objects of `created_kind` ("schedules" or "jobs").

    `payload_bytes` are those of the request, which are not counted yet. The tenant row stays locked until the commit,
    so concurrent transactions cannot exceed a limit together. Raises LimitReached.
    """
    checks = []
    if limits.schedules is not None and created_kind == "schedules":
        checks.append(("schedules", limits.schedules, _select_schedules(tenant_id)))
    if limits.pending_jobs is not None and created_kind == "jobs":
        checks.append(("pendingJobs", limits.pending_jobs, _select_pending_jobs(tenant_id)))
    if checks or limits.payload_bytes_per_day is not None:
        tx.execute(select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update())
    for name, allowed, rows in checks:
        if _count_up_to(tx, rows, allowed + 1) > allowed:
            raise _limit_reached(tenant_id, name, allowed)
    if limits.payload_bytes_per_day is not None:
        today = (usage.c.tenant_id == tenant_id) & (usage.c.day == utc_day(now))
        used_bytes = tx.execute(select(func.sum(usage.c.payload_bytes)).where(today)).scalar() or 0
        if used_bytes + payload_bytes > limits.payload_bytes_per_day:
            midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            raise _limit_reached(
                tenant_id, "payloadBytesPerDay", limits.payload_bytes_per_day, (midnight - now).total_seconds()
            )


def prune(tx: Transaction, now: datetime) -> None:
    """Delete counters older than USAGE_RETENTION."""
    tx.execute(delete(usage).where(usage.c.day < utc_day(now - USAGE_RETENTION)))


def _select_schedules(tenant_id: str) -> Select[tuple[str]]:
    return select(schedules.c.name).where(schedules.c.tenant_id == tenant_id)


def _select_pending_jobs(tenant_id: str) -> Select[tuple[str]]:
    return select(jobs.c.id).where(jobs.c.tenant_id == tenant_id, jobs.c.state == "pending", NOT_RUNNING_CLAUSE)


def _count_up_to(tx: Transaction, rows: Select[tuple[str]], limit: int) -> int:
    count: int = tx.execute(select(func.count()).select_from(rows.limit(limit).subquery())).scalar_one()
    return count


def _limit_reached(tenant_id: str, name: str, allowed: int, retry_after: float | None = None) -> LimitReached:
    return LimitReached(
        f"Tenant {tenant_id} has reached its limit {name} ({allowed:,}).", retry_after=retry_after,
        fix="Delete some, wait, or request a higher limit.", limit={"name": name, "max": allowed},
    )  # fmt: skip
