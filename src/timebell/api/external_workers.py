"""`/jobs/{id}/complete`, `/fail` and `/heartbeat`: outside workers say what becomes of what was handed to them.

A webhook with `reportsBack` that answers 202 takes an attempt over; the token is that of its delivery.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.job_fields import JobOut, shown_job
from timebell.api.jobs import find
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Id, Instant, Json, Shown, answer, utc
from timebell.client.validation import uuid_of
from timebell.engine.node import DEFAULT_RETRY, DEFAULT_SCHEDULE_TIMEOUT, DEFAULT_TIMEOUT
from timebell.engine.runner import mark
from timebell.errors import Conflict, Refused
from timebell.model import decide
from timebell.model.job import Attempt, Ending, Job, JobState
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry
from timebell.store.jobs import external_reports
from timebell.tenancy.roles import Role
from timebell.tenancy.tokens import attempt_of

routes = APIRouter(route_class=Guarded, tags=["jobs"])
Token = Annotated[str, Field(min_length=1, max_length=100, description="timebell-token of the delivery.")]


class CompleteIn(Body):
    token: Token
    result: Json = None


class FailIn(Body):
    token: Token
    error: Annotated[str, Field(min_length=1, max_length=4000)]
    code: Annotated[str, Field(pattern="^[A-Z][A-Z0-9_]{0,99}$")] = "REPORTED"
    retryable: bool = True
    retry_after_seconds: Annotated[float | None, Field(ge=0, le=86_400)] = None


class HeartbeatIn(Body):
    token: Token


class Heard(Shown):
    """Until when the attempt may go on, and whether it would better stop: its cancel was asked."""

    until: Instant
    cancel_asked: bool


@routes.post("/jobs/{id}/complete", response_model=JobOut, **changes("job.complete", Role.OPERATOR))
async def complete_job(id: Id, body: CompleteIn, let: Let) -> Response:
    """It is done. Once more with the same token changes nothing."""
    job, attempt = await _attempt(let, id, body.token, said=JobState.COMPLETED)
    if attempt is not None:
        result = None if body.result is None else encode(body.result, "result")
        ending = Ending(attempt.id, attempt.number, JobState.COMPLETED, let.now, result=result)
        job = await _write(let, attempt, ending)
    return answer(shown_job(job))


@routes.post("/jobs/{id}/fail", response_model=JobOut, **changes("job.fail", Role.OPERATOR))
async def fail_job(id: Id, body: FailIn, let: Let) -> Response:
    """The attempt failed; the job's retry policy decides what comes next."""
    job, attempt = await _attempt(let, id, body.token, said=JobState.FAILED)
    if attempt is not None:
        given = decode(attempt.retry)
        ending = decide.after_failure(
            attempt.id, attempt.number, attempt.tries, DEFAULT_RETRY if given is None else Retry(**given), let.now,
            body.code, body.error, retryable=body.retryable, retry_after=body.retry_after_seconds,
        )  # fmt: skip
        job = await _write(let, attempt, ending)
    return answer(shown_job(job))


# It leaves no audit record: a worker sends one every few seconds.
@routes.post("/jobs/{id}/heartbeat", response_model=Heard, **reads(Role.OPERATOR))
async def beat_job(id: Id, body: HeartbeatIn, let: Let) -> Response:
    """It is still being worked on: its timeout starts anew."""
    async with let.app.store.begin() as let.connection:
        held, number = await _held(let, id, body.token)
        if held.attempt is None:
            raise _over(held.job, number)
        usual = DEFAULT_TIMEOUT if held.attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT
        until = let.now + timedelta(seconds=held.attempt.timeout or usual)
        await let.run(external_reports.beat, held.attempt, until)
    return answer({"until": utc(until), "cancelAsked": held.cancel_asked})


async def _held(let: Let, id_: str, token: str) -> tuple[external_reports.Held, int]:
    """The job that a token is of, and its number. Raises NotFound, Refused (TOKEN_INVALID)."""
    known = uuid_of(id_)
    if known is None:
        raise missing("job", id_)
    try:
        number = attempt_of(let.app.settings.secret_key, known, token)
    except Refused:
        await find(let, id_)  # one that is not there is missed first
        raise
    held: external_reports.Held | None = await let.run(external_reports.held, let.tenant_id, known, number)
    if held is None:
        raise missing("job", id_)
    return held, number


async def _attempt(let: Let, id_: str, token: str, said: JobState) -> tuple[Job, Attempt | None]:
    """The job and the attempt of a token; None when the same was said of it before. Raises NotFound, Refused, Conflict
    (ATTEMPT_OVER)."""
    (job, attempt, _), number = await _held(let, id_, token)
    let.subject, let.before = job.id, shown_job(job)
    let.plans = let.works = False
    if attempt is None:
        failed = bool(job.attempts) and job.attempts[-1]["attempt"] == number and job.attempts[-1]["error"] is not None
        if job.attempt != number or not (failed if said is JobState.FAILED else job.state is said):
            raise _over(job, number)
    return job, attempt


async def _write(let: Let, attempt: Attempt, ending: Ending) -> Job:
    """The job as it is then."""
    service = let.app.service
    written: external_reports.Written = await let.run(
        external_reports.write, let.tenant_id, mark(attempt, ending, let.caller.actor)
    )
    # As the completer: where tenants or queues have limits there may be room now.
    let.works = written.frees or (service is not None and bool(service.node.limited))
    let.plans = written.put_off
    if service is not None:
        service.node.counters.came_to(attempt.topic, ending)
    return written.job


def _over(job: Job, number: int) -> Conflict:
    return Conflict(
        f"Attempt {number} at job {job.id} is over: it was ended, or its time ran out.", code="ATTEMPT_OVER",
        existing=job.id, fix="Stop working on it; what it did may have to be undone.",
    )  # fmt: skip
