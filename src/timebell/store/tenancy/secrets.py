"""Secrets as rows: written, listed without their values, and opened for whoever delivers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, delete, insert, select, update

from timebell.errors import Conflict, NotFound
from timebell.model.page import Page
from timebell.model.target import Secret, secret_names
from timebell.store.campaigns.tables import audiences
from timebell.store.jobs.repository import make_tenants
from timebell.store.schema import data_keys, secrets, targets
from timebell.store.transaction import Transaction, insert_unless
from timebell.store.triggers.tables import sources
from timebell.tenancy.secrets import Box, Keyring

NAMED = 5


def box(tx: Transaction, ring: Keyring, tenant_id: str, now: datetime) -> Box:
    """What encrypts for a tenant; its data key is made if it has none. Raises Refused (SECRET_UNREADABLE)."""
    found = opener(tx, ring, tenant_id)
    if found is not None:
        return found
    make_tenants(tx, {tenant_id}, now)
    values = {
        "tenant_id": tenant_id, "wrapped_by": ring.newest, "wrapped": ring.new_data_key(tenant_id), "created_at": now,
        "updated_at": now,
    }  # fmt: skip
    tx.execute(insert_unless(tx.dialect, data_keys).values(**values))
    made = opener(tx, ring, tenant_id)
    assert made is not None
    return made


def opener(tx: Transaction, ring: Keyring, tenant_id: str) -> Box | None:
    """What decrypts for a tenant; None if it never had a secret. Raises Refused (SECRET_UNREADABLE)."""
    row = tx.execute(select(data_keys).where(data_keys.c.tenant_id == tenant_id)).first()
    return None if row is None else ring.box(tenant_id, row.wrapped_by, row.wrapped)


@dataclass(frozen=True, slots=True)
class Rewrapped:
    """How many data keys were wrapped anew, and the tenants whose key cannot be opened here."""

    wrapped: int
    closed: Sequence[str]


def rewrap(tx: Transaction, ring: Keyring, now: datetime, most: int) -> Rewrapped:
    """Wrap up to `most` data keys that are under older secret keys under the newest one."""
    strange = select(data_keys.c.tenant_id).where(data_keys.c.wrapped_by.not_in(ring.known)).order_by("tenant_id")
    closed = tx.execute(strange.limit(most)).scalars().all()
    older = data_keys.c.wrapped_by.in_([one for one in ring.known if one != ring.newest])
    old = select(data_keys).where(older).order_by(data_keys.c.tenant_id).limit(most)
    done = 0
    for row in tx.execute(old.with_for_update()).all():
        values = {"wrapped": ring.rewrap(row.tenant_id, row.wrapped_by, row.wrapped), "wrapped_by": ring.newest}
        tx.execute(update(data_keys).where(data_keys.c.tenant_id == row.tenant_id).values(**values, updated_at=now))
        done += 1
    return Rewrapped(done, closed)


def put(
    tx: Transaction, ring: Keyring, tenant_id: str, name: str, value: str, now: datetime, by: str | None, *,
    replace: bool | None,
) -> Secret:  # fmt: skip
    """Write a secret: a new one, with `replace` one that is there, with None whichever.

    Raises Conflict (SECRET_EXISTS), NotFound (SECRET_NOT_FOUND), Refused.
    """
    opened = box(tx, ring, tenant_id, now)
    row = tx.execute(select(secrets).where(_mine(tenant_id, name)).with_for_update()).first()
    if row is not None and replace is False:
        raise Conflict(
            f"There is a secret {name!r} already.", code="SECRET_EXISTS", existing=name,
            fix="Replace its value, or use another name.",
        )  # fmt: skip
    if row is None and replace is True:
        raise no_such_secret(name)
    version = 1 if row is None else row.version + 1
    sealed = opened.seal(value, _place(tenant_id, name, version))
    if row is None:
        tx.execute(insert(secrets).values(
            tenant_id=tenant_id, name=name, value=sealed, version=version, created_at=now, created_by=by,
            updated_at=now,
        ))  # fmt: skip
    else:
        values = {"value": sealed, "version": version, "updated_at": now}
        tx.execute(update(secrets).where(_mine(tenant_id, name)).values(**values))
    return _read(tx.execute(select(secrets).where(_mine(tenant_id, name))).one())


def find(tx: Transaction, tenant_id: str, name: str) -> Secret | None:
    """A secret, without its value."""
    row = tx.execute(select(secrets).where(_mine(tenant_id, name))).first()
    return None if row is None else _read(row)


def page(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Secret]:
    """Secrets of a tenant by name, without their values."""
    query = select(secrets).where(secrets.c.tenant_id == tenant_id).order_by(secrets.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(secrets.c.name > after)
    found = [_read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def remove(tx: Transaction, tenant_id: str, name: str) -> Secret | None:
    """Forget a secret; None for an unknown one. Raises Conflict (SECRET_IN_USE) while anything refers to it."""
    row = tx.execute(select(secrets).where(_mine(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    rows = tx.execute(select(targets.c.name, targets.c.options).where(targets.c.tenant_id == tenant_id))
    senders = sorted(one.name for one in rows if name in secret_names(orjson.loads(one.options)))
    homes = tx.execute(select(sources.c.name, sources.c.options).where(sources.c.tenant_id == tenant_id))
    readers = sorted(one.name for one in homes if name in secret_names(orjson.loads(one.options)))
    asked = tx.execute(select(audiences.c.name, audiences.c.source).where(audiences.c.tenant_id == tenant_id))
    groups = sorted(one.name for one in asked if name in secret_names(orjson.loads(one.source)))
    for what, users in (("target", senders), ("source", readers), ("audience", groups)):
        if not users:
            continue
        more = ", ..." if len(users) > NAMED else ""
        raise Conflict(
            f"The secret {name!r} is used by {len(users)} {what}{'s'[: len(users) > 1]}:"
            f" {', '.join(users[:NAMED])}{more}.",
            code="SECRET_IN_USE", existing=users[0], fix="Change these first; to change its value, replace it.",
        )  # fmt: skip
    tx.execute(delete(secrets).where(_mine(tenant_id, name)))
    return _read(row)


def values(
    tx: Transaction, ring: Keyring, tenant_id: str, names: Collection[str], *, kept: bool = False
) -> dict[str, str]:  # fmt: skip
    """The values of secrets; with `kept` these stay until this transaction ends. Raises NotFound (SECRET_NOT_FOUND),
    Refused."""
    if not names:
        return {}
    query = select(secrets).where(secrets.c.tenant_id == tenant_id, secrets.c.name.in_(sorted(names)))
    query = query.order_by(secrets.c.name)
    rows = {row.name: row for row in tx.execute(query.with_for_update(read=True, key_share=True) if kept else query)}
    for name in sorted(names):
        if name not in rows:
            raise no_such_secret(name)
    opened = opener(tx, ring, tenant_id)
    assert opened is not None
    return {name: opened.open(row.value, _place(tenant_id, name, row.version)) for name, row in rows.items()}


def no_such_secret(name: str) -> NotFound:
    """The error for a name that nobody has."""
    return NotFound(
        f"There is no secret {name!r:.80}.", code="SECRET_NOT_FOUND", fix="timebell secret list shows them."
    )


def _mine(tenant_id: str, name: str) -> Any:
    return (secrets.c.tenant_id == tenant_id) & (secrets.c.name == name)


def _place(tenant_id: str, name: str, version: int) -> tuple[str | int, ...]:
    return tenant_id, "timebell_secrets", name, "value", version


def _read(row: Row[Any]) -> Secret:
    return Secret(
        tenant_id=row.tenant_id, name=row.name, version=row.version, created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip
