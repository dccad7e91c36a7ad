"""Warn about new work whose topic no running node handles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from timebell.api.route import RequestContext
from timebell.app import Timebell
from timebell.model.routes import COMPLETE_UNHANDLED, Routes, route_for
from timebell.store.jobs import waiting

CACHE_SECONDS = 2.0
MAX_CACHED_TENANTS = 10_000
_handled: WeakKeyDictionary[Timebell, dict[str, tuple[Routes, float]]] = WeakKeyDictionary()


@lru_cache(maxsize=1000)
def _find_nearest(handled: Routes, topic: str) -> str | None:
    return handled.nearest(topic)


async def list_handled(ctx: RequestContext) -> Routes:
    """Return the routes that nodes and remote workers handle for the tenant, at most CACHE_SECONDS old."""
    now, by_tenant = ctx.app.clock.monotonic(), _handled.setdefault(ctx.app, {})
    cached = by_tenant.get(ctx.tenant_id)
    if cached is None or now - cached[1] >= CACHE_SECONDS:
        if len(by_tenant) > MAX_CACHED_TENANTS:
            by_tenant.clear()
        cached = by_tenant[ctx.tenant_id] = (await ctx.run(waiting.list_handled, ctx.tenant_id), now)
    return cached[0]


async def warn_if_unhandled(ctx: RequestContext, topic: str, target: dict[str, Any] | None) -> list[str]:
    """Return a warning if nodes are running and none of them handles jobs with this topic and target."""
    if target == COMPLETE_UNHANDLED or (target is not None and "kind" not in target):
        return []  # the kind of a named target is known when it is resolved
    handled, route = await list_handled(ctx), route_for(topic, target)
    if not handled or handled.handles(route):
        return []
    similar = _find_nearest(handled, topic) if route == topic else None
    suggestion = f" Did you mean {similar}?" if similar else ""
    return [f"No running node handles {route}: its jobs wait until one does.{suggestion}"]
