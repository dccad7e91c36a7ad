"""`/metrics` for Prometheus: counters of this node and gauges read from the database.

The endpoint requires no key and reveals the names of topics and queues, so it is served only on loopback or on a
separate listener.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from timebell.api.problems import problem_response
from timebell.app import Timebell
from timebell.clock import system_now
from timebell.engine.service import Service
from timebell.errors import StoreError
from timebell.observe.metrics import NodeFacts, Snapshot
from timebell.observe.watchdog import OVERDUE_GRACE_SECONDS
from timebell.recurrence import tzdata_version
from timebell.settings import package_version
from timebell.store.cluster import gauges
from timebell.targets.process_pool import available_cores

log = logging.getLogger("timebell.metrics")

CACHE_SECONDS = 5.0  # lifetime of the gauges, so that frequent scrapes do not load the database
OPENMETRICS = "application/openmetrics-text"  # without a version: an unknown one would choose another format
STORE_TIMEOUT_SECONDS = 3.0  # for the database query; on timeout the gauges are omitted


class GaugeReader:
    """Read the gauges from the database, at most once in CACHE_SECONDS."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._lock = asyncio.Lock()
        self._cached: tuple[float, gauges.Gauges | None] | None = None

    async def read(self) -> gauges.Gauges | None:
        """Return the gauges, or None while the database does not respond."""
        async with self._lock:
            now = self._app.clock.monotonic()
            if self._cached is None or now - self._cached[0] >= CACHE_SECONDS:
                self._cached = now, await self._query()
            return self._cached[1]

    async def _query(self) -> gauges.Gauges | None:
        app = self._app
        labeled = app.settings.metrics_schedule_label
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                return await app.store.run_autocommit(
                    gauges.read_gauges, app.clock.now(), OVERDUE_GRACE_SECONDS, app.features, per_schedule=labeled
                )
        except (StoreError, TimeoutError) as error:
            log.warning("could not read gauges from the database: %s", error or "timeout")
            return None


def router(app: Timebell) -> APIRouter:
    """Return the route of the metrics endpoint."""
    routes, reader = APIRouter(), GaugeReader(app)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        service = app.service
        if service is None:
            return problem_response(
                503, "ENGINE_NOT_RUNNING", "The engine is starting or draining.", {"Retry-After": "1"}
            )
        snapshot = Snapshot(
            service.node.counters,
            _node_facts(app, service),
            await reader.read(),
            app.settings.metrics_schedule_label,
            app.features,
        )
        encode, media_type = choose_encoder(OPENMETRICS if OPENMETRICS in request.headers.get("accept", "") else "")
        # In a thread: encoding thousands of series would delay the engine in this event loop.
        return Response(await asyncio.to_thread(encode, snapshot), media_type=media_type)

    return routes


def _node_facts(app: Timebell, service: Service) -> NodeFacts:
    options, pools = service.node.options, service.worker.pools
    running = sum(pool.slots - pool.free_slots for pool in pools)
    cores = available_cores() if pools[2].routes else 0
    free = max(0, options.slots + options.threads + cores - running)
    return NodeFacts(
        package_version(), tzdata_version(), service.leader.fence is not None,
        round((system_now() - app.clock.now()).total_seconds(), 6), running, free,
    )  # fmt: skip
