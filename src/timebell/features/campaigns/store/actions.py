"""Actions on campaigns: start, pause, resume, stop, retry, archive and delete."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select

from timebell.errors import Refused
from timebell.features.campaigns.model.campaign import CampaignAction, CampaignState, ExclusionReason, next_state
from timebell.features.campaigns.model.campaign_plan import Campaign, ZoneProgress, earliest_send_at
from timebell.features.campaigns.store.campaign_jobs import (
    enqueue_chunk,
    enqueue_next_or_complete,
    enqueue_recipient_count,
)
from timebell.features.campaigns.store.campaigns import (
    CANARY,
    REFUSED,
    SIZE_CHECKS,
    UNKNOWN,
    UNSENT,
    find_campaign,
    save_campaign,
)
from timebell.store.jobs import repository
from timebell.store.schema import jobs as job_table
from timebell.store.transaction import Transaction


def start_campaign(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> Campaign | None:
    """Start a pending campaign immediately, also in zones with a local send time. None for an unknown id."""
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None or next_state(campaign.state, CampaignAction.START) is campaign.state:
        return campaign
    if campaign.job_id is not None:
        repository.cancel(tx, tenant_id, campaign.job_id, now)
    campaign.send_at = now
    campaign.plan = dataclasses.replace(campaign.plan, local_time=None)
    enqueue_chunk(tx, campaign, now, now)
    return save_campaign(tx, campaign, now)


def pause_campaign(tx: Transaction, tenant_id: str, id_: str, reason: str | None, now: datetime) -> Campaign | None:
    """Pause a campaign: no more chunks are opened, open ones finish. None for an unknown id."""
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None or next_state(campaign.state, CampaignAction.PAUSE) is campaign.state:
        return campaign
    campaign.state, campaign.reason = CampaignState.PAUSED, reason
    return save_campaign(tx, campaign, now)


def resume_campaign(
    tx: Transaction, tenant_id: str, id_: str, actor: str | None, can_approve: bool, now: datetime
) -> Campaign | None:  # fmt: skip
    """Resume a campaign at its cursor. None for an unknown id.

    Resuming counts as approval: the check that paused it (canary, size) is not repeated, unless the campaign was
    edited since. Recipients that a pause for errors left unsent are sent to again. Raises Refused (APPROVAL_MISSING)
    if a size check paused it before its start and the caller may not approve.
    """
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None:
        return None
    needs_approval = campaign.started_at is None and (campaign.reason or "").partition(":")[0] in SIZE_CHECKS
    if next_state(campaign.state, CampaignAction.RESUME) is campaign.state:
        if campaign.open_chunks or (campaign.job_id is not None and _is_live_job(tx, campaign.job_id)):
            return campaign
    elif needs_approval and not can_approve:
        raise Refused(
            f"The campaign requires approval ({campaign.reason}).", code="APPROVAL_MISSING",
            fix="An admin can approve it: POST /campaigns/{id}/approve.",
        )  # fmt: skip
    if campaign.reason == CANARY:
        campaign.plan = dataclasses.replace(campaign.plan, canary=None)
    if needs_approval:
        campaign.approved_by = actor or "unknown"
    if campaign.unsent:
        campaign.zone_progress.insert(0, _retry_pass(campaign, [UNSENT], now))
    campaign.health.reset_sample()
    campaign.state, campaign.reason = CampaignState.RUNNING, None
    if campaign.started_at is None:
        campaign.state = CampaignState.PENDING
        enqueue_chunk(tx, campaign, max(now, earliest_send_at(campaign.plan, campaign.send_at)), now)
    else:
        enqueue_next_or_complete(tx, campaign, now)
    return save_campaign(tx, campaign, now)


def _retry_pass(campaign: Campaign, states: Sequence[str], now: datetime) -> ZoneProgress:
    """Return a pass through the recipients of opened chunks that are in these states."""
    campaign.round += 1
    return ZoneProgress(None, now, of="ledger", until=campaign.next_chunk, states=states)


def _is_live_job(tx: Transaction, job_id: str) -> bool:
    """Return whether the job is live; a user may have cancelled it."""
    return tx.execute(select(job_table.c.id).where(job_table.c.id == job_id)).first() is not None


def stop_campaign(tx: Transaction, tenant_id: str, id_: str, reason: str | None, now: datetime) -> Campaign | None:
    """Stop a campaign for good: no more chunks are opened, open ones finish. None for an unknown id."""
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None or next_state(campaign.state, CampaignAction.STOP) is campaign.state:
        return campaign
    campaign.state, campaign.reason, campaign.ended_at = CampaignState.STOPPED, reason, now
    if campaign.job_id is not None and not campaign.open_chunks:
        repository.cancel(tx, tenant_id, campaign.job_id, now)
    if campaign.started_at is not None and not campaign.open_chunks:
        enqueue_recipient_count(tx, campaign, now)
    return save_campaign(tx, campaign, now)


def archive_campaign(tx: Transaction, tenant_id: str, id_: str, archived: bool, now: datetime) -> Campaign | None:
    """Hide an ended campaign from lists, or show it again. None for an unknown id. Raises Conflict (CAMPAIGN_STATE)."""
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None or (campaign.archived_at is not None) is archived:
        return campaign
    if archived:
        next_state(campaign.state, CampaignAction.ARCHIVE)
    campaign.archived_at = now if archived else None
    return save_campaign(tx, campaign, now)


def delete_campaign(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> Campaign | None:
    """Delete a campaign that is not being sent; retention removes its records. None for an unknown id.

    Raises Conflict (CAMPAIGN_STATE).
    """
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None:
        return None
    next_state(CampaignState.RUNNING if campaign.open_chunks else campaign.state, CampaignAction.DELETE)
    if campaign.job_id is not None:
        repository.cancel(tx, tenant_id, campaign.job_id, now)
    campaign.deleted_at, campaign.ended_at = now, campaign.ended_at or now
    return save_campaign(tx, campaign, now)


def retry_campaign(
    tx: Transaction, tenant_id: str, id_: str, *, include_unknown: bool, now: datetime
) -> Campaign | None:
    """Send again to recipients that were not reached, never to those with an accepted message. None for an unknown id.

    With `include_unknown`, also to recipients whose result is unknown. Raises Conflict (CAMPAIGN_STATE).
    """
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None:
        return None
    campaign.state = next_state(campaign.state, CampaignAction.RETRY)
    states = [UNSENT, REFUSED, *([UNKNOWN] if include_unknown else [])]
    if campaign.started_at is not None:
        campaign.zone_progress = [
            _retry_pass(campaign, states, now),
            *(zone for zone in campaign.zone_progress if not zone.done and zone.of == "devices"),
        ]
    campaign.ended_at = campaign.reason = campaign.archived_at = None
    campaign.excluded.pop(ExclusionReason.STOPPED.value, None)
    campaign.health.reset_sample()
    if campaign.started_at is None:  # stopped before it started
        campaign.state = CampaignState.PENDING
    enqueue_next_or_complete(tx, campaign, now)
    return save_campaign(tx, campaign, now)
