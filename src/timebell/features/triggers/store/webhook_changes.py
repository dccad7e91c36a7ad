"""Apply webhook changes for polled sources provisionally, and schedule a re-read.

A webhook reports one column and may arrive late, twice or out of order. Its value is applied if it is newer than the
stored version, and the item is marked: the leader then reads the whole item again, and that result is authoritative.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import select, update

from timebell.features.triggers.model.trigger import ChangeSummary, ItemChange, Source, WebhookNotice, epoch_micros
from timebell.features.triggers.store.item_changes import apply_changes, ensure_items
from timebell.features.triggers.store.planned_firings import lock_items
from timebell.features.triggers.store.sources import SOURCES
from timebell.features.triggers.store.tables import items
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


def apply_webhook_changes(
    tx: Transaction, source: Source, changes: Sequence[WebhookNotice], now: datetime
) -> ChangeSummary:
    """Apply the changes of a webhook in chronological order, and mark the items for a re-read."""
    # Lock order: the source before its items.
    tx.execute(select(sources.c.id).where(sources.c.id == source.id).with_for_update(read=True))
    total = ChangeSummary()
    keys = sorted({notice.key for notice in changes})
    ensure_items(tx, source, keys, now)
    for notice in sorted(changes, key=lambda notice: notice.at or now):
        version, known = lock_items(tx, source.id, [notice.key])[notice.key]
        change = _to_change(notice, version, known, now)
        if change is not None:
            total.add(apply_changes(tx, source, [change], now))
    tx.execute(update(items).where(items.c.source_id == source.id, items.c.key.in_(keys)).values(notified_at=now))
    tx.notify(SOURCES)
    return total


def _to_change(
    notice: WebhookNotice, version: int, fields: dict[str, object] | None, now: datetime
) -> ItemChange | None:
    # A change to an item that is gone does not restore it; the re-read does, if the item exists.
    if notice.at is None or (fields is None and version >= 0 and not notice.deleted):
        return None
    at = min(epoch_micros(notice.at), epoch_micros(now))  # clamp future timestamps to now
    if notice.deleted:
        return ItemChange(notice.key, at, None)
    return (
        None if notice.column is None else ItemChange(notice.key, at, {**(fields or {}), notice.column: notice.value})
    )


def list_unconfirmed_items(tx: Transaction, source_id: str, limit: int) -> list[str]:
    """Return the keys of items marked for a re-read, in key order."""
    unconfirmed = (items.c.source_id == source_id) & items.c.notified_at.is_not(None)
    return list(tx.execute(select(items.c.key).where(unconfirmed).order_by(items.c.key).limit(limit)).scalars())


def list_sources_with_unconfirmed_items(tx: Transaction) -> set[str]:
    """Return the ids of sources with items marked for a re-read."""
    return set(tx.execute(select(items.c.source_id).where(items.c.notified_at.is_not(None)).distinct()).scalars())


def mark_confirmed(tx: Transaction, source_id: str, keys: Collection[str], scan_started: datetime) -> None:
    """Clear the mark of items that were read by a scan started at `scan_started`, unless notified again since."""
    confirmed = (items.c.source_id == source_id) & items.c.key.in_(sorted(keys)) & (items.c.notified_at <= scan_started)
    tx.execute(update(items).where(confirmed).values(notified_at=None))
