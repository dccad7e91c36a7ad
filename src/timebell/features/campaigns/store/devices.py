"""Device repository: register, refresh tokens, find, and filter the devices of an audience."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, case, delete, false, func, literal, null, select, true, update

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.campaign import ExclusionReason
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.model.device import DEVICE_FIELDS, Device, encode_sorted, hash_token
from timebell.features.campaigns.model.filters import Filters, Range
from timebell.features.campaigns.store.filters import (
    audience_conditions,
    below_cap,
    contains_exactly,
    device_conditions,
    is_chosen_device,
)
from timebell.features.campaigns.store.segments import expand_segments
from timebell.features.campaigns.store.tables import devices, notifications
from timebell.ids import new_ids
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.store.jobs import repository
from timebell.store.transaction import Transaction

d = devices.c
ATTRIBUTE_SAMPLE_SIZE = 20
"""Devices whose attributes are compared with a filter."""
_KEY = ("token_hash",)
_IMMUTABLE_COLUMNS = ("id", "tenant_id", "token", "created_at", *_KEY)
_COLUMNS = (
    "id", "tenant_id", "token", "token_hash", "user_id", "platform", "gender", "age", "birth_date", "language",
    "timezone", "push_on", "marketing_on", "topics", "attributes", "created_at", "updated_at",
)  # fmt: skip
_NO_FIELDS: Mapping[str, Any] = {}
_MUTABLE_COLUMNS = tuple(name for name in _COLUMNS if name not in _IMMUTABLE_COLUMNS)


def register_devices(
    tx: Transaction, tenant_id: str, registrations: Sequence[tuple[str, Mapping[str, Any]]], now: datetime
) -> int:
    """Insert or update devices from (token, validated fields); return the number of new devices.

    Fields that are not specified for a known device stay unchanged, and so do attributes; an attribute that is None is
    removed.
    """
    repository.ensure_tenants(tx, {tenant_id}, now)
    by_hash: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for token, fields in registrations:
        hashed = hash_token(tenant_id, token)
        if (earlier := by_hash.get(hashed)) is not None:
            fields = _merge(earlier[1], fields)
        by_hash[hashed] = token, fields
    existing = _find_by_hash(tx, by_hash, lock=True)
    rows, written_at = [], tx.dialect.to_db(now)
    for (hashed, (token, fields)), id_ in zip(by_hash.items(), new_ids(now, len(by_hash)), strict=True):
        if (device := existing.get(hashed)) is not None:
            id_, fields = device.id, _merge({name: getattr(device, name) for name in DEVICE_FIELDS}, fields)
        rows.append(_to_row(id_, tenant_id, token, hashed, fields, written_at))
    if rows:
        tx.bulk_upsert(devices, _COLUMNS, rows, key=_KEY, replace=_MUTABLE_COLUMNS)
    return len(by_hash) - len(existing)


def _merge(known: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return known fields of a device, replaced by those of a later registration; attributes one by one."""
    attributes = {**known.get("attributes", _NO_FIELDS), **fields.get("attributes", _NO_FIELDS)}
    return {**known, **fields, "attributes": attributes}


def replace_token(tx: Transaction, tenant_id: str, old: str, new: str, now: datetime) -> Device | None:
    """Give the device of an old token the new one; None if neither token is known.

    If both tokens are known, the device of the old one is deleted. Repeating the call has no further effect.
    """
    hashes = {hash_token(tenant_id, old), hash_token(tenant_id, new)}
    known = _find_by_hash(tx, hashes, lock=True)
    old_device, new_device = known.get(hash_token(tenant_id, old)), known.get(hash_token(tenant_id, new))
    if old_device is None or hash_token(tenant_id, old) == hash_token(tenant_id, new):
        return new_device or old_device
    if new_device is not None:  # the new token was registered meanwhile
        tx.execute(delete(devices).where(d.id == old_device.id))
        return new_device
    renamed = update(devices).where(d.id == old_device.id)
    tx.execute(renamed.values(token=new, token_hash=hash_token(tenant_id, new), updated_at=now))
    return replace(old_device, token=new, seen_at=now)


def delete_by_token(tx: Transaction, tenant_id: str, tokens: Iterable[str]) -> int:
    """Delete the devices of these tokens; return how many existed."""
    hashes = [hash_token(tenant_id, token) for token in tokens]
    return tx.execute(delete(devices).where(d.token_hash.in_(hashes))).rowcount


def delete_dead(tx: Transaction, tenant_id: str, dead: Sequence[tuple[str, str]]) -> int:
    """Delete devices (id, token) with an invalid token according to the provider, unless the token was replaced."""
    if not dead:
        return 0
    matches = d.id.in_([id_ for id_, _ in dead]) & d.token_hash.in_([hash_token(tenant_id, token) for _, token in dead])
    return tx.execute(delete(devices).where(d.tenant_id == tenant_id, matches)).rowcount


def find_notified_devices(tx: Transaction, tenant_id: str, notification_id: str) -> set[str]:
    """Return the ids of devices for which a notification was accepted."""
    n = notifications.c
    query = select(n.device_id).where(n.tenant_id == tenant_id, n.notification_id == notification_id)
    return set(tx.execute(query).scalars())


def record_notification(
    tx: Transaction, tenant_id: str, notification_id: str | None, accepted: Sequence[str],
    dead: Sequence[tuple[str, str]], now: datetime,
) -> None:  # fmt: skip
    """Record the devices that a notification was accepted for, and delete dead ones."""
    if accepted and notification_id is not None:
        tx.execute(tx.dialect.insert_ignoring_duplicates(notifications), [
            {"tenant_id": tenant_id, "notification_id": notification_id, "device_id": id_, "accepted_at": now}
            for id_ in accepted
        ])  # fmt: skip
    delete_dead(tx, tenant_id, dead)


def prune_notifications(tx: Transaction, before: datetime) -> int:
    """Delete the records of notifications accepted before an instant; return how many."""
    return tx.execute(delete(notifications).where(notifications.c.accepted_at < before)).rowcount


def find_device(tx: Transaction, tenant_id: str, id_: str) -> Device | None:
    """Return a device by id; None if there is none."""
    row = tx.execute(select(devices).where(d.tenant_id == tenant_id, d.id == id_)).first()
    return None if row is None else device_from_row(row)


def delete_device(tx: Transaction, tenant_id: str, id_: str) -> bool:
    """Delete a device; return whether it existed."""
    return bool(tx.execute(delete(devices).where(d.tenant_id == tenant_id, d.id == id_)).rowcount)


def delete_devices_of_user(tx: Transaction, tenant_id: str, user_id: str) -> None:
    """Delete the devices of a user."""
    tx.execute(delete(devices).where(d.tenant_id == tenant_id, d.user_id == user_id))


def find_by_token(tx: Transaction, tenant_id: str, token: str) -> Device | None:
    """Return the device with this token; None if there is none."""
    return _find_by_hash(tx, [hash_token(tenant_id, token)]).get(hash_token(tenant_id, token))


def list_user_devices(tx: Transaction, tenant_id: str, user_id: str, limit: int = 500) -> list[Device]:
    """Return a user's devices with push enabled, in id order."""
    matches = (d.tenant_id == tenant_id) & (d.user_id == user_id) & d.push_on
    return [device_from_row(row) for row in tx.execute(select(devices).where(matches).order_by(d.id).limit(limit))]


def list_devices(
    tx: Transaction, tenant_id: str, limit: int, after: str | None, filters: Filters, user_id: str | None,
    at: datetime, token_prefix: str | None = None,
) -> Page[Device]:  # fmt: skip
    """Return a page of a tenant's devices in id order, the order in which campaigns send."""
    query = select(devices).where(*audience_conditions(tx, tenant_id, filters, at)).order_by(d.id).limit(limit + 1)
    if after is not None:
        query = query.where(d.id > after)
    if user_id is not None:
        query = query.where(d.user_id == user_id)
    if token_prefix is not None:  # no LIKE, which ignores case on SQLite
        query = query.where(func.substr(d.token, 1, len(token_prefix)) == token_prefix)
    page = [device_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)


def count_audience(tx: Transaction, tenant_id: str, filters: Filters, at: datetime) -> dict[str | None, int]:
    """Return the number of devices by time zone for filters of a user. Raises InvalidInput (INVALID_FILTER)."""
    check_attribute_types(tx, tenant_id, expand_segments(tx, tenant_id, filters))
    return count_by_timezone(tx, tenant_id, filters, at)


def count_devices(
    tx: Transaction, tenant_id: str, filters: Filters, at: datetime, campaign_id: str | None = None,
    cutoff: datetime | None = None,
) -> int:  # fmt: skip
    """Return the number of devices in an audience; see `audience_conditions`."""
    conditions = audience_conditions(tx, tenant_id, filters, at, campaign_id, cutoff)
    return int(tx.execute(select(func.count()).select_from(devices).where(*conditions)).scalar_one())


def count_by_timezone(
    tx: Transaction, tenant_id: str, filters: Filters, at: datetime, campaign_id: str | None = None
) -> dict[str | None, int]:
    """Return the number of devices in an audience by time zone; None is the key for unknown zones."""
    conditions = audience_conditions(tx, tenant_id, filters, at, campaign_id)
    query = select(d.timezone, func.count().label("count")).where(*conditions).group_by(d.timezone)
    return {row._mapping["timezone"]: row._mapping["count"] for row in tx.execute(query).all()}


def count_by_reason(
    tx: Transaction, campaign: Campaign, *where: ColumnElement[bool], by_timezone: bool = False
) -> dict[tuple[ExclusionReason | None, str | None], int]:  # fmt: skip
    """Return the number of devices under `where` by the reason why they are not recipients, None if they are.

    Each device counts once. The second part of the key is its time zone if `by_timezone`, otherwise None.
    """
    tenant_id, filters, at = campaign.tenant_id, campaign.filters, campaign.reference_time
    consents: dict[ExclusionReason, Any] = {
        ExclusionReason.PUSH_OFF: d.push_on if filters.push_on else true(),
        ExclusionReason.MARKETING_OFF: d.marketing_on if filters.marketing_on else true(),
    }
    if filters.frequency_cap is not None:
        consents[ExclusionReason.CAPPED] = below_cap(tx, tenant_id, filters.frequency_cap, at, campaign.id)
    passed: list[Any] = device_conditions(
        tx, tenant_id, replace(filters, push_on=False, marketing_on=False), at, campaign.cutoff
    )
    steps = [(~func.coalesce(and_(*passed), false()), literal(ExclusionReason.FILTERS.value))]
    steps += [(~func.coalesce(condition, false()), literal(why.value)) for why, condition in consents.items()]
    if filters.one_per_user:
        chosen = is_chosen_device(tx, tenant_id, filters, at, campaign.cutoff)
        steps.append((~chosen, literal(ExclusionReason.OTHER_DEVICE.value)))
    reason = case(*steps, else_=literal("")).label("why")
    # Zones matter only for recipients: the others are one group per reason.
    zone = (case((reason == "", d.timezone)) if by_timezone else null()).label("zone")
    classified = select(reason, zone).where(d.tenant_id == tenant_id, *where).subquery()
    columns = (classified.c.why, classified.c.zone)
    rows = tx.execute(select(*columns, func.count().label("many")).group_by(*columns))
    return {(ExclusionReason(row.why) if row.why else None, row.zone): row.many for row in rows}


def check_attribute_types(tx: Transaction, tenant_id: str, filters: Filters) -> None:
    """Check that attributes of filters have the type of the devices' attributes. Raises InvalidInput (INVALID_FILTER).

    A filter of another type, such as 42 for a text "42", would match no device. Attributes that no device has pass.
    """
    for name, values in (item for each in filters.walk() for item in each.attributes.items()):
        has_attribute = contains_exactly(d.attributes, f"{encode_sorted(name)}:")
        query = select(d.attributes).where(d.tenant_id == tenant_id, has_attribute).limit(ATTRIBUTE_SAMPLE_SIZE)
        stored = [decode(text).get(name) for text in tx.execute(query).scalars()]
        kinds = {_describe_type(each) for each in stored if each is not None}
        for value in [0] if isinstance(values, Range) else values:
            if kinds and _describe_type(value) not in kinds:
                example = next(each for each in stored if each is not None)
                requested = "a range" if isinstance(values, Range) else encode_sorted(value)
                raise InvalidInput(
                    f"{name:.60} is {_describe_type(example)}, such as {encode_sorted(example):.60}, but the filter is "
                    f"{_describe_type(value)}: {requested:.60}.",
                    code="INVALID_FILTER",
                    fix="Use a value of the same type, or register the attribute with another type.",
                )


def sample_attributes(tx: Transaction, tenant_id: str) -> dict[str, str]:
    """Return the names of attributes of the newest devices, with the suffix of their type in imports: `:number`."""
    newest = select(d.attributes).where(d.tenant_id == tenant_id).order_by(d.id.desc()).limit(ATTRIBUTE_SAMPLE_SIZE)
    suffixes = {"a text": "", "a boolean": ":boolean", "a number": ":number"}
    stored = [decode(text) for text in tx.execute(newest).scalars()]
    return {name: suffixes[_describe_type(value)] for each in stored for name, value in each.items()}


def _describe_type(value: Any) -> str:
    return "a boolean" if isinstance(value, bool) else "a text" if isinstance(value, str) else "a number"


def topic_has_devices(tx: Transaction, tenant_id: str, topic: str) -> bool:
    """Return whether any device is subscribed to the topic."""
    subscribed = contains_exactly(d.topics, encode_sorted(topic))
    query = select(d.id).where(d.tenant_id == tenant_id, subscribed).limit(1)
    return tx.execute(query).first() is not None


def _find_by_hash(tx: Transaction, hashes: Iterable[str], *, lock: bool = False) -> dict[str, Device]:
    """Return the devices with these hashes, which include the tenant."""
    query = select(devices).order_by(d.token_hash)
    if lock:
        query = query.with_for_update()
    rows = tx.execute(tx.dialect.match_keys(query, d.token_hash, list(hashes))).all()
    return {row.token_hash: device_from_row(row) for row in rows}


def _to_row(
    id_: str, tenant_id: str, token: str, hashed: str, fields: Mapping[str, Any], now: Any
) -> tuple[Any, ...]:  # fmt: skip
    """Return a device as a row of _COLUMNS; attributes that are None are removed."""
    get = fields.get
    birth_date, topics, attributes = get("birth_date"), get("topics"), get("attributes")
    if attributes and None in attributes.values():
        attributes = {name: value for name, value in attributes.items() if value is not None}
    return (
        id_, tenant_id, token, hashed, get("user_id"), get("platform"), get("gender"), get("age"),
        None if birth_date is None else birth_date.isoformat(), get("language"), get("timezone"),
        get("push_on", True), get("marketing_on"), encode_sorted(topics) if topics else "[]",
        encode_sorted(attributes) if attributes else "{}", now, now,
    )  # fmt: skip


def device_from_row(row: Row[Any]) -> Device:
    """Return a row as a Device."""
    return Device(
        id=row.id, token=row.token, user_id=row.user_id, platform=row.platform, gender=row.gender, age=row.age,
        birth_date=None if row.birth_date is None else date.fromisoformat(row.birth_date),
        language=row.language, timezone=row.timezone, push_on=row.push_on, marketing_on=row.marketing_on,
        topics=tuple(decode(row.topics)), attributes=decode(row.attributes), seen_at=row.updated_at,
    )  # fmt: skip
