"""`/jobs`: made, found, cancelled, moved, tried again."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.conditions import may_ask
from timebell.api.job_fields import JobIn, JobOut, RequestOut, shown_job
from timebell.api.operations import Counted, OperationOut, begin, counted
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Json, Limit, Name, Shown, answer, paged
from timebell.client.created import shown
from timebell.client.job_fields import spec_of
from timebell.client.jobs import SOON
from timebell.client.validation import uuid_of
from timebell.errors import InvalidInput, Refused
from timebell.ids import new_id
from timebell.model.job import Job
from timebell.model.operation import OperationKind
from timebell.store.jobs import repository
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=Guarded, tags=["jobs"])
Text = Annotated[str | None, Query(max_length=200)]
Statuses = Annotated[list[Annotated[str, Query(max_length=20)]] | None, Query(max_length=20)]


class JobPage(Shown):
    """Jobs, newest first."""

    items: list[JobOut]
    next_cursor: str | None


class Cancelled(Shown):
    """What a cancel achieved: prevented, in_flight or already_done."""

    outcome: str
    job: JobOut


class JobPreview(Shown):
    """What a job would be."""

    job: JobOut
    request: Annotated[RequestOut | None, Field(description="What its target will be sent; null for handlers.")]


class RescheduleIn(Body):
    run_at: Annotated[str | None, Field(max_length=64, description="Left out: now.")] = None
    timezone: Annotated[str | None, Field(max_length=64)] = None


class JobRetryIn(Body):
    payload: Annotated[Json, Field(description="Given, and be it null: what a new job has in its place.")] = None


class LiveFilter(Body):
    """Which jobs: all that is given must fit."""

    topic: Name | None = None
    owner_id: Name | None = None
    schedule_id: Name | None = None
    key: Name | None = None
    queue: Name | None = None


class CancelIn(Body):
    filter: LiveFilter
    dry_run: bool = False


def tenant_of(let: Let, named: object) -> str:
    """The tenant that a request names beside its key. Raises Refused (TENANT_NOT_YOURS)."""
    if named is None or named == let.tenant_id:
        return let.tenant_id
    if not let.caller.everywhere or not isinstance(named, str):
        raise Refused(
            f"This key is of another tenant than {named!r:.60}.", code="TENANT_NOT_YOURS",
            fix="Leave tenantId out: the key decides.",
        )  # fmt: skip
    return named


def one(job: Job, status: int = 200) -> Response:
    """A job as a response."""
    return answer(shown_job(job), status, {"Location": f"/api/v1/jobs/{job.id}"} if status == 201 else None)


@routes.post(
    "/jobs", status_code=201, response_model=JobOut, responses={200: {"model": JobOut}},
    **changes("job.create", Role.EDITOR),
)  # fmt: skip
async def create_job(body: JobIn, let: Let) -> Response:
    """Make a job. With onConflict `keep`, 200 and the job that is there."""
    given = body.model_dump(exclude_unset=True, by_alias=True)
    on_conflict = given.pop("onConflict", "error")
    spec = spec_of(given)
    spec.tenant_id = tenant_of(let, spec.tenant_id)
    may_ask(let, spec.unless)
    (made,) = await let.app.jobs.create([spec], on_conflict=on_conflict, connection=let.connection)
    let.plans = let.works = on_conflict == "replace"  # what made way may have let others go
    if isinstance(made, str):
        let.subject = made
        return one(await let.app.jobs.get(made, spec.tenant_id, let.connection))
    let.subject = made.id
    let.works = let.works or made.run_at <= let.now + SOON
    return one(shown(made), 201)


@routes.post("/jobs/preview", response_model=JobPreview, **reads())
async def preview_job(body: JobIn, let: Let) -> Response:
    """What a job with this body would be, and what its target would be sent; nothing is written."""
    given = body.model_dump(exclude_unset=True, by_alias=True)
    given.pop("onConflict", None)
    spec = spec_of(given)
    spec.tenant_id = tenant_of(let, spec.tenant_id)
    job = shown(let.app.jobs.draft(spec, new_id(let.now), let.now))
    request = let.app.request_of(
        job.target, job_id=job.id, tenant_id=job.tenant_id, topic=job.topic, payload=job.payload,
        metadata=job.metadata, timezone=job.timezone, scheduled_at=job.scheduled_at, fired_at=job.run_at,
        occurrence_key=job.occurrence_key, upcoming=[],
    )  # fmt: skip
    return answer({"job": shown_job(job), "request": request})


@routes.post(
    "/jobs/cancel", status_code=202, response_model=OperationOut, responses={200: {"model": Counted}},
    **changes("jobs.cancel", Role.OPERATOR),
)  # fmt: skip
async def cancel_jobs(body: CancelIn, let: Let) -> Response:
    """Cancel all live jobs that fit: done are those that will not start, skipped those that run already."""
    equal = {name: value for name, value in body.filter.given().items() if value is not None}
    if not equal:
        raise InvalidInput(
            "Nothing says which jobs to cancel.", code="FILTER_MISSING",
            fix="Give at least one of key, ownerId, topic, scheduleId, queue.",
        )  # fmt: skip
    if "schedule_id" in equal:
        equal["schedule_id"] = uuid_of(equal["schedule_id"]) or new_id(let.now)  # what is no id fits nothing
    count = await let.run(repository.live, {**equal, "tenant_id": let.tenant_id})
    if body.dry_run:
        return counted(let, count)
    return await begin(let, OperationKind.CANCEL, {"equal": equal}, count)


@routes.get("/jobs", response_model=JobPage, **reads())
async def list_jobs(
    let: Let, limit: Limit = 50, cursor: Cursor = None, status: Statuses = None, topic: Text = None,
    owner_id: Annotated[Text, Query(alias="ownerId")] = None,
    tenant_id: Annotated[Text, Query(alias="tenantId", description="For keys of the platform.")] = None,
    schedule_id: Annotated[Text, Query(alias="scheduleId")] = None, key: Text = None, queue: Text = None,
    min_attempts: Annotated[int | None, Query(alias="minAttempts", ge=0, le=2**31 - 1)] = None,
) -> Response:  # fmt: skip
    """A page of jobs, newest first; all that is given must fit, `status` one of those given."""
    equal = {
        "tenant_id": tenant_of(let, tenant_id), "topic": topic, "owner_id": owner_id, "schedule_id": schedule_id,
        "key": key, "queue": queue,
    }  # fmt: skip
    page = await let.app.jobs.list(equal, status, limit, cursor, min_attempts)
    return paged(page, [shown_job(job) for job in page])


@routes.get("/jobs/{id}", response_model=JobOut, **reads())
async def get_job(id: Id, let: Let) -> Response:
    """One job, live or finished."""
    return one(await find(let, id))


@routes.post("/jobs/{id}/cancel", response_model=Cancelled, **changes("job.cancel", Role.OPERATOR))
async def cancel_job(id: Id, let: Let) -> Response:
    """Keep it from starting; one that runs is not tried again. Asking again gives the first answer."""
    await _before(let, id)
    cancelled: repository.Cancelled = await let.app.cancel(id, tenant_id=let.tenant_id, connection=let.connection)
    return answer({"outcome": cancelled.outcome.value, "job": shown_job(cancelled.job)})


@routes.post(
    "/jobs/{id}/reschedule", status_code=201, response_model=JobOut, **changes("job.reschedule", Role.OPERATOR)
)
async def reschedule_job(id: Id, body: RescheduleIn, let: Let) -> Response:
    """A new job in its place, at another time; both name each other."""
    await _before(let, id)
    job = await let.app.reschedule(
        id, body.run_at, timezone=body.timezone, tenant_id=let.tenant_id, connection=let.connection
    )
    return one(job, 201)


@routes.post(
    "/jobs/{id}/retry", response_model=JobOut, responses={201: {"model": JobOut}},
    **changes("job.retry", Role.OPERATOR),
)  # fmt: skip
async def retry_job(id: Id, let: Let, body: JobRetryIn | None = None) -> Response:
    """Try a failed job again, under its id and with a fresh budget of tries. With another payload, for
    which one has to be an editor, it is a new job in its place (201): both name each other, and the failed one is a
    dead letter no longer."""
    given = {} if body is None else body.given()
    if "payload" in given:
        require(let.caller.role, Role.EDITOR)  # as for any job that one makes
    await _before(let, id)
    if "payload" not in given:
        return one(await let.app.jobs.replay(id, let.tenant_id, let.connection))
    made = await let.app.jobs.edited(id, given["payload"], let.tenant_id, let.connection)
    return one(await find(let, made.id), 201)


@routes.post("/jobs/{id}/resend", response_model=JobOut, **changes("job.resend", Role.OPERATOR))
async def resend_job(id: Id, let: Let) -> Response:
    """Send a completed or failed job to its target once more: same job, message id with `.rN` at its end."""
    await _before(let, id)
    return one(await let.app.jobs.resend(id, let.tenant_id, let.connection))


async def find(let: Let, id_: str) -> Job:
    """The caller's job. Raises NotFound."""
    known = uuid_of(id_)
    found: Job | None = None if known is None else await let.run(repository.find, let.tenant_id, known)
    if found is None:
        raise missing("job", id_)
    return found


async def _before(let: Let, id_: str) -> Job:
    """The job, kept for the audit record. Raises NotFound."""
    found = await find(let, id_)
    let.subject, let.before = found.id, shown_job(found)
    return found
