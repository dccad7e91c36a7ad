"""HTTP API of campaigns."""

from __future__ import annotations

from timebell.features.campaigns.api import audiences, campaigns, devices, opens, segments

ROUTES = (devices.routes, audiences.routes, segments.routes, campaigns.routes, opens.routes)
