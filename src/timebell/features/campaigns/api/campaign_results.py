"""`/campaigns/{id}/...`: results, recipients, chunks and send times of campaigns."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from timebell.api.route import ApiRoute, Context, read_route
from timebell.api.schemas import Cursor, Id, Json, Limit, ResponseBody, format_utc, json_response, page_response
from timebell.features.campaigns.api.devices import DevicePage, render_device
from timebell.features.campaigns.client.delivery_export import (
    MEDIA_TYPES,
    export_headers,
    render_delivery,
    stream_deliveries,
)

routes = APIRouter(route_class=ApiRoute, tags=["campaigns"])
DeliveryState = Literal["sending", "accepted", "refused", "unknown", "unsent", "held"]


class CampaignRows(ResponseBody):
    """Page of records of a campaign."""

    items: list[dict[str, Json]]
    next_cursor: str | None


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


class TimetableOut(ResponseBody):
    """Planned send times per time zone, for the devices registered now."""

    zones: list[dict[str, Json]]
    excluded: list[dict[str, Json]]
    recipients: int


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
