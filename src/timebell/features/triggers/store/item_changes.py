"""Apply item changes that a source reports or a read finds, and reconcile the jobs of changed items."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import case, select, update

from timebell.errors import InvalidPayload
from timebell.features.triggers.model.trigger import (
    SOURCE_ROWS_REJECTED,
    ChangeSummary,
    ItemChange,
    Source,
    epoch_micros,
    key_problem,
)
from timebell.features.triggers.store.planned_firings import ItemFields, lock_items, reconcile_items
from timebell.features.triggers.store.sources import list_triggers_of_source
from timebell.features.triggers.store.tables import items
from timebell.model.payload import decode, encode
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


def apply_changes(tx: Transaction, source: Source, changes: Sequence[ItemChange], now: datetime) -> ChangeSummary:
    """Apply item changes reported by a source and reconcile the affected jobs, all in one transaction.

    Changes that are not newer than the stored version are ignored. If the fields of a change cannot be stored, the
    item keeps its previous fields.
    """
    tx.execute(select(sources.c.id).where(sources.c.id == source.id).with_for_update(read=True))
    summary = ChangeSummary()
    newest: dict[str, ItemChange] = {}
    for change in changes:
        if (problem := key_problem(change.key)) is not None:
            if change.fields is not None:
                summary.rejected.append(problem)
            continue
        known = newest.get(change.key)
        if known is not None:
            summary.stale += 1
        if known is None or change.version is None or (known.version is not None and change.version > known.version):
            newest[change.key] = change
    keys = sorted(newest)
    ensure_items(tx, source, keys, now)
    changed_fields: dict[str, ItemFields] = {}
    rows = []
    for key, (version, old_fields) in lock_items(tx, source.id, keys).items():
        change = newest[key]
        new_version = max(epoch_micros(now), version + 1) if change.version is None else change.version
        if new_version <= version:
            summary.stale += 1
            continue
        new_fields, fields, problem = _encode_change(change, old_fields)
        if problem is not None:
            summary.rejected.append(f"{key!r:.60}: {problem}")
        rows.append({
            "source_id": source.id, "key": key, "tenant_id": source.tenant_id, "version": new_version,
            "fields": fields, "problem": problem, "updated_at": now,
        })  # fmt: skip
        if decode(fields) == old_fields and version >= 0:
            summary.unchanged += 1
        else:
            summary.changed += 1
            changed_fields[key] = new_fields
    if rows:
        tx.execute(tx.dialect.upsert(items, replace=("version", "fields", "problem", "updated_at")), rows)
    if changed_fields:
        reconcile_items(tx, list_triggers_of_source(tx, source), changed_fields, now, summary)
    return summary


def _encode_change(change: ItemChange, old_fields: dict[str, Any] | None) -> tuple[ItemFields, str | None, str | None]:
    """Return the fields to store for an item, their JSON, and the problem if the new fields cannot be stored.

    With a problem, the fields are the old ones.
    """
    problem = change.problem
    if problem is None:
        try:
            return change.fields, None if change.fields is None else encode(change.fields, "fields"), None
        except InvalidPayload as error:
            problem = error.message[:300]
    return old_fields, None if old_fields is None else encode(old_fields, "fields"), problem


def ensure_items(tx: Transaction, source: Source, keys: Sequence[str], now: datetime) -> None:
    """Insert missing item rows, with version -1 and without fields."""
    if keys:
        common = {"source_id": source.id, "tenant_id": source.tenant_id, "version": -1, "updated_at": now}
        tx.execute(tx.dialect.insert_ignoring_duplicates(items), [{**common, "key": key} for key in keys])


def _store_cursor(tx: Transaction, source: Source, cursor: str) -> None:
    # Update the source before its items: upgrading the lock later could deadlock with a transaction that shares it
    # and waits for one of the items.
    has_rejected_rows = sources.c.error_code == SOURCE_ROWS_REJECTED  # stays until the next full scan
    error_columns = {name: case((has_rejected_rows, sources.c[name]), else_=None) for name in ("error", "error_code")}
    tx.execute(update(sources).where(sources.c.id == source.id).values(cursor=cursor, **error_columns))


def apply_read(
    tx: Transaction, source: Source, changes: Sequence[ItemChange], now: datetime, cursor: str | None = None,
    save_cursor: bool = False,
) -> ChangeSummary:  # fmt: skip
    """Apply the rows of a read that differ from the stored items.

    Stores the cursor if a row differs or `save_cursor` is set, so a read of unchanged rows writes nothing. The stored
    version of an unchanged item stays older than this read. This matters only if an even older read with other values
    is applied later: then the next read corrects the item.

    Only for `Store.run`, which repeats it if another transaction inserts one of the items at the same time.
    """
    query = select(items.c.key, items.c.fields, items.c.problem).where(items.c.source_id == source.id)
    query = tx.dialect.match_keys(query, items.c.key, [change.key for change in changes])
    stored = {key: (fields, problem) for key, fields, problem in map(tuple, tx.execute(query).all())}
    differing = [change for change in changes if _differs(change, stored.get(change.key))]
    if cursor is not None and (differing or save_cursor):
        _store_cursor(tx, source, cursor)
    summary = ChangeSummary(unchanged=len(changes) - len(differing))
    if differing:
        inserted = _insert_items(tx, source, [change for change in differing if change.key not in stored], now)
        reconcile_items(tx, list_triggers_of_source(tx, source), inserted, now, summary, bulk=True)
        summary.changed += len(inserted)
        summary.add(apply_changes(tx, source, [change for change in differing if change.key not in inserted], now))
    known_problems = {change.key for change in changes if change.problem is not None} - {c.key for c in differing}
    summary.rejected += [f"{key!r:.60}: {stored[key][1]}" for key in sorted(known_problems)]
    return summary


def _insert_items(
    tx: Transaction, source: Source, changes: Sequence[ItemChange], now: datetime
) -> dict[str, ItemFields]:  # fmt: skip
    """Insert items that do not exist, as nearly all rows of a first scan; return their fields.

    Changes that do not only set fields are left out.
    """
    rows, fields = [], dict[str, ItemFields]()
    for change in sorted(changes, key=lambda change: change.key):
        new_fields, encoded, problem = _encode_change(change, None)
        if encoded is not None and problem is None and key_problem(change.key) is None:
            fields[change.key] = new_fields
            rows.append((change.key, change.version, encoded))
    if rows:
        constants = {"source_id": source.id, "tenant_id": source.tenant_id, "updated_at": tx.dialect.to_db(now)}
        tx.bulk_insert(items.name, ("key", "version", "fields"), rows, constants)
    return fields


def _differs(change: ItemChange, stored: tuple[str | None, str | None] | None) -> bool:
    """Return whether a row differs from the stored item."""
    if stored is None:
        return True
    fields, problem = stored
    if change.problem is not None or problem is not None:
        return change.problem != problem
    if change.fields is None:
        return fields is not None
    try:
        return fields != orjson.dumps(change.fields).decode()
    except (TypeError, ValueError):
        return True


def list_known_keys(tx: Transaction, source_id: str, after: str | None, limit: int) -> list[str]:
    """Return the keys of a source's items that are not gone, in key order."""
    query = select(items.c.key).where(items.c.source_id == source_id, items.c.fields.is_not(None))
    if after is not None:
        query = query.where(items.c.key > after)
    return list(tx.execute(query.order_by(items.c.key).limit(limit)).scalars().all())
