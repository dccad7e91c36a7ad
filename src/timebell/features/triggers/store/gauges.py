"""Gauges of trigger sources, for the metrics."""

from __future__ import annotations

from sqlalchemy import func, select, text

from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED
from timebell.store.cluster.gauges import FeatureGauge, bounded_count
from timebell.store.schema import sources
from timebell.store.transaction import Transaction

_UNREADABLE = text("(orphaned_at IS NOT NULL OR error IS NOT NULL)")  # literally as in the index
_is_orphaned = sources.c.orphaned_at.is_not(None)
_is_unauthorized = func.coalesce(sources.c.error_code, "") == SOURCE_UNAUTHORIZED
COUNTS = select(
    bounded_count(sources, _UNREADABLE, _is_orphaned).label("orphaned"),
    bounded_count(sources, _UNREADABLE, ~_is_orphaned, _is_unauthorized).label("reauthorize"),
    bounded_count(sources, _UNREADABLE, ~_is_orphaned, ~_is_unauthorized).label("errored"),
)


def read_gauges(tx: Transaction) -> dict[str, FeatureGauge]:
    """Return the numbers of sources that cannot be read, by state."""
    return {"timebell_sources": {(state,): count for state, count in tx.execute(COUNTS).mappings().one().items()}}
