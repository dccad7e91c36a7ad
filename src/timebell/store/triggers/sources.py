"""Where dated rows are, what is known of these rows, and which triggers watch them: as rows of our own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, insert, select, tuple_, update

from timebell.errors import Conflict, NotFound
from timebell.model import condition as conditions
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry
from timebell.model.schedule import Action
from timebell.model.trigger import SET_ASIDE, UNAUTHORISED, Item, Offset, Rule, Source, Trigger
from timebell.store.jobs.repository import make_tenants
from timebell.store.transaction import Transaction
from timebell.store.triggers.query_sources import no_such_source as no_such_source
from timebell.store.triggers.tables import items, sources, triggers


def put(tx: Transaction, wanted: Source, now: datetime, *, replace: bool) -> Source:
    """Write a source. Raises Conflict (SOURCE_EXISTS, SOURCE_KIND_FIXED)."""
    make_tenants(tx, {wanted.tenant_id}, now)
    row = tx.execute(
        select(sources)
        .where((sources.c.tenant_id == wanted.tenant_id) & (sources.c.name == wanted.name))
        .with_for_update()
    ).first()
    options = encode(wanted.options, "options")
    if row is None:
        tx.execute(insert(sources).values(
            id=wanted.id, tenant_id=wanted.tenant_id, name=wanted.name, kind=wanted.kind, options=options,
            created_at=now, created_by=wanted.created_by, updated_at=now,
        ))  # fmt: skip
        return wanted
    if not replace:
        raise Conflict(
            f"There is a source {wanted.name!r} already.", code="SOURCE_EXISTS", existing=row.id,
            fix="Use another name, or put it to change it.",
        )  # fmt: skip
    if row.kind != wanted.kind:
        raise Conflict(
            f"The source {wanted.name!r} is of kind {row.kind}, and its items are.", code="SOURCE_KIND_FIXED",
            existing=row.id, fix="Make another source.",
        )  # fmt: skip
    if decode(row.options) != wanted.options:
        changed = {"options": options, "cursor": None, "updated_at": now}
        tx.execute(update(sources).where(sources.c.id == row.id).values(**changed))
    return read_source(tx.execute(select(sources).where(sources.c.id == row.id)).one())


def find(tx: Transaction, tenant_id: str, name: str) -> Source | None:
    """A source of a tenant, by its name or its id."""
    mine = (sources.c.tenant_id == tenant_id) & (sources.c.name == name)
    row = tx.execute(select(sources).where(mine)).first()
    return None if row is None else read_source(row)


def locked(tx: Transaction, tenant_id: str, name: str) -> Source | None:
    """A source that nobody else changes before this transaction ends."""
    mine = (sources.c.tenant_id == tenant_id) & (sources.c.name == name)
    row = tx.execute(select(sources).where(mine).with_for_update()).first()
    return None if row is None else read_source(row)


def by_id(tx: Transaction, id_: str) -> Source | None:
    """A source, whoever's it is."""
    row = tx.execute(select(sources).where(sources.c.id == id_)).first()
    return None if row is None else read_source(row)


def page(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Source]:
    """Sources of a tenant, by name."""
    query = select(sources).where(sources.c.tenant_id == tenant_id).order_by(sources.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(sources.c.name > after)
    found = [read_source(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def remove(tx: Transaction, tenant_id: str, name: str) -> Source | None:
    """Forget a source and its items; None for an unknown one. Raises Conflict (SOURCE_IN_USE) while it has triggers."""
    mine = (sources.c.tenant_id == tenant_id) & (sources.c.name == name)
    row = tx.execute(select(sources).where(mine).with_for_update()).first()
    if row is None:
        return None
    using = tx.execute(select(triggers.c.name).where(triggers.c.source_id == row.id).order_by("name")).scalars().all()
    if using:
        raise Conflict(
            f"The source {name!r} has {len(using)} trigger{'s'[: len(using) > 1]}, {using[0]} first.",
            code="SOURCE_IN_USE", existing=using[0], fix="Delete these first.",
        )  # fmt: skip
    tx.execute(delete(items).where(items.c.source_id == row.id))
    tx.execute(delete(sources).where(sources.c.id == row.id))
    return read_source(row)


def orphan(tx: Transaction, source_id: str, reason: str | None, now: datetime) -> None:
    """Access to a source was lost, or with None came back."""
    values = {"orphaned_at": None if reason is None else now, "orphaned_reason": reason}
    tx.execute(update(sources).where(sources.c.id == source_id).values(**values))
    if reason is None:
        tx.notify()


def of_kinds(tx: Transaction, kinds: Collection[str]) -> list[Source]:
    """All sources of these kinds, of all tenants."""
    query = select(sources).where(sources.c.kind.in_(sorted(kinds))).order_by(sources.c.id)
    return [read_source(row) for row in tx.execute(query)]


def failed(tx: Transaction, source_id: str, why: str, code: str) -> None:
    """It, or some of its rows, cannot be read just now; what is known stays."""
    tx.execute(update(sources).where(sources.c.id == source_id).values(fault=why[:1000], fault_code=code))


def synced(tx: Transaction, source_id: str, cursor: str | None, now: datetime, aside: str | None = None) -> None:
    """All of it was looked at; `aside` tells of rows that cannot be kept."""
    values = {
        "cursor": cursor, "synced_at": now, "fault": aside, "fault_code": None if aside is None else SET_ASIDE,
        "orphaned_at": None, "orphaned_reason": None,
    }  # fmt: skip
    tx.execute(update(sources).where(sources.c.id == source_id).values(**values))


def page_of_items(tx: Transaction, source_id: str, limit: int, after: str | None) -> Page[Item]:
    """Items of a source by key, also those that are gone."""
    query = select(items).where(items.c.source_id == source_id).order_by(items.c.key).limit(limit + 1)
    if after is not None:
        query = query.where(items.c.key > after)
    found = [
        Item(key=row.key, version=row.version, fields=decode(row.fields), updated_at=row.updated_at)
        for row in tx.execute(query)
    ]
    return Page(found[:limit], found[limit - 1].key if len(found) > limit else None)


def known_items(tx: Transaction, source_id: str) -> int:
    """How many rows of a source are there, as far as is known."""
    alive = (items.c.source_id == source_id) & items.c.fields.is_not(None)
    return int(tx.execute(select(func.count()).select_from(items).where(alive)).scalar_one())


def unread(tx: Transaction, source_id: str) -> bool:
    """Whether a source that Timebell reads itself has not been looked at wholly by now."""
    row = tx.execute(select(sources.c.kind, sources.c.synced_at).where(sources.c.id == source_id)).one()
    return bool(row.kind != "webhook" and row.synced_at is None)


def trigger(tx: Transaction, tenant_id: str, name: str) -> Trigger | None:
    """A trigger of a tenant."""
    row = tx.execute(select(triggers).where(triggers.c.tenant_id == tenant_id, triggers.c.name == name)).first()
    return None if row is None else _with_sources(tx, [row])[0]


def triggers_by_id(tx: Transaction, ids: Collection[str]) -> dict[str, Trigger]:
    """Triggers, whoever's they are, in order of their ids."""
    rows = tx.execute(select(triggers).where(triggers.c.id.in_(sorted(ids))).order_by(triggers.c.id)).all()
    return {found.id: found for found in _with_sources(tx, rows)}


def sources_by_id(tx: Transaction, ids: Collection[str]) -> dict[str, Source]:
    """Sources, whoever's they are."""
    return {row.id: read_source(row) for row in tx.execute(select(sources).where(sources.c.id.in_(sorted(ids))))}


def by_names(tx: Transaction, names: Collection[tuple[str, str]]) -> dict[tuple[str, str], Source]:
    """Sources by tenant and name."""
    mine = tuple_(sources.c.tenant_id, sources.c.name).in_(sorted(names))
    return {(row.tenant_id, row.name): read_source(row) for row in tx.execute(select(sources).where(mine))}


def of_source(tx: Transaction, source: Source) -> list[Trigger]:
    """All triggers over a source, the paused ones too: their jobs follow the items, and stop at the gate."""
    query = select(triggers).where(triggers.c.source_id == source.id).order_by(triggers.c.id)
    return [read_trigger(row, source) for row in tx.execute(query)]


def page_of_triggers(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Trigger]:
    """Triggers of a tenant, by name."""
    query = select(triggers).where(triggers.c.tenant_id == tenant_id).order_by(triggers.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(triggers.c.name > after)
    found = _with_sources(tx, tx.execute(query).all())
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def _with_sources(tx: Transaction, rows: Sequence[Row[Any]]) -> list[Trigger]:
    homes = sources_by_id(tx, {row.source_id for row in rows})
    return [read_trigger(row, homes[row.source_id]) for row in rows]


def rule_json(rule: Rule) -> dict[str, Any]:
    """A rule as it is kept."""
    return {
        "column": rule.column, "offsets": [str(one) for one in rule.offsets], "timezone": rule.timezone,
        "recipients": rule.recipients, "condition": [one.to_json() for one in rule.condition], "grace": rule.grace,
        "unless": rule.unless,
    }  # fmt: skip


def _rule(said: Mapping[str, Any]) -> Rule:
    return Rule(
        column=said["column"], offsets=tuple(Offset.read(one) for one in said["offsets"]), timezone=said["timezone"],
        recipients=said["recipients"], condition=conditions.read(said["condition"]), grace=said["grace"],
        unless=said["unless"],
    )  # fmt: skip


_KEPT = ("topic", "payload", "metadata", "owner_id", "target", "queue", "priority", "group", "timeout", "expires_after")


def action_json(action: Action) -> dict[str, Any]:
    retry = None if action.retry is None else action.retry.to_json()
    return {name: getattr(action, name) for name in _KEPT} | {"retry": retry}


def _action(said: dict[str, Any]) -> Action:
    return Action(**{**said, "retry": Retry.read(said["retry"])})


def read_trigger(row: Row[Any], source: Source) -> Trigger:
    """A row as a Trigger."""
    return Trigger(
        id=row.id, tenant_id=row.tenant_id, name=row.name, source_id=row.source_id, source=source.name,
        board=str(source.options.get("boardId", source.name)), orphaned=source.orphaned_reason,
        unauthorised=source.fault if source.fault_code == UNAUTHORISED else None,
        rule=_rule(decode(row.rule)), action=_action(decode(row.action)), enabled=row.enabled,
        pause_reason=row.pause_reason, revision=row.revision, created_at=row.created_at, created_by=row.created_by,
        updated_at=row.updated_at,
    )  # fmt: skip


def read_source(row: Row[Any]) -> Source:
    """A row as a Source."""
    return Source(
        id=row.id, tenant_id=row.tenant_id, name=row.name, kind=row.kind, options=decode(row.options),
        cursor=row.cursor, synced_at=row.synced_at, fault=row.fault, fault_code=row.fault_code,
        orphaned_at=row.orphaned_at, orphaned_reason=row.orphaned_reason, created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip


def no_such_trigger(name: str) -> NotFound:
    """The error for a name that nobody has."""
    return NotFound(f"There is no trigger {name!r:.80}.", code="TRIGGER_NOT_FOUND")
