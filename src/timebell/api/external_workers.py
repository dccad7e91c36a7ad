"""`/jobs/{id}/complete`, `/fail` and `/heartbeat`: reports of external workers.

A webhook with `reportsBack` that responds with 202 takes over the attempt and reports the result later, with the token
of its delivery.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.job_fields import JobOut, render_job
from timebell.api.jobs import find_job
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import Id, Instant, Json, RequestBody, ResponseBody, format_utc, json_response
from timebell.client.validation import parse_uuid
from timebell.engine.node import DEFAULT_RETRY, DEFAULT_SCHEDULE_TIMEOUT_SECONDS, DEFAULT_TIMEOUT_SECONDS
from timebell.errors import Conflict, Refused
from timebell.model import decide
from timebell.model.attempts import finalize_completion
from timebell.model.job import Attempt, Completion, Job, JobState
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry
from timebell.store.jobs import external_reports
from timebell.tenancy.roles import Role
from timebell.tenancy.tokens import verify_attempt_token

routes = APIRouter(route_class=ApiRoute, tags=["jobs"])
Token = Annotated[
    str, Field(min_length=1, max_length=100, description="Value of the timebell-token header of the delivery.")
]


class CompleteIn(RequestBody):
    token: Token
    result: Json = None


class FailIn(RequestBody):
    token: Token
    error: Annotated[str, Field(min_length=1, max_length=4000)]
    code: Annotated[str, Field(pattern="^[A-Z][A-Z0-9_]{0,99}$")] = "REPORTED"
    retryable: bool = True
    retry_after_seconds: Annotated[float | None, Field(ge=0, le=86_400)] = None


class HeartbeatIn(RequestBody):
    token: Token


class HeartbeatOut(ResponseBody):
    """Deadline of the attempt, and whether its cancellation was requested, so the worker should stop."""

    until: Instant
    cancel_requested: bool


@routes.post("/jobs/{id}/complete", response_model=JobOut, **change_route("job.complete", Role.OPERATOR))
async def complete_job(id: Id, body: CompleteIn, ctx: Context) -> Response:
    """Report success. Idempotent: repeating the call with the same token has no effect."""
    job, attempt = await _find_attempt(ctx, id, body.token, outcome=JobState.COMPLETED)
    if attempt is not None:
        result = None if body.result is None else encode(body.result, "result")
        completion = Completion(attempt.id, attempt.number, JobState.COMPLETED, ctx.now, result=result)
        job = await _write_completion(ctx, attempt, completion)
    return json_response(render_job(job))


@routes.post("/jobs/{id}/fail", response_model=JobOut, **change_route("job.fail", Role.OPERATOR))
async def fail_job(id: Id, body: FailIn, ctx: Context) -> Response:
    """Report failure. The retry policy of the job determines whether it is retried."""
    job, attempt = await _find_attempt(ctx, id, body.token, outcome=JobState.FAILED)
    if attempt is not None:
        retry = decode(attempt.retry)
        completion = decide.complete_after_failure(
            attempt.id, attempt.number, attempt.attempts_used, DEFAULT_RETRY if retry is None else Retry(**retry),
            ctx.now,
            body.code, body.error, retryable=body.retryable, retry_after=body.retry_after_seconds,
        )  # fmt: skip
        job = await _write_completion(ctx, attempt, completion)
    return json_response(render_job(job))


# A read route, because a change would write an audit record every few seconds.
@routes.post("/jobs/{id}/heartbeat", response_model=HeartbeatOut, **read_route(Role.OPERATOR))
async def record_job_heartbeat(id: Id, body: HeartbeatIn, ctx: Context) -> Response:
    """Extend the deadline of an attempt: its timeout starts again."""
    async with ctx.app.store.begin() as ctx.connection:
        locked, number = await _find_dispatched(ctx, id, body.token)
        attempt = locked.attempt
        if attempt is None:
            raise _attempt_over(locked.job, number)
        default = DEFAULT_TIMEOUT_SECONDS if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT_SECONDS
        until = ctx.now + timedelta(seconds=attempt.timeout or default)
        await ctx.run(external_reports.extend_deadline, attempt, until)
    return json_response({"until": format_utc(until), "cancelRequested": locked.cancel_requested})


async def _find_dispatched(ctx: Context, id_: str, token: str) -> tuple[external_reports.LockedJob, int]:
    """Lock the job of a token; return it and the attempt number. Raises NotFound, Refused (INVALID_TOKEN)."""
    valid_id = parse_uuid(id_)
    if valid_id is None:
        raise not_found("job", id_)
    try:
        number = verify_attempt_token(ctx.app.settings.secret_key, valid_id, token)
    except Refused:
        await find_job(ctx, id_)  # a missing job takes precedence: raises NotFound
        raise
    locked: external_reports.LockedJob | None = await ctx.run(
        external_reports.lock_job, ctx.tenant_id, valid_id, number
    )
    if locked is None:
        raise not_found("job", id_)
    return locked, number


async def _find_attempt(ctx: Context, id_: str, token: str, outcome: JobState) -> tuple[Job, Attempt | None]:
    """Return the job and the attempt of a token; the attempt is None if the same outcome was already reported.

    Raises NotFound, Refused (INVALID_TOKEN), Conflict (ATTEMPT_ENDED).
    """
    (job, attempt, _), number = await _find_dispatched(ctx, id_, token)
    ctx.subject, ctx.before = job.id, render_job(job)
    if attempt is None:
        failed = bool(job.attempts) and job.attempts[-1]["attempt"] == number and job.attempts[-1]["error"] is not None
        if job.attempt != number or not (failed if outcome is JobState.FAILED else job.state is outcome):
            raise _attempt_over(job, number)
    return job, attempt


async def _write_completion(ctx: Context, attempt: Attempt, completion: Completion) -> Job:
    """Apply the completion and return the updated job."""
    service = ctx.app.service
    job: Job = await ctx.run(
        external_reports.apply_report, ctx.tenant_id, finalize_completion(attempt, completion, ctx.caller.actor)
    )
    if service is not None:
        service.node.counters.record_completion(attempt.topic, completion)
    return job


def _attempt_over(job: Job, number: int) -> Conflict:
    return Conflict(
        f"Attempt {number} of job {job.id} has already ended or timed out.", code="ATTEMPT_ENDED",
        existing=job.id, fix="Stop working on it. Its effects may have to be undone.",
    )  # fmt: skip
