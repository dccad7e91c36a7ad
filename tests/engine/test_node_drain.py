"""A drain request of another process."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from timebell import Arrived, Timebell
from timebell.store.cluster import nodes


@pytest.mark.heartbeats
def test_a_node_finishes_its_jobs_and_stops_after_a_drain_request(store_url: str) -> None:
    async def body() -> None:
        app = Timebell(store_url, timezone="UTC")
        app.settings = dataclasses.replace(app.settings, scheduler_heartbeat=0.1)
        started, may_finish = asyncio.Event(), asyncio.Event()

        @app.on("slow.work")
        async def slow(_: Arrived) -> str:
            started.set()
            await may_finish.wait()
            return "finished"

        running = asyncio.create_task(app.run())
        try:
            job = await app.schedule_at("slow.work")
            await asyncio.wait_for(started.wait(), 60)
            (node,) = await app.store.run(nodes.list_nodes)
            assert await app.store.run(nodes.request_drain, node.id)
            assert app.service is not None
            await asyncio.wait_for(app.service.node.drain_requested.wait(), 60)
            later = await app.schedule_at("slow.work")
            assert not running.done()
            may_finish.set()
            await asyncio.wait_for(running, 60)
            assert (await app.get(job.id)).result == "finished"
            assert (await app.get(later.id)).state == "pending"
            assert await app.store.run(nodes.list_nodes) == []
            assert not await app.store.run(nodes.request_drain, node.id)
        finally:
            running.cancel()
            await app.close()

    asyncio.run(body())
