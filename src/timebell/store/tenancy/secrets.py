"""Secret repository: encrypted values, listed without them, and decrypted for deliveries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Row, delete, insert, select, update

from timebell.errors import Conflict, NotFound
from timebell.feature import Feature
from timebell.model.page import Page
from timebell.model.target import Secret, secret_names
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import data_keys, secrets, sources, targets
from timebell.store.transaction import Transaction
from timebell.tenancy.secrets import Keyring, TenantCipher

MAX_LISTED_REFERENCES = 5


class SecretUser(NamedTuple):
    """An object that may refer to secrets: what it is, its name, and its options as JSON."""

    noun: str
    name: str
    options: str


def get_or_create_cipher(tx: Transaction, keyring: Keyring, tenant_id: str, now: datetime) -> TenantCipher:
    """Return the cipher of a tenant; creates its data key if it has none. Raises Refused (SECRET_UNREADABLE)."""
    existing = find_cipher(tx, keyring, tenant_id)
    if existing is not None:
        return existing
    ensure_tenants(tx, {tenant_id}, now)
    values = {
        "tenant_id": tenant_id, "wrapped_by": keyring.newest_key_id, "wrapped": keyring.new_data_key(tenant_id),
        "created_at": now, "updated_at": now,
    }  # fmt: skip
    tx.execute(tx.dialect.insert_ignoring_duplicates(data_keys), values)
    created = find_cipher(tx, keyring, tenant_id)
    assert created is not None
    return created


def find_cipher(tx: Transaction, keyring: Keyring, tenant_id: str) -> TenantCipher | None:
    """Return the cipher of a tenant; None if it has no data key. Raises Refused (SECRET_UNREADABLE)."""
    row = tx.execute(select(data_keys).where(data_keys.c.tenant_id == tenant_id)).first()
    return None if row is None else keyring.cipher_for(tenant_id, row.wrapped_by, row.wrapped)


@dataclass(frozen=True, slots=True)
class RewrapResult:
    """The number of rewrapped data keys, and the tenants whose data key cannot be unwrapped with the known keys."""

    rewrapped_count: int
    unreadable_tenants: Sequence[str]


def rewrap_data_keys(tx: Transaction, keyring: Keyring, now: datetime, limit: int) -> RewrapResult:
    """Rewrap up to `limit` data keys from older secret keys to the newest one."""
    unknown_key = (
        select(data_keys.c.tenant_id).where(data_keys.c.wrapped_by.not_in(keyring.key_ids)).order_by("tenant_id")
    )
    unreadable = tx.execute(unknown_key.limit(limit)).scalars().all()
    with_older_key = data_keys.c.wrapped_by.in_([one for one in keyring.key_ids if one != keyring.newest_key_id])
    query = select(data_keys).where(with_older_key).order_by(data_keys.c.tenant_id).limit(limit)
    rewrapped = 0
    for row in tx.execute(query.with_for_update()).all():
        values = {
            "wrapped": keyring.rewrap(row.tenant_id, row.wrapped_by, row.wrapped),
            "wrapped_by": keyring.newest_key_id,
        }
        tx.execute(update(data_keys).where(data_keys.c.tenant_id == row.tenant_id).values(**values, updated_at=now))
        rewrapped += 1
    return RewrapResult(rewrapped, unreadable)


def upsert_secret(
    tx: Transaction, keyring: Keyring, tenant_id: str, name: str, value: str, now: datetime, created_by: str | None, *,
    replace: bool | None,
) -> Secret:  # fmt: skip
    """Store a secret: only a new one (`replace` False), only an existing one (True), or either (None).

    Raises Conflict (SECRET_EXISTS), NotFound (SECRET_NOT_FOUND), Refused.
    """
    cipher = get_or_create_cipher(tx, keyring, tenant_id, now)
    row = tx.execute(select(secrets).where(_by_name(tenant_id, name)).with_for_update()).first()
    if row is not None and replace is False:
        raise Conflict(
            f"A secret named {name!r} already exists.", code="SECRET_EXISTS", existing=name,
            fix="Replace its value, or use another name.",
        )  # fmt: skip
    if row is None and replace is True:
        raise no_such_secret(name)
    version = 1 if row is None else row.version + 1
    encrypted = cipher.encrypt(value, _associated_data(tenant_id, name, version))
    if row is None:
        tx.execute(insert(secrets).values(
            tenant_id=tenant_id, name=name, value=encrypted, version=version, created_at=now, created_by=created_by,
            updated_at=now,
        ))  # fmt: skip
    else:
        values = {"value": encrypted, "version": version, "updated_at": now}
        tx.execute(update(secrets).where(_by_name(tenant_id, name)).values(**values))
    return _secret_from_row(tx.execute(select(secrets).where(_by_name(tenant_id, name))).one())


def find_secret(tx: Transaction, tenant_id: str, name: str, *, lock: bool = False) -> Secret | None:
    """Return a secret without its value; None if there is none."""
    query = select(secrets).where(_by_name(tenant_id, name))
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else _secret_from_row(row)


def list_secrets(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Secret]:
    """Return a page of a tenant's secrets in name order, without their values."""
    query = select(secrets).where(secrets.c.tenant_id == tenant_id).order_by(secrets.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(secrets.c.name > after)
    page = [_secret_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def delete_secret(tx: Transaction, tenant_id: str, name: str, features: Sequence[Feature]) -> Secret | None:
    """Delete a secret; None for an unknown one.

    Raises Conflict (SECRET_IN_USE) while a target, a source or an object of `features` refers to it.
    """
    row = tx.execute(select(secrets).where(_by_name(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    candidates = [
        SecretUser(noun, one.name, one.options)
        for noun, table in (("target", targets), ("source", sources))
        for one in tx.execute(select(table.c.name, table.c.options).where(table.c.tenant_id == tenant_id))
    ]
    candidates += [user for feature in features for user in feature.find_secret_users(tx, tenant_id)]
    names_by_noun: dict[str, list[str]] = {}
    for user in candidates:
        if name in secret_names(orjson.loads(user.options)):
            names_by_noun.setdefault(user.noun, []).append(user.name)
    for noun, users in names_by_noun.items():
        users.sort()
        more = ", ..." if len(users) > MAX_LISTED_REFERENCES else ""
        raise Conflict(
            f"The secret {name!r} is used by {len(users)} {noun}{'s'[: len(users) > 1]}:"
            f" {', '.join(users[:MAX_LISTED_REFERENCES])}{more}.",
            code="SECRET_IN_USE", existing=users[0],
            fix=f"Change each {noun} first. To change the secret's value, replace it.",
        )  # fmt: skip
    tx.execute(delete(secrets).where(_by_name(tenant_id, name)))
    return _secret_from_row(row)


def decrypt_values(
    tx: Transaction, keyring: Keyring, tenant_id: str, names: Collection[str], *, lock: bool = False
) -> dict[str, str]:  # fmt: skip
    """Return the values of secrets by name; `lock` prevents their deletion until the transaction ends.

    Raises NotFound (SECRET_NOT_FOUND), Refused.
    """
    if not names:
        return {}
    query = select(secrets).where(secrets.c.tenant_id == tenant_id, secrets.c.name.in_(sorted(names)))
    query = query.order_by(secrets.c.name)
    rows = {row.name: row for row in tx.execute(query.with_for_update(read=True, key_share=True) if lock else query)}
    for name in sorted(names):
        if name not in rows:
            raise no_such_secret(name)
    cipher = find_cipher(tx, keyring, tenant_id)
    assert cipher is not None
    return {
        name: cipher.decrypt(row.value, _associated_data(tenant_id, name, row.version)) for name, row in rows.items()
    }


def no_such_secret(name: str) -> NotFound:
    """Return the error for an unknown secret name."""
    return NotFound(
        f"There is no secret {name!r:.80}.", code="SECRET_NOT_FOUND", fix="List the secrets: timebell secret list."
    )


def _by_name(tenant_id: str, name: str) -> Any:
    return (secrets.c.tenant_id == tenant_id) & (secrets.c.name == name)


def _associated_data(tenant_id: str, name: str, version: int) -> tuple[str | int, ...]:
    return tenant_id, "timebell_secrets", name, "value", version


def _secret_from_row(row: Row[Any]) -> Secret:
    return Secret(
        tenant_id=row.tenant_id, name=row.name, version=row.version, created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip
