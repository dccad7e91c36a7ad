"""Audiences of customers' own databases: what they are read from, how far, and who is in them.

Each page that is read is one transaction with the key it ends at. A reading that was broken off goes on there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, insert, select, update

from timebell.errors import NotFound
from timebell.model.audience import hash_of
from timebell.model.audience_source import Source
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.campaigns import devices as device_rows
from timebell.store.campaigns.tables import audiences, devices, members
from timebell.store.jobs import repository
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

a = audiences.c
JOIN = Statement(
    "WITH $rows INSERT INTO timebell_audience_members (tenant_id, audience, device_id, generation)"
    " SELECT tenant_id, audience, device_id, generation FROM d WHERE true"
    " ON CONFLICT (tenant_id, audience, device_id) DO UPDATE SET generation = excluded.generation",
    tenant_id="text",
    audience="text",
    device_id="text",
    generation="int",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """An audience. `loading` is the generation that is being read, `cursor` the last key read, `until` the last that
    there was when it began."""

    tenant_id: str
    name: str
    source: Source
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


def put(tx: Transaction, tenant_id: str, name: str, source: Source, by: str | None, now: datetime) -> Audience:
    """Make one, or have the one that there is read from elsewhere; who is in it stays until it is read."""
    repository.make_tenants(tx, {tenant_id}, now)
    values = {"source": encode(source.json()), "loading": None, "cursor": None, "until": None, "updated_at": now}
    if not tx.execute(update(audiences).where(_is(tenant_id, name)).values(**values)).rowcount:
        tx.execute(insert(audiences).values(
            tenant_id=tenant_id, name=name, created_at=now, created_by=by, **values
        ))  # fmt: skip
    found = find(tx, tenant_id, name)
    assert found is not None
    return found


def find(tx: Transaction, tenant_id: str, name: str, *, lock: bool = False) -> Audience | None:
    """One audience."""
    query = select(audiences).where(_is(tenant_id, name))
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else _read(row)


def without_token(tx: Transaction, tenant_id: str, name: str) -> int:
    """How many rows of its last reading have none."""
    return int(tx.execute(select(a.without_token).where(_is(tenant_id, name))).scalar() or 0)


def page(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Audience]:
    """Audiences of a tenant, by name."""
    query = select(audiences).where(a.tenant_id == tenant_id).order_by(a.name).limit(limit + 1)
    if after is not None:
        query = query.where(a.name > after)
    found = [_read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def remove(tx: Transaction, tenant_id: str, name: str) -> bool:
    """Forget one, not the devices in it; whether there was one."""
    tx.execute(delete(members).where(members.c.tenant_id == tenant_id, members.c.audience == name))
    return bool(tx.execute(delete(audiences).where(_is(tenant_id, name))).rowcount)


def begin(tx: Transaction, tenant_id: str, name: str, until: Any, now: datetime) -> Audience | None:
    """Read it anew, up to this key; one that is being read is gone on with. None for an unknown name."""
    found = find(tx, tenant_id, name, lock=True)
    if found is None or found.loading is not None:
        return found
    values = {"loading": found.generation + 1, "cursor": None, "until": encode(until), "refused": 0,
              "without_token": 0, "updated_at": now}  # fmt: skip
    tx.execute(update(audiences).where(_is(tenant_id, name)).values(**values))
    return find(tx, tenant_id, name)


def take_in(
    tx: Transaction, was: Audience, given: Sequence[tuple[str, Mapping[str, Any]]], refused: int, bare: int,
    cursor: Any, now: datetime,
) -> Audience | None:  # fmt: skip
    """A page of it, that ends at the key `cursor`; `bare` rows of it have no token, `refused` others do not fit.

    None, and nothing done, if another took this page in."""
    found = find(tx, was.tenant_id, was.name, lock=True)
    if found is None or found.loading != was.loading or found.cursor != was.cursor:
        return None
    if given:
        device_rows.register(tx, was.tenant_id, given, now)
        hashes = [hash_of(token) for token, _ in given]
        mine = (devices.c.tenant_id == was.tenant_id) & devices.c.token_hash.in_(hashes)
        tx.fetch(JOIN, [
            {"tenant_id": was.tenant_id, "audience": was.name, "device_id": id_, "generation": was.loading}
            for id_ in tx.execute(select(devices.c.id).where(mine)).scalars()
        ])  # fmt: skip
    values = {"cursor": encode(cursor), "refused": a.refused + refused,
              "without_token": a.without_token + bare, "updated_at": now}  # fmt: skip
    tx.execute(update(audiences).where(_is(was.tenant_id, was.name)).values(**values))
    return find(tx, was.tenant_id, was.name)


def finish(tx: Transaction, was: Audience, now: datetime) -> Audience | None:
    """It is read: who is not in it any more leaves."""
    found = find(tx, was.tenant_id, was.name, lock=True)
    if found is None or found.loading is None or found.loading != was.loading:
        return found
    mine = (members.c.tenant_id == was.tenant_id) & (members.c.audience == was.name)
    tx.execute(delete(members).where(mine, members.c.generation < found.loading))
    count = tx.execute(select(func.count()).where(mine)).scalar_one()
    tx.execute(update(audiences).where(_is(was.tenant_id, was.name)).values(
        generation=found.loading, loading=None, cursor=None, until=None, members=count, refreshed_at=now, updated_at=now
    ))  # fmt: skip
    return find(tx, was.tenant_id, was.name)


def no_such(name: object) -> NotFound:
    """The error for an unknown name."""
    return NotFound(f"There is no audience {name!s:.60}.", code="AUDIENCE_NOT_FOUND")


def _is(tenant_id: str, name: str) -> Any:
    return (a.tenant_id == tenant_id) & (a.name == name)


def _read(row: Row[Any]) -> Audience:
    said = dict(row._mapping)
    return Audience(**{
        **said, "source": Source.read(decode(said["source"])), "cursor": decode(said["cursor"]),
        "until": decode(said["until"]),
    })  # fmt: skip
