"""`/campaigns`: push messages to many devices: create, edit, list, preview and test."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.history import HistoryPage, history_response
from timebell.api.if_match import IfMatch, require_match
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schedule_fields import ScheduleIn, parse_schedule
from timebell.api.schemas import (
    Cursor,
    Id,
    InstantText,
    Json,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
    parse_period,
)
from timebell.errors import InvalidInput
from timebell.features.campaigns.api.campaign_fields import (
    CampaignIn,
    CampaignOut,
    CampaignPage,
    MessageIn,
    campaign_response,
    etag,
    message_fields,
    render_campaign,
)
from timebell.features.campaigns.client.campaigns import parse_campaign_id
from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import OPTION_NAMES, Campaign
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store.campaign_jobs import TOPIC
from timebell.features.campaigns.store.progress import forecast_campaign
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["campaigns"])
RECURRENCE_FIELDS = ("cronExpression", "interval", "rrule", "dates")
CampaignStateName = Literal["pending", "running", "paused", "stopped", "completed", "partly_sent", "failed"]


class CampaignTestIn(RequestBody):
    tokens: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=100, default_factory=list)]
    user_ids: Annotated[list[Name], Field(max_length=100, default_factory=list)]
    variant: Annotated[str | None, Field(max_length=20)] = None


class TestJob(ResponseBody):
    """Job that sends the message to the test devices."""

    job_id: str


class MessagePreview(ResponseBody):
    """FCM request for one device, exactly as sent."""

    request: dict[str, Json]


@routes.post("/campaigns", response_model=CampaignOut, status_code=201, **change_route("campaign.create", Role.EDITOR))
async def create_campaign(body: CampaignIn, ctx: Context) -> Response:
    """Create a campaign. Messages are sent asynchronously."""
    fields = message_fields(body)
    in_recipient_zones = bool(fields.pop("inRecipientZones", False))
    recurrence = {name: fields.pop(name) for name in RECURRENCE_FIELDS if fields.get(name) is not None}
    message = {name: fields[name] for name in OPTION_NAMES if name in fields}
    if recurrence:
        return await _create_recurring(ctx, fields, message, recurrence, in_recipient_zones)
    if in_recipient_zones:
        raise InvalidInput(
            "inRecipientZones requires a recurrence.", code="INVALID_CAMPAIGN",
            fix="Add cronExpression, interval, rrule or dates; for a single campaign, use localTime.",
        )  # fmt: skip
    campaign = await ctx.app.campaigns.create(
        message, send_at=fields.get("sendAt"), timezone=fields.get("timezone"), name=fields.get("name"),
        tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection,
    )  # fmt: skip
    return campaign_response(ctx, campaign, 201)


async def _create_recurring(
    ctx: Context, fields: dict[str, Any], message: dict[str, Any], recurrence: dict[str, Any],
    in_recipient_zones: bool,
) -> Response:  # fmt: skip
    """Create a schedule whose occurrences are campaigns."""
    optional = {"name": fields.get("name"), "timezone": fields.get("timezone")}
    body = {**{name: value for name, value in optional.items() if value is not None}, **recurrence, "topic": TOPIC}
    _, spec, options = parse_schedule(ScheduleIn.model_validate(body), ctx.app.settings.default_timezone)
    schedule = await ctx.app.campaigns.repeat(
        message, spec, send_at=fields.get("sendAt"), in_recipient_zones=in_recipient_zones, tenant_id=ctx.tenant_id,
        created_by=ctx.caller.actor, connection=ctx.connection, **options,
    )  # fmt: skip
    ctx.subject = schedule.id
    return json_response({
        **message, "id": schedule.id, "scheduleId": schedule.id, "name": schedule.name, "state": "pending",
        "reason": None, "sendAt": format_utc(schedule.next_fire_at), "timezone": schedule.timezone, "jobId": None,
        "counts": {}, "totalSent": 0, "excluded": {}, "opened": 0, "expected": None,
        "registered": None, "possibleDuplicates": 0, "errors": {},
        "createdAt": format_utc(schedule.created_at), "createdBy": schedule.created_by,
        "updatedAt": format_utc(schedule.updated_at), "approvedBy": None, "actualSendStart": None,
        "actualSendEnd": None,
        "pinnedAt": None, "archivedAt": None, "revision": schedule.revision, "forecast": None,
    }, 201, {"Location": f"/api/v1/schedules/{schedule.id}"})  # fmt: skip


@routes.get("/campaigns", response_model=CampaignPage, **read_route())
async def list_campaigns(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None,
    state: Annotated[CampaignStateName | None, Query()] = None,
    archived: Annotated[bool, Query(description="Only the archived campaigns, instead of the others.")] = False,
    from_: Annotated[InstantText, Query(alias="from", description="Send time at or after this time.")] = None,
    to: Annotated[InstantText, Query(description="Send time before this time.")] = None,
) -> Response:  # fmt: skip
    """List campaigns, newest first."""
    start, end = parse_period(from_, to)
    page = await ctx.app.campaigns.list(
        state=state, archived=archived, start=start, end=end, tenant_id=ctx.tenant_id, limit=limit, cursor=cursor
    )
    return page_response(page, [render_campaign(campaign) for campaign in page])


@routes.get("/campaigns/{id}", response_model=CampaignOut, **read_route())
async def get_campaign(id: Id, ctx: Context) -> Response:
    """Get a campaign and its progress."""
    campaign = await ctx.app.campaigns.get(id, tenant_id=ctx.tenant_id)
    body = render_campaign(campaign)
    if campaign.state is CampaignState.RUNNING:
        forecast = await ctx.run(forecast_campaign, campaign, ctx.app.clock.now())
        body["forecast"] = {
            "rate": forecast.rate, "endsAt": format_utc(forecast.ends_at),
            "waitingUntil": format_utc(forecast.waiting_until), "waitingForZone": forecast.waiting_for,
        }  # fmt: skip
    return json_response(body, 200, {"ETag": etag(campaign)})


@routes.get("/campaigns/{id}/history", response_model=HistoryPage, **read_route())
async def list_campaign_history(id: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List who changed a campaign, when and how, newest first. Also works for deleted campaigns."""
    return await history_response(
        ctx, "campaign", id, limit, cursor, lambda: ctx.app.campaigns.get(id, tenant_id=ctx.tenant_id)
    )


@routes.patch("/campaigns/{id}", response_model=CampaignOut, **change_route("campaign.update", Role.EDITOR))
async def patch_campaign(id: Id, body: MessageIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Change a campaign before its first message, or the message of a running one with live content.

    A campaign that a size check has paused stays paused, and resuming it repeats the check.
    null resets a field to its default.
    """
    valid_id = parse_campaign_id(id)
    campaign: Campaign | None = (
        None if valid_id is None else await ctx.run(rows.find_campaign, ctx.tenant_id, valid_id, lock=True)
    )
    if campaign is None:
        raise not_found("campaign", id)
    require_match(if_match, etag(campaign), "The campaign", campaign.id)
    ctx.before = render_campaign(campaign)
    changed = await ctx.app.campaigns.edit(id, message_fields(body), tenant_id=ctx.tenant_id, connection=ctx.connection)
    return campaign_response(ctx, changed)


@routes.post(
    "/campaigns/{id}/test", response_model=TestJob, status_code=202, **change_route("campaign.test", Role.OPERATOR)
)
async def test_campaign(id: Id, body: CampaignTestIn, ctx: Context) -> Response:
    """Send the message to the given test devices now. Test messages are not counted."""
    job = await ctx.app.campaigns.test(
        id, tokens=body.tokens, user_ids=body.user_ids, variant=body.variant, tenant_id=ctx.tenant_id,
        connection=ctx.connection,
    )  # fmt: skip
    ctx.subject = id
    return json_response({"jobId": job.id}, 202, {"Location": f"/api/v1/jobs/{job.id}"})


@routes.get("/campaigns/{id}/preview", response_model=MessagePreview, **read_route())
async def preview_campaign(
    id: Id, ctx: Context, user_id: Annotated[str | None, Query(alias="userId", max_length=200)] = None,
    variant: Annotated[str | None, Query(max_length=20)] = None,
) -> Response:  # fmt: skip
    """Return the exact FCM request for the first device of a user, or for an example whose placeholders are empty."""
    request = await ctx.app.campaigns.preview(id, user_id=user_id, variant=variant, tenant_id=ctx.tenant_id)
    return json_response({"request": request})
