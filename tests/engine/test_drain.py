"""A node that is asked, by another process, to finish what it runs and leave."""

from __future__ import annotations

import asyncio
import dataclasses

from timebell import Arrived, Timebell
from timebell.store.cluster import nodes


def test_a_node_that_is_asked_to_drain_finishes_and_leaves(store_url: str) -> None:
    async def body() -> None:
        app = Timebell(store_url, timezone="UTC")
        app.settings = dataclasses.replace(app.settings, scheduler_heartbeat=0.1)
        begun, go_on = asyncio.Event(), asyncio.Event()

        @app.on("slow.work")
        async def slow(_: Arrived) -> str:
            begun.set()
            await go_on.wait()
            return "finished"

        running = asyncio.create_task(app.run())
        try:
            job = await app.schedule_at("slow.work")
            await asyncio.wait_for(begun.wait(), 60)
            (node,) = await app.store.run(nodes.listed)
            assert await app.store.run(nodes.drain, node.id)
            assert app.service is not None
            await asyncio.wait_for(app.service.node.drain_asked.wait(), 60)
            later = await app.schedule_at("slow.work")
            assert not running.done()
            go_on.set()
            await asyncio.wait_for(running, 60)
            assert (await app.get(job.id)).result == "finished"
            assert (await app.get(later.id)).state == "pending"
            assert await app.store.run(nodes.listed) == []
            assert not await app.store.run(nodes.drain, node.id)
        finally:
            running.cancel()
            await app.close()

    asyncio.run(body())
