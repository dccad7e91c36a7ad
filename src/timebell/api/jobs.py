"""`/jobs`: create, preview, list, get, cancel, reschedule, retry and redeliver jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.conditions import require_query_permission
from timebell.api.job_fields import JobIn, JobOut, RequestOut, render_job
from timebell.api.operations import DryRunCount, OperationOut, dry_run_response, start_operation
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    ZoneName,
    json_response,
    page_response,
    parse_period,
)
from timebell.api.topic_warnings import warn_if_unhandled
from timebell.client.created import job_from_new
from timebell.client.job_fields import parse_job
from timebell.client.validation import parse_uuid
from timebell.errors import InvalidInput, Refused
from timebell.ids import new_id
from timebell.model.job import STATE_WORDS, Job, NewJob
from timebell.model.operation import OperationKind
from timebell.store.jobs import repository
from timebell.store.jobs.recorded_creation import create_recorded, needs_lookup
from timebell.store.jobs.search import JobSearch
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=ApiRoute, tags=["jobs"])
Text = Annotated[str | None, Query(max_length=200)]
Status = Annotated[str, Field(max_length=20, json_schema_extra={"enum": list(STATE_WORDS)})]
Statuses = Annotated[list[Status] | None, Query(max_length=20)]


Pairs = Annotated[
    list[Annotated[str, Query(max_length=400)]] | None,
    Query(max_length=10, description="`path=value`, such as `order.id=42`."),
]


class JobPage(ResponseBody):
    """Page of jobs, newest first."""

    items: list[JobOut]
    next_cursor: str | None


class JobCancelOut(ResponseBody):
    """Outcome of a cancellation: prevented, in_flight or already_done."""

    outcome: str
    job: JobOut


class JobPreview(ResponseBody):
    """Job and request that would be created."""

    job: JobOut
    request: Annotated[
        RequestOut | None, Field(description="Request that its target would receive; null for handlers.")
    ]


class JobCancelIn(RequestBody):
    stop: Annotated[
        bool, Field(description="Also stop a running job: its handler is cancelled, its request is closed.")
    ] = False


class RescheduleIn(RequestBody):
    run_at: Annotated[str | None, Field(max_length=64, description="Defaults to now.")] = None
    timezone: ZoneName | None = None


class JobRetryIn(RequestBody):
    payload: Annotated[
        Json, Field(description="If present, even as null: payload of a new job that replaces the failed one.")
    ] = None


class LiveJobFilter(RequestBody):
    """Filter of live jobs, combined with AND."""

    topic: Name | None = None
    owner_id: Name | None = None
    schedule_id: Name | None = None
    key: Name | None = None
    queue: Name | None = None


class JobsCancelIn(RequestBody):
    filter: LiveJobFilter
    dry_run: bool = False


def parse_pairs(texts: list[str] | None, field: str) -> tuple[tuple[str, str], ...]:
    """Parse `path=value` filters. Raises InvalidInput (INVALID_FILTER)."""
    pairs = [text.partition("=") for text in texts or ()]
    for path, separator, _ in pairs:
        if not path or not separator:
            raise InvalidInput(
                f"{field} filter {path!r:.60} has no value.", code="INVALID_FILTER", fix="Write path=value."
            )
    return tuple((path, value) for path, _, value in pairs)


def resolve_tenant(ctx: Context, requested: object) -> str:
    """Return the tenant that a request specifies in addition to its key. Raises Refused (TENANT_FORBIDDEN)."""
    if requested is None or requested == ctx.tenant_id:
        return ctx.tenant_id
    if not ctx.caller.is_platform or not isinstance(requested, str):
        raise Refused(
            f"The key does not belong to the tenant {requested!r:.60}.", code="TENANT_FORBIDDEN",
            fix="Omit tenantId: the key determines it.",
        )  # fmt: skip
    return requested


def job_response(job: Job, status: int = 200, warnings: Sequence[str] = ()) -> Response:
    """Return a job as a response; a created job (201) with its Location."""
    body = render_job(job) | ({"warnings": list(warnings)} if warnings else {})
    return json_response(body, status, _location(job.id) if status == 201 else None)


def _location(id_: str) -> dict[str, str]:
    return {"Location": f"/api/v1/jobs/{id_}"}


@routes.post(
    "/jobs", status_code=201, response_model=JobOut, responses={200: {"model": JobOut}},
    **change_route("job.create", Role.EDITOR),
)  # fmt: skip
async def create_job(body: JobIn, ctx: Context) -> Response:
    """Create a job. With onConflict `keep`, an existing job with the same key is returned with status 200."""
    fields = body.model_dump(exclude_unset=True, by_alias=True)
    on_conflict = fields.pop("onConflict", "error")
    spec = parse_job(fields)
    spec.tenant_id = resolve_tenant(ctx, spec.tenant_id)
    require_query_permission(ctx, spec.unless)

    async def render_created(new: NewJob) -> dict[str, Any]:
        ctx.subject = new.id
        job = job_from_new(new)
        warnings = await warn_if_unhandled(ctx, job.topic, job.target)
        return render_job(job) | ({"warnings": warnings} if warnings else {})

    rendered: dict[str, Any] | None = None

    async def insert_recorded(new: NewJob) -> bool:
        nonlocal rendered
        if needs_lookup(new) or not ctx.may_record_early:
            return False
        rendered = await render_created(new)
        return await ctx.record_early(create_recorded, new, after=rendered)

    (created,) = await ctx.app._jobs.create(
        [spec], on_conflict=on_conflict, connection=ctx.connection, insert_single=insert_recorded
    )
    if isinstance(created, str):  # the id of the existing job
        ctx.subject = created
        return job_response(await ctx.app._jobs.get(created, spec.tenant_id, ctx.connection))
    return json_response(rendered or await render_created(created), 201, _location(created.id))


@routes.post("/jobs/preview", response_model=JobPreview, **read_route())
async def preview_job(body: JobIn, ctx: Context) -> Response:
    """Return the job and the target request that this body would create, without writing anything."""
    fields = body.model_dump(exclude_unset=True, by_alias=True)
    fields.pop("onConflict", None)
    spec = parse_job(fields)
    spec.tenant_id = resolve_tenant(ctx, spec.tenant_id)
    job = job_from_new(ctx.app._jobs.draft(spec, new_id(ctx.now), ctx.now))
    request = ctx.app.render_request(
        job.target, job_id=job.id, tenant_id=job.tenant_id, topic=job.topic, payload=job.payload,
        metadata=job.metadata, timezone=job.timezone, scheduled_at=job.scheduled_at, fired_at=job.run_at,
        occurrence_key=job.occurrence_key, upcoming=[],
    )  # fmt: skip
    return json_response({"job": render_job(job), "request": request})


@routes.post(
    "/jobs/cancel", status_code=202, response_model=OperationOut, responses={200: {"model": DryRunCount}},
    **change_route("jobs.cancel", Role.OPERATOR),
)  # fmt: skip
async def cancel_jobs(body: JobsCancelIn, ctx: Context) -> Response:
    """Cancel all matching live jobs.

    The operation counts jobs prevented from starting as `done`, and jobs that are already running as `skipped`.
    """
    equal = {name: value for name, value in body.filter.sent_fields().items() if value is not None}
    if not equal:
        raise InvalidInput(
            "The filter is empty.", code="FILTER_MISSING",
            fix="Specify at least one of key, ownerId, topic, scheduleId, queue.",
        )  # fmt: skip
    if "schedule_id" in equal:
        equal["schedule_id"] = parse_uuid(equal["schedule_id"]) or new_id(ctx.now)  # an invalid id matches nothing
    count = await ctx.run(repository.count_live, {**equal, "tenant_id": ctx.tenant_id})
    if body.dry_run:
        return dry_run_response(ctx, count)
    return await start_operation(ctx, OperationKind.CANCEL, {"equal": equal}, count)


@routes.get("/jobs", response_model=JobPage, **read_route())
async def list_jobs(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None, status: Statuses = None, topic: Text = None,
    owner_id: Annotated[Text, Query(alias="ownerId")] = None,
    tenant_id: Annotated[Text, Query(alias="tenantId", description="Tenant to list; requires a platform key.")] = None,
    schedule_id: Annotated[Text, Query(alias="scheduleId")] = None, key: Text = None, queue: Text = None,
    min_attempts: Annotated[int | None, Query(alias="minAttempts", ge=0, le=2**31 - 1)] = None,
    from_: Annotated[
        Instant | None, Query(alias="from", description="Finished or, if live, due at or after this time.")
    ] = None,
    to: Annotated[Instant | None, Query(description="Finished or, if live, due before this time.")] = None,
    correlation_id: Annotated[Text, Query(alias="correlationId")] = None,
    client_request_id: Annotated[Text, Query(alias="clientRequestId")] = None,
    metadata: Pairs = None, payload: Pairs = None,
    error: Annotated[Text, Query(description="Part of the error of any attempt.")] = None,
    sort: Annotated[
        Literal["-createdAt", "runAt"],
        Query(description="`runAt`: pending jobs that are not held, earliest due time first; only with `queue`."),
    ] = "-createdAt",
) -> Response:  # fmt: skip
    """List jobs, newest first. Filters are combined with AND, several `status` values with OR.

    `retrying` jobs are pending after an attempt, `held` ones wait for something else than their time, such as a node
    that handles their topic; these two are not combined with other statuses.

    `topic` may end with `*`. A page examines at most 20,000 jobs of each state for metadata, payloads, errors and, of
    finished jobs, the queue, so it may be short and have a `nextCursor`.
    """
    if sort == "runAt":
        other_filters = (
            topic, owner_id, schedule_id, key, min_attempts, from_, to, correlation_id, client_request_id, metadata,
            payload, error,
        )  # fmt: skip
        if status != ["pending"] or any(each is not None for each in other_filters):
            raise InvalidInput(
                "Only pending jobs, of all queues or of one, are sorted by runAt.", code="INVALID_SORT",
                fix="Use status=pending and queue, or leave out sort.",
            )  # fmt: skip
        page = await ctx.app._jobs.list_next_due(resolve_tenant(ctx, tenant_id), queue, limit, cursor)
        return page_response(page, [render_job(job) for job in page])
    start, end = parse_period(from_, to)
    search = JobSearch(
        start=start, end=end,
        topic_prefix=topic[:-1] if topic is not None and topic.endswith("*") else None,
        request_id=client_request_id, correlation_id=correlation_id,
        metadata=parse_pairs(metadata, "metadata"), payload=parse_pairs(payload, "payload"), error=error or None,
    )  # fmt: skip
    topic = None if search.topic_prefix is not None else topic
    equal = {
        "tenant_id": resolve_tenant(ctx, tenant_id), "topic": topic, "owner_id": owner_id, "schedule_id": schedule_id,
        "key": key, "queue": queue,
    }  # fmt: skip
    page = await ctx.app._jobs.list(equal, status, limit, cursor, min_attempts, search)
    return page_response(page, [render_job(job) for job in page])


@routes.get("/jobs/{id}", response_model=JobOut, **read_route())
async def get_job(id: Id, ctx: Context) -> Response:
    """Get a live or finished job."""
    return job_response(await find_job(ctx, id))


@routes.post("/jobs/{id}/cancel", response_model=JobCancelOut, **change_route("job.cancel", Role.OPERATOR))
async def cancel_job(id: Id, ctx: Context, body: JobCancelIn | None = None) -> Response:
    """Prevent a job from starting. If it is already running, it is not retried, and with `stop` it is stopped.

    Idempotent: repeated calls return the first outcome.
    """
    await _load_for_change(ctx, id)
    cancelled: repository.CancelResult = await ctx.app.cancel(
        id, stop=body is not None and body.stop, tenant_id=ctx.tenant_id, connection=ctx.connection
    )
    return json_response({"outcome": cancelled.outcome.value, "job": render_job(cancelled.job)})


@routes.post(
    "/jobs/{id}/reschedule", status_code=201, response_model=JobOut, **change_route("job.reschedule", Role.OPERATOR)
)
async def reschedule_job(id: Id, body: RescheduleIn, ctx: Context) -> Response:
    """Replace a job with a new one at another time. Each refers to the other."""
    await _load_for_change(ctx, id)
    job = await ctx.app.reschedule(
        id, body.run_at, timezone=body.timezone, tenant_id=ctx.tenant_id, connection=ctx.connection
    )
    return job_response(job, 201)


@routes.post(
    "/jobs/{id}/retry", response_model=JobOut, responses={201: {"model": JobOut}},
    **change_route("job.retry", Role.OPERATOR),
)  # fmt: skip
async def retry_job(id: Id, ctx: Context, body: JobRetryIn | None = None) -> Response:
    """Retry a failed job under the same id with a fresh attempt budget.

    With `payload`, which requires the role editor, a new job replaces it instead (201). Each refers to the other, and
    the failed job leaves the dead letters.
    """
    fields = {} if body is None else body.sent_fields()
    if "payload" in fields:
        require(ctx.caller.role, Role.EDITOR)  # the same role as for creating a job
    await _load_for_change(ctx, id)
    if "payload" not in fields:
        return job_response(await ctx.app._jobs.retry(id, ctx.tenant_id, ctx.connection, ctx.caller.actor))
    created = await ctx.app._jobs.retry_with_payload(id, fields["payload"], ctx.tenant_id, ctx.connection)
    return job_response(await find_job(ctx, created.id), 201)


@routes.post("/jobs/{id}/redeliver", response_model=JobOut, **change_route("job.redeliver", Role.OPERATOR))
async def redeliver_job(id: Id, ctx: Context) -> Response:
    """Send a completed or failed job to its target again: same job, message id with the suffix `.rN`."""
    await _load_for_change(ctx, id)
    return job_response(await ctx.app._jobs.redeliver(id, ctx.tenant_id, ctx.connection, ctx.caller.actor))


async def find_job(ctx: Context, id_: str) -> Job:
    """Find a job of the caller's tenant. Raises NotFound."""
    valid_id = parse_uuid(id_)
    job: Job | None = None if valid_id is None else await ctx.run(repository.find_job, ctx.tenant_id, valid_id)
    if job is None:
        raise not_found("job", id_)
    return job


async def _load_for_change(ctx: Context, id_: str) -> Job:
    """Find a job and record it as the audit subject. Raises NotFound."""
    job = await find_job(ctx, id_)
    ctx.subject, ctx.before = job.id, render_job(job)
    return job
