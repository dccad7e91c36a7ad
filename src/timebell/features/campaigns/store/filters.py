"""Filters as SQL: the conditions of an audience. Comparisons with an unknown value are never true.

SQL evaluates such a comparison to NULL, and so `all` and `any`; only `not` has to turn NULL into false.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Double, Integer, and_, case, cast, false, func, or_, select, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from timebell.features.campaigns.model.device import encode_sorted
from timebell.features.campaigns.model.filters import Filters, FrequencyCap, Range
from timebell.features.campaigns.store.segments import expand_segments
from timebell.features.campaigns.store.tables import campaigns, deliveries, devices, members
from timebell.store.transaction import Transaction

Condition = ColumnElement[bool]


def audience_conditions(
    tx: Transaction, tenant_id: str, filters: Filters, at: datetime, campaign_id: str | None = None,
    cutoff: datetime | None = None,
) -> list[Condition]:  # fmt: skip
    """Return the SQL conditions of an audience.

    Ages and days refer to `at`. Messages of the campaign `campaign_id` do not count for the frequency cap. Devices
    registered after `cutoff` are excluded.
    """
    conditions = device_conditions(tx, tenant_id, filters, at, cutoff)
    if filters.frequency_cap is not None:
        conditions.append(below_cap(tx, tenant_id, filters.frequency_cap, at, campaign_id))
    if filters.one_per_user:
        conditions.append(is_chosen_device(tx, tenant_id, filters, at, cutoff))
    return conditions


def device_conditions(
    tx: Transaction, tenant_id: str, filters: Filters, at: datetime, cutoff: datetime | None = None,
    device: Any = devices.c,
) -> list[Condition]:  # fmt: skip
    """Return the conditions of an audience without `one_per_user` and `frequency_cap`, on the columns `device`."""
    conditions = [device.tenant_id == tenant_id]
    if cutoff is not None:
        conditions.append(device.created_at <= cutoff)
    return conditions + _compile(tx, expand_segments(tx, tenant_id, filters), at, device)


def is_chosen_device(
    tx: Transaction, tenant_id: str, filters: Filters, at: datetime, cutoff: datetime | None
) -> Condition:  # fmt: skip
    """Return the condition that no newer device of the same user matches.

    The ids are in the order of creation and never change, so the choice is the same throughout a campaign.
    """
    other = devices.alias("other")
    same_user = (other.c.user_id == devices.c.user_id) & (other.c.id > devices.c.id)
    matches = device_conditions(tx, tenant_id, filters, at, cutoff, other.c)
    return ~select(other.c.id).where(same_user, *matches).exists()


def below_cap(
    tx: Transaction, tenant_id: str, cap: FrequencyCap, at: datetime, campaign_id: str | None
) -> Condition:  # fmt: skip
    """Return the condition that a device got fewer messages of recent campaigns than the cap.

    The campaigns are looked up first, so that the database searches their deliveries by primary key.
    """
    c = campaigns.c
    recent = select(c.id).where(c.tenant_id == tenant_id, c.started_at > at - timedelta(days=cap.days))
    ids = [id_ for id_ in tx.execute(recent).scalars() if id_ != campaign_id]
    if not ids:
        return true()
    received = (deliveries.c.campaign_id.in_(ids)) & (deliveries.c.recipient == devices.c.id)
    received &= deliveries.c.state.in_(["sending", "accepted", "unknown"])
    count = select(func.count()).select_from(deliveries).where(received).scalar_subquery()
    return count < cap.messages


class _Position(FunctionElement[int]):
    """The position of a text in a column, from 1, and 0 without it. Case-sensitive, which LIKE is not on SQLite."""

    type = Integer()
    inherit_cache = True


@compiles(_Position)
def _compile_position(element: Any, compiler: Any, **options: Any) -> str:
    return f"instr({compiler.process(element.clauses, **options)})"


@compiles(_Position, "postgresql")
def _compile_position_on_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return f"strpos({compiler.process(element.clauses, **options)})"


def contains_exactly(column: ColumnElement[str], text: str) -> Condition:
    """Return the condition that a column contains a text, case-sensitively."""
    return _Position(column, text) > 0


def _compile(tx: Transaction, filters: Filters, at: datetime, device: Any) -> list[Condition]:
    conditions = [
        *_field_conditions(filters, at, device),
        *(_attribute_condition(tx, device.attributes, name, values) for name, values in filters.attributes.items()),
        *_membership_conditions(filters, device),
        *(_conjunction(tx, inner, at, device) for inner in filters.all_of),
        *(~func.coalesce(_conjunction(tx, inner, at, device), false()) for inner in filters.none_of),
    ]
    if filters.any_of:
        conditions.append(or_(*(_conjunction(tx, inner, at, device) for inner in filters.any_of)))
    return conditions


def _field_conditions(filters: Filters, at: datetime, device: Any) -> Iterator[Condition]:
    for name in ("gender", "platform", "language", "timezone"):
        if values := getattr(filters, name):
            yield device[name].in_(values)
    if filters.age_min is not None:
        yield _is_at_least(device, filters.age_min, at)
    if filters.age_max is not None:
        is_known = device.birth_date.is_not(None) | device.age.is_not(None)
        yield is_known & ~func.coalesce(_is_at_least(device, filters.age_max + 1, at), false())
    if filters.push_on:
        yield device.push_on
    if filters.marketing_on:
        yield device.marketing_on
    if filters.seen_within_days is not None:
        yield device.updated_at >= at - timedelta(days=filters.seen_within_days)
    if filters.not_seen_for_days is not None:
        yield device.updated_at < at - timedelta(days=filters.not_seen_for_days)


def _membership_conditions(filters: Filters, device: Any) -> Iterator[Condition]:
    if filters.topic:
        yield or_(*(contains_exactly(device.topics, encode_sorted(topic)) for topic in filters.topic))
    if filters.audience:
        m = members.c
        is_member = (m.tenant_id == device.tenant_id) & (m.device_id == device.id) & m.audience.in_(filters.audience)
        yield select(m.device_id).where(is_member).exists()
    if filters.received:
        t = deliveries.c
        accepted = t.campaign_id.in_(filters.received) & (t.recipient == device.id) & (t.state == "accepted")
        yield select(t.recipient).where(accepted).exists()


def _conjunction(tx: Transaction, filters: Filters, at: datetime, device: Any) -> Condition:
    return and_(true(), *_compile(tx, filters, at, device))


def _is_at_least(device: Any, years: int, at: datetime) -> Condition:
    """Return the condition that the user of a device has an age; the birth date takes precedence.

    Dates are stored as ISO text and compared as such, so the limit may be a day that does not exist: a user born on
    29 February has a birthday on 1 March in other years.
    """
    limit = f"{at.year - years:04}-{at:%m-%d}"
    condition: Condition = case((device.birth_date.is_not(None), device.birth_date <= limit), else_=device.age >= years)
    return condition


def _attribute_condition(
    tx: Transaction, attributes: ColumnElement[str], name: str, values: Sequence[Any] | Range
) -> Condition:  # fmt: skip
    prefix = f"{encode_sorted(name)}:"
    if not isinstance(values, Range):
        members = [f"{prefix}{encode_sorted(value)}" for value in values]
        return or_(*(contains_exactly(attributes, f"{member}{end}") for member in members for end in (",", "}")))
    # CASE guarantees that only numbers are converted; the database may evaluate other conditions in any order.
    is_number = contains_exactly(attributes, prefix)
    for start in ('"', "t", "f"):
        is_number &= ~contains_exactly(attributes, f"{prefix}{start}")
    number = case((is_number, cast(tx.dialect.json_text(attributes, [name]), Double)))
    limits = ((values.minimum, number.__ge__), (values.maximum, number.__le__))
    return and_(*(compare(limit) for limit, compare in limits if limit is not None))
