"""Recipients and chunks of campaigns: their numbers and results, and the devices that are left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from timebell.features.campaigns.model.campaign import CampaignState, ExclusionReason
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.model.device import Device
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store import walk
from timebell.features.campaigns.store.campaigns import find_campaign, save_campaign
from timebell.features.campaigns.store.tables import chunks, deliveries, devices
from timebell.model.page import Page
from timebell.store.transaction import Transaction

_COUNTED_WHILE_SENDING = (ExclusionReason.NO_TOKEN, ExclusionReason.HOLD_OUT)


def count_recipients(tx: Transaction, id_: str) -> int | None:
    """Count the registered, expected and excluded devices of a campaign that has started; return the expected ones.

    An estimate while it is sent, exact for a stopped campaign. None if the campaign does not exist, or if its walk has
    ended and the exact numbers are stored.
    """
    campaign = find_campaign(tx, None, id_)
    if campaign is None or campaign.cutoff is None or campaign.all_opened:
        return None
    if campaign.state is CampaignState.STOPPED:
        return _count_stopped(tx, id_)
    registered, expected, excluded = walk.count_registered(tx, campaign)
    campaign = find_campaign(tx, None, id_, lock=True)  # only now, because the count may take a second
    if campaign is None or campaign.all_opened or campaign.state is CampaignState.STOPPED:
        return None
    expected = round(expected * (1 - campaign.plan.experiment.hold_out))
    campaign.registered = max(registered, campaign.registered or 0)  # devices may have been deleted since the start
    campaign.expected = max(expected, campaign.opened)
    counted = {reason: campaign.excluded.get(reason.value, 0) for reason in _COUNTED_WHILE_SENDING}
    campaign.excluded = excluded
    for reason, count in counted.items():
        campaign.exclude(reason, count)
    save_campaign(tx, campaign, campaign.updated_at)
    return campaign.expected


def _count_stopped(tx: Transaction, id_: str) -> int | None:
    campaign = find_campaign(tx, None, id_, lock=True)
    if campaign is None or campaign.state is not CampaignState.STOPPED or campaign.open_chunks:
        return None  # its last chunk has it counted again
    walk.count_stopped(tx, campaign)
    save_campaign(tx, campaign, campaign.updated_at)
    return campaign.expected


def list_deliveries(
    tx: Transaction, campaign_id: str, limit: int, after_id: str | None, state: str | None
) -> Page[Mapping[str, Any]]:  # fmt: skip
    """Return a page of a campaign's recipients with their results, in recipient id order.

    `user_id` is None once the device is deleted. The times are those of the recipient's chunk.
    """
    t = deliveries.c
    in_chunk = (chunks.c.campaign_id == t.campaign_id) & (chunks.c.number == t.chunk)
    # A subquery, because PostgreSQL would merge a join of many devices: it would read those of all earlier pages again.
    user_id = select(devices.c.user_id).where(devices.c.id == t.recipient).scalar_subquery().label("user_id")
    query = (
        select(
            t.recipient, user_id, t.state, t.code, t.message_id, t.chunk, t.sends, t.unknown_sends,
            t.variant, t.opened_at, chunks.c.started_at, chunks.c.ended_at,
        )
        .outerjoin_from(deliveries, chunks, in_chunk)
        .where(t.campaign_id == campaign_id)
    )  # fmt: skip
    if state is not None:
        query = query.where(t.state == state)
    if after_id is not None:
        query = query.where(t.recipient > after_id)
    rows: list[Mapping[str, Any]] = [
        dict(row._mapping) for row in tx.execute(query.order_by(t.recipient).limit(limit + 1))
    ]
    return Page(rows[:limit], rows[limit - 1]["recipient"] if len(rows) > limit else None)


def list_remaining(tx: Transaction, campaign: Campaign, limit: int, after_id: str | None) -> Page[Device]:
    """Return a page of the devices that a campaign was not sent to yet, in id order."""
    query = select(devices).where(*walk.remaining_conditions(tx, campaign)).order_by(devices.c.id).limit(limit + 1)
    if after_id is not None:
        query = query.where(devices.c.id > after_id)
    rows = [device_rows.device_from_row(row) for row in tx.execute(query)]
    return Page(rows[:limit], rows[limit - 1].id if len(rows) > limit else None)


def list_chunks(tx: Transaction, campaign_id: str, limit: int, after_number: int) -> Page[Mapping[str, Any]]:
    """Return a page of a campaign's chunks in order."""
    query = select(chunks).where(chunks.c.campaign_id == campaign_id, chunks.c.number > after_number)
    rows: list[Mapping[str, Any]] = [
        dict(row._mapping) for row in tx.execute(query.order_by(chunks.c.number).limit(limit + 1))
    ]
    return Page(rows[:limit], str(rows[limit - 1]["number"]) if len(rows) > limit else None)
