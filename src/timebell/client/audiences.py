"""The verbs for audiences that are read from a database of the customer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from timebell.client.secrets import named
from timebell.client.validation import text
from timebell.clock import Clock
from timebell.model import page
from timebell.model.audience_source import Source
from timebell.model.page import Page
from timebell.store.campaigns import audiences, campaigns
from timebell.store.campaigns.audiences import Audience, no_such
from timebell.store.dialects.base import Store
from timebell.tenancy.secrets import Keyring


class Audiences:
    """The verbs. `opened` makes sure that the store is open, `ring` opens secrets."""

    def __init__(
        self, store: Store, clock: Clock, opened: Callable[[], Any], ring: Callable[[], Keyring]
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._opened = opened
        self._ring = ring

    async def put(
        self, name: str, source: Mapping[str, Any], *, tenant_id: str = "default", created_by: str | None = None,
        connection: Any = None,
    ) -> Audience:  # fmt: skip
        """Make an audience, or have it read from elsewhere: {"url": "..." or {"secret": "name"}, "query", "key"}.

        The query is tried. Raises InvalidInput (AUDIENCE_INVALID, AUDIENCE_KEY_MISSING, AUDIENCE_QUERY_WRITES,
        AUDIENCE_UNREADABLE), NotFound (SECRET_NOT_FOUND), Refused.
        """
        from timebell.campaigns.outside import Outside

        name, tenant_id, read = named(name), text(tenant_id, "tenant_id"), Source.read(source)
        await self._opened()
        await Outside(self._store, self._ring, self._clock.now).check(tenant_id, read, connection)
        found: Audience = await self._run(
            connection, audiences.put, tenant_id, name, read, created_by, self._clock.now()
        )
        return found

    async def get(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Audience:
        """One audience. Raises NotFound (AUDIENCE_NOT_FOUND)."""
        found: Audience | None = await self._run(connection, audiences.find, tenant_id, name)
        if found is None:
            raise no_such(name)
        return found

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Audience]:  # fmt: skip
        """A page of audiences, by name."""
        page.check(limit, None)
        found: Page[Audience] = await self._run(connection, audiences.page, tenant_id, limit, cursor)
        return found

    async def refresh(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> str:
        """Read it now; the id of the job that does. Raises NotFound."""
        await self.get(name, tenant_id=tenant_id, connection=connection)
        job: str = await self._run(connection, campaigns.refresh, tenant_id, name, self._clock.now())
        return job

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> None:
        """Forget it, not the devices in it. Raises NotFound."""
        if not await self._run(connection, audiences.remove, tenant_id, name):
            raise no_such(name)

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._opened()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)
