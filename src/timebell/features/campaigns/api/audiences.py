"""`/audiences`: recipients read from a customer database by a query."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_absent, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, RequestContext, change_route, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    NewName,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.store import audiences as rows
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.audiences import Audience
from timebell.tenancy.roles import Role


class AudienceRoute(ApiRoute):
    """Route that checks the query of an audience to be stored against its database."""

    async def check_outside_transaction(self, request: Request, ctx: RequestContext) -> None:
        if self.endpoint is not put_audience:
            return
        try:
            sent = AudienceIn.model_validate(await request.json())
        except (ValueError, TypeError, RecursionError):
            return  # refused when the route reads it
        await ctx.app.audiences.check(sent.sent_fields(), tenant_id=ctx.tenant_id)


routes = APIRouter(route_class=AudienceRoute, tags=["audiences"])


class AudienceIn(RequestBody):
    """Database URL, query, and the name of the unique column."""

    url: Annotated[Json, Field(description='URL such as postgresql://user@host/name, or {"secret": "name"}.')]
    query: Annotated[
        str, Field(max_length=20_000, description="A single SELECT statement that returns a column `token`.")
    ]
    key: Annotated[str | None, Field(max_length=63, description="Name of the unique column.")] = None


class AudienceOut(ResponseBody):
    """Audience.

    At `refreshedAt` it had `members` recipients; `withoutToken` rows had no token, and `refused` rows were invalid for
    other reasons.
    """

    name: str
    url: Json
    query: str
    key: str
    members: int
    refused: int
    without_token: int
    refreshing: bool
    refreshed_at: Instant | None
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class AudiencePage(ResponseBody):
    """Page of audiences, sorted by name."""

    items: list[AudienceOut]
    next_cursor: str | None


class RefreshJob(ResponseBody):
    """Job that refreshes the audience."""

    job_id: str


class AudienceCountIn(RequestBody):
    filters: Annotated[dict[str, Json] | None, Field(description="Same filters as in a campaign.")] = None


class AudienceCount(ResponseBody):
    """Number of matching devices, in total and per time zone ("" if unknown)."""

    count: int
    zones: dict[str, int]


def _render_audience(audience: Audience) -> dict[str, Any]:
    return {
        "name": audience.name, **audience.source.to_json(), "members": audience.members, "refused": audience.refused,
        "withoutToken": audience.without_token,
        "refreshing": audience.loading is not None, "refreshedAt": format_utc(audience.refreshed_at),
        "createdAt": format_utc(audience.created_at), "createdBy": audience.created_by,
        "updatedAt": format_utc(audience.updated_at),
    }  # fmt: skip


@routes.post("/audiences/count", response_model=AudienceCount, **read_route())
async def count_audience(body: AudienceCountIn, ctx: Context) -> Response:
    """Count the devices that currently match the filters of a campaign."""
    zones = await ctx.run(
        device_rows.count_audience, ctx.tenant_id, Filters.from_json(body.filters), ctx.app.clock.now()
    )
    return json_response({"count": sum(zones.values()), "zones": {name or "": count for name, count in zones.items()}})


@routes.get("/audiences", response_model=AudiencePage, **read_route())
async def list_audiences(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List audiences, sorted by name."""
    page = await ctx.app.audiences.list(tenant_id=ctx.tenant_id, limit=limit, cursor=cursor)
    return page_response(page, [_render_audience(audience) for audience in page])


@routes.get("/audiences/{name}", response_model=AudienceOut, **read_route())
async def get_audience(name: Id, ctx: Context) -> Response:
    """Get an audience."""
    return _audience_response(await ctx.app.audiences.get(name, tenant_id=ctx.tenant_id))


@routes.put("/audiences/{name}", response_model=AudienceOut, **change_route("audience.put", Role.PLATFORM))
async def put_audience(name: NewName, body: AudienceIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Create or replace an audience. Requires a platform key, because the server connects to the database."""
    await _lock_for_change(ctx, name, if_match)
    audience = await ctx.app.audiences.put(
        name, body.sent_fields(), tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection
    )
    return _audience_response(audience)


@routes.post(
    "/audiences/{name}/refresh", response_model=RefreshJob, status_code=202,
    **change_route("audience.refresh", Role.OPERATOR),
)  # fmt: skip
async def refresh_audience(name: Id, ctx: Context) -> Response:
    """Refresh the audience now, in a job.

    Campaigns also refresh it when they start, unless their audience is pinned.
    """
    ctx.subject = name
    job_id = await ctx.app.audiences.refresh(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response({"jobId": job_id}, 202, {"Location": f"/api/v1/jobs/{job_id}"})


@routes.delete("/audiences/{name}", response_model=AudienceOut, **change_route("audience.delete", Role.ADMIN))
async def delete_audience(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete the audience and return it. Its devices are kept."""
    await _lock_for_change(ctx, name, if_match)
    audience = await ctx.app.audiences.get(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    await ctx.app.audiences.delete(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response(_render_audience(audience))


async def _lock_for_change(ctx: Context, name: str, if_match: str | None) -> None:
    """Lock an audience if it exists, check If-Match, and record the audit subject. Raises RevisionStale."""
    audience: Audience | None = await ctx.run(rows.find_audience, ctx.tenant_id, name, lock=True)
    ctx.subject = name
    if audience is not None:
        check_match(if_match, etag(audience), f"The audience {name!r:.80}", name)
        ctx.before = _render_audience(audience)
    else:
        check_absent(if_match, f"The audience {name!r:.80}")


def etag(audience: Audience) -> str:
    """Return the strong ETag of an audience. Changing its source changes it; refreshing it does not."""
    return entity_tag(0, audience.created_at, audience.source.to_json())


def _audience_response(audience: Audience) -> Response:
    return json_response(_render_audience(audience), headers={"ETag": etag(audience)})
