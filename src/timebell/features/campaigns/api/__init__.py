"""HTTP API of campaigns."""

from __future__ import annotations

from timebell.features.campaigns.api import audiences, campaigns, devices

ROUTES = (devices.routes, audiences.routes, campaigns.routes)
