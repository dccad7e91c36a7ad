"""`/sources`: external data sources with dated items, and the items themselves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_absent, check_match, require_match
from timebell.api.route import ApiRoute, Context, RequestContext, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    InstantText,
    Json,
    Limit,
    NewName,
    ObjectName,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
    parse_period,
)
from timebell.errors import InvalidInput, NotFound
from timebell.features.triggers.client.triggers import SOURCE_KINDS
from timebell.features.triggers.metrics import record_changes
from timebell.features.triggers.model.trigger import ChangeSummary, Item, Source, epoch_micros
from timebell.features.triggers.sources.call_plan import CallPlan
from timebell.features.triggers.sources.webhook_url import HOOKS_PATH, token_query
from timebell.features.triggers.store import sources as rows
from timebell.model.target import MASK
from timebell.tenancy.roles import Role, require


class SourceRoute(ApiRoute):
    """Route that checks a source to be stored against its database."""

    async def check_outside_transaction(self, request: Request, ctx: RequestContext) -> None:
        if self.endpoint not in (create_source, put_source):
            return
        try:
            sent = SourceIn.model_validate({**request.path_params, **await request.json()})
        except (ValueError, TypeError, RecursionError):
            return  # refused when the route reads it
        _authorize_options(ctx, sent)
        await ctx.app.triggers.check_source(_draft_source(ctx, sent.name, sent))


routes = APIRouter(route_class=SourceRoute, tags=["sources"])
MAX_ITEMS = 500
SECRET_OPTIONS = ("token", "signingSecret")
ItemKey = Annotated[str | int, Field(description="Key of the item in its source.")]


class SourcePut(RequestBody):
    """Kind and options of a source."""

    kind: Annotated[str, Field(max_length=20, json_schema_extra={"enum": list(SOURCE_KINDS)})] = "webhook"
    options: dict[str, Json] | None = None
    dry_run: Annotated[bool, Field(description="Check the source, and show its calls a day, without storing it.")] = (
        False
    )


class SourceIn(SourcePut):
    """Fields of a new source."""

    name: ObjectName


class ItemChangeIn(RequestBody):
    """Current state of an item, or its deletion."""

    key: ItemKey
    version: Annotated[
        int | str | None,
        Field(
            description="Increases with each change: a number or a time. If omitted, the change counts as the newest."
        ),
    ] = None
    fields: dict[str, Json] | None = None
    deleted: bool | None = None


class ItemChangesIn(RequestBody):
    """Changes of several items."""

    items: Annotated[list[ItemChangeIn], Field(max_length=MAX_ITEMS)]


class CallsOut(ResponseBody):
    """Calls a day to the API of the source: at most `limit`, of which full reads take `full_reads` per page."""

    limit: int
    full_reads: int
    interval_seconds: float


class SourceOut(ResponseBody):
    """Source. `hook` is the path of its inbound webhook, `calls` the plan of calls to an API that limits them."""

    id: str
    name: str
    tenant_id: str
    kind: str
    options: dict[str, Json]
    hook: str
    calls: CallsOut | None
    state: Literal["ready", "errored", "reauthorize", "orphaned"]
    synced_at: Instant | None
    error: str | None
    orphaned_at: Instant | None
    orphaned_reason: str | None
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class SourcePage(ResponseBody):
    """Page of sources, sorted by name."""

    items: list[SourceOut]
    next_cursor: str | None


class ItemOut(ResponseBody):
    """Last known state of an item. `fields` is null if the item was deleted.

    `problem` is why its current row is rejected; then `fields` are those of an earlier one.
    """

    key: str
    version: int
    fields: dict[str, Json] | None
    problem: str | None
    updated_at: Instant


class ItemPage(ResponseBody):
    """Page of items, sorted by key."""

    items: list[ItemOut]
    next_cursor: str | None


class ItemsSummary(ResponseBody):
    """Outcome of item changes."""

    changed: Annotated[int, Field(description="Items with changed fields.")]
    unchanged: Annotated[int, Field(description="Items with a newer version but equal fields.")]
    stale: Annotated[int, Field(description="Changes older than the known version; ignored.")]
    created: Annotated[int, Field(description="Jobs created. A move counts as one cancelled and one created.")]
    cancelled: Annotated[int, Field(description="Jobs cancelled.")]
    late: Annotated[int, Field(description="Due times past by more than the grace period; no job was created.")]
    unreadable: Annotated[int, Field(description="Items in which a trigger found no valid time or recipient.")]


@routes.post("/sources", status_code=201, response_model=SourceOut, **change_route("source.create", Role.EDITOR))
async def create_source(body: SourceIn, ctx: Context) -> Response:
    """Create a source."""
    source = await _write_source(ctx, body.name, body, None, replace=False)
    headers = {"ETag": etag(source), "Location": f"/api/v1/sources/{source.name}"}
    return json_response(render_source(source), 201, headers)


@routes.get("/sources", response_model=SourcePage, **read_route())
async def list_sources(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List sources, sorted by name."""
    page = await ctx.run(rows.list_sources, ctx.tenant_id, limit, cursor)
    return page_response(page, [render_source(source) for source in page])


@routes.get("/sources/{name}", response_model=SourceOut, **read_route())
async def get_source(name: Id, ctx: Context) -> Response:
    """Get a source.

    For editors, `hook` of a monday source includes the token that authenticates webhooks without a key.
    """
    source = await _find_source(ctx, name)
    rendered = render_source(source)
    if source.kind == "monday" and ctx.caller.role.covers(Role.EDITOR):
        rendered["hook"] += token_query(ctx.app.settings.secret_key, source.id)
    return json_response(rendered, headers={"ETag": etag(source)})


@routes.put("/sources/{name}", response_model=SourceOut, **change_route("source.put", Role.EDITOR))
async def put_source(name: NewName, body: SourcePut, ctx: Context, if_match: IfMatch = None) -> Response:
    """Create a source, or replace the options of an existing one."""
    source = await _write_source(ctx, name, body, if_match, replace=True)
    return json_response(render_source(source), headers={"ETag": etag(source)})


@routes.delete("/sources/{name}", response_model=SourceOut, **change_route("source.delete", Role.EDITOR))
async def delete_source(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a source without triggers, and its items."""
    source: Source | None = await ctx.run(rows.lock_source, ctx.tenant_id, name)
    if source is None:
        raise not_found("source", name)
    check_match(if_match, etag(source), f"The source {name!r:.80}", source.id)
    ctx.subject, ctx.before = name, render_source(source)
    return json_response(
        render_source(await ctx.app.triggers.delete_source(name, tenant_id=ctx.tenant_id, connection=ctx.connection))
    )


@routes.get("/sources/{name}/items", response_model=ItemPage, **read_route())
async def list_source_items(
    name: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None, rejected: bool = False,
    from_: Annotated[InstantText, Query(alias="from", description="Updated at or after this time.")] = None,
    to: Annotated[InstantText, Query(description="Updated before this time.")] = None,
) -> Response:  # fmt: skip
    """List the last known items of a source, or only the rejected ones, sorted by key."""
    source = await _find_source(ctx, name)
    page = await ctx.run(rows.list_items, source.id, limit, cursor, *parse_period(from_, to), rejected=rejected)
    return page_response(page, [_render_item(item) for item in page])


@routes.post("/sources/{name}/items", response_model=ItemsSummary, **change_route("source.items", Role.OPERATOR))
async def put_source_items(name: Id, body: ItemChangesIn, ctx: Context) -> Response:
    """Set the current state of up to 500 items and update their jobs, in one transaction."""
    source = await _find_source(ctx, name)
    ctx.subject = source.name
    return json_response(
        render_summary(await apply_changes(ctx, source.name, [change_arguments(change) for change in body.items]))
    )


def _authorize_options(ctx: Context, body: SourcePut) -> None:
    """Check that the caller may use these options. Raises Refused, InvalidInput."""
    if body.kind != "webhook":
        # A caller who chooses the destination of a secret can read the secret there, so this requires an admin. A
        # custom URL requires a platform key, because nodes send requests to it from inside the network.
        uses_default_url = body.kind == "monday" and "url" not in (body.options or {})
        require(ctx.caller.role, Role.ADMIN if uses_default_url else Role.PLATFORM)
    if plain := [name for name in SECRET_OPTIONS if isinstance((body.options or {}).get(name), str)]:
        raise InvalidInput(
            f"{plain[0]} is in plain text and would be visible to every reader of the source.",
            code="INVALID_SOURCE_OPTIONS", fix='Store it as a secret and specify {"secret": "its name"}.',
        )  # fmt: skip


def _draft_source(ctx: Context, name: str, body: SourcePut) -> Source:
    draft: Source = ctx.app.triggers.draft_source(
        name, body.kind, body.options, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor
    )
    return draft


async def _write_source(ctx: Context, name: str, body: SourcePut, if_match: str | None, *, replace: bool) -> Source:
    ctx.subject = name
    _authorize_options(ctx, body)
    if body.dry_run:
        return _draft_source(ctx, name, body)
    existing: Source | None = await ctx.run(rows.lock_source, ctx.tenant_id, name)
    if existing is not None:
        ctx.before = render_source(existing)
        if replace:
            require_match(if_match, etag(existing), f"The source {name!r:.80}", existing.id)
    else:
        check_absent(if_match, f"The source {name!r:.80}")
    source: Source = await ctx.app.triggers.put_source(
        name, body.kind, body.options, replace=replace, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor,
        connection=ctx.connection,
    )  # fmt: skip
    return source


async def _find_source(ctx: Context, name: str) -> Source:
    try:
        return await ctx.app.triggers.get_source(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    except NotFound:
        raise not_found("source", name) from None


async def apply_changes(ctx: Context, name: str, items: list[dict[str, Any]]) -> ChangeSummary:
    """Apply item changes and count them. Raises InvalidInput (INVALID_ITEM)."""
    if not items:
        raise InvalidInput("The list of items is empty.", code="INVALID_ITEM", fix="Specify at least one item.")
    summary = await ctx.app.triggers.put_items(name, items, tenant_id=ctx.tenant_id, connection=ctx.connection)
    if ctx.app.service is not None:
        record_changes(ctx.app.service.node.counters, summary)
    return summary


def change_arguments(body: ItemChangeIn) -> dict[str, Any]:
    """Return a change as a mapping for `triggers.put_items`."""
    return body.sent_fields()


def etag(source: Source) -> str:
    """Return the strong ETag of a source: the time of its last change."""
    return f'"{epoch_micros(source.updated_at)}"'


def render_source(source: Source) -> dict[str, Any]:
    """Render a source as JSON. Plain-text tokens that were set by code are masked."""
    masked = {name: MASK for name in SECRET_OPTIONS if isinstance(source.options.get(name), str)}
    return {
        "id": source.id, "name": source.name, "tenantId": source.tenant_id, "kind": source.kind,
        "options": {**source.options, **masked}, "hook": f"{HOOKS_PATH}/{source.id}", "calls": _render_calls(source),
        "state": source.state,
        "syncedAt": format_utc(source.synced_at), "error": source.error, "orphanedAt": format_utc(source.orphaned_at),
        "orphanedReason": source.orphaned_reason, "createdAt": format_utc(source.created_at),
        "createdBy": source.created_by, "updatedAt": format_utc(source.updated_at),
    }  # fmt: skip


def _render_calls(source: Source) -> dict[str, Any] | None:
    if source.kind != "monday":
        return None
    plan = CallPlan.parse(source.options)
    return {"limit": plan.daily_calls, "fullReads": plan.full_reads, "intervalSeconds": plan.interval}


def _render_item(item: Item) -> dict[str, Any]:
    return {
        "key": item.key, "version": item.version, "fields": item.fields, "problem": item.problem,
        "updatedAt": format_utc(item.updated_at),
    }  # fmt: skip


def render_summary(summary: ChangeSummary) -> dict[str, int]:
    """Render the outcome of item changes as JSON."""
    return {name: getattr(summary, name) for name in ItemsSummary.model_fields}
