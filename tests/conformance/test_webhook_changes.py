"""Webhooks of polled sources, whose items are read again."""

from __future__ import annotations

from timebell.features.triggers.model.trigger import WebhookNotice
from timebell.features.triggers.store import webhook_changes

from .helpers import Store, after, stored
from .test_planned_firings import source


@stored
async def test_an_item_that_is_reported_during_its_read_is_read_again(store: Store) -> None:
    board = await source(store)
    await store.run(webhook_changes.apply_webhook_changes, board, [WebhookNotice(key="42")], after(seconds=10))
    for scan_started, unconfirmed in ((9, ["42"]), (10, [])):
        await store.run(webhook_changes.mark_confirmed, board.id, ["42"], after(seconds=scan_started))
        assert await store.run(webhook_changes.list_unconfirmed_items, board.id, 10) == unconfirmed
