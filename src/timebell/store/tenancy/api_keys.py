"""API key repository: create, find by id, list, revoke."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import Row, insert, select, update

from timebell.model.page import Page
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import keys
from timebell.store.transaction import Transaction, read_only
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

LAST_USED_RESOLUTION = timedelta(minutes=1)


def create_key(tx: Transaction, key: Key, digest: str) -> Key:
    """Insert a key with the digest of its secret; creates its tenant if needed."""
    if key.tenant_id is not None:
        ensure_tenants(tx, {key.tenant_id}, key.created_at)
    json_columns = {name: None if value is None else orjson.dumps(value).decode()
              for name, value in (("scopes", key.scopes), ("networks", key.networks))}  # fmt: skip
    tx.execute(insert(keys).values(
        id=key.id, tenant_id=key.tenant_id, name=key.name, role=key.role.value, digest=digest,
        created_at=key.created_at, created_by=key.created_by, expires_at=key.expires_at, **json_columns,
    ))  # fmt: skip
    return key


@read_only
def find_key(tx: Transaction, id_: str) -> tuple[Key, str] | None:
    """Return the key with this id and its digest; None if there is none."""
    row = tx.execute(select(keys).where(keys.c.id == id_)).first()
    return None if row is None else (_key_from_row(row), row.digest)


def record_use(tx: Transaction, id_: str, now: datetime) -> None:
    """Set `last_used_at` of a key, at most once per minute."""
    stale = keys.c.last_used_at.is_(None) | (keys.c.last_used_at < now - LAST_USED_RESOLUTION)
    tx.execute(update(keys).where(keys.c.id == id_, stale).values(last_used_at=now))


def replace_digest(tx: Transaction, id_: str, old: str, new: str) -> None:
    """Replace a key's digest by one made with a newer server secret; no effect if it has changed meanwhile."""
    tx.execute(update(keys).where(keys.c.id == id_, keys.c.digest == old).values(digest=new))


def revoke_key(tx: Transaction, tenant_id: str | None, id_: str, now: datetime) -> Key | None:
    """Revoke a key permanently: of this tenant, or of any tenant if None. None for an unknown key."""
    matches = keys.c.id == id_
    if tenant_id is not None:
        matches &= keys.c.tenant_id == tenant_id
    tx.execute(update(keys).where(matches, keys.c.revoked_at.is_(None)).values(revoked_at=now))
    row = tx.execute(select(keys).where(matches)).first()
    return None if row is None else _key_from_row(row)


def list_keys(tx: Transaction, tenant_id: str | None, limit: int, after: str | None) -> Page[Key]:
    """Return a page of keys in id order: of one tenant, or of all tenants and the platform if None."""
    query = select(keys).order_by(keys.c.id).limit(limit + 1)
    if tenant_id is not None:
        query = query.where(keys.c.tenant_id == tenant_id)
    if after is not None:
        query = query.where(keys.c.id > after)
    page = [_key_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)


def _key_from_row(row: Row[Any]) -> Key:
    scopes, networks = (None if text is None else tuple(orjson.loads(text)) for text in (row.scopes, row.networks))
    return Key(
        id=row.id, tenant_id=row.tenant_id, name=row.name, role=Role(row.role), scopes=scopes, networks=networks,
        created_at=row.created_at, created_by=row.created_by, expires_at=row.expires_at,
        last_used_at=row.last_used_at, revoked_at=row.revoked_at,
    )  # fmt: skip
