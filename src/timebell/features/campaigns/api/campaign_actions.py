"""`/campaigns/{id}/...`: start, pause, resume, approve, stop, retry, archive and delete campaigns."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_match
from timebell.api.route import ApiRoute, Context, change_route
from timebell.api.schemas import Id, RequestBody
from timebell.features.campaigns.api.campaign_fields import CampaignOut, campaign_response, etag, render_campaign
from timebell.features.campaigns.client.campaigns import parse_campaign_id
from timebell.features.campaigns.store import campaigns as rows
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["campaigns"])


class ReasonIn(RequestBody):
    reason: Annotated[str | None, Field(max_length=500)] = None


class CampaignRetryIn(RequestBody):
    unknown: Annotated[bool, Field(description="Include recipients whose delivery result is unknown.")] = False


async def _lock_for_change(ctx: Context, id_: str, if_match: str | None) -> None:
    """Lock a campaign, check If-Match, and record its state for the audit log; nothing if it does not exist."""
    valid_id = parse_campaign_id(id_)
    campaign = None if valid_id is None else await ctx.run(rows.find_campaign, ctx.tenant_id, valid_id, lock=True)
    if campaign is not None:
        check_match(if_match, etag(campaign), "The campaign", campaign.id)
        ctx.before = render_campaign(campaign)


@routes.post("/campaigns/{id}/start", response_model=CampaignOut, **change_route("campaign.start", Role.OPERATOR))
async def start_campaign(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Start sending now, regardless of the planned time."""
    await _lock_for_change(ctx, id, if_match)
    return campaign_response(ctx, await ctx.app.campaigns.start(id, tenant_id=ctx.tenant_id, connection=ctx.connection))


@routes.post("/campaigns/{id}/pause", response_model=CampaignOut, **change_route("campaign.pause", Role.OPERATOR))
async def pause_campaign(id: Id, ctx: Context, body: ReasonIn | None = None, if_match: IfMatch = None) -> Response:
    """Pause the campaign: no further chunk is started, and its position is kept."""
    await _lock_for_change(ctx, id, if_match)
    reason = None if body is None else body.reason
    return campaign_response(
        ctx, await ctx.app.campaigns.pause(id, reason, tenant_id=ctx.tenant_id, connection=ctx.connection)
    )


@routes.post("/campaigns/{id}/resume", response_model=CampaignOut, **change_route("campaign.resume", Role.OPERATOR))
async def resume_campaign(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Resume the campaign at its position.

    If it is waiting for approval, this requires the role admin.
    """
    await _lock_for_change(ctx, id, if_match)
    campaign = await ctx.app.campaigns.resume(
        id, by=ctx.caller.actor, approve=ctx.caller.role.covers(Role.ADMIN), tenant_id=ctx.tenant_id,
        connection=ctx.connection,
    )  # fmt: skip
    return campaign_response(ctx, campaign)


@routes.post("/campaigns/{id}/approve", response_model=CampaignOut, **change_route("campaign.approve", Role.ADMIN))
async def approve_campaign(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Approve and resume a campaign that is waiting for approval."""
    await _lock_for_change(ctx, id, if_match)
    campaign = await ctx.app.campaigns.resume(
        id, by=ctx.caller.actor, tenant_id=ctx.tenant_id, connection=ctx.connection
    )
    return campaign_response(ctx, campaign)


@routes.post("/campaigns/{id}/archive", response_model=CampaignOut, **change_route("campaign.archive", Role.EDITOR))
async def archive_campaign(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Hide a campaign that has ended from lists. It is kept as long as others."""
    await _lock_for_change(ctx, id, if_match)
    campaign = await ctx.app.campaigns.archive(id, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return campaign_response(ctx, campaign)


@routes.post(
    "/campaigns/{id}/unarchive", response_model=CampaignOut, **change_route("campaign.unarchive", Role.EDITOR)
)  # fmt: skip
async def unarchive_campaign(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Show an archived campaign in lists again."""
    await _lock_for_change(ctx, id, if_match)
    campaign = await ctx.app.campaigns.archive(id, False, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return campaign_response(ctx, campaign)


@routes.delete("/campaigns/{id}", response_model=CampaignOut, **change_route("campaign.delete", Role.EDITOR))
async def delete_campaign(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a campaign that is not being sent, with its results, and return it. Its history is kept."""
    await _lock_for_change(ctx, id, if_match)
    campaign = await ctx.app.campaigns.delete(id, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return campaign_response(ctx, campaign)


@routes.post("/campaigns/{id}/stop", response_model=CampaignOut, **change_route("campaign.stop", Role.OPERATOR))
async def stop_campaign(id: Id, ctx: Context, body: ReasonIn | None = None, if_match: IfMatch = None) -> Response:
    """Stop the campaign permanently.

    `/deliveries` lists the recipients it was sent to, `/remaining` the others.
    """
    await _lock_for_change(ctx, id, if_match)
    reason = None if body is None else body.reason
    return campaign_response(
        ctx, await ctx.app.campaigns.stop(id, reason, tenant_id=ctx.tenant_id, connection=ctx.connection)
    )


@routes.post("/campaigns/{id}/retry", response_model=CampaignOut, **change_route("campaign.retry", Role.OPERATOR))
async def retry_campaign(
    id: Id, ctx: Context, body: CampaignRetryIn | None = None, if_match: IfMatch = None
) -> Response:
    """Send to recipients who were not reached; with `unknown`, also to those whose result is unknown.

    Recipients whose message was accepted never receive it again.
    """
    await _lock_for_change(ctx, id, if_match)
    unknown = body is not None and body.unknown
    campaign = await ctx.app.campaigns.retry(id, unknown=unknown, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return campaign_response(ctx, campaign)
