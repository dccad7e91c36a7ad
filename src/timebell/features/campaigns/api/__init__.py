"""HTTP API of campaigns."""

from __future__ import annotations

from timebell.api import audiences, campaigns, devices

ROUTES = (devices.routes, audiences.routes, campaigns.routes)
