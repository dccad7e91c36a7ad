"""Erase a person from trigger items and firings (GDPR)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import delete, select, update

from timebell.features.triggers.model.column_values import parse_recipients
from timebell.features.triggers.store.tables import firings, items, triggers
from timebell.model.payload import decode, encode
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


def erase_person(tx: Transaction, tenant_id: str, person: str, now: datetime) -> int:
    """Remove a person from items that list them as a recipient, and delete their firings; return the number of items.

    The fields of an item without other recipients are deleted. Versions are kept, so that a late change with an older
    version cannot restore the data.
    """
    tx.execute(delete(firings).where(firings.c.tenant_id == tenant_id, firings.c.recipient == person))
    columns: dict[str, set[str]] = defaultdict(set)
    for row in tx.execute(select(triggers.c.source_id, triggers.c.rule).where(triggers.c.tenant_id == tenant_id)):
        if (recipient_column := decode(row.rule)["recipients"]) is not None:
            columns[row.source_id].add(recipient_column)
    needle = orjson.dumps(person).decode()[1:-1]  # without quotes, so that it matches a JSON string and a number
    count = 0
    for source_id in sorted(columns):
        tx.execute(select(sources.c.id).where(sources.c.id == source_id).with_for_update(read=True))
        candidates = (items.c.source_id == source_id) & items.c.fields.contains(needle, autoescape=True)
        for row in tx.execute(select(items).where(candidates).order_by(items.c.key).with_for_update()).all():
            fields, recipient_columns = decode(row.fields), columns[source_id]
            if any(person in (parse_recipients(fields.get(name)) or ()) for name in recipient_columns):
                remaining = _without_person(fields, recipient_columns, person)
                values = {"fields": None if remaining is None else encode(remaining, "fields"), "updated_at": now}
                same_item = (items.c.source_id == source_id) & (items.c.key == row.key)
                tx.execute(update(items).where(same_item).values(**values))
                count += 1
    return count


def _without_person(fields: dict[str, Any], columns: Set[str], person: str) -> dict[str, Any] | None:
    """Return the fields without the person; None if no recipient is left."""
    remaining = dict(fields)
    for name in columns & fields.keys():
        value = fields[name]
        recipients = value if isinstance(value, list) else [value]
        remaining[name] = [recipient for recipient in recipients if str(recipient) != person]
    return remaining if any(remaining[name] for name in columns & fields.keys()) else None
