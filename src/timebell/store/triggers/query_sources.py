"""The sources that jobs and schedules put queries of their own to."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, tuple_

from timebell.errors import InvalidInput, NotFound
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import sources


def askable(tx: Transaction, names: Collection[tuple[str, str]]) -> None:
    """See that these sources, by tenant and name, are there and take queries.

    Raises NotFound (SOURCE_NOT_FOUND), InvalidInput (INVALID_CONDITION).
    """
    if not names:
        return
    mine = tuple_(sources.c.tenant_id, sources.c.name).in_(sorted(names))
    query = select(sources.c.tenant_id, sources.c.name, sources.c.kind).where(mine)
    kinds = {(row.tenant_id, row.name): row.kind for row in tx.execute(query)}
    for tenant_id, name in sorted(names):
        if (kind := kinds.get((tenant_id, name))) is None:
            raise no_such_source(name)
        if kind != "sql":
            raise no_query(name)


def no_such_source(name: str) -> NotFound:
    """The error for a name that nobody has."""
    return NotFound(f"There is no source {name!r:.80}.", code="SOURCE_NOT_FOUND")


def no_query(name: str) -> InvalidInput:
    """The error for a query to a source that takes none."""
    return InvalidInput(
        f"The source {name!r} is no database, so it takes no query.", code="INVALID_CONDITION",
        fix="Leave unless out, and give a condition over fields.",
    )  # fmt: skip
