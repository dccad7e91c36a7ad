"""Tenant repository: tenants and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, select, update

from timebell.model.job import Hold
from timebell.model.page import Page
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import jobs, tenants
from timebell.store.transaction import JOBS, Transaction
from timebell.tenancy.limits import Limits


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. `created_at` is aware UTC; its billing months begin in `timezone`."""

    id: str
    created_at: datetime
    limits: Limits
    timezone: str | None = None


def get_limits(tx: Transaction, id_: str) -> Limits:
    """Return the limits of a tenant; no limits for an unknown one."""
    text = tx.execute(select(tenants.c.limits).where(tenants.c.id == id_)).scalar()
    return limits_from_json(text)


def find_tenant(tx: Transaction, id_: str) -> Tenant | None:
    """Return a tenant; None if there is none."""
    row = tx.execute(select(tenants).where(tenants.c.id == id_)).first()
    return None if row is None else _tenant_from_row(row)


def lock_tenant(tx: Transaction, id_: str) -> None:
    """Lock the row of a tenant, if it exists, for a change."""
    tx.execute(select(tenants.c.id).where(tenants.c.id == id_).with_for_update())


def upsert_tenant(
    tx: Transaction, id_: str, changes: Mapping[str, int | None], now: datetime, timezone: str | None = None
) -> Tenant:  # fmt: skip
    """Create a tenant if needed, apply `changes` to its limits, and set its time zone unless None."""
    ensure_tenants(tx, {id_}, now)
    row = tx.execute(select(tenants).where(tenants.c.id == id_).with_for_update()).one()
    changed = Limits.parse({**_tenant_from_row(row).limits.to_json(), **changes})
    starts = (row.starts or "[]") if changed.has_execution_limits else None
    limits_json = orjson.dumps(changed.to_json()).decode()
    tx.execute(update(tenants).where(tenants.c.id == id_).values(limits=limits_json, starts=starts))
    if timezone is not None:
        tx.execute(update(tenants).where(tenants.c.id == id_).values(timezone=timezone))
    if starts is None and row.starts is not None:  # the execution limits were removed: release the jobs they held
        tx.execute(update(jobs).where(jobs.c.hold == Hold.TENANT.value, jobs.c.tenant_id == id_).values(hold=None))
    if changes:
        tx.notify(JOBS)
    return Tenant(id_, row.created_at, changed, timezone or row.timezone)


def list_tenants(tx: Transaction, limit: int, after: str | None) -> Page[Tenant]:
    """Return a page of tenants in id order."""
    query = select(tenants).order_by(tenants.c.id).limit(limit + 1)
    if after is not None:
        query = query.where(tenants.c.id > after)
    page = [_tenant_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)


def _tenant_from_row(row: Row[Any]) -> Tenant:
    return Tenant(row.id, row.created_at, limits_from_json(row.limits), row.timezone)


def limits_from_json(text: str | None) -> Limits:
    """Return limits from their stored JSON; no limits for None."""
    return Limits(**orjson.loads(text)) if text else Limits()
