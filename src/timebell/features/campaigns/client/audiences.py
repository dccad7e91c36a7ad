"""Client operations on audiences that are read from a customer's own database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from timebell.client.secrets import check_name
from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.features.campaigns.model.audience_source import AudienceSource
from timebell.features.campaigns.store import audiences, campaign_jobs
from timebell.features.campaigns.store.audiences import Audience, no_such_audience
from timebell.model import page
from timebell.model.page import Page
from timebell.store.dialects.base import Store
from timebell.tenancy.secrets import Keyring


class Audiences:
    """Audience operations. `ensure_open` opens the store if needed; `get_keyring` provides the keys for secrets."""

    def __init__(
        self, store: Store, clock: Clock, ensure_open: Callable[[], Any], get_keyring: Callable[[], Keyring]
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._get_keyring = get_keyring

    async def put(
        self, name: str, source: Mapping[str, Any], *, tenant_id: str = "default", created_by: str | None = None,
        connection: Any = None,
    ) -> Audience:  # fmt: skip
        """Create an audience, or change its source: {"url": "..." or {"secret": "name"}, "query": ..., "key": ...}.

        Without a `connection`, the query is checked as by `check`. Raises InvalidInput (INVALID_AUDIENCE,
        AUDIENCE_KEY_MISSING, AUDIENCE_QUERY_WRITES, AUDIENCE_UNREADABLE), NotFound (SECRET_NOT_FOUND), Refused.
        """
        name, tenant_id, parsed_source = (
            check_name(name),
            check_text(tenant_id, "tenant_id"),
            AudienceSource.from_json(source),
        )
        await self._ensure_open()
        if connection is None:
            await self.check(source, tenant_id=tenant_id)
        audience: Audience = await self._run(
            connection, audiences.upsert_audience, tenant_id, name, parsed_source, created_by, self._clock.now()
        )
        return audience

    async def check(self, source: Mapping[str, Any], *, tenant_id: str = "default") -> None:
        """Run the query of an audience once, which takes as long as the database of the audience needs to answer.

        Raises the errors of `put`.
        """
        from timebell.features.campaigns.engine.external_audience import AudienceReader

        parsed_source = AudienceSource.from_json(source)
        await self._ensure_open()
        reader = AudienceReader(self._store, self._get_keyring, self._clock.now)
        await reader.check_query(tenant_id, parsed_source)

    async def get(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Audience:
        """Return an audience. Raises NotFound (AUDIENCE_NOT_FOUND)."""
        audience: Audience | None = await self._run(connection, audiences.find_audience, tenant_id, name)
        if audience is None:
            raise no_such_audience(name)
        return audience

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None, connection: Any = None
    ) -> Page[Audience]:  # fmt: skip
        """Return a page of audiences in name order."""
        page.validate_paging(limit, None)
        audience_page: Page[Audience] = await self._run(connection, audiences.list_audiences, tenant_id, limit, cursor)
        return audience_page

    async def refresh(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> str:
        """Refresh an audience now; return the id of the job that does. Raises NotFound."""
        await self.get(name, tenant_id=tenant_id, connection=connection)
        job_id: str = await self._run(
            connection, campaign_jobs.enqueue_audience_refresh, tenant_id, [name], self._clock.now()
        )
        return job_id

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> None:
        """Delete an audience, but not its devices. Raises NotFound."""
        if not await self._run(connection, audiences.delete_audience, tenant_id, name):
            raise no_such_audience(name)

    async def _run(self, connection: Any, operation: Callable[..., Any], *args: Any) -> Any:
        await self._ensure_open()
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)
