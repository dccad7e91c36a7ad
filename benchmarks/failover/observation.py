"""Observations from outside while a fault is injected."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import httpx2

from benchmarks.failover.cluster import PROBE_TIMEOUT_SECONDS, Cluster

PROBE_INTERVAL_SECONDS = 0.1
REQUEST_INTERVAL_SECONDS = 0.05  # of each node's client
FAR = "2090-01-01T00:00:00Z"


@dataclass
class Observation:
    """Writes that the database accepted, the readiness of each node, and the answers of their APIs."""

    writes: list[float] = field(default_factory=list)
    ready: dict[int, list[tuple[float, float, bool]]] = field(default_factory=dict)
    """Per node, when it was asked, when it answered, and whether it was ready."""
    answers: Counter[str] = field(default_factory=Counter)
    """The number of answers by status; `none` if the connection was closed."""
    created: dict[str, float] = field(default_factory=dict)
    """When the creation of each job was acknowledged."""

    async def watch_database(self, cluster: Cluster) -> None:
        """Write through the proxy, each time on a new connection."""
        while True:
            with suppress(Exception):  # of any driver
                async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                    await cluster.write()
                    self.writes.append(time.time())
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)

    async def watch_node(self, port: int) -> None:
        """Poll the readiness of a node."""
        seen = self.ready.setdefault(port, [])
        async with httpx2.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                asked = time.time()
                try:
                    ready = (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
                except httpx2.HTTPError:
                    ready = False
                seen.append((asked, time.time(), ready))
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)

    async def use_api(self, port: int, key: str) -> None:
        """Create jobs, read and cancel them over HTTP, one request after another."""
        base, headers = f"http://127.0.0.1:{port}/api/v1", {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(trust_env=False, timeout=60, base_url=base, headers=headers) as client:
            while True:
                job_id = await self._request(client, "POST", "/jobs", {"topic": "api.load", "runAt": FAR})
                await self._request(client, "GET", f"/jobs/{job_id or 'unknown'}")
                if job_id is not None and len(self.created) % 2:
                    await self._request(client, "POST", f"/jobs/{job_id}/cancel")

    async def _request(self, client: httpx2.AsyncClient, method: str, path: str, body: object = None) -> str | None:
        """Send a request; return the id of a created job."""
        await asyncio.sleep(REQUEST_INTERVAL_SECONDS)
        try:
            answer = await client.request(method, path, json=body)
        except httpx2.HTTPError:
            self.answers["none"] += 1
            return None
        self.answers[str(answer.status_code)] += 1
        if answer.status_code != 201:
            return None
        job_id = str(answer.json()["id"])
        self.created[job_id] = time.time()
        return job_id

    def outage(self, began_at: float, ended_at: float) -> tuple[float, float]:
        """Return the start and the end of the longest time without a write that began during the fault."""
        writes = [began_at, *(at for at in self.writes if at > began_at)]
        return max((pair for pair in pairwise(writes) if pair[0] <= ended_at), key=lambda pair: pair[1] - pair[0])

    def unready_times(self, after: float) -> list[list[float]]:
        """Return when each node was asked after an instant, or just before, and was not ready."""
        return [
            [max(asked, after) for asked, answered, ready in seen if answered > after and not ready]
            for seen in self.ready.values()
        ]
