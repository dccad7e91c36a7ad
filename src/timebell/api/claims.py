"""`/claims`: remote workers claim due jobs, extend their leases, and report the outcomes.

A claim holds no capacity slot, because it waits most of its time. Nothing here is in the audit log: reports are part of
the history of each job. Every report can be repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, Self
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from timebell.api.admission import TooBusy, wait_for_disconnect
from timebell.api.authentication import Authenticator
from timebell.api.external_workers import CompleteIn, FailIn, HeartbeatIn
from timebell.api.route import ApiRoute, Context, RequestContext, read_route
from timebell.api.schemas import Instant, Json, Name, RequestBody, ResponseBody, format_utc, json_response
from timebell.client.job_fields import metadata_json
from timebell.client.validation import check_text, parse_uuid
from timebell.engine.remote_workers import ClaimedJob, Report
from timebell.engine.waiting_claims import ClaimRequest
from timebell.errors import Refused
from timebell.model.progress import Progress, check_progress
from timebell.model.routes import Routes, check_pattern
from timebell.store.cluster.workers import RemoteWorker, worker_id
from timebell.store.jobs.remote_claims import Renewal
from timebell.targets.base import Outcome, event_fields
from timebell.tenancy.roles import Role
from timebell.tenancy.tokens import attempt_token, verify_attempt_token

MAX_CLAIMED_JOBS = 500
MAX_WAIT_SECONDS = 30.0
DEFAULT_LEASE_SECONDS = 30.0
MAX_WAITING_CLAIMS_PER_TENANT = 500  # on one node

routes = APIRouter(route_class=ApiRoute, tags=["claims"])
_waiting: WeakKeyDictionary[Authenticator, Counter[str]] = WeakKeyDictionary()
Worker = Annotated[
    str, Field(min_length=1, max_length=200, description="Name of the process, unique among those of the tenant.")
]
Lease = Annotated[float, Field(ge=1, le=3600, description="Seconds without a heartbeat until a job is retried.")]


class ClaimIn(RequestBody):
    """Jobs that a worker wants: of topics, or of all topics in some queues."""

    worker: Worker
    topics: Annotated[
        list[Annotated[str, Field(max_length=200)]],
        Field(max_length=200, description="Topics, prefixes such as billing.*, or * (default if queues are given)."),
    ] = Field(default_factory=list)
    queues: Annotated[list[Name], Field(max_length=200, description="Claim from these queues only.")] = Field(
        default_factory=list
    )
    max: Annotated[int, Field(ge=1, le=MAX_CLAIMED_JOBS)] = 10
    wait_seconds: Annotated[
        float, Field(ge=0, le=MAX_WAIT_SECONDS, description="Wait up to this long for a due job.")
    ] = MAX_WAIT_SECONDS
    lease_seconds: Lease = DEFAULT_LEASE_SECONDS
    claim_id: Annotated[
        str | None,
        Field(pattern="^[!-~]{1,100}$", description="Unique id of the claim. Repeating the last one returns its jobs."),
    ] = None

    @model_validator(mode="after")
    def _check_is_restricted(self) -> Self:
        if not self.topics and not self.queues:
            raise ValueError("Specify topics, queues or both.")
        return self


class ClaimedJobOut(ResponseBody):
    """A started job: the fields of every delivery, and what the worker needs to report its outcome."""

    job_id: str
    tenant_id: str
    topic: str
    payload: Json
    metadata: dict[str, Any]
    timezone: str
    scheduled_at: Instant
    fired_at: Instant
    late_by: Annotated[float, Field(description="Seconds between scheduledAt and firedAt.")]
    schedule_id: str | None
    schedule_name: str | None
    occurrence_key: Annotated[str, Field(description="The same for every attempt: deduplicate effects by it.")]
    attempt: int
    upcoming: list[Instant]
    token: Annotated[str, Field(description="Proof of this attempt, for heartbeats and reports.")]
    lease_until: Annotated[Instant, Field(description="Send a heartbeat before; then the job is retried.")]
    timeout_seconds: Annotated[float, Field(description="Time for the whole attempt, from firedAt.")]


class ClaimOut(ResponseBody):
    """Claimed jobs; none if none was due in time. A `draining` worker finishes its jobs and stops."""

    jobs: list[ClaimedJobOut]
    draining: bool


class HeartbeatJobIn(HeartbeatIn):
    job_id: Name
    progress: Annotated[float | None, Field(ge=0, le=1)] = None
    progress_text: Annotated[str | None, Field(max_length=200)] = None


class HeartbeatsIn(RequestBody):
    worker: Worker
    lease_seconds: Lease = DEFAULT_LEASE_SECONDS
    jobs: Annotated[list[HeartbeatJobIn], Field(max_length=MAX_CLAIMED_JOBS)] = Field(default_factory=list)


class RenewedJobOut(ResponseBody):
    """A job after its heartbeat. With `code` the attempt has ended, and its worker should stop working on it."""

    job_id: str
    lease_until: Instant | None
    cancel_requested: Annotated[bool, Field(description="Stop the work and report any outcome.")]
    code: Literal["INVALID_TOKEN", "ATTEMPT_ENDED"] | None


class HeartbeatsOut(ResponseBody):
    jobs: list[RenewedJobOut]
    draining: bool


class CompletedJobIn(CompleteIn):
    job_id: Name


class FailedJobIn(FailIn):
    job_id: Name


class ReturnedJobIn(HeartbeatIn):
    job_id: Name
    delay_seconds: Annotated[float, Field(ge=0, le=86_400 * 365, description="The job is due again after it.")] = 0


class CompletedJobsIn(RequestBody):
    jobs: Annotated[list[CompletedJobIn], Field(min_length=1, max_length=MAX_CLAIMED_JOBS)]


class FailedJobsIn(RequestBody):
    jobs: Annotated[list[FailedJobIn], Field(min_length=1, max_length=MAX_CLAIMED_JOBS)]


class ReturnedJobsIn(RequestBody):
    jobs: Annotated[list[ReturnedJobIn], Field(min_length=1, max_length=MAX_CLAIMED_JOBS)]


class ReportedJobOut(ResponseBody):
    """A reported job. With `code` the report was refused, and the other reports of the request still count."""

    job_id: str
    code: Literal["INVALID_TOKEN", "JOB_NOT_FOUND", "ATTEMPT_ENDED"] | None


class ReportsOut(ResponseBody):
    jobs: list[ReportedJobOut]


@routes.post("/claims", response_model=ClaimOut, **read_route(Role.OPERATOR, waits=True))
async def claim_jobs(body: ClaimIn, ctx: Context, request: Request) -> Response:
    """Claim due jobs for a worker; without any, wait for the next one. Claiming a job starts an attempt of it."""
    attempt_token(ctx.app.settings.secret_key, "", 0)  # a node without a secret key cannot make tokens: refuse first
    remote = ctx.app.remote_workers
    claim = ClaimRequest(_worker(ctx, body), body.claim_id, body.max, body.lease_seconds, body.wait_seconds)
    with _count_waiting(ctx):
        answer = await remote.claim(claim, _disconnected(request))
    return json_response({"jobs": [_render_claimed(ctx, each) for each in answer.jobs], "draining": answer.draining})


@routes.post("/claims/heartbeat", response_model=HeartbeatsOut, **read_route(Role.OPERATOR))
async def renew_claims(body: HeartbeatsIn, ctx: Context) -> Response:
    """Extend the leases of claimed jobs and store their progress. The response tells which jobs to stop."""
    numbers = _verify(ctx, body.jobs)
    renewals = [
        Renewal(job_id, number, _progress(ctx, each))
        for each, (job_id, number) in zip(body.jobs, numbers, strict=True)
        if number is not None
    ]
    worker = worker_id(_tenant(ctx), body.worker)
    renewed, draining = await ctx.app.remote_workers.renew(worker, _tenant(ctx), body.lease_seconds, renewals)
    items = []
    for job_id, number in numbers:
        lease = None if number is None else renewed.get(job_id)
        code = "INVALID_TOKEN" if number is None else "ATTEMPT_ENDED" if lease is None else None
        items.append({
            "jobId": job_id, "leaseUntil": None if lease is None else format_utc(lease.until),
            "cancelRequested": lease is not None and lease.cancel_requested, "code": code,
        })  # fmt: skip
    return json_response({"jobs": items, "draining": draining})


@routes.post("/claims/complete", response_model=ReportsOut, **read_route(Role.OPERATOR))
async def complete_claims(body: CompletedJobsIn, ctx: Context) -> Response:
    """Report success of claimed jobs."""
    return await _report(ctx, body.jobs, lambda job: Outcome.ok(job.result))


@routes.post("/claims/fail", response_model=ReportsOut, **read_route(Role.OPERATOR))
async def fail_claims(body: FailedJobsIn, ctx: Context) -> Response:
    """Report failure of claimed jobs. Their retry policies determine whether they are retried."""
    return await _report(
        ctx, body.jobs, lambda job: Outcome.failed(job.code, job.error, job.retryable, job.retry_after_seconds)
    )


@routes.post("/claims/return", response_model=ReportsOut, **read_route(Role.OPERATOR))
async def return_claims(body: ReturnedJobsIn, ctx: Context) -> Response:
    """Return claimed jobs, such as those of a worker that stops. They are due again and have used no attempt."""
    return await _report(ctx, body.jobs, lambda job: None)


def _tenant(ctx: RequestContext) -> str | None:
    """Return the tenant whose jobs the caller may claim; None for a platform key that names none: all tenants."""
    return None if ctx.caller.is_platform and not ctx.caller.specifies_tenant else ctx.tenant_id


def _worker(ctx: RequestContext, body: ClaimIn) -> RemoteWorker:
    """Return the worker that sends a claim. Raises InvalidInput (INVALID_TOPIC, INVALID_NAME, INVALID_QUEUE)."""
    tenant_id, topics = _tenant(ctx), [check_pattern(topic) for topic in body.topics]
    claimed = Routes(
        frozenset(topic for topic in topics if not topic.endswith("*")),
        frozenset(topic[:-1] for topic in topics if topic.endswith(".*")),
        "*" in topics or not topics,
        tenant_id=tenant_id,
    )
    name = check_text(body.worker, "name")
    queues = tuple(sorted({check_text(queue, "queue") for queue in body.queues})) or None
    return RemoteWorker(worker_id(tenant_id, name), name, claimed, queues, body.max, ctx.now, ctx.now)


def _disconnected(request: Request) -> Callable[[], Coroutine[Any, Any, None]]:
    return partial(wait_for_disconnect, request.receive)


@contextmanager
def _count_waiting(ctx: RequestContext) -> Iterator[None]:
    """Count a waiting claim of the tenant while the block runs. Raises TooBusy."""
    waiting = _waiting.setdefault(ctx.authenticator, Counter())
    if waiting[ctx.tenant_id] >= MAX_WAITING_CLAIMS_PER_TENANT:
        raise TooBusy("Too many claims of this tenant wait on this node.", fix="Claim more jobs with fewer requests.")
    waiting[ctx.tenant_id] += 1
    try:
        yield
    finally:
        waiting[ctx.tenant_id] -= 1
        if not waiting[ctx.tenant_id]:
            del waiting[ctx.tenant_id]


def _render_claimed(ctx: RequestContext, job: ClaimedJob) -> dict[str, Any]:
    delivery = job.delivery
    return {
        **event_fields(delivery), "metadata": metadata_json(delivery.metadata), "tenantId": delivery.tenant_id,
        "token": attempt_token(ctx.app.settings.secret_key, delivery.job_id, delivery.attempt),
        "leaseUntil": format_utc(job.until), "timeoutSeconds": job.timeout,
    }  # fmt: skip


def _progress(ctx: RequestContext, job: HeartbeatJobIn) -> Progress | None:
    if job.progress is None and job.progress_text is None:
        return None
    return Progress(*check_progress(job.progress, job.progress_text), ctx.now)


def _verify(ctx: RequestContext, jobs: Sequence[HeartbeatIn | CompleteIn | FailIn]) -> list[tuple[str, int | None]]:
    """Return the id of each reported job, and the attempt number of its token; None if the token is invalid."""
    numbers: list[tuple[str, int | None]] = []
    for job in jobs:
        sent_id: str = job.job_id  # type: ignore[union-attr]
        job_id = parse_uuid(sent_id)
        try:
            number = None if job_id is None else verify_attempt_token(ctx.app.settings.secret_key, job_id, job.token)
        except Refused as error:
            if error.code != "INVALID_TOKEN":
                raise
            number = None
        numbers.append((job_id or sent_id, number))
    return numbers


async def _report(ctx: RequestContext, jobs: Sequence[Any], outcome: Callable[[Any], Outcome | None]) -> Response:
    """Write the outcomes of jobs. Each job has its own result, so that one refused report stops no other one."""
    numbers = _verify(ctx, jobs)
    reports = {
        job_id: Report(job_id, number, outcome(job), getattr(job, "delay_seconds", 0.0))
        for job, (job_id, number) in zip(jobs, numbers, strict=True)
        if number is not None
    }
    codes = await ctx.app.remote_workers.report(_tenant(ctx), list(reports.values()))
    refusals = dict(zip(reports, codes, strict=True))
    return json_response({
        "jobs": [
            {"jobId": job_id, "code": "INVALID_TOKEN" if number is None else refusals[job_id]}
            for job_id, number in numbers
        ]
    })  # fmt: skip
