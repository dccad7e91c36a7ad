"""`/backlogs`: jobs held after an outage (above `catchUp.holdAbove`) or a restore, until released or discarded."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, change_route, read_route
from timebell.api.schemas import Instant, RequestBody, ResponseBody, format_utc, json_response
from timebell.client.validation import parse_uuid, schedule_not_found
from timebell.store.jobs import backlogs as rows
from timebell.store.schedules import actions
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["backlogs"])


class BacklogOut(ResponseBody):
    """Held jobs of one schedule; held jobs without a schedule are grouped in one entry with null `scheduleId`."""

    schedule_id: str | None
    schedule: str | None
    topic: str
    jobs: int
    first_at: Instant
    last_at: Instant


class BacklogPage(ResponseBody):
    """Backlogs of up to 1,000 schedules, largest first."""

    items: list[BacklogOut]
    next_cursor: None = None


class BacklogFilter(RequestBody):
    """Schedule to act on; null or omitted: all backlogs."""

    schedule_id: Annotated[str | None, Field(max_length=64)] = None


class BacklogResult(ResponseBody):
    """Number of jobs affected."""

    jobs: int


@routes.get("/backlogs", response_model=BacklogPage, **read_route())
async def list_backlogs(ctx: Context) -> Response:
    """List held backlogs by schedule."""
    backlogs: list[rows.Backlog] = await ctx.run(rows.list_backlogs, ctx.tenant_id)
    return json_response({"items": [_render_backlog(backlog) for backlog in backlogs], "nextCursor": None})


@routes.post("/backlogs/release", response_model=BacklogResult, **change_route("backlogs.release", Role.OPERATOR))
async def release_backlogs(ctx: Context, body: BacklogFilter | None = None) -> Response:
    """Run the held jobs: one after another, unless the overlap policy of the schedule is `allow`."""
    return await _release_or_discard(ctx, body, discard=False)


@routes.post("/backlogs/discard", response_model=BacklogResult, **change_route("backlogs.discard", Role.OPERATOR))
async def discard_backlogs(ctx: Context, body: BacklogFilter | None = None) -> Response:
    """Cancel the held jobs. They become `cancelled` with the reason `discarded`."""
    return await _release_or_discard(ctx, body, discard=True)


async def _release_or_discard(ctx: Context, body: BacklogFilter | None, *, discard: bool) -> Response:
    requested_id = None if body is None else body.schedule_id
    id_ = None if requested_id is None else parse_uuid(requested_id)
    backlogs: list[rows.Backlog] = await ctx.run(rows.list_backlogs, ctx.tenant_id)
    if requested_id is not None and (id_ is None or not await ctx.run(actions.list_revisions, ctx.tenant_id, id_)):
        raise schedule_not_found(requested_id)
    ctx.subject = id_ or "*"
    ctx.before = [_render_backlog(backlog) for backlog in backlogs if id_ in (None, backlog.schedule_id)]
    return json_response({"jobs": await ctx.run(actions.release_backlog, ctx.tenant_id, id_, discard, ctx.now)})


def _render_backlog(backlog: rows.Backlog) -> dict[str, Any]:
    return {
        "scheduleId": backlog.schedule_id, "schedule": backlog.schedule, "topic": backlog.topic, "jobs": backlog.jobs,
        "firstAt": format_utc(backlog.first), "lastAt": format_utc(backlog.last),
    }  # fmt: skip
