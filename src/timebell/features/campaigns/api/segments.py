"""`/segments`: filters of devices with a name, for the audiences of campaigns."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_absent, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.features.campaigns.store.segments import Segment, find_segment
from timebell.store.tenancy.tenants import lock_tenant
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["segments"])


class SegmentIn(RequestBody):
    filters: Annotated[dict[str, Json], Field(description="Same filters as in a campaign, also segments.")]


class SegmentOut(ResponseBody):
    """Segment. `count` is the number of devices that are in it now."""

    name: str
    filters: dict[str, Json]
    count: Annotated[int | None, Field(description="Only in GET and PUT /segments/{name}.")]
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class SegmentPage(ResponseBody):
    """Page of segments, sorted by name."""

    items: list[SegmentOut]
    next_cursor: str | None


def _render_segment(segment: Segment, count: int | None = None) -> dict[str, Any]:
    return {
        "name": segment.name, "filters": segment.filters.to_json(), "count": count,
        "createdAt": format_utc(segment.created_at), "createdBy": segment.created_by,
        "updatedAt": format_utc(segment.updated_at),
    }  # fmt: skip


@routes.get("/segments", response_model=SegmentPage, **read_route())
async def list_segments(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List segments, sorted by name."""
    page = await ctx.app.segments.list(tenant_id=ctx.tenant_id, limit=limit, cursor=cursor)
    return page_response(page, [_render_segment(segment) for segment in page])


@routes.get("/segments/{name}", response_model=SegmentOut, **read_route())
async def get_segment(name: Id, ctx: Context) -> Response:
    """Get a segment, with the number of devices that are in it now."""
    segment = await ctx.app.segments.get(name, tenant_id=ctx.tenant_id)
    count = await ctx.app.segments.count(name, tenant_id=ctx.tenant_id)
    return json_response(_render_segment(segment, count), headers={"ETag": etag(segment)})


@routes.put("/segments/{name}", response_model=SegmentOut, **change_route("segment.put", Role.EDITOR))
async def put_segment(name: Id, body: SegmentIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Create a segment, or change its filters, also for campaigns that are being sent."""
    ctx.subject = name
    await _lock_for_change(ctx, name, if_match)
    segment = await ctx.app.segments.put(
        name, body.filters, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection
    )
    count = await ctx.app.segments.count(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response(_render_segment(segment, count), headers={"ETag": etag(segment)})


@routes.delete("/segments/{name}", response_model=SegmentOut, **change_route("segment.delete", Role.EDITOR))
async def delete_segment(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a segment and return it. Refused while a segment or an unfinished campaign uses it."""
    ctx.subject = name
    await _lock_for_change(ctx, name, if_match)
    segment = await ctx.app.segments.get(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    await ctx.app.segments.delete(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response(_render_segment(segment))


def etag(segment: Segment) -> str:
    """Return the strong ETag of a segment."""
    return entity_tag(0, segment.filters.to_json(), segment.updated_at)


async def _lock_for_change(ctx: Context, name: str, if_match: str | None) -> None:
    """Lock the tenant, check If-Match, and record the segment for the audit log. Raises RevisionStale."""
    await ctx.run(lock_tenant, ctx.tenant_id)
    segment = await ctx.run(find_segment, ctx.tenant_id, name)
    if segment is not None:
        check_match(if_match, etag(segment), f"The segment {name!r:.80}", name)
        ctx.before = _render_segment(segment)
    else:
        check_absent(if_match, f"The segment {name!r:.80}")
