"""`/campaigns`: push messages to many devices: create, edit, test, control, and inspect deliveries."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field

from timebell.api.history import HistoryPage, history_response
from timebell.api.if_match import IfMatch, check_match, entity_tag, require_match
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schedule_fields import IntervalIn, ScheduleIn, parse_schedule
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    InstantText,
    Json,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    ZoneName,
    format_utc,
    json_response,
    page_response,
    parse_period,
)
from timebell.errors import InvalidInput
from timebell.features.campaigns.api.devices import DevicePage, render_device
from timebell.features.campaigns.client.campaigns import parse_campaign_id
from timebell.features.campaigns.client.delivery_export import (
    MEDIA_TYPES,
    export_headers,
    render_delivery,
    stream_deliveries,
)
from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import OPTION_NAMES, Campaign
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store.campaign_jobs import TOPIC
from timebell.features.campaigns.store.progress import forecast_campaign
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["campaigns"])
RECURRENCE_FIELDS = ("cronExpression", "interval", "rrule", "dates")
CampaignStateName = Literal["pending", "running", "paused", "stopped", "completed", "partly_sent", "failed"]
DeliveryState = Literal["sending", "accepted", "refused", "unknown", "unsent", "held"]


class MessageIn(RequestBody):
    """Message, recipients and sending options."""

    title: Annotated[str | None, Field(max_length=4096)] = None
    body: Annotated[str | None, Field(max_length=4096)] = None
    content: Annotated[str | None, Field(max_length=4096, description="Alias of body.")] = None
    data: Annotated[
        dict[str, Json] | None, Field(description="Values are converted to strings; null values are omitted.")
    ] = None
    fields: Annotated[
        dict[str, Json] | None, Field(description='Renamed data fields: {"rename": {"bible_code": "bibleCode"}}.')
    ] = None
    ttl: Annotated[int | None, Field(ge=0, le=28 * 86_400)] = None
    collapse_key: Annotated[str | None, Field(max_length=200)] = None
    translations: Annotated[
        dict[str, Json] | None, Field(description='Texts by language: {"ko": {"title": "...", "body": "..."}}.')
    ] = None
    image: Annotated[str | None, Field(max_length=2048, description="https URL.")] = None
    sound: Annotated[str | None, Field(max_length=200, description="default, or a sound of the app.")] = None
    badge: Annotated[int | None, Field(ge=0)] = None
    priority: Literal["high", "normal"] | None = None
    channel: Annotated[str | None, Field(max_length=200, description="Android notification channel.")] = None
    link: Annotated[str | None, Field(max_length=2048, description="https URL; also sent as data.link.")] = None
    actions: Annotated[
        list[dict[str, Json]] | None, Field(description='Buttons on the web: [{"action": "open", "title": "Open"}].')
    ] = None
    analytics_label: Annotated[str | None, Field(max_length=50)] = None
    android: Annotated[dict[str, Json] | None, Field(description="Fields of FCM's AndroidConfig.")] = None
    apns: Annotated[dict[str, Json] | None, Field(description="Fields of FCM's ApnsConfig.")] = None
    webpush: Annotated[dict[str, Json] | None, Field(description="Fields of FCM's WebpushConfig.")] = None
    notification_id: Annotated[str | None, Field(max_length=500)] = None
    filters: Annotated[
        dict[str, Json] | None,
        Field(description="Same filters as POST /audiences/count: gender, ageMin, marketingOnOff, topic, ..."),
    ] = None
    marketing: bool | None = None
    chunk_size: Annotated[int | None, Field(ge=1, le=500)] = None
    chunk_delay_ms: Annotated[int | Literal["adaptive"] | None, Field(description="Milliseconds, or adaptive.")] = None
    quiet_hours: Annotated[
        dict[str, Json] | None, Field(description='Local hours without sending: {"start": "21:00", "end": "08:00"}.')
    ] = None
    local_time: Annotated[
        str | None, Field(max_length=32, description="Send at this local time in each recipient's time zone.")
    ] = None
    expires_at: Instant | None = None
    unknown: Literal["leave", "retry"] | None = None
    canary: Annotated[
        dict[str, Json] | None,
        Field(description='Trial batch before the rest is sent: {"size": 1000, "maxErrorRate": 0.05}.'),
    ] = None
    max_error_rate: Annotated[
        float | None,
        Field(ge=0, le=1, description="Pause above this share of refused messages, apart from dead tokens."),
    ] = None
    max_recipients: Annotated[int | None, Field(ge=1)] = None
    max_change: Annotated[float | None, Field(ge=0)] = None
    approve_above: Annotated[int | None, Field(ge=0)] = None
    audience_format: Annotated[
        Literal["live", "pinned"] | None,
        Field(description="Whether recipients are selected at the start (live) or at creation (pinned)."),
    ] = None
    content_type: Annotated[
        Literal["live", "pinned"] | None,
        Field(description="Whether the message may change while it is being sent (live) or not (pinned)."),
    ] = None
    variants: Annotated[
        list[dict[str, Json]] | None,
        Field(description='Variants by share of the recipients: [{"name": "A"}, {"name": "B", "title": "..."}].'),
    ] = None
    hold_out: Annotated[
        float | None, Field(ge=0, le=0.9, description="Share of the recipients that get no message, for comparison.")
    ] = None
    track_opens: Annotated[bool | None, Field(description="Send campaignId to the app, for POST /opens.")] = None
    notify: Annotated[
        str | None, Field(max_length=200, description="Named target that receives start, pause, resumption and end.")
    ] = None
    name: Name | None = None
    send_at: Annotated[str | None, Field(max_length=64, description="Defaults to now.")] = None
    timezone: ZoneName | None = None


class CampaignIn(MessageIn):
    """Campaign that is sent now, at `sendAt`, or repeatedly by one recurrence."""

    cron_expression: Annotated[str | None, Field(max_length=256)] = None
    interval: IntervalIn | None = None
    rrule: Annotated[str | None, Field(max_length=4096)] = None
    dates: Annotated[list[str] | None, Field(max_length=10_000)] = None
    in_recipient_zones: Annotated[
        bool | None, Field(description="The times of the recurrence are local times of each recipient.")
    ] = None


class ForecastOut(ResponseBody):
    """Speed, pause and expected end of a running campaign; null if unknown.

    `rate` is in recipients per second. While no time zone is due, it waits until `waitingUntil` for `waitingForZone`.
    """

    rate: float | None
    ends_at: Instant | None
    waiting_until: Instant | None
    waiting_for_zone: str | None


class CampaignOut(ResponseBody):
    """Campaign and its progress.

    `errors` are the error codes of all results with their numbers. `possibleDuplicates` recipients were sent to again
    although an earlier message may have arrived. At the end, `opened` and the devices in `excluded` add up to
    `registered`, the devices registered when it started.

    A recurring campaign is a schedule (`scheduleId`), and these are the settings of each occurrence.
    """

    model_config = ConfigDict(**{**ResponseBody.model_config, "extra": "allow"})
    id: str
    name: str | None
    state: str
    reason: str | None
    send_at: Instant | None
    timezone: str | None
    schedule_id: str | None
    job_id: str | None
    counts: dict[str, int]
    total_sent: int
    excluded: dict[str, int]
    opened: int
    expected: int | None
    registered: int | None
    possible_duplicates: int
    errors: dict[str, int]
    created_at: Instant | None
    created_by: str | None
    updated_at: Instant | None
    approved_by: str | None
    actual_send_start: Instant | None
    actual_send_end: Instant | None
    pinned_at: Instant | None
    archived_at: Instant | None
    revision: int
    forecast: Annotated[
        ForecastOut | None, Field(description="Only in GET /campaigns/{id}, and null unless it is running.")
    ]


class CampaignPage(ResponseBody):
    """Page of campaigns, newest first."""

    items: list[CampaignOut]
    next_cursor: str | None


class CampaignRows(ResponseBody):
    """Page of records of a campaign."""

    items: list[dict[str, Json]]
    next_cursor: str | None


class ReasonIn(RequestBody):
    reason: Annotated[str | None, Field(max_length=500)] = None


class CampaignRetryIn(RequestBody):
    unknown: Annotated[bool, Field(description="Include recipients whose delivery result is unknown.")] = False


class CampaignTestIn(RequestBody):
    tokens: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=100, default_factory=list)]
    user_ids: Annotated[list[Name], Field(max_length=100, default_factory=list)]
    variant: Annotated[str | None, Field(max_length=20)] = None


class TestJob(ResponseBody):
    """Job that sends the message to the test devices."""

    job_id: str


class VariantResultOut(ResponseBody):
    """Numbers of recipients of a variant; null: of messages without variants.

    `held` recipients got no message, for comparison. `openRate` is the share of the accepted messages that were opened.
    """

    variant: str | None
    sending: int
    accepted: int
    refused: int
    unknown: int
    unsent: int
    held: int
    opened: int
    open_rate: float | None


class CampaignResults(ResponseBody):
    items: list[VariantResultOut]


class MessagePreview(ResponseBody):
    """FCM request for one device, exactly as sent."""

    request: dict[str, Json]


class TimetableOut(ResponseBody):
    """Planned send times per time zone, for the devices registered now."""

    zones: list[dict[str, Json]]
    excluded: list[dict[str, Json]]
    recipients: int


def render_campaign(campaign: Campaign) -> dict[str, Any]:
    """Render a campaign as JSON."""
    counts = campaign.counts()
    return {
        **campaign.plan.to_json(), "id": campaign.id, "name": campaign.name, "state": campaign.state.value,
        "reason": campaign.reason, "sendAt": format_utc(campaign.send_at), "timezone": campaign.timezone,
        "scheduleId": campaign.schedule_id, "jobId": campaign.job_id,
        "counts": {
            "pending": counts.pending, "accepted": counts.accepted, "refused": counts.refused,
            "unknown": counts.unknown, "unsent": campaign.unsent,
        },
        "totalSent": campaign.accepted, "excluded": campaign.excluded, "opened": campaign.opened,
        "expected": campaign.expected, "registered": campaign.registered,
        "possibleDuplicates": campaign.possible_duplicates, "errors": campaign.health.codes,
        "createdAt": format_utc(campaign.created_at), "createdBy": campaign.created_by,
        "updatedAt": format_utc(campaign.updated_at),
        "approvedBy": campaign.approved_by, "actualSendStart": format_utc(campaign.started_at),
        "actualSendEnd": format_utc(campaign.ended_at), "pinnedAt": format_utc(campaign.pinned_at),
        "archivedAt": format_utc(campaign.archived_at), "revision": campaign.revision, "forecast": None,
    }  # fmt: skip


def etag(campaign: Campaign) -> str:
    """Return the strong ETag of a campaign. Starting, pausing and stopping it changes the ETag."""
    return entity_tag(campaign.revision, None if campaign.state is CampaignState.PENDING else campaign.state)


def campaign_response(ctx: Context, campaign: Campaign, status: int = 200) -> Response:
    """Return a campaign as a response with its ETag, and set it as the audit subject."""
    ctx.subject = campaign.id
    headers = {"ETag": etag(campaign)} | ({"Location": f"/api/v1/campaigns/{campaign.id}"} if status == 201 else {})
    return json_response(render_campaign(campaign), status, headers)


@routes.post("/campaigns", response_model=CampaignOut, status_code=201, **change_route("campaign.create", Role.EDITOR))
async def create_campaign(body: CampaignIn, ctx: Context) -> Response:
    """Create a campaign. Messages are sent asynchronously."""
    fields = _message_fields(body)
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


def _message_fields(body: RequestBody) -> dict[str, Any]:
    fields = body.model_dump(by_alias=True, exclude_unset=True)
    if "content" in fields:
        fields.setdefault("body", fields["content"])
        del fields["content"]
    return fields


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
    changed = await ctx.app.campaigns.edit(
        id, _message_fields(body), tenant_id=ctx.tenant_id, connection=ctx.connection
    )
    return campaign_response(ctx, changed)


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


@routes.get("/campaigns/{id}/results", response_model=CampaignResults, **read_route())
async def get_campaign_results(id: Id, ctx: Context) -> Response:
    """Return the results of each variant, with the opens that apps reported."""
    results = await ctx.app.campaigns.results(id, tenant_id=ctx.tenant_id)
    return json_response({"items": [
        {"variant": each.variant, "sending": each.sending, "accepted": each.accepted, "refused": each.refused,
         "unknown": each.unknown, "unsent": each.unsent, "held": each.held, "opened": each.opened,
         "openRate": each.open_rate}
        for each in results
    ]})  # fmt: skip


@routes.get("/campaigns/{id}/timetable", response_model=TimetableOut, **read_route())
async def get_campaign_timetable(id: Id, ctx: Context) -> Response:
    """Return the planned send times per time zone, and the excluded recipients."""
    plan = await ctx.app.campaigns.timetable(id, tenant_id=ctx.tenant_id)
    zones = [
        {"timezone": zone, "first": format_utc(first), "last": format_utc(last), "recipients": count}
        for zone, first, last, count in plan.zone_summaries()
    ]
    excluded = [
        {"timezone": zone, "why": reason.value, "recipients": count} for (zone, reason), count in plan.excluded.items()
    ]
    return json_response({"zones": zones, "excluded": excluded, "recipients": sum(chunk.size for chunk in plan.chunks)})


@routes.get("/campaigns/{id}/deliveries", response_model=CampaignRows, **read_route())
async def list_deliveries(
    id: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None,
    state: Annotated[DeliveryState | None, Query()] = None
) -> Response:  # fmt: skip
    """List the recipients the campaign was sent to, with the delivery results."""
    page = await ctx.app.campaigns.deliveries(id, state=state, tenant_id=ctx.tenant_id, limit=limit, cursor=cursor)
    return page_response(page, [render_delivery(row) for row in page])


@routes.get(
    "/campaigns/{id}/deliveries/export", response_class=StreamingResponse, **read_route(),
    responses={200: {"description": "One recipient per line, with the fields of the list.", "content": {
        media_type: {"schema": {"type": "string"}} for media_type in MEDIA_TYPES.values()}}},
)  # fmt: skip
async def export_deliveries(
    id: Id, ctx: Context, format: Annotated[Literal["csv", "ndjson"], Query()] = "csv",
    state: Annotated[DeliveryState | None, Query()] = None,
) -> Response:  # fmt: skip
    """Download all recipients the campaign was sent to, with the delivery results, as CSV or JSON lines."""
    campaign = await ctx.app.campaigns.get(id, tenant_id=ctx.tenant_id)
    content = stream_deliveries(ctx.app.campaigns, campaign.id, format, state=state, tenant_id=ctx.tenant_id)
    return StreamingResponse(content, media_type=MEDIA_TYPES[format], headers=export_headers(campaign.id, format))


@routes.get("/campaigns/{id}/remaining", response_model=DevicePage, **read_route())
async def list_remaining_recipients(id: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List the recipients the campaign was not sent to."""
    page = await ctx.app.campaigns.remaining(id, tenant_id=ctx.tenant_id, limit=limit, cursor=cursor)
    return page_response(page, [render_device(device) for device in page])


@routes.get("/campaigns/{id}/chunks", response_model=CampaignRows, **read_route())
async def list_chunks(id: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List the chunks of the campaign with their times and delivery counts."""
    page = await ctx.app.campaigns.chunks(id, tenant_id=ctx.tenant_id, limit=limit, cursor=cursor)
    return page_response(page, [
        {"number": row["number"], "jobId": row["job_id"], "state": row["state"], "timezone": row["timezone"],
         "size": row["size"], "accepted": row["accepted"], "refused": row["refused"], "unknown": row["unknown"],
         "unsent": row["unsent"], "startedAt": format_utc(row["started_at"]), "endedAt": format_utc(row["ended_at"])}
        for row in page
    ])  # fmt: skip
