"""Whose which device is, for pushes to a person, and which notifications it has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from timebell.store.campaigns import devices
from timebell.store.dialects.base import Store


class StoredRegistry:
    """As `targets.push.target.Registry`. `now` is aware."""

    def __init__(self, store: Store, now: Callable[[], datetime]) -> None:
        self._store, self._now = store, now

    async def devices(self, tenant_id: str, user_id: str) -> list[tuple[str, str]]:
        """As in Registry."""
        return [(each.id, each.token) for each in await self._store.run(devices.of_user, tenant_id, user_id)]

    async def accepted(self, tenant_id: str, notification_id: str) -> set[str]:
        """As in Registry."""
        return await self._store.run(devices.notified, tenant_id, notification_id)

    async def record(
        self, tenant_id: str, notification_id: str | None, accepted: list[str], dead: list[tuple[str, str]]
    ) -> None:
        """As in Registry."""
        if dead or (accepted and notification_id is not None):
            await self._store.run(devices.notify, tenant_id, notification_id, accepted, dead, self._now())
