"""`/schedules`: create, preview, edit by revision, pause, trigger, backfill and override schedules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from timebell.api.conditions import require_query_permission
from timebell.api.executions import ExecutionPage, render_execution
from timebell.api.history import HistoryPage, history_response
from timebell.api.if_match import IfMatch, check_absent, matches
from timebell.api.job_fields import JobOut, RequestOut, render_job
from timebell.api.jobs import Statuses
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schedule_fields import (
    FIELD_ALIASES,
    RECURRENCE_FIELDS,
    ScheduleIn,
    ScheduleOut,
    etag,
    parse_schedule,
    render_definition,
    render_schedule,
)
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
    parse_timestamp,
)
from timebell.api.topic_warnings import warn_if_unhandled
from timebell.client.validation import parse_uuid
from timebell.engine.delivery import UPCOMING_COUNT
from timebell.errors import Conflict, InvalidInput, RevisionMissing, RevisionStale
from timebell.ids import occurrence_key
from timebell.model.page import MAX_LIMIT
from timebell.model.policy import Overlap, parse_choice
from timebell.model.schedule import Schedule
from timebell.recurrence.preview import dst_notes, next_fires
from timebell.store.audit import audit_log
from timebell.store.jobs.search import JobSearch
from timebell.store.schedules import actions, queries
from timebell.tenancy.roles import Role

YEAR = timedelta(days=366)
Sort = Literal["name", "-name", "nextFireAt", "-nextFireAt", "createdAt", "-createdAt"]
SORTS = {
    "nextFireAt": "next_fire_at", "-nextFireAt": "-next_fire_at", "createdAt": "created_at",
    "-createdAt": "-created_at",
}  # fmt: skip
routes = APIRouter(route_class=ApiRoute, tags=["schedules"])


class SchedulePage(ResponseBody):
    """Page of schedules."""

    items: list[ScheduleOut]
    next_cursor: str | None


class FireTime(ResponseBody):
    """Time at which the schedule fires."""

    utc: Instant
    local: str
    note: str | None


class SchedulePreview(ResponseBody):
    """Preview of a schedule."""

    description: str
    next: list[FireTime]
    notes: list[str]
    warnings: Annotated[list[str], Field(description="For example, that no running node handles the topic.")]
    schedule: Annotated[ScheduleOut, Field(description="Schedule that would be saved, including defaults.")]
    request: Annotated[
        RequestOut | None, Field(description="Request that its target would receive; null for handlers.")
    ]


class FireTimes(ResponseBody):
    """Next fire times."""

    items: list[FireTime]


class RevisionList(ResponseBody):
    """All revisions with their settings, newest first. `changedBy` is null for changes by the library."""

    items: list[dict[str, Json]]


class BackfillOut(ResponseBody):
    """Result of a backfill."""

    dry_run: bool
    instants: list[Instant]
    created: int
    already_run: Annotated[int, Field(description="Occurrences that have already run and are not repeated.")]


class ScheduleDeleted(ResponseBody):
    """Effect of the deletion on pending and running jobs."""

    prevented: int
    in_flight: int


class PauseIn(RequestBody):
    reason: Annotated[str | None, Field(min_length=1, max_length=500)] = None


class ResumeIn(RequestBody):
    catch_up: bool = False


class BackfillIn(RequestBody):
    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    overlap_policy: Annotated[str | None, Field(max_length=20)] = None
    dry_run: bool = False


class RevertIn(RequestBody):
    revision: Annotated[int, Field(ge=1, le=2**31 - 1)]


class OverrideIn(RequestBody):
    at: Instant
    action: Annotated[str, Field(pattern="^(skip|move)$")]
    to: Instant | None = None


async def find_schedule(ctx: Context, id_: str) -> Schedule:
    """Find a schedule of the caller's tenant. Raises NotFound."""
    valid_id = parse_uuid(id_)
    schedule: Schedule | None = (
        None if valid_id is None else await ctx.run(queries.find_schedule, ctx.tenant_id, id_=valid_id)
    )
    if schedule is None:
        raise not_found("schedule", id_)
    return schedule


async def lock_if_match(ctx: Context, id_: str, if_match: str | None) -> Schedule:
    """Lock a schedule for a change, check its revision and record it as the audit subject.

    Raises NotFound, RevisionMissing, RevisionStale.
    """
    valid_id = parse_uuid(id_)
    schedule: Schedule | None = (
        None if valid_id is None else await ctx.run(actions.lock_schedule, ctx.tenant_id, valid_id)
    )
    if schedule is None:
        raise not_found("schedule", id_)
    ctx.subject, ctx.before = schedule.id, render_schedule(schedule)
    if if_match is None:
        raise RevisionMissing(
            "A change must specify its revision.",
            fix=f"Send If-Match: {etag(schedule)} (or * to overwrite any revision).",
        )
    if not matches(if_match, etag(schedule)):
        records = await ctx.run(audit_log.list_history, ctx.tenant_id, "schedule", schedule.id, 1, None)
        last_change = "".join(
            f" Last changed by {record.actor} at {format_utc(record.at)} ({record.action})." for record in records
        )
        raise RevisionStale(
            f"{schedule.name} is at revision {schedule.revision}, {etag(schedule)}, and the change is based on"
            f" {if_match:.40}."
            f"{last_change}",
            existing=schedule.id, fix="Read it again and repeat the change.",
        )  # fmt: skip
    return schedule


def schedule_response(schedule: Schedule, status: int = 200, warnings: Sequence[str] = ()) -> Response:
    """Return a schedule as a response with its ETag; a created one (201) with its Location."""
    headers = {"ETag": etag(schedule)} | ({"Location": f"/api/v1/schedules/{schedule.id}"} if status == 201 else {})
    body = render_schedule(schedule) | ({"warnings": list(warnings)} if warnings else {})
    return json_response(body, status, headers)


async def _write_schedule(ctx: Context, body: ScheduleIn, *, replace: bool) -> Schedule:
    topic, spec, options = parse_schedule(body, ctx.app.settings.default_timezone)
    if "name" not in options:
        raise InvalidInput("A schedule requires a name.", code="NAME_MISSING", fix="Specify name.")
    if options.setdefault("tenant_id", ctx.tenant_id) != ctx.tenant_id:
        raise not_found("tenant", options["tenant_id"])
    require_query_permission(ctx, body.unless)
    options["created_by"] = ctx.caller.actor
    enabled = options.pop("enabled", True)
    schedule = await ctx.app.schedule_repeat(
        topic, spec, replace=replace, connection=ctx.connection, enabled=enabled, **options
    )
    if replace and schedule.enabled != enabled and body.enabled is not None:
        set_enabled = resume_by_id if enabled else pause_by_id
        schedule = await set_enabled(ctx, schedule.id)
    ctx.subject = schedule.id
    return schedule


async def resume_by_id(ctx: Context, id_: str, catch_up: bool = False) -> Schedule:
    """Resume a schedule in the transaction of the request."""
    return await ctx.app.schedules.resume(id_, catch_up=catch_up, tenant_id=ctx.tenant_id, connection=ctx.connection)


async def pause_by_id(ctx: Context, id_: str, reason: str | None = None) -> Schedule:
    """Pause a schedule in the transaction of the request."""
    return await ctx.app.schedules.pause(id_, reason, tenant_id=ctx.tenant_id, connection=ctx.connection)


@routes.post("/schedules", status_code=201, response_model=ScheduleOut, **change_route("schedule.create", Role.EDITOR))
async def create_schedule(body: ScheduleIn, ctx: Context) -> Response:
    """Create a schedule."""
    schedule = await _write_schedule(ctx, body, replace=False)
    return schedule_response(schedule, 201, await warn_if_unhandled(ctx, schedule.topic, schedule.action.target))


@routes.get("/schedules", response_model=SchedulePage, **read_route())
async def list_schedules(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None,
    enabled: bool | None = None, name: Annotated[str | None, Query(max_length=200)] = None,
    contains: Annotated[
        str | None, Query(max_length=200, description="Part of the name or topic, case-insensitive.")
    ] = None,
    topic: Annotated[str | None, Query(max_length=200)] = None,
    job_type: Annotated[str | None, Query(alias="jobType", max_length=200)] = None,
    label: Annotated[list[str] | None, Query(max_length=32, description="Label as name=value; all must match.")] = None,
    tenant: Annotated[str | None, Query(max_length=200, description="Tenant to list; requires a platform key.")] = None,
    recent: Annotated[int, Query(ge=0, le=28, description="Number of last runs whose outcomes are included.")] = 0,
    sort: Annotated[Sort, Query(description="A leading minus reverses the order.")] = "-createdAt",
) -> Response:  # fmt: skip
    """List schedules, by default newest first. Filters are combined with AND."""
    labels = {}
    for text in label or []:
        key, equals, value = text.partition("=")
        if not equals or '"' in key:
            raise InvalidInput(
                f"label is {text!r:.60}, which is not a label.",
                code="INVALID_LABELS",
                fix="Use a format such as team=billing.",
            )
        labels[key] = value
    page = await ctx.app.schedules.list(
        ctx.tenant_id,
        limit,
        cursor,
        name=name,
        enabled=enabled,
        topic=topic or job_type,
        labels=labels,
        contains=contains,
        sort=SORTS.get(sort, sort),
    )
    outcomes = await ctx.run(queries.list_recent_outcomes, [schedule.id for schedule in page], recent) if recent else {}
    return page_response(page, [
        await _render_with_warnings(ctx, schedule)
        | {"recent": outcomes.get(schedule.id, []) if recent else None} for schedule in page
    ])  # fmt: skip


async def _render_with_warnings(ctx: Context, schedule: Schedule) -> dict[str, Any]:
    warnings = await warn_if_unhandled(ctx, schedule.topic, schedule.action.target)
    return render_schedule(schedule) | {"warnings": warnings}


@routes.post("/schedules/preview", response_model=SchedulePreview, **read_route())
async def preview_schedule(
    body: ScheduleIn, ctx: Context, count: Annotated[int, Query(ge=1, le=1000)] = 10
) -> Response:
    """Preview the schedule that this body would create, without writing anything."""
    topic, spec, options = parse_schedule(body, ctx.app.settings.default_timezone)
    options |= {"tenant_id": ctx.tenant_id}
    calendar = await ctx.app.schedules.find_calendar(options)
    since = await ctx.app.schedules.find_created_at(options)
    draft = ctx.app.schedules.draft(topic, spec, options, ctx.now, since, calendar)
    return json_response({
        "description": draft.recurrence.describe(), "next": next_fires(draft.recurrence, ctx.now, count),
        "notes": [*spec.warnings(), *dst_notes(draft.recurrence, ctx.now, ctx.now + YEAR)],
        "warnings": await warn_if_unhandled(ctx, draft.topic, draft.action.target),
        "schedule": render_schedule(draft), "request": _preview_request(ctx, draft),
    })  # fmt: skip


def _preview_request(ctx: Context, draft: Schedule) -> dict[str, Any] | None:
    """Return the request that the first occurrence would send; None without a target."""
    recurrence, at = draft.recurrence, draft.next_fire_at or ctx.now
    upcoming: list[datetime] = []
    while (
        len(upcoming) < UPCOMING_COUNT and (following := recurrence.next(upcoming[-1] if upcoming else at)) is not None
    ):
        upcoming.append(following)
    return ctx.app.render_request(
        draft.action.target, tenant_id=draft.tenant_id, topic=draft.topic, payload=draft.action.payload,
        metadata=draft.action.metadata, timezone=draft.timezone, scheduled_at=at, fired_at=at, schedule_id=draft.id,
        schedule_name=draft.name, occurrence_key=occurrence_key(draft.id, at), upcoming=upcoming,
    )  # fmt: skip


@routes.put(
    "/schedules/by-name/{name}", response_model=ScheduleOut, responses={201: {"model": ScheduleOut}},
    **change_route("schedule.put", Role.EDITOR),
)  # fmt: skip
async def put_schedule(
    name: Id, body: ScheduleIn, ctx: Context, if_match: IfMatch = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match", max_length=200)] = None,
) -> Response:  # fmt: skip
    """Create or replace the schedule with this name. Omitted fields get their defaults."""
    if body.name not in (None, name):
        raise InvalidInput(
            "The name in the body differs from the name in the path.", code="NAME_MISMATCH",
            fix="Omit the name in the body.",
        )  # fmt: skip
    existing: Schedule | None = await ctx.run(queries.find_schedule, ctx.tenant_id, name=name)
    if existing is not None and if_none_match == "*":
        raise Conflict(
            f"The schedule {name!r} already exists.", code="SCHEDULE_EXISTS", existing=existing.id,
            fix="Use another name, or omit If-None-Match to replace it.",
        )  # fmt: skip
    if existing is not None:
        await lock_if_match(ctx, existing.id, if_match)
    else:
        check_absent(if_match, f"The schedule {name!r:.80}")
    schedule = await _write_schedule(ctx, body.model_copy(update={"name": name}), replace=True)
    return schedule_response(schedule, 201 if existing is None else 200)


@routes.get("/schedules/{id}", response_model=ScheduleOut, **read_route())
async def get_schedule(id: Id, ctx: Context) -> Response:
    """Get a schedule."""
    schedule = await find_schedule(ctx, id)
    return schedule_response(schedule, warnings=await warn_if_unhandled(ctx, schedule.topic, schedule.action.target))


@routes.patch("/schedules/{id}", response_model=ScheduleOut, **change_route("schedule.update", Role.EDITOR))
async def patch_schedule(id: Id, patch: dict[str, Json], ctx: Context, if_match: IfMatch = None) -> Response:
    """Change fields of a schedule (RFC 7396 merge patch: null resets a field to its default)."""
    schedule = await lock_if_match(ctx, id, if_match)
    body = _validate_schedule(_apply_patch(render_definition(schedule), patch))
    if body.name != schedule.name:
        raise InvalidInput("A schedule cannot be renamed.", code="NAME_MISMATCH", fix="Create another schedule.")
    return schedule_response(await _write_schedule(ctx, body, replace=True))


def _validate_schedule(merged: dict[str, Any]) -> ScheduleIn:
    """Validate the fields like a request body of FastAPI. Raises RequestValidationError."""
    try:
        return ScheduleIn.model_validate(merged)
    except ValidationError as invalid:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in invalid.errors()]
        raise RequestValidationError(errors) from invalid


def _apply_patch(fields: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a merge patch to the fields of a schedule. A new recurrence replaces one of another kind."""
    names = {"jobType": "topic", "jobPayload": "payload"}
    assert set(names.values()) == set(FIELD_ALIASES.values())
    patch = {names.get(name, name): value for name, value in patch.items()}
    kinds = {"cronExpression", *RECURRENCE_FIELDS[1:]}
    if kinds & {name for name, value in patch.items() if value is not None}:
        fields = {name: value for name, value in fields.items() if name not in kinds and name != "dst"}
    if "maxRetries" in patch:
        fields.pop("retry", None)
    merged: dict[str, Any] = _merge_patch(fields, patch)
    merged.setdefault("name", fields["name"])
    return merged


def _merge_patch(into: Any, patch: Any) -> Any:
    """Merge as in RFC 7396, section 2, but replace payload, target, retry and condition as a whole."""
    if not isinstance(patch, dict):
        return patch
    result = dict(into) if isinstance(into, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = (
                value if name in ("payload", "target", "retry", "condition") else _merge_patch(result.get(name), value)
            )
    return result


@routes.delete("/schedules/{id}", response_model=ScheduleDeleted, **change_route("schedule.delete", Role.EDITOR))
async def delete_schedule(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a schedule. Pending jobs are cancelled, running jobs are not retried, and the history is kept."""
    await lock_if_match(ctx, id, if_match)
    cancelled = await ctx.app.schedules.delete(id, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response({"prevented": cancelled.prevented, "inFlight": cancelled.in_flight})


@routes.post("/schedules/{id}/pause", response_model=ScheduleOut, **change_route("schedule.pause", Role.OPERATOR))
async def pause_schedule(id: Id, ctx: Context, body: PauseIn | None = None, if_match: IfMatch = None) -> Response:
    """Pause a schedule. It does not fire until it is resumed."""
    await _lock_for_change(ctx, id, if_match)
    return schedule_response(await pause_by_id(ctx, id, body.reason if body else None))


@routes.post("/schedules/{id}/resume", response_model=ScheduleOut, **change_route("schedule.resume", Role.OPERATOR))
async def resume_schedule(id: Id, ctx: Context, body: ResumeIn | None = None, if_match: IfMatch = None) -> Response:
    """Resume a schedule. With catchUp, its catch-up policy applies to occurrences missed during the pause."""
    await _lock_for_change(ctx, id, if_match)
    return schedule_response(await resume_by_id(ctx, id, body.catch_up if body else False))


@routes.post(
    "/schedules/{id}/trigger", status_code=201, response_model=JobOut, **change_route("schedule.trigger", Role.OPERATOR)
)
async def trigger_schedule(id: Id, ctx: Context) -> Response:
    """Run a schedule once, now. The overlap policy applies; the next scheduled run is unchanged."""
    await _lock_for_change(ctx, id)
    job = await ctx.app.schedules.trigger(id, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response(render_job(job), 201, {"Location": f"/api/v1/jobs/{job.id}"})


@routes.post("/schedules/{id}/backfill", response_model=BackfillOut, **change_route("schedule.backfill", Role.OPERATOR))
async def backfill_schedule(id: Id, body: BackfillIn, ctx: Context) -> Response:
    """Run skipped and missing occurrences of a time range. With dryRun, only list them."""
    await _lock_for_change(ctx, id)
    policy = body.overlap_policy
    overlap = None if policy is None else parse_choice(Overlap, policy, "overlap")
    result = await ctx.app.schedules.backfill(
        id, parse_timestamp(body.from_, "from"), parse_timestamp(body.to, "to"), overlap=overlap,
        dry_run=body.dry_run,
        tenant_id=ctx.tenant_id, connection=ctx.connection,
    )  # fmt: skip
    return json_response({
        "dryRun": body.dry_run, "instants": [format_utc(at) for at in result.instants],
        "created": 0 if body.dry_run else len(result.instants), "alreadyRun": result.already_run,
    })  # fmt: skip


@routes.post(
    "/schedules/{id}/skip-next", response_model=ScheduleOut, **change_route("schedule.skip_next", Role.OPERATOR)
)
async def skip_next_occurrence(id: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Skip the next occurrence. It is recorded as `skipped` with the reason `override`."""
    schedule = await _lock_for_change(ctx, id, if_match)
    if schedule.effective_next_fire_at is None:
        raise Conflict(f"{schedule.name} has no further occurrence.", code="NOTHING_TO_SKIP", existing=schedule.id)
    return schedule_response(
        await ctx.app.schedules.skip(
            id, schedule.effective_next_fire_at, tenant_id=ctx.tenant_id, connection=ctx.connection
        )
    )


@routes.post(
    "/schedules/{id}/overrides", response_model=ScheduleOut, **change_route("schedule.override", Role.OPERATOR)
)
async def override_occurrence(id: Id, body: OverrideIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Skip or move one occurrence, identified by its nominal time."""
    await _lock_for_change(ctx, id, if_match)
    at, schedules = parse_timestamp(body.at, "at"), ctx.app.schedules
    shared: dict[str, Any] = {"tenant_id": ctx.tenant_id, "connection": ctx.connection}
    if (body.action == "move") != (body.to is not None):
        raise InvalidInput(
            "to is required with the action move, and only allowed with it.",
            code="INVALID_OVERRIDE",
            fix="Specify to with move, and omit it with skip.",
        )
    if body.to is None:
        return schedule_response(await schedules.skip(id, at, **shared))
    return schedule_response(await schedules.move(id, at, parse_timestamp(body.to, "to"), **shared))


@routes.delete("/schedules/{id}/overrides", response_model=ScheduleOut, **change_route("schedule.undo", Role.OPERATOR))
async def undo_override(id: Id, ctx: Context, at: Annotated[Instant, Query()], if_match: IfMatch = None) -> Response:
    """Undo a skip or move whose nominal time is in the future."""
    await _lock_for_change(ctx, id, if_match)
    undone = ctx.app.schedules.undo(id, parse_timestamp(at, "at"), tenant_id=ctx.tenant_id, connection=ctx.connection)
    return schedule_response(await undone)


@routes.post("/schedules/{id}/revert", response_model=ScheduleOut, **change_route("schedule.revert", Role.EDITOR))
async def revert_schedule(id: Id, body: RevertIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Restore a schedule to an earlier revision."""
    await _lock_for_change(ctx, id, if_match)
    reverted = ctx.app.schedules.revert(id, body.revision, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return schedule_response(await reverted)


@routes.get("/schedules/{id}/executions", response_model=ExecutionPage, **read_route())
async def list_executions(
    id: Id, ctx: Context, limit: Limit = 20, cursor: Cursor = None,
    status: Statuses = None,
    from_: Annotated[
        Instant | None, Query(alias="from", description="Finished or, if live, due at or after this time.")
    ] = None,
    to: Annotated[Instant | None, Query(description="Finished or, if live, due before this time.")] = None,
) -> Response:  # fmt: skip
    """List the occurrences of a schedule with their outcomes, newest first."""
    await find_schedule(ctx, id)
    filters = {"schedule_id": id, "tenant_id": ctx.tenant_id}
    search = JobSearch(
        start=None if from_ is None else parse_timestamp(from_, "from"),
        end=None if to is None else parse_timestamp(to, "to"),
    )
    page = await ctx.app._jobs.list(filters, status, limit, cursor, search=search)
    return page_response(page, [render_execution(job) for job in page])


@routes.get("/schedules/{id}/next", response_model=FireTimes, **read_route())
async def list_next_occurrences(
    id: Id, ctx: Context, count: Annotated[int, Query(ge=1, le=1000)] = 10,
    from_: Annotated[Instant | None, Query(alias="from")] = None,
) -> Response:  # fmt: skip
    """List the next fire times. Overrides are applied; pauses are ignored."""
    schedule = await find_schedule(ctx, id)
    after = ctx.now if from_ is None else parse_timestamp(from_, "from")
    return json_response({"items": next_fires(schedule.recurrence.effective(), after, count)})


@routes.get("/schedules/{id}/revisions", response_model=RevisionList, **read_route())
async def list_revisions(id: Id, ctx: Context) -> Response:
    """List all revisions of a schedule, newest first. Also works for deleted schedules."""
    revisions = await ctx.app.schedules.history(id, tenant_id=ctx.tenant_id)
    records = await ctx.run(audit_log.list_history, ctx.tenant_id, "schedule", id, MAX_LIMIT, None)
    actors = {
        record.after["revision"]: record.actor for record in records if record.after and "revision" in record.after
    }
    return json_response({"items": [_render_revision(each, actors.get(each.number)) for each in revisions]})


@routes.get("/schedules/{id}/history", response_model=HistoryPage, **read_route())
async def list_schedule_history(id: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List who changed a schedule, when and how, newest first. Also works for deleted schedules."""
    return await history_response(ctx, "schedule", id, limit, cursor, lambda: find_schedule(ctx, id))


def _render_revision(revision: Any, actor: str | None) -> dict[str, Any]:
    schedule = Schedule(
        id="", tenant_id="", name="", recurrence=revision.recurrence, action=revision.action,
        policies=revision.policies, created_at=revision.effective_at, updated_at=revision.effective_at,
    )  # fmt: skip
    definition = render_definition(schedule)
    del definition["name"]
    return {
        "revision": revision.number, "effectiveAt": format_utc(revision.effective_at),
        "changedBy": actor,
        "summary": revision.recurrence.describe(), **definition,
    }  # fmt: skip


async def _lock_for_change(ctx: Context, id_: str, if_match: str | None = None) -> Schedule:
    """Lock a schedule, check If-Match if it was sent, and record the schedule as the audit subject.

    Raises NotFound, RevisionStale.
    """
    return await lock_if_match(ctx, id_, if_match or "*")
