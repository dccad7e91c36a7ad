"""Client operations on segments: filters with a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.features.campaigns.model.filters import parse_segment
from timebell.features.campaigns.store import devices, segments
from timebell.features.campaigns.store.segments import Segment, no_such_segment
from timebell.model import page
from timebell.model.page import Page
from timebell.store.dialects.base import Store

_NAME = re.compile(r"[\w(][^/\x00-\x1f]{0,98}[^/\s]|\w")


class Segments:
    """Segment operations. `ensure_open` opens the store if needed."""

    def __init__(self, store: Store, clock: Clock, ensure_open: Callable[[], Any]) -> None:
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open

    async def put(
        self, name: str, filters: Mapping[str, Any], *, tenant_id: str = "default", created_by: str | None = None,
        connection: Any = None,
    ) -> Segment:  # fmt: skip
        """Create a segment, or change its filters. Raises InvalidInput.

        The codes are INVALID_NAME, INVALID_FILTER and UNKNOWN_SEGMENT.
        """
        segment: Segment = await self._run(
            connection, segments.upsert_segment, check_text(tenant_id, "tenant_id"), _check_name(name),
            parse_segment(filters), created_by, self._clock.now(),
        )  # fmt: skip
        return segment

    async def get(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Segment:
        """Return a segment. Raises NotFound (SEGMENT_NOT_FOUND)."""
        segment: Segment | None = await self._run(connection, segments.find_segment, tenant_id, name)
        if segment is None:
            raise no_such_segment(name)
        return segment

    async def count(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> int:
        """Return the number of devices that are in a segment now. Raises NotFound (SEGMENT_NOT_FOUND)."""
        segment = await self.get(name, tenant_id=tenant_id, connection=connection)
        number: int = await self._run(connection, devices.count_devices, tenant_id, segment.filters, self._clock.now())
        return number

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Segment]:  # fmt: skip
        """Return a page of segments in name order."""
        page.validate_paging(limit, None)
        segment_page: Page[Segment] = await self._run(connection, segments.list_segments, tenant_id, limit, cursor)
        return segment_page

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> None:
        """Delete a segment. Raises NotFound (SEGMENT_NOT_FOUND), Conflict (SEGMENT_IN_USE)."""
        if not await self._run(connection, segments.delete_segment, tenant_id, name):
            raise no_such_segment(name)

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._ensure_open()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)


def _check_name(name: object) -> str:
    """Return a name that is valid in URLs. Raises InvalidInput (INVALID_NAME)."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"name is {name!r:.60}.", code="INVALID_NAME",
            fix="Use up to 100 characters without slashes, such as Gold customers.",
        )  # fmt: skip
    return name
