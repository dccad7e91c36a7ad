"""Tenants and what they may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, select, update

from timebell.model.job import Hold
from timebell.model.page import Page
from timebell.store.jobs.repository import make_tenants
from timebell.store.schema import jobs, tenants
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import Limits


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. `created_at` is aware UTC; its months begin in `timezone`."""

    id: str
    created_at: datetime
    limits: Limits
    timezone: str | None = None


def limits(tx: Transaction, id_: str) -> Limits:
    """The limits of a tenant; none for one that is not there yet."""
    found = tx.execute(select(tenants.c.limits).where(tenants.c.id == id_)).scalar()
    return read_limits(found)


def find(tx: Transaction, id_: str) -> Tenant | None:
    """A tenant."""
    row = tx.execute(select(tenants).where(tenants.c.id == id_)).first()
    return None if row is None else _read(row)


def put(
    tx: Transaction, id_: str, changes: Mapping[str, int | None], now: datetime, timezone: str | None = None
) -> Tenant:  # fmt: skip
    """Make a tenant if there is none, change these of its limits, and its zone unless that is None."""
    make_tenants(tx, {id_}, now)
    row = tx.execute(select(tenants).where(tenants.c.id == id_).with_for_update()).one()
    changed = Limits.read({**_read(row).limits.to_json(), **changes})
    starts = (row.starts or "[]") if changed.of_running else None
    kept = orjson.dumps(changed.to_json()).decode()
    tx.execute(update(tenants).where(tenants.c.id == id_).values(limits=kept, starts=starts))
    if timezone is not None:
        tx.execute(update(tenants).where(tenants.c.id == id_).values(timezone=timezone))
    if starts is None and row.starts is not None:  # nothing waits for its limits any more
        tx.execute(update(jobs).where(jobs.c.hold == Hold.TENANT.value, jobs.c.tenant_id == id_).values(hold=None))
        tx.notify()
    return Tenant(id_, row.created_at, changed, timezone or row.timezone)


def page(tx: Transaction, limit: int, after: str | None) -> Page[Tenant]:
    """Tenants, by id."""
    query = select(tenants).order_by(tenants.c.id).limit(limit + 1)
    if after is not None:
        query = query.where(tenants.c.id > after)
    found = [_read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


def _read(row: Row[Any]) -> Tenant:
    return Tenant(row.id, row.created_at, read_limits(row.limits), row.timezone)


def read_limits(text: str | None) -> Limits:
    """Limits as they are kept."""
    return Limits(**orjson.loads(text)) if text else Limits()
