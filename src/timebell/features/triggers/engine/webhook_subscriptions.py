"""Subscribe webhooks for sources whose API allows it, and unsubscribe them when the source is deleted or changed.

The leader does both. A webhook is recorded after it was subscribed; a crash between the two leaves a second webhook for
the same events, which has no further effect because events may arrive twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from timebell.engine.node import Node
from timebell.errors import InvalidInput, NotFound, SourceFailed, StoreError, TimebellError
from timebell.features.triggers.engine.source_adapters import AdapterCache
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED, Source
from timebell.features.triggers.sources.monday import Board
from timebell.features.triggers.sources.webhook_url import HOOKS_PATH, token_query
from timebell.features.triggers.store import source_webhooks
from timebell.features.triggers.store.source_webhooks import SourceWebhook

log = logging.getLogger("timebell.sources")

EVENTS = ("change_column_value", "change_name", "create_item", "item_archived", "item_deleted", "item_restored")
RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS = 5.0, 3600.0  # doubled: each try counts towards the daily limit
IDENTITY_OPTIONS = ("boardId", "url", "token", "webhooks")
"""Options whose change requires new webhooks."""


class WebhookSubscriptions:
    """Subscriptions of all sources. `run_as_leader` runs a store operation on the leader."""

    def __init__(self, node: Node, adapters: AdapterCache, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._adapters = adapters
        self._run_as_leader = run_as_leader
        self._retry_at: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._errors: dict[str, str] = {}
        self._removal: asyncio.Task[None] | None = None

    def error(self, source_id: str) -> str | None:
        """Return why webhooks of a source could not be subscribed, if so."""
        return self._errors.get(source_id)

    async def update(self, source: Source) -> None:
        """Subscribe missing webhooks of a source, and unsubscribe those of former options. Raises StoreError."""
        if source.kind != "monday" or self._is_paused(source.id):
            return
        known: list[SourceWebhook] = await self._run_as_leader(source_webhooks.list_webhooks, source.id) or []
        outdated = [webhook for webhook in known if _identity(webhook.options) != _identity(source.options)]
        current = {webhook.event for webhook in known} - {webhook.event for webhook in outdated}
        try:
            for webhook in outdated:
                await self._unsubscribe(webhook)
            if source.options.get("webhooks") is not None:
                for event in EVENTS:
                    if event not in current:
                        await self._subscribe(source, event)
        except SourceFailed as error:
            self._pause(source.id, error)
        else:
            self._retry_at.pop(source.id, None)
            self._errors.pop(source.id, None)
            self._failures.pop(source.id, None)

    def start_removal(self) -> None:
        """Unsubscribe the webhooks of deleted sources in the background."""
        if self._removal is None or self._removal.done():
            self._removal = asyncio.create_task(self._remove_orphaned(), name="timebell-unsubscribe")

    async def close(self) -> None:
        """Stop, and close the adapters."""
        if self._removal is not None:
            self._removal.cancel()
            await asyncio.gather(self._removal, return_exceptions=True)
        await self._adapters.close()

    async def _remove_orphaned(self) -> None:
        try:
            orphaned = await self._run_as_leader(source_webhooks.list_webhooks_of_deleted_sources) or []
        except StoreError:
            return  # the services log store failures
        for webhook in orphaned:
            if not self._is_paused(webhook.source_id):
                try:
                    await self._unsubscribe(webhook)
                except SourceFailed as error:
                    self._pause(webhook.source_id, error)
                except StoreError:
                    return  # the services log store failures
                finally:
                    await self._adapters.discard(webhook.source_id)

    async def _subscribe(self, source: Source, event: str) -> None:
        adapter = await self._adapters.get(source)
        assert isinstance(adapter, Board)
        url = f"{str(source.options['webhooks']).rstrip('/')}{HOOKS_PATH}/{source.id}"
        webhook_id = await adapter.subscribe(event, url + token_query(self.node.secret_key, source.id))
        await self._run_as_leader(source_webhooks.add_webhook, source, event, webhook_id, self.node.clock.now())
        log.info("source %s: subscribed to %s", source.name, event)

    async def _unsubscribe(self, webhook: SourceWebhook) -> None:
        """Unsubscribe a webhook with the options of its time; give it up if its token does not exist anymore."""
        now = self.node.clock.now()
        former = Source(
            id=webhook.source_id, tenant_id=webhook.tenant_id, name=webhook.source_id, kind="monday",
            options=webhook.options, created_at=now, updated_at=now,
        )  # fmt: skip
        try:
            adapter = await self._adapters.get(former)
            assert isinstance(adapter, Board)
            await adapter.unsubscribe(webhook.webhook_id)
        except StoreError:
            raise
        except TimebellError as error:
            if not isinstance(error, NotFound | InvalidInput) and error.code != SOURCE_UNAUTHORIZED:
                raise
            log.warning("webhook %s of a deleted source is not unsubscribed: %s", webhook.webhook_id, error)
        await self._run_as_leader(source_webhooks.remove_webhooks, webhook.source_id, [webhook.event])

    def _is_paused(self, source_id: str) -> bool:
        return self._retry_at.get(source_id, 0.0) > self.node.clock.monotonic()

    def _pause(self, source_id: str, error: SourceFailed) -> None:
        if self._errors.get(source_id) != error.message:
            log.warning("source %s: webhooks are not subscribed: %s", source_id, error)
        self._errors[source_id] = error.message
        pause = min(RETRY_DELAY_SECONDS * 2 ** self._failures[source_id], MAX_RETRY_DELAY_SECONDS)
        self._failures[source_id] = min(self._failures[source_id] + 1, 20)
        self._retry_at[source_id] = self.node.clock.monotonic() + max(pause, error.retry_after or 0.0)


def _identity(options: dict[str, Any]) -> list[Any]:
    return [options.get(name) for name in IDENTITY_OPTIONS]
