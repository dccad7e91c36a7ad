"""Fields of campaigns in requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import ConfigDict, Field

from timebell.api.if_match import entity_tag
from timebell.api.route import Context
from timebell.api.schedule_fields import IntervalIn
from timebell.api.schemas import Instant, Json, Name, RequestBody, ResponseBody, ZoneName, format_utc, json_response
from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign


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


def message_fields(body: RequestBody) -> dict[str, Any]:
    """Return the fields of a request that were sent, by their names in JSON."""
    fields = body.model_dump(by_alias=True, exclude_unset=True)
    if "content" in fields:
        fields.setdefault("body", fields["content"])
        del fields["content"]
    return fields
