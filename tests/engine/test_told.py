"""What another process makes, a node that sleeps hears of: not only jobs, schedules too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from timebell import Arrived, Every, Timebell
from timebell.model.schedule import Schedule

BEFORE_A_HEARTBEAT = 2.5  # seconds; without being told a node would learn of it after up to 5


async def _created(client: Timebell) -> None:
    await _make(client, start_in=0.3)


async def _edited(client: Timebell) -> None:
    made = await _make(client, start_in=3600)
    await client.schedule_repeat(
        "told", Every("PT1H", anchor=_in(0.3)), name=made.name, timezone="UTC", replace=True, overlap="allow"
    )


async def _resumed(client: Timebell) -> None:
    made = await _make(client, start_in=0.3, every="PT1S", enabled=False)
    await client.schedules.resume(made.id)


def _in(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def _make(client: Timebell, start_in: float, every: str = "PT1H", **options: object) -> Schedule:
    return await client.schedule_repeat(
        "told", Every(every, anchor=_in(start_in)), timezone="UTC", overlap="allow", **options
    )


@pytest.mark.parametrize("act", [_created, _edited, _resumed])
def test_a_node_is_on_time_with_a_schedule_of_another_process(
    act: Callable[[Timebell], Awaitable[None]], store_url: str
) -> None:
    async def test() -> None:
        node, client = Timebell(store_url, timezone="UTC"), Timebell(store_url, timezone="UTC")
        came: asyncio.Future[Arrived] = asyncio.get_running_loop().create_future()

        @node.on("told")
        async def told(event: Arrived) -> None:
            if not came.done():
                came.set_result(event)

        async with node.running() as service:
            beat = service.pulse.announced.beat
            while service.pulse.announced.beat == beat or not service.node.beating._waiter:  # it has just beaten
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await act(client)
            await asyncio.wait_for(came, 10)
            assert time.monotonic() - began < BEFORE_A_HEARTBEAT
        await client.close()
        await node.close()

    asyncio.run(test())
