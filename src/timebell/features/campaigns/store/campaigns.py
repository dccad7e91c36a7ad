"""Campaign repository: rows, actions and jobs of campaigns. Chunks are opened and closed in chunks.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, func, insert, literal, or_, select, update

from timebell.errors import Conflict, InvalidInput, NotFound, Refused
from timebell.features.campaigns.model.campaign import (
    TERMINAL_STATES,
    CampaignAction,
    CampaignState,
    ExclusionReason,
    next_state,
)
from timebell.features.campaigns.model.campaign_plan import (
    Campaign,
    CampaignPlan,
    ZoneProgress,
    earliest_send_at,
    pinned_audience,
)
from timebell.features.campaigns.model.device import Device
from timebell.features.campaigns.model.health import Health
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store import walk
from timebell.features.campaigns.store.filters import audience_conditions
from timebell.features.campaigns.store.lifecycle_events import announce_change
from timebell.features.campaigns.store.segments import expand_segments
from timebell.features.campaigns.store.tables import audiences, campaigns, chunks, deliveries, devices, members
from timebell.ids import new_id
from timebell.model.job import NewJob
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.cluster import nodes
from timebell.store.jobs import claim, repository
from timebell.store.jobs.bind_targets import target_not_found
from timebell.store.schema import jobs as job_table
from timebell.store.tenancy.targets import find_target
from timebell.store.transaction import Transaction

TOPIC = "timebell.campaign"
TARGET: dict[str, Any] = {"kind": "campaign", "options": {}}
QUEUE = "campaigns"
CHUNK_TIMEOUT_SECONDS = 600.0
AUDIENCE_READ_TIMEOUT_SECONDS = 3600.0
"""Long enough to read an audience of millions."""
CHUNK_RETRY = {"attempts": 100, "backoff": "fixed", "delay": 1.0, "max_delay": 1.0, "jitter": 0.0}
"""Retries after the death of a node. Messages that the provider rejects temporarily are counted per chunk instead."""
REFUSED, UNKNOWN, UNSENT = "refused", "unknown", "unsent"
# The beginnings of the reasons why Timebell itself pauses a campaign.
CANARY, APPROVAL, CEILING, CHANGE, ERRORS, BLOCKED = "canary", "approval", "ceiling", "change", "errors", "blocked"
_COUNTED_WHILE_SENDING = (ExclusionReason.NO_TOKEN, ExclusionReason.HOLD_OUT)
EDITED = "edited"
"""The reason of a campaign that a size check paused and that was edited since: the check is repeated."""

c = campaigns.c


def create_campaign(tx: Transaction, campaign: Campaign) -> Campaign:
    """Insert a campaign and the job of its first chunk. Raises InvalidInput (UNKNOWN_TOPIC, UNKNOWN_AUDIENCE)."""
    repository.ensure_tenants(tx, {campaign.tenant_id}, campaign.created_at)
    require_audience(tx, campaign.tenant_id, campaign.plan)
    _require_notify_target(tx, campaign, campaign.created_at)
    enqueue_chunk(tx, campaign, earliest_send_at(campaign.plan, campaign.send_at), campaign.created_at)
    _apply_pin(tx, campaign, campaign.created_at)
    tx.execute(insert(campaigns).values(**_campaign_to_row(campaign), id=campaign.id, tenant_id=campaign.tenant_id))
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
        if tx.execute(select(c.id).where(c.tenant_id == tenant_id, c.id == id_)).first() is None:
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


def count_with_target(tx: Transaction, tenant_id: str, target_name: str) -> int:
    """Return the number of unfinished campaigns that announce their changes to a named target."""
    specs = tx.execute(select(c.spec).where(c.tenant_id == tenant_id, c.ended_at.is_(None))).scalars()
    return sum(decode(spec).get("notify") == target_name for spec in specs)


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


def find_campaign(tx: Transaction, tenant_id: str | None, id_: str, *, lock: bool = False) -> Campaign | None:
    """Return a campaign of a tenant, or of any tenant if None; None if there is none."""
    query = select(campaigns).where(c.id == id_, c.deleted_at.is_(None))
    if tenant_id is not None:
        query = query.where(c.tenant_id == tenant_id)
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else campaign_from_row(row)


def list_campaigns(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, state: CampaignState | None = None,
    archived: bool = False, start: datetime | None = None, end: datetime | None = None,
) -> Page[Campaign]:  # fmt: skip
    """Return a page of a tenant's campaigns with a send time in [start, end), newest first.

    These are the archived ones, or the others.
    """
    query = select(campaigns).where(c.tenant_id == tenant_id, c.deleted_at.is_(None)).order_by(c.id.desc())
    query = query.where(c.archived_at.is_not(None) if archived else c.archived_at.is_(None)).limit(limit + 1)
    if state is not None:
        query = query.where(c.state == state.value)
    if start is not None:
        query = query.where(c.send_at >= start)
    if end is not None:
        query = query.where(c.send_at < end)
    if before is not None:
        query = query.where(c.id < before)
    page = [campaign_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)


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
    needs_approval = campaign.started_at is None and campaign.reason is not None and campaign.reason != EDITED
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


def enqueue_next_or_complete(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Insert the job of the next chunk, or complete the campaign if no chunk is left or open. The caller saves it."""
    if not campaign.all_chunks_opened:
        enqueue_chunk(tx, campaign, now, now)
    elif not campaign.open_chunks:
        campaign.job_id, campaign.state, campaign.ended_at = None, campaign.final_state(), now
        campaign.reason = campaign.health.describe_codes() if campaign.state is not CampaignState.COMPLETED else None


def list_deliveries(
    tx: Transaction, campaign_id: str, limit: int, after_id: str | None, state: str | None
) -> Page[Mapping[str, Any]]:  # fmt: skip
    """Return a page of a campaign's recipients with their results, in recipient id order.

    `user_id` is None once the device is deleted. The times are those of the recipient's chunk.
    """
    t = deliveries.c
    in_chunk = (chunks.c.campaign_id == t.campaign_id) & (chunks.c.number == t.chunk)
    query = (
        select(
            t.recipient, devices.c.user_id, t.state, t.code, t.message_id, t.chunk, t.sends, t.unknown_sends,
            t.variant, t.opened_at, chunks.c.started_at, chunks.c.ended_at,
        )
        .outerjoin_from(deliveries, devices, devices.c.id == t.recipient)
        .outerjoin(chunks, in_chunk)
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


def count_remaining(tx: Transaction, campaign: Campaign) -> int:
    """Return the number of devices that a campaign was not sent to yet."""
    return int(tx.execute(select(func.count()).where(*walk.remaining_conditions(tx, campaign))).scalar_one())


def previous_recipient_count(tx: Transaction, campaign: Campaign) -> int | None:
    """Return the number of recipients of the last completed campaign with the same name; None if there is none."""
    if campaign.name is None:
        return None
    query = select(c.opened).where(
        c.tenant_id == campaign.tenant_id, c.name == campaign.name, c.id != campaign.id,
        c.state.in_([CampaignState.COMPLETED.value, CampaignState.PARTLY_SENT.value]),
    )  # fmt: skip
    return tx.execute(query.order_by(c.id.desc()).limit(1)).scalar()


def list_chunks(tx: Transaction, campaign_id: str, limit: int, after_number: int) -> Page[Mapping[str, Any]]:
    """Return a page of a campaign's chunks in order."""
    query = select(chunks).where(chunks.c.campaign_id == campaign_id, chunks.c.number > after_number)
    rows: list[Mapping[str, Any]] = [
        dict(row._mapping) for row in tx.execute(query.order_by(chunks.c.number).limit(limit + 1))
    ]
    return Page(rows[:limit], str(rows[limit - 1]["number"]) if len(rows) > limit else None)


def prune_campaigns(tx: Transaction, before: datetime, limit: int) -> int:
    """Remove up to `limit` campaigns that ended before an instant or were deleted; return how many."""
    is_over = or_(c.ended_at < before, c.deleted_at.is_not(None))
    ids = list(tx.execute(select(c.id).where(is_over).order_by(c.ended_at).limit(limit)).scalars())
    for table in (deliveries, chunks):
        tx.execute(delete(table).where(table.c.campaign_id.in_(ids)))
    tx.execute(delete(members).where(members.c.audience.in_([pinned_audience(id_) for id_ in ids])))
    return tx.execute(delete(campaigns).where(c.id.in_(ids))).rowcount


def save_campaign(tx: Transaction, campaign: Campaign, now: datetime) -> Campaign:
    """Update the row of a campaign, and announce a new phase."""
    campaign.updated_at = now
    announce_change(tx, campaign, now)
    campaign.stored_phase = campaign.phase
    tx.execute(update(campaigns).where(c.id == campaign.id).values(**_campaign_to_row(campaign)))
    return campaign


_PLAIN_COLUMNS = (
    "name", "reason", "send_at", "timezone", "schedule_id", "job_id", "next_chunk", "cutoff", "round", "open_chunks",
    "opened", "accepted", "refused", "unknown", "unsent", "expected", "revision", "approved_by", "created_at",
    "created_by", "updated_at", "started_at", "ended_at", "pinned_at", "registered", "all_opened",
    "possible_duplicates", "archived_at", "deleted_at",
)  # fmt: skip


def _campaign_to_row(campaign: Campaign) -> dict[str, Any]:
    return {
        **{name: getattr(campaign, name) for name in _PLAIN_COLUMNS}, "state": campaign.state.value,
        "spec": encode(campaign.plan.to_json(), "campaign"),
        "lanes": encode([zone.to_json() for zone in campaign.zone_progress]), "excluded": encode(campaign.excluded),
        "health": encode(campaign.health.to_json()),
    }  # fmt: skip


def campaign_from_row(row: Row[Any]) -> Campaign:
    """Return a row as a Campaign."""
    plain = {name: getattr(row, name) for name in _PLAIN_COLUMNS}
    campaign = Campaign(
        id=row.id, tenant_id=row.tenant_id, state=CampaignState(row.state),
        plan=CampaignPlan.from_json(decode(row.spec)),
        zone_progress=[ZoneProgress.from_json(zone) for zone in decode(row.lanes) or []],
        excluded=decode(row.excluded) or {}, health=Health.from_json(decode(row.health)), **plain,
    )  # fmt: skip
    campaign.stored_phase = campaign.phase
    return campaign


def no_such_campaign(id_: object) -> NotFound:
    """Return the error for an unknown campaign id."""
    return NotFound(f"There is no campaign {id_!s:.60}.", code="CAMPAIGN_NOT_FOUND")
