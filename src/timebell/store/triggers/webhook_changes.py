"""What webhooks of a source that Timebell reads itself say of its items: taken in at once, and read again soon.

A webhook tells of one column, comes late, twice or out of order. So its value counts if it is newer than what is
known, and the item is marked: whoever leads reads all of it once more, and what was read is what is true.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import select, update

from timebell.model.trigger import Change, Observed, Said, Source, micros
from timebell.store.transaction import Transaction
from timebell.store.triggers.planned_firings import locked, meet, observe
from timebell.store.triggers.tables import items, sources


def hear(tx: Transaction, source: Source, said: Sequence[Said], now: datetime) -> Observed:
    """Take in what a webhook says, in the order in which it happened."""
    tx.execute(select(sources.c.id).where(sources.c.id == source.id).with_for_update(read=True))  # before its items
    total = Observed()
    keys = sorted({one.key for one in said})
    meet(tx, source, keys, now)
    for one in sorted(said, key=lambda each: each.at or now):
        version, known = locked(tx, source.id, [one.key])[one.key]
        change = _change(one, version, known, now)
        if change is not None:
            total.add(observe(tx, source, [change], now))
    tx.execute(update(items).where(items.c.source_id == source.id, items.c.key.in_(keys)).values(told_at=now))
    return total


def _change(said: Said, version: int, known: dict[str, object] | None, now: datetime) -> Change | None:
    if said.at is None or (known is None and version >= 0 and not said.gone):  # gone, unless a look finds it
        return None
    at = min(micros(said.at), micros(now))  # no clock of theirs may speak for a time that is yet to come
    if said.gone:
        return Change(said.key, at, None)
    return None if said.column is None else Change(said.key, at, {**(known or {}), said.column: said.value})


def waiting(tx: Transaction, source_id: str, most: int) -> list[str]:
    """Items that are to be read again, by key."""
    mine = (items.c.source_id == source_id) & items.c.told_at.is_not(None)
    return list(tx.execute(select(items.c.key).where(mine).order_by(items.c.key).limit(most)).scalars())


def sources_waiting(tx: Transaction) -> set[str]:
    """The sources that have such items."""
    return set(tx.execute(select(items.c.source_id).where(items.c.told_at.is_not(None)).distinct()).scalars())


def read(tx: Transaction, source_id: str, keys: Collection[str], began: datetime) -> None:
    """These were read by a look that began then."""
    mine = (items.c.source_id == source_id) & items.c.key.in_(sorted(keys)) & (items.c.told_at <= began)
    tx.execute(update(items).where(mine).values(told_at=None))
