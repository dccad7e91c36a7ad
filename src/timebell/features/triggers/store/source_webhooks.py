"""Webhooks that were subscribed for sources. They outlive their source until they are unsubscribed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, select

from timebell.features.triggers.model.trigger import Source
from timebell.features.triggers.store.tables import source_webhooks
from timebell.model.payload import decode, encode
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class SourceWebhook:
    """A webhook for one event. `options` are those of the source when it was subscribed."""

    source_id: str
    event: str
    tenant_id: str
    webhook_id: str
    options: dict[str, Any]


def list_webhooks(tx: Transaction, source_id: str) -> list[SourceWebhook]:
    """Return the webhooks of a source."""
    return list(map(_from_row, tx.execute(select(source_webhooks).where(source_webhooks.c.source_id == source_id))))


_ORPHANED_WEBHOOKS = select(source_webhooks).where(
    ~select(sources.c.id).where(sources.c.id == source_webhooks.c.source_id).exists()
)


def list_webhooks_of_deleted_sources(tx: Transaction) -> list[SourceWebhook]:
    """Return webhooks whose source was deleted."""
    return list(map(_from_row, tx.execute(_ORPHANED_WEBHOOKS)))


def add_webhook(tx: Transaction, source: Source, event: str, webhook_id: str, now: datetime) -> None:
    """Record a subscribed webhook."""
    tx.execute(tx.dialect.upsert(source_webhooks, replace=("webhook_id", "options", "created_at")), [{
        "source_id": source.id, "event": event, "tenant_id": source.tenant_id, "webhook_id": webhook_id,
        "options": encode(source.options, "options"), "created_at": now,
    }])  # fmt: skip


def remove_webhooks(tx: Transaction, source_id: str, events: Collection[str]) -> None:
    """Delete the records of unsubscribed webhooks."""
    matches = (source_webhooks.c.source_id == source_id) & source_webhooks.c.event.in_(sorted(events))
    tx.execute(delete(source_webhooks).where(matches))


def _from_row(row: Row[Any]) -> SourceWebhook:
    return SourceWebhook(row.source_id, row.event, row.tenant_id, row.webhook_id, decode(row.options))
