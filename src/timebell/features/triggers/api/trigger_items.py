"""`/triggers/{name}/...`: the items of a trigger: history, what did not fire and why, dry run, fire and skip."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.job_fields import JobOut, render_job
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    InstantText,
    Json,
    Limit,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
    parse_period,
    parse_timestamp,
)
from timebell.features.triggers.model.column_values import MAX_KEY_LENGTH
from timebell.features.triggers.model.item_history import FiringRecord, explain_item
from timebell.features.triggers.model.trigger import ColumnStatus, Trigger
from timebell.features.triggers.store import item_history
from timebell.features.triggers.store import sources as rows
from timebell.model import condition
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["triggers"])
MAX_PREVIEW_ROWS = 100
ItemKey = Annotated[str, Field(min_length=1, max_length=MAX_KEY_LENGTH, description="Key of the item in its source.")]


class ItemRef(RequestBody):
    """An item of the source of a trigger."""

    item: ItemKey


class PreviewIn(RequestBody):
    """Fields of rows, as the source would report them."""

    rows: Annotated[list[dict[str, Json]], Field(min_length=1, max_length=MAX_PREVIEW_ROWS)]


class FiringOut(ResponseBody):
    """Firing of an item: what is planned, what fired last, or why nothing is planned (`reason`, `detail`)."""

    item: str
    offset: str
    recipient: str | None
    at: Instant | None
    job_id: str | None
    fired_at: Instant | None
    reason: Literal["late", "past", "unreadable", "skipped"] | None
    detail: str | None
    noticed_at: Instant | None


class FiringPage(ResponseBody):
    """Page of firings, sorted by item."""

    items: list[FiringOut]
    next_cursor: str | None


class FiringList(ResponseBody):
    """Firings of one item."""

    items: list[FiringOut]


class JobList(ResponseBody):
    """Jobs of one item."""

    items: list[JobOut]


class ItemHistoryOut(ResponseBody):
    """Item with its firings, and its latest jobs, newest first. `fields` is null if the item was deleted."""

    key: str
    fields: dict[str, Json] | None
    problem: str | None
    explanation: Annotated[list[str], Field(description="Why it fired, will fire, or did not, in sentences.")]
    updated_at: Instant
    firings: list[FiringOut]
    jobs: list[JobOut]


class FiringDifferenceOut(ResponseBody):
    """Firing that differs: it has no record, its job has not started, or two jobs have."""

    kind: Literal["missing", "overdue", "duplicate"]
    item: str
    offset: str
    recipient: str | None
    at: Instant


class FiringAuditOut(ResponseBody):
    """Result of an audit. `more`: there are more differences."""

    expected: int
    outcomes: Annotated[dict[str, int], Field(description="`fired`, `planned`, or why nothing fired.")]
    differences: list[FiringDifferenceOut]
    more: bool


class PreviewedFiring(ResponseBody):
    """Firing that a row would have."""

    offset: str
    recipient: str | None
    at: Instant


class PreviewedRow(ResponseBody):
    """Firings of a row in its zone; `problem` if a value is unreadable; `holds`: whether the condition holds now."""

    firings: list[PreviewedFiring]
    timezone: str
    problem: str | None
    holds: bool


class PreviewOut(ResponseBody):
    """Results of a dry run, in the order of the rows."""

    rows: list[PreviewedRow]


@routes.get("/triggers/{name}/why", response_model=ItemHistoryOut, **read_route())
async def get_trigger_item(name: Id, ctx: Context, item: Annotated[str, Query(max_length=MAX_KEY_LENGTH)]) -> Response:
    """Explain why an item fired or did not, with its state, its firings and its latest jobs."""
    trigger = await _find_trigger(ctx, name)
    found = await ctx.run(item_history.find_item_history, trigger, item)
    if found is None:
        raise item_history.no_such_item(item)
    return json_response({
        "key": found.item.key, "fields": found.item.fields, "problem": found.item.problem,
        "explanation": explain_item(trigger, found, ctx.now),
        "updatedAt": format_utc(found.item.updated_at), "firings": list(map(_render_firing, found.firings)),
        "jobs": list(map(render_job, found.jobs)),
    })  # fmt: skip


@routes.get("/triggers/{name}/not-fired", response_model=FiringPage, **read_route())
async def list_not_fired(
    name: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None,
    from_: Annotated[InstantText, Query(alias="from", description="Noticed at or after this time.")] = None,
    to: Annotated[InstantText, Query(description="Noticed before this time.")] = None,
) -> Response:  # fmt: skip
    """List the firings of a trigger for which nothing is planned, each with the reason."""
    trigger = await _find_trigger(ctx, name)
    page = await ctx.run(item_history.list_not_fired, trigger, limit, cursor, *parse_period(from_, to))
    return page_response(page, [_render_firing(record) for record in page])


@routes.get("/triggers/{name}/audit", response_model=FiringAuditOut, **read_route())
async def audit_trigger(
    name: Id, ctx: Context, from_: Annotated[Instant, Query(alias="from")], to: Annotated[Instant, Query()]
) -> Response:
    """Compare the desired instants of the items with the recorded firings, to find missing and duplicate ones."""
    await _find_trigger(ctx, name)
    start, end = parse_timestamp(from_, "from"), parse_timestamp(to, "to")
    report = await ctx.app.triggers.audit(name, start, end, tenant_id=ctx.tenant_id)
    return json_response({
        "expected": report.expected, "outcomes": dict(report.outcomes), "more": report.truncated,
        "differences": [
            {"kind": each.kind, "item": each.item, "offset": each.offset, "recipient": each.recipient or None,
             "at": format_utc(each.at)}
            for each in report.differences
        ],
    })  # fmt: skip


@routes.post("/triggers/{name}/fire", response_model=JobList, **change_route("trigger.fire", Role.OPERATOR))
async def fire_trigger_item(name: Id, body: ItemRef, ctx: Context) -> Response:
    """Fire an item now, for each of its recipients. What is planned stays planned."""
    await _find_trigger(ctx, name)
    ctx.subject = name
    jobs = await ctx.app.triggers.fire(name, body.item, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response({"items": [render_job(job) for job in jobs]})


@routes.post("/triggers/{name}/skip", response_model=FiringList, **change_route("trigger.skip", Role.OPERATOR))
async def skip_trigger_item(name: Id, body: ItemRef, ctx: Context) -> Response:
    """Skip the planned firings of an item. A new date fires again."""
    await _find_trigger(ctx, name)
    ctx.subject = name
    skipped = await ctx.app.triggers.skip(name, body.item, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response({"items": [_render_firing(record) for record in skipped]})


@routes.post("/triggers/{name}/preview", response_model=PreviewOut, **read_route())
async def preview_trigger(name: Id, body: PreviewIn, ctx: Context) -> Response:
    """Show when given rows would fire. Nothing is stored."""
    trigger = await _find_trigger(ctx, name)
    return json_response({"rows": [_preview_row(trigger, fields) for fields in body.rows]})


def _preview_row(trigger: Trigger, fields: dict[str, Any]) -> dict[str, Any]:
    firings, status, timezone = trigger.rule.desired_firings(fields)
    ordered = sorted(firings.items(), key=lambda entry: (entry[1], entry[0]))
    return {
        "firings": [
            {"offset": key.offset, "recipient": key.recipient or None, "at": format_utc(at)} for key, at in ordered
        ],
        "timezone": timezone,
        "problem": trigger.rule.describe_unreadable(fields) if status is ColumnStatus.UNREADABLE else None,
        "holds": condition.evaluate(trigger.rule.condition, fields).holds,
    }


async def _find_trigger(ctx: Context, name: str) -> Trigger:
    trigger: Trigger | None = await ctx.run(rows.find_trigger, ctx.tenant_id, name)
    if trigger is None:
        raise not_found("trigger", name)
    return trigger


def _render_firing(record: FiringRecord) -> dict[str, Any]:
    return {
        "item": record.item, "offset": record.offset, "recipient": record.recipient or None,
        "at": format_utc(record.at), "jobId": record.job_id, "firedAt": format_utc(record.fired_at),
        "reason": record.reason, "detail": record.detail, "noticedAt": format_utc(record.noticed_at),
    }  # fmt: skip
