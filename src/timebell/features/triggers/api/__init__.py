"""HTTP API of triggers."""

from __future__ import annotations

from timebell.features.triggers.api import connections, inbound_webhooks, sources, trigger_items, triggers

ROUTES = (connections.routes, sources.routes, inbound_webhooks.routes, triggers.routes, trigger_items.routes)
