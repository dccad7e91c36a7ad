"""`/dead-letters`: permanently failed jobs: list, group, retry, discard."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.job_fields import JobOut, render_job
from timebell.api.operations import DryRunCount, OperationOut, Rate, dry_run_response, start_operation
from timebell.api.route import ApiRoute, Context, change_route, read_route
from timebell.api.schemas import (
    Instant,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
    parse_timestamp,
)
from timebell.client.validation import parse_uuid
from timebell.errors import InvalidInput
from timebell.model.job import Job
from timebell.model.operation import OperationKind
from timebell.store.jobs import dead_letters
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["dead letters"])
Text = Annotated[str | None, Query(max_length=200)]
ErrorGroup = Annotated[str | None, Query(pattern="^[0-9a-f]{16}$", description="Normalized error message.")]
GROUP_COLUMNS = {"topic": ("topic",), "error": ("topic", "error_code", "error_group")}


class DeadLetter(JobOut):
    """Permanently failed job."""

    failed_at: Instant


class DeadLetterPage(ResponseBody):
    """Page of dead letters, latest failure first."""

    items: list[DeadLetter]
    next_cursor: str | None


class DeadLetterGroup(ResponseBody):
    """Dead letters with the same topic or, grouped by error, the same topic, code and normalized message.

    Values that the group shares are filters for retry and discard.
    """

    topic: str | None = None
    error: Annotated[str | None, Field(description="Error code.")] = None
    error_group: Annotated[str | None, Field(description="Normalized error message.")] = None
    count: int
    last_failed_at: Instant
    error_message: str | None
    latest: DeadLetter


class DeadLetterGroups(ResponseBody):
    """Up to `limit` groups, largest first. `total` counts all matching dead letters."""

    items: list[DeadLetterGroup]
    total: int
    next_cursor: None = None


class DeadLetterFilter(RequestBody):
    """Filter of dead letters, combined with AND; `{}` matches all."""

    topic: Name | None = None
    schedule_id: Name | None = None
    error_code: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    error_group: Annotated[str | None, Field(pattern="^[0-9a-f]{16}$")] = None
    from_: Annotated[Instant | None, Field(alias="from")] = None
    to: Instant | None = None


class DeadLetterRetryIn(RequestBody):
    filter: DeadLetterFilter
    rate: Rate = None
    dry_run: bool = False


class DeadLetterDiscardIn(RequestBody):
    filter: DeadLetterFilter
    dry_run: bool = False


def parse_filter(
    topic: str | None,
    schedule_id: str | None,
    error_code: str | None,
    start: str | None,
    end: str | None,
    error_group: str | None = None,
) -> dead_letters.DeadLetterFilter:
    """Build a filter from query parameters. Raises InvalidInput."""
    if schedule_id is not None and (schedule_id := parse_uuid(schedule_id)) is None:
        raise InvalidInput("scheduleId is not a valid id.", code="INVALID_FILTER", fix="Specify the id of a schedule.")
    return dead_letters.DeadLetterFilter(
        topic=topic, schedule_id=schedule_id, error_code=error_code, error_group=error_group,
        start=None if start is None else parse_timestamp(start, "from"),
        end=None if end is None else parse_timestamp(end, "to"),
    )  # fmt: skip


def render_dead_letter(job: Job) -> dict[str, Any]:
    """Render a dead letter as JSON."""
    return {**render_job(job), "failedAt": format_utc(job.finished_at)}


@routes.get("/dead-letters", response_model=DeadLetterPage | DeadLetterGroups, **read_route())
async def list_dead_letters(
    ctx: Context, limit: Limit = 50, cursor: Text = None, topic: Text = None,
    schedule_id: Annotated[Text, Query(alias="scheduleId")] = None,
    error_code: Annotated[Text, Query(alias="errorCode")] = None,
    error_group: Annotated[ErrorGroup, Query(alias="errorGroup")] = None,
    from_: Annotated[Instant | None, Query(alias="from", description="Failed at or after this time.")] = None,
    to: Annotated[Instant | None, Query(description="Failed before this time.")] = None,
    group_by: Annotated[Literal["topic", "error"] | None, Query(alias="groupBy")] = None,
) -> Response:  # fmt: skip
    """List dead letters, latest failure first, or group them by topic, or by topic, code and normalized message."""
    dead_letter_filter = parse_filter(topic, schedule_id, error_code, from_, to, error_group)
    if group_by is None:
        page = await ctx.run(dead_letters.list_page, ctx.tenant_id, dead_letter_filter, limit, cursor)
        return page_response(page, [render_dead_letter(job) for job in page])
    groups = await ctx.run(dead_letters.list_groups, ctx.tenant_id, dead_letter_filter, GROUP_COLUMNS[group_by], limit)
    items = [
        {"topic": group.values.get("topic"), "error": group.values.get("error_code"),
         "errorGroup": group.values.get("error_group"), "count": group.count,
         "lastFailedAt": format_utc(group.latest.finished_at), "errorMessage": group.latest.error,
         "latest": render_dead_letter(group.latest)}
        for group in groups
    ]  # fmt: skip
    total = await ctx.run(dead_letters.count, ctx.tenant_id, dead_letter_filter)
    return json_response({"items": items, "total": total, "nextCursor": None})


@routes.post(
    "/dead-letters/retry", status_code=202, response_model=OperationOut, responses={200: {"model": DryRunCount}},
    **change_route("dead_letters.retry", Role.OPERATOR),
)  # fmt: skip
async def retry_dead_letters(body: DeadLetterRetryIn, ctx: Context) -> Response:
    """Retry matching dead letters, at most `rate` per second. With dryRun, only count them."""
    return await _start_or_count(ctx, OperationKind.RETRY, body.filter, body.dry_run, body.rate)


@routes.post(
    "/dead-letters/discard", status_code=202, response_model=OperationOut, responses={200: {"model": DryRunCount}},
    **change_route("dead_letters.discard", Role.OPERATOR),
)  # fmt: skip
async def discard_dead_letters(body: DeadLetterDiscardIn, ctx: Context) -> Response:
    """Discard matching dead letters. Their jobs stay `failed` in the history, with the reason `discarded`."""
    return await _start_or_count(ctx, OperationKind.DISCARD, body.filter, body.dry_run, None)


async def _start_or_count(
    ctx: Context, kind: OperationKind, selection: DeadLetterFilter, dry_run: bool, rate: float | None
) -> Response:
    dead_letter_filter = parse_filter(
        selection.topic,
        selection.schedule_id,
        selection.error_code,
        selection.from_,
        selection.to,
        selection.error_group,
    )
    count = await ctx.run(dead_letters.count, ctx.tenant_id, dead_letter_filter)
    if dry_run:
        return dry_run_response(ctx, count)
    return await start_operation(ctx, kind, {"which": dead_letter_filter.to_json(), "rate": rate}, count)
