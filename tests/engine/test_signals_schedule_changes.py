"""A sleeping node is notified of schedules that another process creates or changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from timebell import Arrived, Every, Timebell
from timebell.model.schedule import Schedule

HEARTBEAT = 60.0  # seconds; without a notification, the node would notice only then


async def _created(client: Timebell) -> None:
    await _make(client)


async def _edited(client: Timebell) -> None:
    made = await _make(client, "PT1H")
    await client.schedule_repeat("ticks", Every("PT1S"), name=made.name, timezone="UTC", replace=True, overlap="allow")


async def _resumed(client: Timebell) -> None:
    made = await _make(client, enabled=False)
    await client.schedules.resume(made.id)


async def _make(client: Timebell, every: str = "PT1S", **options: object) -> Schedule:
    return await client.schedule_repeat("ticks", Every(every), timezone="UTC", overlap="allow", **options)


@pytest.mark.parametrize("act", [_created, _edited, _resumed])
def test_a_node_is_on_time_with_a_schedule_of_another_process(
    act: Callable[[Timebell], Awaitable[None]], store_url: str
) -> None:
    async def test() -> None:
        node, client = Timebell(store_url, timezone="UTC"), Timebell(store_url, timezone="UTC")
        received: asyncio.Future[Arrived] = asyncio.get_running_loop().create_future()

        @node.on("ticks")
        async def ticks(event: Arrived) -> None:
            if not received.done():
                received.set_result(event)

        async with node.running(poll=1.0, heartbeat=HEARTBEAT, lease=3 * HEARTBEAT) as service:
            async with asyncio.timeout(HEARTBEAT / 2):
                while (
                    not service.heartbeat.node_record.heartbeat or not service.node.wakeups.heartbeat._waiter
                ):  # until its first heartbeat is complete
                    await asyncio.sleep(0.01)
            await act(client)
            await asyncio.wait_for(received, HEARTBEAT / 2)
        await client.close()
        await node.close()

    asyncio.run(test())
