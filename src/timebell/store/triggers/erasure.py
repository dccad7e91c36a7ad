"""A person among the rows of sources: nothing of them is kept there, nor what was planned for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import delete, select, update

from timebell.model.payload import decode, encode
from timebell.model.trigger import people_of
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import firings, items, sources, triggers


def forget(tx: Transaction, tenant_id: str, person: str, now: datetime) -> int:
    """Take a person out of the items in which the recipients of a trigger name them, and forget their firings; how
    many items. One that names nobody else is emptied whole; versions stay, so that no old change brings it back."""
    tx.execute(delete(firings).where(firings.c.tenant_id == tenant_id, firings.c.recipient == person))
    columns: dict[str, set[str]] = defaultdict(set)
    for row in tx.execute(select(triggers.c.source_id, triggers.c.rule).where(triggers.c.tenant_id == tenant_id)):
        if (named := decode(row.rule)["recipients"]) is not None:
            columns[row.source_id].add(named)
    written = orjson.dumps(person).decode()[1:-1]  # as it is in JSON, whether it is a text there or a number
    count = 0
    for source_id in sorted(columns):
        tx.execute(select(sources.c.id).where(sources.c.id == source_id).with_for_update(read=True))
        mine = (items.c.source_id == source_id) & items.c.fields.contains(written, autoescape=True)
        for row in tx.execute(select(items).where(mine).order_by(items.c.key).with_for_update()).all():
            fields, named = decode(row.fields), columns[source_id]
            if any(person in (people_of(fields.get(name)) or ()) for name in named):
                left = _without(fields, named, person)
                values = {"fields": None if left is None else encode(left, "fields"), "updated_at": now}
                which = (items.c.source_id == source_id) & (items.c.key == row.key)
                tx.execute(update(items).where(which).values(**values))
                count += 1
    return count


def _without(fields: dict[str, Any], columns: Set[str], person: str) -> dict[str, Any] | None:
    """The fields without the person; None if they name nobody else."""
    left = dict(fields)
    for name in columns & fields.keys():
        value = fields[name]
        listed = value if isinstance(value, list) else [value]
        left[name] = [one for one in listed if str(one) != person]
    return left if any(left[name] for name in columns & fields.keys()) else None
