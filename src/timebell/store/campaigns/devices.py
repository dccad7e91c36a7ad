"""Devices: registered, refreshed, found, walked through. A walk ends: who is registered after it began is not in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, case, delete, func, literal, select, true, update

from timebell.ids import new_ids
from timebell.model.audience import Device, Filters, hash_of, written
from timebell.model.campaign import LeftOut
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.store.campaigns.tables import devices, members, notifications
from timebell.store.jobs import repository
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

d = devices.c
_COLUMNS = {
    "id": "text", "tenant_id": "text", "token": "text", "token_hash": "text", "user_id": "text", "platform": "text",
    "gender": "text", "age": "int", "language": "text", "timezone": "text", "push_on": "bool", "marketing_on": "bool",
    "topics": "text", "attributes": "text", "created_at": "instant", "updated_at": "instant",
}  # fmt: skip
_KEPT = ("id", "tenant_id", "token", "token_hash", "created_at")
_SET = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name not in _KEPT)
PUT = Statement(
    f"WITH $rows INSERT INTO timebell_devices ({', '.join(_COLUMNS)}) SELECT {', '.join(_COLUMNS)} FROM d WHERE true"  # noqa: S608
    f" ON CONFLICT (tenant_id, token_hash) DO UPDATE SET {_SET}",
    **_COLUMNS,
)


def register(tx: Transaction, tenant_id: str, given: Sequence[tuple[str, Mapping[str, Any]]], now: datetime) -> int:
    """Write devices: (token, what is said of it, checked). What is not said of a known one stays as it was.

    How many are new.
    """
    repository.make_tenants(tx, {tenant_id}, now)
    said: dict[str, dict[str, Any]] = {}
    tokens = {}
    for token, more in given:
        hashed = hash_of(token)
        tokens[hashed] = token
        said.setdefault(hashed, {}).update(more)
    known = _by_hash(tx, tenant_id, said, lock=True)
    rows = []
    for (hashed, more), id_ in zip(said.items(), new_ids(now, len(said)), strict=True):
        device = replace(known.get(hashed) or Device(id=id_, token=tokens[hashed]), **more)
        rows.append(_record(tx, tenant_id, device, hashed, now))
    if rows:
        tx.fetch(PUT, rows)
    return len(said) - len(known)


def refresh(tx: Transaction, tenant_id: str, old: str, new: str, now: datetime) -> Device | None:
    """The device of an old token, under the new one; None if neither is known. The same app asked twice is one."""
    hashes = {hash_of(old), hash_of(new)}
    known = _by_hash(tx, tenant_id, hashes, lock=True)
    was, there = known.get(hash_of(old)), known.get(hash_of(new))
    if was is None or hash_of(old) == hash_of(new):
        return there or was
    if there is not None:  # it was registered as new meanwhile
        tx.execute(delete(devices).where(d.id == was.id))
        return there
    moved = update(devices).where(d.id == was.id)
    tx.execute(moved.values(token=new, token_hash=hash_of(new), updated_at=now))
    return replace(was, token=new)


def remove(tx: Transaction, tenant_id: str, tokens: Iterable[str]) -> int:
    """Forget tokens; how many were known."""
    hashes = [hash_of(token) for token in tokens]
    return tx.execute(delete(devices).where(d.tenant_id == tenant_id, d.token_hash.in_(hashes))).rowcount


def remove_dead(tx: Transaction, tenant_id: str, dead: Sequence[tuple[str, str]]) -> int:
    """Forget devices (id, token) of which the provider says that they are gone, unless the token is another by now."""
    if not dead:
        return 0
    mine = d.id.in_([id_ for id_, _ in dead]) & d.token_hash.in_([hash_of(token) for _, token in dead])
    return tx.execute(delete(devices).where(d.tenant_id == tenant_id, mine)).rowcount


NOTIFIED = Statement(
    "WITH $rows INSERT INTO timebell_notifications (tenant_id, notification_id, device_id, accepted_at)"
    " SELECT tenant_id, notification_id, device_id, accepted_at FROM d WHERE true ON CONFLICT DO NOTHING",
    tenant_id="text",
    notification_id="text",
    device_id="text",
    accepted_at="instant",
)


def notified(tx: Transaction, tenant_id: str, notification_id: str) -> set[str]:
    """The devices that a notification was accepted for."""
    n = notifications.c
    query = select(n.device_id).where(n.tenant_id == tenant_id, n.notification_id == notification_id)
    return set(tx.execute(query).scalars())


def notify(
    tx: Transaction, tenant_id: str, notification_id: str | None, accepted: Sequence[str],
    dead: Sequence[tuple[str, str]], now: datetime,
) -> None:  # fmt: skip
    """A notification was accepted for these devices; those are gone."""
    if accepted and notification_id is not None:
        at = tx.dialect.to_db(now)
        tx.fetch(NOTIFIED, [
            {"tenant_id": tenant_id, "notification_id": notification_id, "device_id": id_, "accepted_at": at}
            for id_ in accepted
        ])  # fmt: skip
    remove_dead(tx, tenant_id, dead)


def prune(tx: Transaction, before: datetime) -> int:
    """Forget notifications that were accepted before an instant; how many."""
    return tx.execute(delete(notifications).where(notifications.c.accepted_at < before)).rowcount


def find(tx: Transaction, tenant_id: str, id_: str) -> Device | None:
    """One device."""
    row = tx.execute(select(devices).where(d.tenant_id == tenant_id, d.id == id_)).first()
    return None if row is None else read(row)


def forget(tx: Transaction, tenant_id: str, id_: str) -> bool:
    """Delete a device; whether there was one."""
    return bool(tx.execute(delete(devices).where(d.tenant_id == tenant_id, d.id == id_)).rowcount)


def of_token(tx: Transaction, tenant_id: str, token: str) -> Device | None:
    """The device of a token."""
    return _by_hash(tx, tenant_id, [hash_of(token)]).get(hash_of(token))


def of_user(tx: Transaction, tenant_id: str, user_id: str, most: int = 500) -> list[Device]:
    """A person's devices that take pushes."""
    mine = (d.tenant_id == tenant_id) & (d.user_id == user_id) & d.push_on
    return [read(row) for row in tx.execute(select(devices).where(mine).order_by(d.id).limit(most))]


def page(
    tx: Transaction, tenant_id: str, limit: int, after: str | None, filters: Filters, user_id: str | None
) -> Page[Device]:  # fmt: skip
    """Devices of a tenant, in the order of the walk."""
    query = select(devices).where(*meant(tenant_id, filters)).order_by(d.id).limit(limit + 1)
    if after is not None:
        query = query.where(d.id > after)
    if user_id is not None:
        query = query.where(d.user_id == user_id)
    found = [read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


def count(tx: Transaction, tenant_id: str, filters: Filters, cutoff: datetime | None = None) -> int:
    """How many devices are meant."""
    return int(tx.execute(select(func.count()).where(*meant(tenant_id, filters, cutoff))).scalar_one())


def zones(tx: Transaction, tenant_id: str, filters: Filters, cutoff: datetime | None = None) -> dict[str | None, int]:
    """How many in each zone (None: it is not known where)."""
    query = (
        select(d.timezone, func.count().label("count")).where(*meant(tenant_id, filters, cutoff)).group_by(d.timezone)
    )
    return {row._mapping["timezone"]: row._mapping["count"] for row in tx.execute(query)}


def left_out(
    tx: Transaction, tenant_id: str, filters: Filters, *where: ColumnElement[bool]
) -> dict[str, int]:  # fmt: skip
    """How many of those devices filters leave out, by why (LeftOut), each once."""
    if filters == Filters():
        return {}
    fits: Any = and_(*meant(tenant_id, replace(filters, push_on=False, marketing_on=False)))
    wants: Any = d.push_on if filters.push_on else true()
    consents: Any = d.marketing_on if filters.marketing_on else true()
    why = case(
        (and_(fits, wants, consents), literal("")), (and_(fits, wants), literal(LeftOut.MARKETING_OFF.value)),
        (fits, literal(LeftOut.PUSH_OFF.value)), else_=literal(LeftOut.FILTERS.value),
    ).label("why")  # fmt: skip
    each = select(why).where(d.tenant_id == tenant_id, *where).subquery()
    rows = tx.execute(select(each.c.why, func.count().label("count")).group_by(each.c.why))
    return {row._mapping["why"]: row._mapping["count"] for row in rows if row._mapping["why"]}


def has_topic(tx: Transaction, tenant_id: str, topic: str) -> bool:
    """Whether any device is in it."""
    query = select(d.id).where(*meant(tenant_id, Filters(topic=topic))).limit(1)
    return tx.execute(query).first() is not None


def meant(tenant_id: str, filters: Filters, cutoff: datetime | None = None) -> list[ColumnElement[bool]]:
    """The conditions of an audience; `cutoff`: who was registered later is not in it."""
    found = [d.tenant_id == tenant_id]
    if cutoff is not None:
        found.append(d.created_at <= cutoff)
    for name in ("gender", "platform", "language", "timezone"):
        if (value := getattr(filters, name)) is not None:
            found.append(d[name] == value)
    if filters.audience is not None:
        m = members.c
        mine = (m.tenant_id == tenant_id) & (m.audience == filters.audience) & (m.device_id == d.id)
        found.append(select(m.device_id).where(mine).exists())
    if filters.age_min is not None:
        found.append(d.age >= filters.age_min)
    if filters.age_max is not None:
        found.append(d.age <= filters.age_max)
    if filters.push_on:
        found.append(d.push_on)
    if filters.marketing_on:
        found.append(d.marketing_on)
    if filters.topic is not None:
        found.append(_has(d.topics, written(filters.topic)))
    for name, value in filters.attributes.items():
        member = f"{written(name)}:{written(value)}"
        found.append(_has(d.attributes, f"{member},") | _has(d.attributes, f"{member}}}"))
    return found


def _has(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    """Whether a text is in a column, to the letter: LIKE is not, on SQLite."""
    return func.replace(column, text, "") != column


def _by_hash(tx: Transaction, tenant_id: str, hashes: Iterable[str], *, lock: bool = False) -> dict[str, Device]:
    query = select(devices).where(d.tenant_id == tenant_id, d.token_hash.in_(list(hashes))).order_by(d.id)
    return {row.token_hash: read(row) for row in tx.execute(query.with_for_update() if lock else query)}


def _record(tx: Transaction, tenant_id: str, device: Device, hashed: str, now: datetime) -> dict[str, Any]:
    at = tx.dialect.to_db(now)
    return {
        "id": device.id, "tenant_id": tenant_id, "token": device.token, "token_hash": hashed,
        "user_id": device.user_id, "platform": device.platform, "gender": device.gender, "age": device.age,
        "language": device.language, "timezone": device.timezone, "push_on": device.push_on,
        "marketing_on": device.marketing_on, "topics": written(list(device.topics)),
        "attributes": written(dict(device.attributes)), "created_at": at, "updated_at": at,
    }  # fmt: skip


def read(row: Row[Any]) -> Device:
    """A row as a Device."""
    return Device(
        id=row.id, token=row.token, user_id=row.user_id, platform=row.platform, gender=row.gender, age=row.age,
        language=row.language, timezone=row.timezone, push_on=row.push_on, marketing_on=row.marketing_on,
        topics=tuple(decode(row.topics)), attributes=decode(row.attributes),
    )  # fmt: skip
