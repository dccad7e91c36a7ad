"""The verbs for devices: register, refresh, find, delete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from timebell.client.validation import text
from timebell.clock import Clock
from timebell.errors import InvalidInput, NotFound
from timebell.model import page
from timebell.model.audience import Device, Filters, checked
from timebell.model.page import Page
from timebell.store.campaigns import devices
from timebell.store.dialects.base import Store
from timebell.targets.push import message

MOST = 1000


class Devices:
    """The verbs. `opened` makes sure that the store is open."""

    def __init__(self, store: Store, clock: Clock, opened: Callable[[], Any]) -> None:
        self._store = store
        self._clock = clock
        self._opened = opened

    async def register(
        self, /, token: str, *, tenant_id: str = "default", connection: Any = None, **about: Any
    ) -> Device:  # fmt: skip
        """Know a device by its token, or more of one that is known: what is not given stays as it was.

        `about`: user_id, platform (android, ios, web), gender, age (years), language, timezone, push_on, marketing_on
        (consent to pushes, to marketing), topics (of FCM), attributes (texts, numbers, booleans by name). Raises
        InvalidInput (DEVICE_INVALID, PUSH_MESSAGE_INVALID, INVALID_TIMEZONE).
        """
        given = [(message.check_to("token", token), checked(about))]
        await self._run(connection, devices.register, text(tenant_id, "tenant_id"), given, self._clock.now())
        found: Device | None = await self._run(connection, devices.of_token, tenant_id, token)
        assert found is not None
        return found

    async def register_many(
        self, given: Iterable[Mapping[str, Any]], *, tenant_id: str = "default", connection: Any = None
    ) -> int:  # fmt: skip
        """As `register`, of at most 1000 ({"token": ..., ...}), all or none; how many are new. Raises InvalidInput."""
        lines = [read(each) for each in given]
        if len(lines) > MOST:
            raise InvalidInput(f"These are {len(lines):,} devices.", code="DEVICE_INVALID", fix=f"Give {MOST} at once.")
        new: int = await self._run(connection, devices.register, text(tenant_id, "tenant_id"), lines, self._clock.now())
        return new

    async def refresh(
        self, old_token: str, token: str, *, tenant_id: str = "default", connection: Any = None
    ) -> Device:  # fmt: skip
        """A device has a new token. Raises NotFound (DEVICE_NOT_FOUND), InvalidInput."""
        new = message.check_to("token", token)
        found: Device | None = await self._run(
            connection, devices.refresh, tenant_id, old_token, new, self._clock.now()
        )
        if found is None:
            raise no_such(old_token)
        return found

    async def get(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Device:
        """One device. Raises NotFound."""
        found: Device | None = await self._run(connection, devices.find, tenant_id, id)
        if found is None:
            raise no_such(id)
        return found

    async def delete(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> None:
        """Forget a device. Raises NotFound."""
        if not await self._run(connection, devices.forget, tenant_id, id):
            raise no_such(id)

    async def delete_tokens(
        self, tokens: Iterable[str], *, tenant_id: str = "default", connection: Any = None
    ) -> int:  # fmt: skip
        """Forget devices by their tokens; how many were known."""
        gone: int = await self._run(connection, devices.remove, tenant_id, list(tokens))
        return gone

    async def list(
        self, filters: Mapping[str, Any] | None = None, *, user_id: str | None = None, tenant_id: str = "default",
        limit: int = 50, cursor: str | None = None, connection: Any = None,
    ) -> Page[Device]:  # fmt: skip
        """A page of devices. Raises InvalidInput (FILTER_INVALID)."""
        page.check(limit, None)
        found: Page[Device] = await self._run(
            connection, devices.page, tenant_id, limit, cursor, Filters.read(filters), user_id
        )
        return found

    async def count(
        self, filters: Mapping[str, Any] | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> int:  # fmt: skip
        """How many devices a campaign with these filters is for. Raises InvalidInput (FILTER_INVALID)."""
        found: int = await self._run(connection, devices.count, tenant_id, Filters.read(filters))
        return found

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._opened()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)


def read(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A token and what is said of it, checked. Raises InvalidInput."""
    about = dict(given)
    return message.check_to("token", about.pop("token", None)), checked(about)


def no_such(named: object) -> NotFound:
    """The error for an unknown device."""
    return NotFound(f"There is no device {named!s:.60}.", code="DEVICE_NOT_FOUND")
