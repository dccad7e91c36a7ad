"""Audience repository: audiences read from customers' own databases, the progress of a refresh, and their members.

Each page is stored in one transaction with the key it ends at, so an interrupted refresh resumes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, insert, select, update

from timebell.errors import NotFound
from timebell.features.campaigns.model.audience_source import AudienceSource
from timebell.features.campaigns.model.device import hash_token
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.tables import audiences, devices, members
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.jobs import repository
from timebell.store.tenancy.secrets import SecretUser
from timebell.store.transaction import Transaction

a = audiences.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """An audience.

    During a refresh, `loading` is the generation being read, `cursor` the last key read, and `until` the last key that
    existed when the refresh started.
    """

    tenant_id: str
    name: str
    source: AudienceSource
    generation: int
    loading: int | None
    cursor: Any
    until: Any
    members: int
    refused: int
    without_token: int
    refreshed_at: datetime | None
    created_at: datetime
    created_by: str | None
    updated_at: datetime


def upsert_audience(
    tx: Transaction, tenant_id: str, name: str, source: AudienceSource, created_by: str | None, now: datetime
) -> Audience:
    """Create an audience, or change its source; its members stay until the next refresh."""
    repository.ensure_tenants(tx, {tenant_id}, now)
    values = {"source": encode(source.to_json()), "loading": None, "cursor": None, "until": None, "updated_at": now}
    if not tx.execute(update(audiences).where(_by_name(tenant_id, name)).values(**values)).rowcount:
        tx.execute(insert(audiences).values(
            tenant_id=tenant_id, name=name, created_at=now, created_by=created_by, **values
        ))  # fmt: skip
    audience = find_audience(tx, tenant_id, name)
    assert audience is not None
    return audience


def find_audience(tx: Transaction, tenant_id: str, name: str, *, lock: bool = False) -> Audience | None:
    """Return an audience; None if there is none."""
    query = select(audiences).where(_by_name(tenant_id, name))
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else _audience_from_row(row)


def count_without_token(tx: Transaction, tenant_id: str, name: str) -> int:
    """Return the number of rows without a token in the last refresh of an audience."""
    return int(tx.execute(select(a.without_token).where(_by_name(tenant_id, name))).scalar() or 0)


def list_audiences(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Audience]:
    """Return a page of a tenant's audiences in name order."""
    query = select(audiences).where(a.tenant_id == tenant_id).order_by(a.name).limit(limit + 1)
    if after is not None:
        query = query.where(a.name > after)
    page = [_audience_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def delete_audience(tx: Transaction, tenant_id: str, name: str) -> bool:
    """Delete an audience, but not its devices; return whether it existed."""
    tx.execute(delete(members).where(members.c.tenant_id == tenant_id, members.c.audience == name))
    return bool(tx.execute(delete(audiences).where(_by_name(tenant_id, name))).rowcount)


def start_refresh(tx: Transaction, tenant_id: str, name: str, until: Any, now: datetime) -> Audience | None:
    """Start a refresh up to the key `until`, or continue the current one. None for an unknown name."""
    audience = find_audience(tx, tenant_id, name, lock=True)
    if audience is None or audience.loading is not None:
        return audience
    values = {"loading": audience.generation + 1, "cursor": None, "until": encode(until), "refused": 0,
              "without_token": 0, "updated_at": now}  # fmt: skip
    tx.execute(update(audiences).where(_by_name(tenant_id, name)).values(**values))
    return find_audience(tx, tenant_id, name)


def store_page(
    tx: Transaction, audience: Audience, registrations: Sequence[tuple[str, Mapping[str, Any]]], refused: int,
    rows_without_token: int, cursor: Any, now: datetime,
) -> Audience | None:  # fmt: skip
    """Store a page of a refresh, which ends at the key `cursor`, and count its invalid rows and rows without a token.

    None, without any change, if the page has already been stored or the refresh has ended.
    """
    current = find_audience(tx, audience.tenant_id, audience.name, lock=True)
    if current is None or current.loading != audience.loading or current.cursor != audience.cursor:
        return None
    if registrations:
        device_rows.register_devices(tx, audience.tenant_id, registrations, now)
        hashes = [hash_token(audience.tenant_id, token) for token, _ in registrations]
        registered = devices.c.token_hash.in_(hashes)
        tx.execute(tx.dialect.upsert(members, replace=("generation",)), [
            {"tenant_id": audience.tenant_id, "audience": audience.name, "device_id": id_,
             "generation": audience.loading}
            for id_ in tx.execute(select(devices.c.id).where(registered)).scalars()
        ])  # fmt: skip
    values = {"cursor": encode(cursor), "refused": a.refused + refused,
              "without_token": a.without_token + rows_without_token, "updated_at": now}  # fmt: skip
    tx.execute(update(audiences).where(_by_name(audience.tenant_id, audience.name)).values(**values))
    return find_audience(tx, audience.tenant_id, audience.name)


def finish_refresh(tx: Transaction, audience: Audience, now: datetime) -> Audience | None:
    """Finish a refresh: remove members that it did not find."""
    current = find_audience(tx, audience.tenant_id, audience.name, lock=True)
    if current is None or current.loading is None or current.loading != audience.loading:
        return current
    in_audience = (members.c.tenant_id == audience.tenant_id) & (members.c.audience == audience.name)
    tx.execute(delete(members).where(in_audience, members.c.generation < current.loading))
    count = tx.execute(select(func.count()).where(in_audience)).scalar_one()
    tx.execute(update(audiences).where(_by_name(audience.tenant_id, audience.name)).values(
        generation=current.loading, loading=None, cursor=None, until=None, members=count, refreshed_at=now,
        updated_at=now,
    ))  # fmt: skip
    return find_audience(tx, audience.tenant_id, audience.name)


def no_such_audience(name: object) -> NotFound:
    """Return the error for an unknown audience name."""
    return NotFound(
        f"There is no audience {name!s:.60}.", code="AUDIENCE_NOT_FOUND",
        fix="Check the spelling, and the tenant.",
    )  # fmt: skip


def _by_name(tenant_id: str, name: str) -> Any:
    return (a.tenant_id == tenant_id) & (a.name == name)


def _audience_from_row(row: Row[Any]) -> Audience:
    values = dict(row._mapping)
    return Audience(**{
        **values, "source": AudienceSource.from_json(decode(values["source"])), "cursor": decode(values["cursor"]),
        "until": decode(values["until"]),
    })  # fmt: skip


def list_secret_users(tx: Transaction, tenant_id: str) -> list[SecretUser]:
    """Return the audiences of a tenant, whose sources may refer to secrets."""
    rows = tx.execute(select(audiences.c.name, audiences.c.source).where(audiences.c.tenant_id == tenant_id))
    return [SecretUser("audience", row.name, row.source) for row in rows]
