"""Client operations on devices: register, refresh tokens, list, delete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.errors import InvalidInput, NotFound
from timebell.features.campaigns.client.options import DeviceOptions
from timebell.features.campaigns.model.device import Device, validate_device
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.push import message
from timebell.features.campaigns.store import devices
from timebell.model import page
from timebell.model.page import Page
from timebell.store.dialects.base import Store

MAX_DEVICES_PER_CALL = 1000


class Devices:
    """Device operations. `ensure_open` opens the store if needed."""

    def __init__(self, store: Store, clock: Clock, ensure_open: Callable[[], Any]) -> None:
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open

    async def register(
        self, /, token: str, *, tenant_id: str = "default", connection: Any = None, **about: Unpack[DeviceOptions]
    ) -> Device:  # fmt: skip
        """Register a device by its token, or update a registered one; fields that are not specified stay unchanged.

        `about` are those of `campaigns.client.options.DeviceOptions`. Raises InvalidInput (INVALID_DEVICE,
        INVALID_PUSH_MESSAGE, INVALID_TIMEZONE).
        """
        registrations = [(message.check_recipient("token", token), validate_device(about))]
        await self._run(
            connection, devices.register_devices, check_text(tenant_id, "tenant_id"), registrations, self._clock.now()
        )
        device: Device | None = await self._run(connection, devices.find_by_token, tenant_id, token)
        assert device is not None
        return device

    async def register_many(
        self, registrations: Iterable[Mapping[str, Any]], *, tenant_id: str = "default", connection: Any = None
    ) -> int:  # fmt: skip
        """Register up to 1000 devices ({"token": ..., ...}), all or none; return the number of new ones.

        Fields as in `register`. Raises InvalidInput.
        """
        lines = [parse_device(registration) for registration in registrations]
        if len(lines) > MAX_DEVICES_PER_CALL:
            raise InvalidInput(
                f"The request has {len(lines):,} devices.",
                code="INVALID_DEVICE",
                fix=f"Register at most {MAX_DEVICES_PER_CALL} per request.",
            )
        new: int = await self._run(
            connection, devices.register_devices, check_text(tenant_id, "tenant_id"), lines, self._clock.now()
        )
        return new

    async def refresh(
        self, old_token: str, token: str, *, tenant_id: str = "default", connection: Any = None
    ) -> Device:  # fmt: skip
        """Replace the token of a device. Raises NotFound (DEVICE_NOT_FOUND), InvalidInput."""
        new = message.check_recipient("token", token)
        device: Device | None = await self._run(
            connection, devices.replace_token, tenant_id, old_token, new, self._clock.now()
        )
        if device is None:
            raise device_not_found(old_token)
        return device

    async def get(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> Device:
        """Return a device. Raises NotFound."""
        device: Device | None = await self._run(connection, devices.find_device, tenant_id, id)
        if device is None:
            raise device_not_found(id)
        return device

    async def delete(self, id: str, *, tenant_id: str = "default", connection: Any = None) -> None:
        """Delete a device. Raises NotFound."""
        if not await self._run(connection, devices.delete_device, tenant_id, id):
            raise device_not_found(id)

    async def delete_tokens(
        self, tokens: Iterable[str], *, tenant_id: str = "default", connection: Any = None
    ) -> int:  # fmt: skip
        """Delete devices by their tokens; return how many existed."""
        deleted: int = await self._run(connection, devices.delete_by_token, tenant_id, list(tokens))
        return deleted

    async def list(
        self, filters: Mapping[str, Any] | None = None, *, user_id: str | None = None, token_prefix: str | None = None,
        tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None,
    ) -> Page[Device]:  # fmt: skip
        """Return a page of devices: that match filters, of a user, and whose token begins with a text.

        Raises InvalidInput (INVALID_FILTER).
        """
        page.validate_paging(limit, None)
        device_page: Page[Device] = await self._run(
            connection,
            devices.list_devices,
            tenant_id,
            limit,
            cursor,
            Filters.from_json(filters),
            user_id,
            self._clock.now(),
            token_prefix,
        )
        return device_page

    async def count(
        self, filters: Mapping[str, Any] | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> int:  # fmt: skip
        """Return the number of devices with these filters. Raises InvalidInput (INVALID_FILTER)."""
        number: int = await self._run(
            connection, devices.count_devices, tenant_id, Filters.from_json(filters), self._clock.now()
        )
        return number

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._ensure_open()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)


def parse_device(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the token of a registration and its validated fields. Raises InvalidInput."""
    about = dict(fields)
    return message.check_recipient("token", about.pop("token", None)), validate_device(about)


def device_not_found(identifier: object) -> NotFound:
    """Return the error for an unknown device."""
    return NotFound(f"There is no device {identifier!s:.60}.", code="DEVICE_NOT_FOUND")
