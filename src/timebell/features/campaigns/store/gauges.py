"""Gauges of campaigns, for the metrics."""

from __future__ import annotations

from timebell.store.cluster.gauges import FeatureGauge, bounded_count
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

STATES = ("pending", "running", "paused")


def _count_live(state: str) -> str:
    where = f"ended_at IS NULL AND state = '{state}'"
    return f"{bounded_count('timebell_campaigns', where)} AS {state}"


COUNTS = Statement(f"SELECT {', '.join(map(_count_live, STATES))}")
REMAINING = Statement(
    "SELECT coalesce(sum(CASE WHEN expected > opened THEN expected - opened ELSE 0 END), 0) AS count"
    " FROM timebell_campaigns WHERE ended_at IS NULL AND state = 'running'"
)


def read_gauges(tx: Transaction) -> dict[str, FeatureGauge]:
    """Return the numbers of unfinished campaigns by state, and of the recipients still to be reached."""
    counts = tx.fetch(COUNTS)[0]
    return {
        "timebell_campaigns": {(state,): counts[state] for state in STATES},
        "timebell_campaign_remaining": {(): int(tx.fetch(REMAINING)[0]["count"])},
    }
