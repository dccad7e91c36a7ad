"""Devices registered in batches of any size: each keeps its own fields, whatever it has in common with the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from timebell.features.campaigns.model.device import Device, validate_device
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.store import devices
from timebell.store.dialects.base import Store

from .helpers import T0


@pytest.mark.parametrize("count", [1, 3, 256, 300])
def test_new_and_known_devices_of_a_batch_get_their_own_fields(
    store: Store, runner: asyncio.Runner, count: int
) -> None:  # fmt: skip
    def register(first: int, end: int, **common: Any) -> int:
        batch = [
            (f"phone-{n:04}", validate_device({"user_id": f"user-{n}", "age": n % 90, **common}))
            for n in range(first, end)
        ]
        return int(runner.run(store.run(devices.register_devices, "default", batch, T0)))

    assert register(0, count, platform="ios", timezone="Asia/Seoul", attributes={"tier": 1}) == count
    assert register(count // 2, count + 1, marketing_on=True, attributes={"plan": "pro"}) == 1

    page = runner.run(store.run(devices.list_devices, "default", count + 1, None, Filters(), None, T0))
    found: dict[str, Device] = {device.token: device for device in page}
    assert len(found) == count + 1
    for n in range(count + 1):
        device, is_known, again = found[f"phone-{n:04}"], n < count, n >= count // 2
        assert (device.user_id, device.age, device.marketing_on) == (f"user-{n}", n % 90, True if again else None)
        assert (device.platform, device.timezone) == (("ios", "Asia/Seoul") if is_known else (None, None))
        assert device.attributes == ({"tier": 1} if is_known else {}) | ({"plan": "pro"} if again else {})
        assert (device.push_on, device.topics) == (True, ())
