"""Device registry of the push target, backed by the store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from timebell.features.campaigns.store import devices
from timebell.store.dialects.base import Store


class StoredRegistry:
    """Implementation of `targets.push.target.Registry` on the store. `now` returns an aware datetime."""

    def __init__(self, store: Store, now: Callable[[], datetime]) -> None:
        self._store, self._now = store, now

    async def devices(self, tenant_id: str, user_id: str) -> list[tuple[str, str]]:
        user_devices = await self._store.run(devices.list_user_devices, tenant_id, user_id)
        return [(device.id, device.token) for device in user_devices]

    async def accepted(self, tenant_id: str, notification_id: str) -> set[str]:
        return await self._store.run(devices.find_notified_devices, tenant_id, notification_id)

    async def record(
        self, tenant_id: str, notification_id: str | None, accepted: list[str], dead: list[tuple[str, str]]
    ) -> None:
        if dead or (accepted and notification_id is not None):
            await self._store.run(devices.record_notification, tenant_id, notification_id, accepted, dead, self._now())
