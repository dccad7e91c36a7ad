"""Metrics of sources and connections. This module is light, because every process imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from timebell.features.triggers.model.trigger import ChangeSummary
    from timebell.observe.counters import Counters
    from timebell.observe.metrics import MetricDefinition

SCANS = "timebell_source_scans_total"
ITEMS = "timebell_source_items_total"
REFRESHES = "timebell_connection_refreshes_total"
COUNTERS: Mapping[str, Sequence[str]] = {
    SCANS: ("ok", "failed", "unauthorized", "orphaned"),
    ITEMS: ("changed", "unchanged", "stale", "unusable"),
    REFRESHES: ("ok", "failed", "unauthorized"),
}


def definitions() -> Mapping[str, MetricDefinition]:
    """Return the definitions of the counters and gauges."""
    from timebell.observe.metrics import MetricDefinition

    return {
        SCANS: MetricDefinition("counter", ("outcome",), "Full scans of sources: ok, failed, unauthorized, orphaned."),
        ITEMS: MetricDefinition(
            "counter",
            ("outcome",),
            "Source items this node received or read: changed, unchanged, stale, unusable.",
        ),
        REFRESHES: MetricDefinition(
            "counter", ("outcome",), "Token renewals of connections: ok, failed (possibly transient), unauthorized."
        ),
        "timebell_sources": MetricDefinition(
            "gauge", ("state",), "Sources that cannot be read: errored, reauthorize, orphaned."
        ),
    }


def record_changes(counters: Counters, summary: ChangeSummary) -> None:
    """Count the outcomes of item changes."""
    items = counters.of_features[ITEMS]
    for outcome in ("changed", "unchanged", "stale"):
        items.add(outcome, by=getattr(summary, outcome))
    items.add("unusable", by=len(summary.rejected))
