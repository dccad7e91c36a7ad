"""Gauges of campaigns, for the metrics."""

from __future__ import annotations

from sqlalchemy import case, func, select

from timebell.features.campaigns.store.tables import campaigns
from timebell.store.cluster.gauges import FeatureGauge, bounded_count
from timebell.store.transaction import Transaction

STATES = ("pending", "running", "paused")

_c = campaigns.c
COUNTS = select(*(bounded_count(campaigns, _c.ended_at.is_(None), _c.state == state).label(state) for state in STATES))
REMAINING = select(func.coalesce(func.sum(case((_c.expected > _c.opened, _c.expected - _c.opened), else_=0)), 0)).where(
    _c.ended_at.is_(None), _c.state == "running"
)


def read_gauges(tx: Transaction) -> dict[str, FeatureGauge]:
    """Return the numbers of unfinished campaigns by state, and of the recipients still to be reached."""
    counts = tx.execute(COUNTS).mappings().one()
    return {
        "timebell_campaigns": {(state,): counts[state] for state in STATES},
        "timebell_campaign_remaining": {(): int(tx.execute(REMAINING).scalar_one())},
    }
