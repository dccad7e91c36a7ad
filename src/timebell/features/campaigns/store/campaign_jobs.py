"""Jobs of campaigns: they open chunks, count recipients and refresh audiences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.ids import new_id
from timebell.model.job import NewJob
from timebell.model.payload import encode
from timebell.store.cluster import nodes
from timebell.store.jobs import claim
from timebell.store.transaction import Transaction

TOPIC = "timebell.campaign"
TARGET: dict[str, Any] = {"kind": "campaign", "options": {}}
QUEUE = "campaigns"
CHUNK_TIMEOUT_SECONDS = 600.0
AUDIENCE_READ_TIMEOUT_SECONDS = 3600.0
"""Long enough to read an audience of millions."""
CHUNK_RETRY: dict[str, Any] = {"attempts": 100, "backoff": "fixed", "delay": 1.0, "max_delay": 1.0, "jitter": 0.0}
"""Retries after the death of a node. Messages that the provider rejects temporarily are counted per chunk instead."""


def enqueue_audience_refresh(
    tx: Transaction, tenant_id: str, names: Sequence[str], now: datetime, pin_campaign_id: str | None = None
) -> str:
    """Insert a job that refreshes audiences and then pins a campaign to them, if specified; return the job's id."""
    id_ = new_id(now)
    payload: dict[str, Any] = {"audiences": list(names)} | (
        {} if pin_campaign_id is None else {"pins": pin_campaign_id}
    )
    claim.insert_jobs(tx, [NewJob(
        id=id_, tenant_id=tenant_id, topic=TOPIC, scheduled_at=now, run_at=now, timezone="UTC", created_at=now,
        payload=encode(payload), target=encode(TARGET), route=f"@{TARGET['kind']}", queue=QUEUE,
        timeout=AUDIENCE_READ_TIMEOUT_SECONDS,
    )])  # fmt: skip
    return id_


def enqueue_chunk(tx: Transaction, campaign: Campaign, at: datetime, now: datetime) -> None:
    """Insert the job that opens the next chunk at `at`. The caller saves the campaign."""
    campaign.job_id = new_id(now)
    claim.insert_jobs(tx, [NewJob(
        id=campaign.job_id, tenant_id=campaign.tenant_id, topic=TOPIC, scheduled_at=at, run_at=at,
        timezone=campaign.timezone, created_at=now,
        payload=encode({"campaignId": campaign.id, "chunk": campaign.next_chunk}), target=encode(TARGET),
        route=f"@{TARGET['kind']}", queue=QUEUE, retry=encode(CHUNK_RETRY), timeout=CHUNK_TIMEOUT_SECONDS,
    )])  # fmt: skip


def enqueue_recipient_count(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Insert a job that counts the recipients, so that the first message does not wait for the count."""
    claim.insert_jobs(tx, [NewJob(
        id=new_id(now), tenant_id=campaign.tenant_id, topic=TOPIC, scheduled_at=now, run_at=now,
        timezone=campaign.timezone, created_at=now, payload=encode({"campaignId": campaign.id}),
        target=encode(TARGET), route=f"@{TARGET['kind']}", queue=QUEUE, timeout=CHUNK_TIMEOUT_SECONDS,
    )])  # fmt: skip


def count_sending_nodes(tx: Transaction) -> int:
    """Return the number of nodes that send campaigns, at least 1: they share the quota of the provider."""
    route = f"@{TARGET['kind']}"
    return max(1, sum(node.routes.handles(route) for node in nodes.list_nodes(tx) if not node.draining))


def enqueue_next_or_complete(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Insert the job of the next chunk, or complete the campaign if no chunk is left or open. The caller saves it."""
    if not campaign.all_chunks_opened:
        enqueue_chunk(tx, campaign, now, now)
    elif not campaign.open_chunks:
        campaign.job_id, campaign.state, campaign.ended_at = None, campaign.final_state(), now
        campaign.reason = campaign.health.describe_codes() if campaign.state is not CampaignState.COMPLETED else None
