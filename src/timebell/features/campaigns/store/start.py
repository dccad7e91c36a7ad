"""The start of a campaign: when its first recipients are due, after the size checks."""

from __future__ import annotations

from datetime import datetime, timedelta

from timebell.features.campaigns.model.campaign import CampaignState, ExclusionReason
from timebell.features.campaigns.model.campaign_plan import Campaign, next_zone, plan_zones
from timebell.features.campaigns.store import audiences, campaign_jobs
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.campaigns import APPROVAL, CEILING, CHANGE
from timebell.store.transaction import Transaction

MAX_WAIT = timedelta(hours=1)
"""How long a campaign waits before it looks for recipients in new time zones again."""


def start_when_due(tx: Transaction, campaign: Campaign, now: datetime) -> str | None:
    """Start a campaign whose first recipients are due now. Otherwise return why not; the caller saves it either way.

    A campaign by local time is not started before it is due in the first zone that has recipients, so that it can be
    edited until then. A failed size check pauses it.
    """
    plan = campaign.plan
    zones: list[str | None] = []
    if plan.is_zone_dependent:
        zones = list(device_rows.count_by_timezone(tx, campaign.tenant_id, campaign.filters, now, campaign.id))
    progress = plan_zones(plan, campaign.send_at, campaign.timezone, zones)
    _, due_at = next_zone(progress, plan, now)
    if due_at > now:
        campaign_jobs.enqueue_chunk(tx, campaign, min(due_at, now + MAX_WAIT), now)
        return f"No recipients are due before {due_at.isoformat()}."
    if plan.requires_size_check and campaign.approved_by is None:
        count = device_rows.count_devices(tx, campaign.tenant_id, campaign.filters, now, campaign.id)
        if (reason := _failed_size_check(tx, campaign, count)) is not None:
            campaign.expected, campaign.job_id = count, None
            campaign.state, campaign.reason = CampaignState.PAUSED, reason
            return f"The campaign is paused: {reason}."
    campaign.state, campaign.started_at, campaign.cutoff = CampaignState.RUNNING, now, now
    campaign.zone_progress = progress
    campaign_jobs.enqueue_recipient_count(tx, campaign, now)
    for audience in plan.filters.audience:
        campaign.exclude(ExclusionReason.NO_TOKEN, audiences.count_without_token(tx, campaign.tenant_id, audience))
    return None


def _failed_size_check(tx: Transaction, campaign: Campaign, count: int) -> str | None:
    """Return why `count` recipients prevent the start, if they do."""
    plan = campaign.plan
    if plan.max_recipients is not None and count > plan.max_recipients:
        return f"{CEILING}: {count} recipients, at most {plan.max_recipients}"
    previous = rows.previous_recipient_count(tx, campaign) if plan.max_change is not None else None
    if (
        previous is not None
        and plan.max_change is not None
        and abs(count - previous) > plan.max_change * max(previous, 1)
    ):
        return f"{CHANGE}: {count} recipients, {previous} in the previous campaign"
    if plan.approve_above is not None and count > plan.approve_above:
        return f"{APPROVAL}: {count} recipients, more than {plan.approve_above}"
    return None
