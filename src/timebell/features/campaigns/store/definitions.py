"""Create and edit campaigns, and pin their recipients."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from sqlalchemy import ColumnElement, delete, insert, literal, select

from timebell.errors import Conflict, InvalidInput
from timebell.features.campaigns.model.campaign import TERMINAL_STATES, CampaignAction, CampaignState, next_state
from timebell.features.campaigns.model.campaign_plan import Campaign, CampaignPlan, earliest_send_at, pinned_audience
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.campaign_jobs import enqueue_audience_refresh, enqueue_chunk
from timebell.features.campaigns.store.campaigns import EDITED, campaign_to_row, find_campaign, save_campaign
from timebell.features.campaigns.store.filters import audience_conditions
from timebell.features.campaigns.store.segments import expand_segments
from timebell.features.campaigns.store.tables import audiences, campaigns, devices, members
from timebell.store.jobs import repository
from timebell.store.jobs.bind_targets import target_not_found
from timebell.store.tenancy.targets import find_target
from timebell.store.transaction import Transaction


def create_campaign(tx: Transaction, campaign: Campaign) -> Campaign:
    """Insert a campaign and the job of its first chunk. Raises InvalidInput (UNKNOWN_TOPIC, UNKNOWN_AUDIENCE)."""
    repository.ensure_tenants(tx, {campaign.tenant_id}, campaign.created_at)
    require_audience(tx, campaign.tenant_id, campaign.plan)
    _require_notify_target(tx, campaign, campaign.created_at)
    enqueue_chunk(tx, campaign, earliest_send_at(campaign.plan, campaign.send_at), campaign.created_at)
    _apply_pin(tx, campaign, campaign.created_at)
    tx.execute(insert(campaigns).values(**campaign_to_row(campaign), id=campaign.id, tenant_id=campaign.tenant_id))
    return campaign


def _apply_pin(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Pin the recipients, if the plan requires it: now, or after its audience was refreshed. The caller saves it."""
    if campaign.pinned_at is not None:
        tx.execute(delete(members).where(*_pinned_members(campaign)))
        campaign.pinned_at = None
    if not campaign.plan.audience_pinned:
        return
    if audience_names := find_audiences(tx, campaign):
        enqueue_audience_refresh(tx, campaign.tenant_id, audience_names, now, campaign.id)
    else:
        pin_recipients(tx, campaign, now)


def find_audiences(tx: Transaction, campaign: Campaign) -> list[str]:
    """Return the names of the audiences in the filters of a campaign, also of those in its segments."""
    return expand_segments(tx, campaign.tenant_id, campaign.plan.filters).audiences


def pin_recipients(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Fix the devices that match now as the recipients. The caller saves the campaign."""
    matching = select(
        literal(campaign.tenant_id), literal(pinned_audience(campaign.id)), devices.c.id, literal(1)
    ).where(*audience_conditions(tx, campaign.tenant_id, campaign.plan.filters, now))  # fmt: skip
    tx.execute(insert(members).from_select(["tenant_id", "audience", "device_id", "generation"], matching))
    campaign.pinned_at = now


def pin_after_refresh(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> None:
    """Pin the recipients of a campaign whose audience was refreshed, unless it is pinned or has started."""
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if (
        campaign is not None
        and campaign.plan.audience_pinned
        and campaign.pinned_at is None
        and campaign.started_at is None
    ):
        pin_recipients(tx, campaign, now)
        save_campaign(tx, campaign, now)


def _pinned_members(campaign: Campaign) -> list[ColumnElement[bool]]:
    return [members.c.tenant_id == campaign.tenant_id, members.c.audience == pinned_audience(campaign.id)]


def create_for_occurrence(
    tx: Transaction, id_: str, tenant_id: str, sending: CampaignPlan, *, name: str | None, schedule_id: str | None,
    at: datetime, timezone: str, now: datetime,
) -> bool:  # fmt: skip
    """Create the campaign of an occurrence; return False if it exists.

    Its id is that of the occurrence's job, so a retry of the job does not create another campaign.
    """
    if find_campaign(tx, tenant_id, id_) is not None:
        return False
    create_campaign(tx, Campaign(
        id=id_, tenant_id=tenant_id, name=name, plan=sending, state=CampaignState.PENDING, send_at=at,
        timezone=timezone, schedule_id=schedule_id, created_at=now, updated_at=now,
    ))  # fmt: skip
    return True


def require_audience(tx: Transaction, tenant_id: str, plan: CampaignPlan) -> None:
    """Check that the segments, audiences and campaigns in the filters exist, and the topics have devices.

    Raises InvalidInput (UNKNOWN_SEGMENT, UNKNOWN_TOPIC, UNKNOWN_AUDIENCE, INVALID_FILTER): the campaign would have no
    recipients.
    """
    filters = expand_segments(tx, tenant_id, plan.filters)
    device_rows.check_attribute_types(tx, tenant_id, filters)
    for audience in filters.audiences:
        matches = (audiences.c.tenant_id == tenant_id) & (audiences.c.name == audience)
        if tx.execute(select(audiences.c.name).where(matches)).first() is None:
            raise InvalidInput(
                f"There is no audience {audience!r:.60}.",
                code="UNKNOWN_AUDIENCE",
                fix="Create it first: PUT /audiences/{name}.",
            )
    for id_ in sorted({id_ for each in filters.walk() for id_ in each.received}):
        if (
            tx.execute(select(campaigns.c.id).where(campaigns.c.tenant_id == tenant_id, campaigns.c.id == id_)).first()
            is None
        ):
            raise InvalidInput(
                f"There is no campaign {id_}.", code="INVALID_FILTER", fix="Use the id of a campaign in received."
            )
    for topic in sorted({topic for each in filters.walk() for topic in each.topic}):
        if not device_rows.topic_has_devices(tx, tenant_id, topic):
            raise InvalidInput(
                f"No device is subscribed to the topic {topic!r:.60}.", code="UNKNOWN_TOPIC",
                fix="Register devices with the topics that their app subscribes to, or omit the topic.",
            )  # fmt: skip


def _require_notify_target(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Check that the target `notify` exists. Raises NotFound (TARGET_NOT_FOUND)."""
    name = campaign.plan.notify
    if name is not None and find_target(tx, campaign.tenant_id, name, now) is None:
        raise target_not_found(name)


def edit_campaign(
    tx: Transaction, tenant_id: str, id_: str, change: Callable[[Campaign], Campaign], revision: int | None,
    now: datetime,
) -> Campaign | None:  # fmt: skip
    """Edit a campaign that has not started, or the content of a running one whose plan has `content_live`.

    A campaign that a size check has paused stays paused; when it is resumed, the check is repeated.

    None for an unknown id. Raises Conflict (CAMPAIGN_STATE, CAMPAIGN_CHANGED), and the errors of `change`.
    """
    campaign = find_campaign(tx, tenant_id, id_, lock=True)
    if campaign is None:
        return None
    is_live_edit = (
        campaign.started_at is not None and campaign.plan.content_live and campaign.state not in TERMINAL_STATES
    )
    if not is_live_edit:
        is_sending = campaign.state is CampaignState.PAUSED and campaign.started_at is not None
        next_state(CampaignState.RUNNING if is_sending else campaign.state, CampaignAction.EDIT)
    if revision is not None and revision != campaign.revision:
        raise Conflict(
            f"The campaign is at revision {campaign.revision}, not {revision}.",
            code="CAMPAIGN_CHANGED",
            fix="Fetch it again and repeat the change.",
        )
    changed = change(campaign)
    changed.revision += 1
    if is_live_edit:
        unchanged = (changed.name, changed.send_at, changed.timezone) == (
            campaign.name,
            campaign.send_at,
            campaign.timezone,
        )
        if not unchanged or changed.plan != campaign.plan.with_content_from(changed.plan):
            raise Conflict(
                "The campaign has started: only title, body, data, fields and ttl can be changed.",
                code="CAMPAIGN_STATE", fix="Stop it and create another campaign.",
            )  # fmt: skip
        return save_campaign(tx, changed, now)
    require_audience(tx, tenant_id, changed.plan)
    _require_notify_target(tx, changed, now)
    _apply_pin(tx, changed, now)
    if campaign.job_id is not None:
        repository.cancel(tx, tenant_id, campaign.job_id, now)
    if campaign.state is CampaignState.PAUSED:
        changed.reason, changed.approved_by, changed.expected = EDITED, None, None
    else:
        enqueue_chunk(tx, changed, earliest_send_at(changed.plan, changed.send_at), now)
    return save_campaign(tx, changed, now)
