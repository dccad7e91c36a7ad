"""API keys as rows: made, found by id, listed, revoked."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import Row, insert, select, update

from timebell.model.page import Page
from timebell.store.jobs.repository import make_tenants
from timebell.store.schema import keys
from timebell.store.transaction import Transaction
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

USED_EVERY = timedelta(minutes=1)


def create(tx: Transaction, key: Key, digest: str) -> Key:
    """Write a key."""
    if key.tenant_id is not None:
        make_tenants(tx, {key.tenant_id}, key.created_at)
    listed = {name: None if value is None else orjson.dumps(value).decode()
              for name, value in (("scopes", key.scopes), ("networks", key.networks))}  # fmt: skip
    tx.execute(insert(keys).values(
        id=key.id, tenant_id=key.tenant_id, name=key.name, role=key.role.value, digest=digest,
        created_at=key.created_at, created_by=key.created_by, expires_at=key.expires_at, **listed,
    ))  # fmt: skip
    return key


def find(tx: Transaction, id_: str) -> tuple[Key, str] | None:
    """The key with this id, and its digest."""
    row = tx.execute(select(keys).where(keys.c.id == id_)).first()
    return None if row is None else (_read(row), row.digest)


def used(tx: Transaction, id_: str, now: datetime) -> None:
    """Record that it was used, to the minute."""
    stale = keys.c.last_used_at.is_(None) | (keys.c.last_used_at < now - USED_EVERY)
    tx.execute(update(keys).where(keys.c.id == id_, stale).values(last_used_at=now))


def under(tx: Transaction, id_: str, old: str, new: str) -> None:
    """Keep another digest of it, under a newer secret key."""
    tx.execute(update(keys).where(keys.c.id == id_, keys.c.digest == old).values(digest=new))


def revoke(tx: Transaction, tenant_id: str | None, id_: str, now: datetime) -> Key | None:
    """Make a key useless for ever; one of this tenant, or with None of any. None for an unknown one."""
    mine = keys.c.id == id_
    if tenant_id is not None:
        mine &= keys.c.tenant_id == tenant_id
    tx.execute(update(keys).where(mine, keys.c.revoked_at.is_(None)).values(revoked_at=now))
    row = tx.execute(select(keys).where(mine)).first()
    return None if row is None else _read(row)


def page(tx: Transaction, tenant_id: str | None, limit: int, after: str | None) -> Page[Key]:
    """Keys of a tenant, or with None of all and of the platform, by id."""
    query = select(keys).order_by(keys.c.id).limit(limit + 1)
    if tenant_id is not None:
        query = query.where(keys.c.tenant_id == tenant_id)
    if after is not None:
        query = query.where(keys.c.id > after)
    found = [_read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


def _read(row: Row[Any]) -> Key:
    scopes, networks = (None if text is None else tuple(orjson.loads(text)) for text in (row.scopes, row.networks))
    return Key(
        id=row.id, tenant_id=row.tenant_id, name=row.name, role=Role(row.role), scopes=scopes, networks=networks,
        created_at=row.created_at, created_by=row.created_by, expires_at=row.expires_at,
        last_used_at=row.last_used_at, revoked_at=row.revoked_at,
    )  # fmt: skip
