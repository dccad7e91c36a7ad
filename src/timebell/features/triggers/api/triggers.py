"""`/triggers`: jobs due at the time in a column of source items, plus an offset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from timebell.api.conditions import ComparisonIn, ComparisonOut
from timebell.api.history import HistoryPage, history_response
from timebell.api.if_match import IfMatch, check_absent, check_match, entity_tag, require_match
from timebell.api.operations import OperationOut, render_operation
from timebell.api.route import ApiRoute, Context, RequestContext, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    Name,
    NewName,
    ObjectName,
    RequestBody,
    ResponseBody,
    ZoneName,
    format_utc,
    json_response,
    page_response,
)
from timebell.api.topic_warnings import warn_if_unhandled
from timebell.client.job_fields import metadata_json, parse_metadata, parse_retry, target_json
from timebell.errors import InvalidInput, NotFound
from timebell.features.triggers.client.triggers import parse_rule
from timebell.features.triggers.model.trigger import Trigger
from timebell.features.triggers.store import sources as rows
from timebell.features.triggers.store import triggers
from timebell.model.operation import Operation
from timebell.tenancy.roles import Role, require


class TriggerRoute(ApiRoute):
    """Route that checks a trigger to be stored against the database of its source."""

    async def check_outside_transaction(self, request: Request, ctx: RequestContext) -> None:
        if self.endpoint not in (create_trigger, put_trigger):
            return
        try:
            sent = TriggerIn.model_validate({**request.path_params, **await request.json()})
        except (ValueError, TypeError, RecursionError):
            return  # refused when the route reads it
        _authorize_query(ctx, sent)
        rule = parse_rule(sent.column, _sent_options(sent))
        await ctx.app.triggers.check_rule(sent.name, sent.source, rule, tenant_id=ctx.tenant_id)


routes = APIRouter(route_class=TriggerRoute, tags=["triggers"])
Offsets = Annotated[
    list[Annotated[str, Field(max_length=20)]],
    Field(
        min_length=1,
        max_length=20,
        description="Offsets such as 0, -15m, +1d. s, m and h are elapsed time; d and w are calendar units.",
    ),
]


class TriggerPut(RequestBody):
    """Settings of a trigger."""

    source: Annotated[str, Field(min_length=1, max_length=100)]
    column: Name
    offsets: Offsets | None = None
    timezone: Annotated[ZoneName | None, Field(description="Time zone of values without a UTC offset.")] = None
    zone_column: Annotated[
        Name | None,
        Field(description="Field with the time zone of the row; `timezone` applies if it is empty or invalid."),
    ] = None
    edge: Annotated[Literal["start", "end"] | None, Field(description="Edge of a range that fires.")] = None
    recipients: Annotated[
        Name | None, Field(description="Field with recipients; one job is created per recipient.")
    ] = None
    condition: Annotated[list[ComparisonIn] | None, Field(max_length=20)] = None
    unless: Annotated[
        str | None,
        Field(
            max_length=10_000,
            description="Query to a source of kind sql; the job is not delivered if it returns a row.",
        ),
    ] = None
    grace_seconds: Annotated[
        float | None,
        Field(ge=0, lt=1e10, description="Maximum age of a past time that still fires when it becomes known."),
    ] = None
    topic: Name
    payload: Annotated[Json, Field(description="Value of `action` in the payload of each job.")] = None
    max_retries: Annotated[int | None, Field(ge=0, le=999)] = None
    retry: dict[str, Json] | None = None
    timeout_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    expires_after_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    queue: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    priority: Annotated[int | None, Field(ge=-32_768, le=32_767)] = None
    group: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    target: Annotated[dict[str, Json] | Name | None, Field(description="Inline target, or the name of a target.")] = (
        None
    )
    metadata: dict[str, Json] | None = None


class TriggerIn(TriggerPut):
    """Fields of a new trigger."""

    name: ObjectName


class TriggerPauseIn(RequestBody):
    """Reason of a pause."""

    reason: Annotated[str | None, Field(max_length=1000)] = None


class TriggerOut(ResponseBody):
    """Trigger with its state."""

    id: str
    name: str
    tenant_id: str
    source: str
    column: str
    offsets: list[str]
    timezone: str | None
    zone_column: str | None
    edge: Literal["start", "end"]
    recipients: str | None
    condition: list[ComparisonOut]
    unless: str | None
    grace_seconds: float
    topic: str
    payload: Json
    retry: dict[str, Json] | None
    timeout_seconds: float | None
    expires_after_seconds: float | None
    queue: str
    priority: int
    group: str | None
    target: Json = None
    on_unhandled: str | None = None
    metadata: dict[str, Json]
    state: Literal["ready", "paused", "orphaned", "reauthorize"]
    orphaned_reason: str | None
    unauthorized_reason: str | None
    enabled: bool
    pause_reason: str | None
    revision: int
    created_at: Instant
    created_by: str | None
    updated_at: Instant
    warnings: Annotated[list[str] | None, Field(description="For example, that no running node handles the topic.")] = (
        None
    )


class TriggerWritten(TriggerOut):
    """Trigger and the operation that plans jobs for existing items; `scan` is null if nothing changed."""

    scan: OperationOut | None


class TriggerPage(ResponseBody):
    """Page of triggers, sorted by name."""

    items: list[TriggerOut]
    next_cursor: str | None


@routes.post("/triggers", status_code=201, response_model=TriggerWritten, **change_route("trigger.create", Role.EDITOR))
async def create_trigger(body: TriggerIn, ctx: Context) -> Response:
    """Create a trigger."""
    return await _write_trigger(ctx, body.name, body, replace=False)


@routes.get("/triggers", response_model=TriggerPage, **read_route())
async def list_triggers(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List triggers, sorted by name."""
    page = await ctx.run(rows.list_triggers, ctx.tenant_id, limit, cursor)
    return page_response(page, [render_trigger(trigger) for trigger in page])


@routes.get("/triggers/{name}", response_model=TriggerOut, **read_route())
async def get_trigger(name: Id, ctx: Context) -> Response:
    """Get a trigger."""
    trigger = await _find_trigger(ctx, name)
    warnings = await warn_if_unhandled(ctx, trigger.action.topic, trigger.action.target)
    return json_response({**render_trigger(trigger), "warnings": warnings}, headers={"ETag": etag(trigger)})


@routes.get("/triggers/{name}/history", response_model=HistoryPage, **read_route())
async def list_trigger_history(name: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List who changed a trigger, when and how, newest first. Also works for deleted triggers."""
    return await history_response(ctx, "trigger", name, limit, cursor, lambda: _find_trigger(ctx, name))


@routes.put("/triggers/{name}", response_model=TriggerWritten, **change_route("trigger.put", Role.EDITOR))
async def put_trigger(name: NewName, body: TriggerPut, ctx: Context, if_match: IfMatch = None) -> Response:
    """Create a trigger, or replace an existing one and replan its future jobs."""
    existing: Trigger | None = await ctx.run(triggers.lock_trigger, ctx.tenant_id, name)
    if existing is not None:
        ctx.before = render_trigger(existing)
        require_match(if_match, etag(existing), f"The trigger {name!r:.80}", existing.id)
    else:
        check_absent(if_match, f"The trigger {name!r:.80}")
    return await _write_trigger(ctx, name, body, replace=True)


@routes.delete("/triggers/{name}", status_code=202, response_model=OperationOut,
               **change_route("trigger.delete", Role.EDITOR))  # fmt: skip
async def delete_trigger(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a trigger. Deliveries stop immediately, and the returned operation cancels its jobs."""
    await _lock_for_change(ctx, name, if_match)
    operation = await ctx.app.triggers.delete(
        name, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection
    )
    return _operation_response(ctx, operation)


@routes.post("/triggers/{name}/pause", response_model=TriggerOut, **change_route("trigger.pause", Role.OPERATOR))
async def pause_trigger(
    name: Id, ctx: Context, body: TriggerPauseIn | None = None, if_match: IfMatch = None
) -> Response:
    """Pause a trigger. Jobs that become due are skipped until it is resumed."""
    await _lock_for_change(ctx, name, if_match)
    reason = None if body is None else body.reason
    return json_response(render_trigger(
        await ctx.app.triggers.pause(name, reason, tenant_id=ctx.tenant_id, connection=ctx.connection)
    ))  # fmt: skip


@routes.post("/triggers/{name}/resume", response_model=TriggerOut, **change_route("trigger.resume", Role.OPERATOR))
async def resume_trigger(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Resume a paused trigger."""
    await _lock_for_change(ctx, name, if_match)
    return json_response(
        render_trigger(await ctx.app.triggers.resume(name, tenant_id=ctx.tenant_id, connection=ctx.connection))
    )


@routes.post("/triggers/{name}/scan", status_code=202, response_model=OperationOut,
             **change_route("trigger.scan", Role.OPERATOR))  # fmt: skip
async def scan_trigger(name: Id, ctx: Context) -> Response:
    """Scan all items again and plan missing jobs."""
    await _find_trigger(ctx, name)
    ctx.subject = name
    operation = await ctx.app.triggers.scan(
        name, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection
    )
    return _operation_response(ctx, operation)


async def _write_trigger(ctx: Context, name: str, body: TriggerPut, *, replace: bool) -> Response:
    ctx.subject = name
    _authorize_query(ctx, body)
    options = _sent_options(body)
    if "max_retries" in options and "retry" in options:
        raise InvalidInput("retry and maxRetries cannot be combined; specify only one.", code="INVALID_RETRY")
    retry = options.pop("max_retries", options.pop("retry", None))
    labels = parse_metadata(options.pop("metadata", {}))
    if labels.keys() - {"owner_id", "metadata"}:
        raise InvalidInput(
            "The metadata of a trigger cannot set fields of single jobs.",
            code="INVALID_METADATA",
        )
    if retry is not None:
        options["retry"] = parse_retry(retry)
    trigger, operation = await ctx.app.triggers.put(
        name, replace=replace, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection,
        **options, **labels,
    )  # fmt: skip
    rendered = {
        **render_trigger(trigger), "scan": None if operation is None else render_operation(operation),
        "warnings": await warn_if_unhandled(ctx, trigger.action.topic, trigger.action.target),
    }  # fmt: skip
    is_new = operation is not None and trigger.revision == 1
    headers = {"ETag": etag(trigger)} | ({"Location": f"/api/v1/triggers/{trigger.name}"} if is_new else {})
    return json_response(rendered, 201 if is_new and not replace else 200, headers)


def _authorize_query(ctx: Context, body: TriggerPut) -> None:
    if body.unless is not None:
        require(ctx.caller.role, Role.PLATFORM)  # like its source: the query runs on an external database


def _sent_options(body: TriggerPut) -> dict[str, Any]:
    """Return the options that were sent, by their names in Python."""
    sent = {field: value for field, value in body.sent_fields().items() if value is not None and field != "name"}
    return {_OPTION_NAMES.get(field, field): value for field, value in sent.items()}


_OPTION_NAMES = {"grace_seconds": "grace", "timeout_seconds": "timeout", "expires_after_seconds": "expires_after"}


async def _lock_for_change(ctx: Context, name: str, if_match: str | None) -> None:
    """Lock a trigger, check If-Match if it was sent, and record the trigger as the audit subject.

    Raises NotFound, RevisionStale.
    """
    trigger: Trigger | None = await ctx.run(triggers.lock_trigger, ctx.tenant_id, name)
    if trigger is None:
        raise not_found("trigger", name)
    check_match(if_match, etag(trigger), f"The trigger {name!r:.80}", trigger.id)
    ctx.subject, ctx.before = name, render_trigger(trigger)


async def _find_trigger(ctx: Context, name: str) -> Trigger:
    try:
        return await ctx.app.triggers.get(name, tenant_id=ctx.tenant_id, connection=ctx.connection)
    except NotFound:
        raise not_found("trigger", name) from None


def _operation_response(ctx: Context, operation: Operation) -> Response:
    return json_response(render_operation(operation), 202, {"Location": f"/api/v1/operations/{operation.id}"})


def etag(trigger: Trigger) -> str:
    """Return the strong ETag of a trigger. Pausing and resuming it changes the ETag."""
    return entity_tag(trigger.revision, not trigger.enabled, trigger.pause_reason)


def render_trigger(trigger: Trigger) -> dict[str, Any]:
    """Render a trigger as JSON."""
    rule, action = trigger.rule, trigger.action
    metadata = {**action.metadata, **({"owner_id": action.owner_id} if action.owner_id else {})}
    return {
        "id": trigger.id, "name": trigger.name, "tenantId": trigger.tenant_id, "source": trigger.source,
        "column": rule.column, "offsets": [str(offset) for offset in rule.offsets], "timezone": rule.timezone,
        "zoneColumn": rule.zone_column, "edge": rule.edge,
        "recipients": rule.recipients, "condition": [comparison.to_json() for comparison in rule.condition],
        "unless": rule.unless, "graceSeconds": rule.grace, "topic": action.topic, "payload": action.payload,
        "retry": None if action.retry is None else action.retry.to_json(), "timeoutSeconds": action.timeout,
        "expiresAfterSeconds": action.expires_after, "queue": action.queue, "priority": action.priority,
        "group": action.group, **target_json(action.target), "metadata": metadata_json(metadata),
        "state": trigger.state,
        "orphanedReason": trigger.orphaned_reason, "unauthorizedReason": trigger.unauthorized_reason,
        "enabled": trigger.enabled,
        "pauseReason": trigger.pause_reason, "revision": trigger.revision,
        "createdAt": format_utc(trigger.created_at), "createdBy": trigger.created_by,
        "updatedAt": format_utc(trigger.updated_at),
    }  # fmt: skip
