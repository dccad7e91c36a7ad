"""`/metrics`, for Prometheus: what this node counted, and what stands in the database.

It tells names of topics and queues to whoever asks, so it is served on loopback, or on a listener of its own.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request, Response

from timebell.api.problems import problem
from timebell.app import Timebell
from timebell.clock import wall
from timebell.engine.service import Service
from timebell.errors import StoreError
from timebell.observe.exposition import exposed
from timebell.observe.metrics import NodeFacts, Snapshot
from timebell.observe.watchdog import GRACE
from timebell.recurrence import tzdata_version
from timebell.settings import package_version
from timebell.store.cluster import gauges

log = logging.getLogger("timebell.metrics")

FRESH = 5.0  # seconds for which what was read of the database is told again: scraping cannot load it
PATIENCE = 3.0  # seconds for the database to answer; then the rest is told without it


class Reader:
    """Reads the gauges of the store, at most once in `FRESH` seconds however many ask."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._reading = asyncio.Lock()
        self._read: tuple[float, gauges.Gauges | None] | None = None

    async def read(self) -> gauges.Gauges | None:
        """The gauges; None while the database does not answer."""
        async with self._reading:
            now = self._app.clock.monotonic()
            if self._read is None or now - self._read[0] >= FRESH:
                self._read = now, await self._look()
            return self._read[1]

    async def _look(self) -> gauges.Gauges | None:
        app = self._app
        labelled = app.settings.metrics_schedule_label
        try:
            async with asyncio.timeout(PATIENCE):
                return await app.store.hot(gauges.read, app.clock.now(), GRACE, labelled=labelled)
        except (StoreError, TimeoutError) as failed:
            log.warning("the database does not answer a scrape: %s", failed or "too slow")
            return None


def router(app: Timebell) -> APIRouter:
    """The one endpoint."""
    routes, reader = APIRouter(), Reader(app)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        service = app.service
        if service is None:
            return problem(503, "ENGINE_NOT_RUNNING", "The engine is starting or draining.", {"Retry-After": "1"})
        snapshot = Snapshot(
            service.node.counters, _facts(app, service), await reader.read(), app.settings.metrics_schedule_label
        )
        text, media_type = exposed(snapshot.collect(), request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    return routes


def _facts(app: Timebell, service: Service) -> NodeFacts:
    free = sum(hands.free for hands in service.worker.hands)
    options = service.node.options
    return NodeFacts(
        package_version(), tzdata_version(), service.leader.fence is not None,
        round((wall() - app.clock.now()).total_seconds(), 6), options.slots + options.threads - free, free,
    )  # fmt: skip
