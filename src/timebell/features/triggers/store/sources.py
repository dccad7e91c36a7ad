"""Repository of trigger sources, their items, and the triggers defined on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, bindparam, delete, func, insert, select, tuple_, update

from timebell.errors import Conflict, InvalidInput, NotFound
from timebell.features.triggers.model.trigger import (
    SOURCE_ROWS_REJECTED,
    SOURCE_UNAUTHORIZED,
    Item,
    Offset,
    Source,
    Trigger,
    TriggerRule,
)
from timebell.features.triggers.store.tables import items, triggers
from timebell.model import condition as conditions
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry
from timebell.model.schedule import Action
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import sources
from timebell.store.transaction import JOBS, Transaction

COLUMN_SAMPLE_SIZE = 20
INTERVAL_OPTIONS = ("everySeconds", "sweepEverySeconds")
SOURCES = "sources"
"""Subject of notifications: a source is to be read."""


def upsert_source(
    tx: Transaction, source: Source, now: datetime, *, replace: bool, intervals: Mapping[str, float] | None = None
) -> Source:
    """Store a source; changed options start a new scan. The position of its changes is kept if only intervals differ.

    `intervals` are the seconds between full scans, by name, of this source and of those whose daily calls it shares.
    Raises Conflict (SOURCE_EXISTS, SOURCE_KIND_FIXED), InvalidInput (GRACE_TOO_SHORT).
    """
    ensure_tenants(tx, {source.tenant_id}, now)
    row = tx.execute(
        select(sources)
        .where((sources.c.tenant_id == source.tenant_id) & (sources.c.name == source.name))
        .with_for_update()
    ).first()
    options = encode(source.options, "options")
    if row is None:
        tx.execute(insert(sources).values(
            id=source.id, tenant_id=source.tenant_id, name=source.name, kind=source.kind, options=options,
            created_at=now, created_by=source.created_by, updated_at=now,
        ))  # fmt: skip
        _check_graces(tx, source.tenant_id, intervals or {})
        tx.notify(SOURCES)
        return source
    if not replace:
        raise Conflict(
            f"A source named {source.name!r} already exists.", code="SOURCE_EXISTS", existing=row.id,
            fix="Use another name, or replace the source with PUT.",
        )  # fmt: skip
    if row.kind != source.kind:
        raise Conflict(
            f"The source {source.name!r} is of kind {row.kind}, which cannot change.", code="SOURCE_KIND_FIXED",
            existing=row.id, fix="Create another source.",
        )  # fmt: skip
    stored = decode(row.options)
    if stored != source.options:
        _check_graces(tx, source.tenant_id, intervals or {})
        is_read_alike = _without_intervals(stored) == _without_intervals(source.options)
        cursor = _position_of_changes(row.cursor) if is_read_alike else None
        changed = {"options": options, "cursor": cursor, "updated_at": now}
        tx.execute(update(sources).where(sources.c.id == row.id).values(**changed))
        tx.notify(SOURCES)
    return source_from_row(tx.execute(select(sources).where(sources.c.id == row.id)).one())


def _without_intervals(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in INTERVAL_OPTIONS}


def _position_of_changes(cursor: str | None) -> str | None:
    """Return a cursor without the scan in progress.

    Changes from then on are read at once, and not only when the new scan reaches their rows.
    """
    changes = decode(cursor or "{}").get("changes")
    return None if changes is None else encode({"changes": changes})


def _check_graces(tx: Transaction, tenant_id: str, intervals: Mapping[str, float]) -> None:
    """Raise InvalidInput (GRACE_TOO_SHORT) if a trigger's grace is not longer than the interval of its source."""
    query = select(triggers.c.name, triggers.c.rule, sources.c.name.label("source")).join(
        sources, sources.c.id == triggers.c.source_id
    )
    names = [name for name, interval in intervals.items() if interval > 0]
    for row in tx.execute(query.where((sources.c.tenant_id == tenant_id) & sources.c.name.in_(names))):
        grace = decode(row.rule)["grace"]
        if grace <= intervals[row.source]:
            raise grace_too_short(row.name, grace, intervals[row.source])


def find_source(tx: Transaction, tenant_id: str, name: str) -> Source | None:
    """Return a source of a tenant by name; None if there is none."""
    matches = (sources.c.tenant_id == tenant_id) & (sources.c.name == name)
    row = tx.execute(select(sources).where(matches)).first()
    return None if row is None else source_from_row(row)


def lock_source(tx: Transaction, tenant_id: str, name: str) -> Source | None:
    """Return a source by name, locked until the transaction ends; None if there is none."""
    matches = (sources.c.tenant_id == tenant_id) & (sources.c.name == name)
    row = tx.execute(select(sources).where(matches).with_for_update()).first()
    return None if row is None else source_from_row(row)


def find_source_by_id(tx: Transaction, id_: str) -> Source | None:
    """Return a source of any tenant by id; None if there is none."""
    row = tx.execute(select(sources).where(sources.c.id == id_)).first()
    return None if row is None else source_from_row(row)


def list_sources(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Source]:
    """Return a page of a tenant's sources in name order."""
    query = select(sources).where(sources.c.tenant_id == tenant_id).order_by(sources.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(sources.c.name > after)
    page = [source_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def delete_source(tx: Transaction, tenant_id: str, name: str) -> Source | None:
    """Delete a source and its items; None for an unknown one. Raises Conflict (SOURCE_IN_USE) while it has triggers."""
    matches = (sources.c.tenant_id == tenant_id) & (sources.c.name == name)
    row = tx.execute(select(sources).where(matches).with_for_update()).first()
    if row is None:
        return None
    trigger_names = (
        tx.execute(select(triggers.c.name).where(triggers.c.source_id == row.id).order_by("name")).scalars().all()
    )
    if trigger_names:
        raise Conflict(
            f"The source {name!r} has {len(trigger_names)} trigger{'s'[: len(trigger_names) > 1]},"
            f" e.g. {trigger_names[0]}.",
            code="SOURCE_IN_USE", existing=trigger_names[0], fix="Delete its triggers first.",
        )  # fmt: skip
    tx.execute(delete(items).where(items.c.source_id == row.id))
    tx.execute(delete(sources).where(sources.c.id == row.id))
    tx.notify(SOURCES)
    return source_from_row(row)


def set_orphaned(tx: Transaction, source_id: str, reason: str | None, now: datetime) -> None:
    """Record that access to a source was lost for `reason`, or restored if None."""
    values = {"orphaned_at": None if reason is None else now, "orphaned_reason": reason}
    tx.execute(update(sources).where(sources.c.id == source_id).values(**values))
    if reason is None:
        tx.notify(JOBS)


_SOURCES_OF_KINDS = select(sources).where(sources.c.kind.in_(bindparam("kinds", expanding=True))).order_by(sources.c.id)


def list_sources_of_kinds(tx: Transaction, kinds: Collection[str], tenant_id: str | None = None) -> list[Source]:
    """Return all sources of these kinds, of one tenant or of all."""
    query = _SOURCES_OF_KINDS if tenant_id is None else _SOURCES_OF_KINDS.where(sources.c.tenant_id == tenant_id)
    return [source_from_row(row) for row in tx.execute(query, {"kinds": sorted(kinds)})]


def record_failure(tx: Transaction, source_id: str, error: str, code: str) -> None:
    """Record that a source or some of its rows cannot be read; known items are kept."""
    tx.execute(update(sources).where(sources.c.id == source_id).values(error=error[:1000], error_code=code))


def record_full_scan(
    tx: Transaction, source_id: str, cursor: str | None, now: datetime, storage_error: str | None = None
) -> None:
    """Record a finished full scan; `storage_error` describes rows that could not be stored, if any."""
    values = {
        "cursor": cursor, "synced_at": now, "error": storage_error,
        "error_code": None if storage_error is None else SOURCE_ROWS_REJECTED, "orphaned_at": None,
        "orphaned_reason": None,
    }  # fmt: skip
    tx.execute(update(sources).where(sources.c.id == source_id).values(**values))


def list_items(
    tx: Transaction, source_id: str, limit: int, after: str | None, start: datetime | None = None,
    end: datetime | None = None, *, rejected: bool = False,
) -> Page[Item]:  # fmt: skip
    """Return a page of a source's items updated in [start, end), in key order, including those that are gone.

    With `rejected`, only the rejected ones.
    """
    query = select(items).where(items.c.source_id == source_id).order_by(items.c.key).limit(limit + 1)
    if rejected:
        query = query.where(items.c.problem.is_not(None))
    if start is not None:
        query = query.where(items.c.updated_at >= start)
    if end is not None:
        query = query.where(items.c.updated_at < end)
    if after is not None:
        query = query.where(items.c.key > after)
    page = [
        Item(
            key=row.key, version=row.version, fields=decode(row.fields), problem=row.problem, updated_at=row.updated_at
        )
        for row in tx.execute(query)
    ]
    return Page(page[:limit], page[limit - 1].key if len(page) > limit else None)


def list_known_columns(tx: Transaction, source_id: str) -> set[str]:
    """Return the columns of some items of a source; empty if none is known."""
    alive = (items.c.source_id == source_id) & items.c.fields.is_not(None)
    sample = tx.execute(select(items.c.fields).where(alive).limit(COLUMN_SAMPLE_SIZE)).scalars()
    return {column for fields in sample for column in decode(fields)}


def count_items(tx: Transaction, source_id: str) -> int:
    """Return the number of known items of a source that are not gone."""
    alive = (items.c.source_id == source_id) & items.c.fields.is_not(None)
    return int(tx.execute(select(func.count()).select_from(items).where(alive)).scalar_one())


def count_rows_of_first_scan(tx: Transaction, source_id: str) -> int | None:
    """Return how many rows the first full scan of a polled source has read; None if it has ended."""
    row = tx.execute(
        select(sources.c.kind, sources.c.synced_at, sources.c.cursor).where(sources.c.id == source_id)
    ).one()
    if row.kind == "webhook" or row.synced_at is not None:
        return None
    return int(decode(row.cursor or "{}").get("rows", 0))  # the poller stores it with the position of the scan


def find_trigger(tx: Transaction, tenant_id: str, name: str) -> Trigger | None:
    """Return a trigger of a tenant by name; None if there is none."""
    row = tx.execute(select(triggers).where(triggers.c.tenant_id == tenant_id, triggers.c.name == name)).first()
    return None if row is None else _triggers_from_rows(tx, [row])[0]


def find_triggers(tx: Transaction, ids: Collection[str]) -> dict[str, Trigger]:
    """Return triggers of any tenant by id, in id order."""
    rows = tx.execute(select(triggers).where(triggers.c.id.in_(sorted(ids))).order_by(triggers.c.id)).all()
    return {trigger.id: trigger for trigger in _triggers_from_rows(tx, rows)}


def find_sources(tx: Transaction, ids: Collection[str]) -> dict[str, Source]:
    """Return sources of any tenant by id."""
    return {row.id: source_from_row(row) for row in tx.execute(select(sources).where(sources.c.id.in_(sorted(ids))))}


def find_sources_by_name(tx: Transaction, names: Collection[tuple[str, str]]) -> dict[tuple[str, str], Source]:
    """Return sources by tenant and name."""
    matches = tuple_(sources.c.tenant_id, sources.c.name).in_(sorted(names))
    return {(row.tenant_id, row.name): source_from_row(row) for row in tx.execute(select(sources).where(matches))}


def list_triggers_of_source(tx: Transaction, source: Source) -> list[Trigger]:
    """Return all triggers of a source. Includes paused ones: their jobs are planned, and skipped before delivery."""
    query = select(triggers).where(triggers.c.source_id == source.id).order_by(triggers.c.id)
    return [trigger_from_row(row, source) for row in tx.execute(query)]


def list_triggers(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Trigger]:
    """Return a page of a tenant's triggers in name order."""
    query = select(triggers).where(triggers.c.tenant_id == tenant_id).order_by(triggers.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(triggers.c.name > after)
    page = _triggers_from_rows(tx, tx.execute(query).all())
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def _triggers_from_rows(tx: Transaction, rows: Sequence[Row[Any]]) -> list[Trigger]:
    sources_by_id = find_sources(tx, {row.source_id for row in rows})
    return [trigger_from_row(row, sources_by_id[row.source_id]) for row in rows]


def rule_to_json(rule: TriggerRule) -> dict[str, Any]:
    """Return a rule as stored."""
    return {
        "column": rule.column, "offsets": [str(offset) for offset in rule.offsets], "timezone": rule.timezone,
        "zone_column": rule.zone_column, "edge": rule.edge,
        "recipients": rule.recipients, "condition": [comparison.to_json() for comparison in rule.condition],
        "grace": rule.grace, "unless": rule.unless,
    }  # fmt: skip


def _rule_from_json(stored: Mapping[str, Any]) -> TriggerRule:
    return TriggerRule(
        column=stored["column"], offsets=tuple(Offset.parse(text) for text in stored["offsets"]),
        timezone=stored["timezone"], zone_column=stored["zone_column"], edge=stored["edge"],
        recipients=stored["recipients"],
        condition=conditions.parse_comparisons(stored["condition"]), grace=stored["grace"], unless=stored["unless"],
    )  # fmt: skip


_STORED_ACTION_FIELDS = (
    "topic",
    "payload",
    "metadata",
    "owner_id",
    "target",
    "queue",
    "priority",
    "group",
    "timeout",
    "expires_after",
)


def action_to_json(action: Action) -> dict[str, Any]:
    """Return the action of a trigger as stored."""
    retry = None if action.retry is None else action.retry.to_json()
    return {name: getattr(action, name) for name in _STORED_ACTION_FIELDS} | {"retry": retry}


def _action_from_json(stored: dict[str, Any]) -> Action:
    return Action(**{**stored, "retry": Retry.parse(stored["retry"])})


def trigger_from_row(row: Row[Any], source: Source) -> Trigger:
    """Return a row as a Trigger."""
    return Trigger(
        id=row.id, tenant_id=row.tenant_id, name=row.name, source_id=row.source_id, source=source.name,
        source_label=str(source.options.get("boardId", source.name)), orphaned_reason=source.orphaned_reason,
        unauthorized_reason=source.error if source.error_code == SOURCE_UNAUTHORIZED else None,
        rule=_rule_from_json(decode(row.rule)), action=_action_from_json(decode(row.action)), enabled=row.enabled,
        pause_reason=row.pause_reason, revision=row.revision, created_at=row.created_at, created_by=row.created_by,
        updated_at=row.updated_at,
    )  # fmt: skip


def source_from_row(row: Row[Any]) -> Source:
    """Return a row as a Source."""
    return Source(
        id=row.id, tenant_id=row.tenant_id, name=row.name, kind=row.kind, options=decode(row.options),
        cursor=row.cursor, synced_at=row.synced_at, error=row.error, error_code=row.error_code,
        orphaned_at=row.orphaned_at, orphaned_reason=row.orphaned_reason, created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip


def grace_too_short(trigger: str, grace: float, interval: float) -> InvalidInput:
    """Return the error for a grace that a change which only a full scan finds may exceed."""
    return InvalidInput(
        f"The grace of the trigger {trigger!r:.80} is {grace:g} s, but its source would be read completely only every"
        f" {interval:g} s: a change that this read finds may be too late.",
        code="GRACE_TOO_SHORT",
        fix=f"Use a grace of more than {interval:g} s, or read the source more often (everySeconds or, for boards that"
        " share the calls of an account, dailyCalls).",
    )  # fmt: skip


def no_such_trigger(name: str) -> NotFound:
    """Return the error for an unknown trigger name."""
    return NotFound(
        f"There is no trigger {name!r:.80}.", code="TRIGGER_NOT_FOUND",
        fix="Check the spelling, and the tenant.",
    )  # fmt: skip
