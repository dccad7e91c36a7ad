"""Campaign repository: rows of campaigns."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row, bindparam, delete, or_, select, update

from timebell.errors import NotFound
from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign, CampaignPlan, ZoneProgress, pinned_audience
from timebell.features.campaigns.model.health import Health
from timebell.features.campaigns.store.lifecycle_events import announce_change
from timebell.features.campaigns.store.tables import campaigns, chunks, deliveries, members
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.transaction import Transaction

REFUSED, UNKNOWN, UNSENT = "refused", "unknown", "unsent"
# The beginnings of the reasons why Timebell itself pauses a campaign.
CANARY, APPROVAL, CEILING, CHANGE, ERRORS, BLOCKED = "canary", "approval", "ceiling", "change", "errors", "blocked"
SIZE_CHECKS = (APPROVAL, CEILING, CHANGE)
EDITED = "edited"
"""The reason of a campaign that a size check paused and that was edited since: the check is repeated."""

c = campaigns.c


def count_with_target(tx: Transaction, tenant_id: str, target_name: str) -> int:
    """Return the number of unfinished campaigns that announce their changes to a named target."""
    specs = tx.execute(select(c.spec).where(c.tenant_id == tenant_id, c.ended_at.is_(None))).scalars()
    return sum(decode(spec).get("notify") == target_name for spec in specs)


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


def previous_recipient_count(tx: Transaction, campaign: Campaign) -> int | None:
    """Return the number of recipients of the last completed campaign with the same name; None if there is none."""
    if campaign.name is None:
        return None
    query = select(c.opened).where(
        c.tenant_id == campaign.tenant_id, c.name == campaign.name, c.id != campaign.id,
        c.state.in_([CampaignState.COMPLETED.value, CampaignState.PARTLY_SENT.value]),
    )  # fmt: skip
    return tx.execute(query.order_by(c.id.desc()).limit(1)).scalar()


def prune_campaigns(tx: Transaction, before: datetime, limit: int) -> int:
    """Remove up to `limit` campaigns that ended before an instant or were deleted; return how many."""
    is_over = or_(c.ended_at < before, c.deleted_at.is_not(None))
    ids = list(tx.execute(select(c.id).where(is_over).order_by(c.ended_at).limit(limit)).scalars())
    for table in (deliveries, chunks):
        tx.execute(delete(table).where(table.c.campaign_id.in_(ids)))
    tx.execute(delete(members).where(members.c.audience.in_([pinned_audience(id_) for id_ in ids])))
    return tx.execute(delete(campaigns).where(c.id.in_(ids))).rowcount


_SAVE = update(campaigns).where(c.id == bindparam("campaign"))


def save_campaign(tx: Transaction, campaign: Campaign, now: datetime) -> Campaign:
    """Update the row of a campaign, and announce a new phase."""
    campaign.updated_at = now
    announce_change(tx, campaign, now)
    campaign.stored_phase = campaign.phase
    tx.execute(_SAVE, {"campaign": campaign.id, **campaign_to_row(campaign)})
    return campaign


_PLAIN_COLUMNS = (
    "name", "reason", "send_at", "timezone", "schedule_id", "job_id", "next_chunk", "cutoff", "round", "open_chunks",
    "opened", "accepted", "refused", "unknown", "unsent", "expected", "revision", "approved_by", "created_at",
    "created_by", "updated_at", "started_at", "ended_at", "pinned_at", "registered", "all_opened",
    "possible_duplicates", "archived_at", "deleted_at",
)  # fmt: skip


def campaign_to_row(campaign: Campaign) -> dict[str, Any]:
    """Return the columns of a campaign, except its id and tenant."""
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
    return NotFound(
        f"There is no campaign {id_!s:.60}.", code="CAMPAIGN_NOT_FOUND",
        fix="Check the spelling, and the tenant.",
    )  # fmt: skip
