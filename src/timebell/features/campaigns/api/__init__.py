"""HTTP API of campaigns."""

from __future__ import annotations

from timebell.features.campaigns.api import (
    audiences,
    campaign_actions,
    campaign_results,
    campaigns,
    devices,
    opens,
    segments,
)

ROUTES = (
    devices.routes, audiences.routes, segments.routes, campaigns.routes, campaign_actions.routes,
    campaign_results.routes, opens.routes,
)  # fmt: skip
