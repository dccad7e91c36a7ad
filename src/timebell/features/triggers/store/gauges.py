"""Gauges of trigger sources, for the metrics."""

from __future__ import annotations

from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED
from timebell.store.cluster.gauges import FeatureGauge, bounded_count
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

_UNREADABLE = "(orphaned_at IS NOT NULL OR error IS NOT NULL)"  # literally as in the index
_FAILING = f"{_UNREADABLE} AND orphaned_at IS NULL"
_COUNTED_ROWS = {
    "orphaned": f"{_UNREADABLE} AND orphaned_at IS NOT NULL",
    "reauthorize": f"{_FAILING} AND error_code = '{SOURCE_UNAUTHORIZED}'",
    "failing": f"{_FAILING} AND COALESCE(error_code, '') <> '{SOURCE_UNAUTHORIZED}'",
}
COUNTS = Statement(
    "SELECT "
    + ", ".join(f"{bounded_count('timebell_sources', where)} AS {name}" for name, where in _COUNTED_ROWS.items())
)


def read_gauges(tx: Transaction) -> dict[str, FeatureGauge]:
    """Return the numbers of sources that cannot be read, by state."""
    return {"timebell_sources": {(state,): count for state, count in tx.fetch(COUNTS)[0].items()}}
