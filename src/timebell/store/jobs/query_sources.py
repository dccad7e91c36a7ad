"""Validate the sources that jobs and schedules query in their `unless` condition."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, tuple_

from timebell.errors import InvalidInput, NotFound
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


def require_query_sources(tx: Transaction, names: Collection[tuple[str, str]]) -> None:
    """Check that these sources, by tenant and name, exist and accept queries.

    Raises NotFound (SOURCE_NOT_FOUND), InvalidInput (INVALID_CONDITION).
    """
    if not names:
        return
    matches = tuple_(sources.c.tenant_id, sources.c.name).in_(sorted(names))
    query = select(sources.c.tenant_id, sources.c.name, sources.c.kind).where(matches)
    kinds = {(row.tenant_id, row.name): row.kind for row in tx.execute(query)}
    for tenant_id, name in sorted(names):
        if (kind := kinds.get((tenant_id, name))) is None:
            raise no_such_source(name)
        if kind != "sql":
            raise source_not_queryable(name)


def no_such_source(name: str) -> NotFound:
    """Return the error for an unknown source name."""
    return NotFound(
        f"There is no source {name!r:.80}.", code="SOURCE_NOT_FOUND",
        fix="Check the spelling, and the tenant.",
    )  # fmt: skip


def source_not_queryable(name: str) -> InvalidInput:
    """Return the error for a query to a source that accepts none."""
    return InvalidInput(
        f"The source {name!r} is not a database and accepts no query.", code="INVALID_CONDITION",
        fix="Omit `unless`, and specify a condition on fields instead.",
    )  # fmt: skip
