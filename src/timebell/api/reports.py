"""`/jobs/{id}/complete`, `/fail` and `/heartbeat`: outside workers say what becomes of what was handed to them.

A webhook with `reportsBack` that answers 202 takes an attempt over; the token is that of its delivery.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.guard import Guarded, Let, changes, reads
from timebell.api.job_fields import JobOut, shown_job
from timebell.api.jobs import find
from timebell.api.shapes import Body, Id, Instant, Json, Shown, answer, utc
from timebell.engine.context import DEFAULT_RETRY, DEFAULT_SCHEDULE_TIMEOUT, DEFAULT_TIMEOUT
from timebell.engine.runner import mark
from timebell.errors import Conflict
from timebell.model import decide
from timebell.model.job import Attempt, Ending, Job, JobState
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry
from timebell.store.sql import reports
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
    job = await find(let, id)
    result = None if body.result is None else encode(body.result, "result")
    attempt = await _attempt(let, job, body.token, said=JobState.COMPLETED)
    if attempt is not None:
        await _write(let, attempt, Ending(attempt.id, attempt.number, JobState.COMPLETED, let.now, result=result))
    return answer(shown_job(await find(let, id)))


@routes.post("/jobs/{id}/fail", response_model=JobOut, **changes("job.fail", Role.OPERATOR))
async def fail_job(id: Id, body: FailIn, let: Let) -> Response:
    """The attempt failed; the job's retry policy decides what comes next."""
    job = await find(let, id)
    attempt = await _attempt(let, job, body.token, said=JobState.FAILED)
    if attempt is not None:
        given = decode(attempt.retry)
        ending = decide.after_failure(
            attempt.id, attempt.number, attempt.tries, DEFAULT_RETRY if given is None else Retry(**given), let.now,
            body.code, body.error, retryable=body.retryable, retry_after=body.retry_after_seconds,
        )  # fmt: skip
        await _write(let, attempt, ending)
    return answer(shown_job(await find(let, id)))


# It leaves no audit record: a worker sends one every few seconds.
@routes.post("/jobs/{id}/heartbeat", response_model=Heard, **reads(Role.OPERATOR))
async def beat_job(id: Id, body: HeartbeatIn, let: Let) -> Response:
    """It is still being worked on: its timeout starts anew."""
    job = await find(let, id)
    number = attempt_of(let.app.settings.secret_key, job.id, body.token)
    async with let.app.store.begin() as let.connection:
        held = await let.run(reports.held, let.tenant_id, job.id, number)
        if held is None:
            raise _over(job, number)
        attempt, cancel_asked = held
        usual = DEFAULT_TIMEOUT if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT
        until = let.now + timedelta(seconds=attempt.timeout or usual)
        await let.run(reports.beat, attempt, until)
    return answer({"until": utc(until), "cancelAsked": cancel_asked})


async def _attempt(let: Let, job: Job, token: str, said: JobState) -> Attempt | None:
    """The attempt of a token; None when the same was said of it before. Raises Refused, Conflict (ATTEMPT_OVER)."""
    number = attempt_of(let.app.settings.secret_key, job.id, token)
    let.subject, let.before = job.id, shown_job(job)
    held = await let.run(reports.held, let.tenant_id, job.id, number)
    if held is not None:
        return held[0]  # type: ignore[no-any-return]
    failed = bool(job.attempts) and job.attempts[-1]["attempt"] == number and job.attempts[-1]["error"] is not None
    if job.attempt == number and (failed if said is JobState.FAILED else job.state is said):
        return None
    raise _over(job, number)


async def _write(let: Let, attempt: Attempt, ending: Ending) -> None:
    await let.run(reports.write, mark(attempt, ending, let.caller.actor))
    if let.app.service is not None:
        let.app.service.node.counters.came_to(attempt.topic, ending)


def _over(job: Job, number: int) -> Conflict:
    return Conflict(
        f"Attempt {number} at job {job.id} is over: it was ended, or its time ran out.", code="ATTEMPT_OVER",
        existing=job.id, fix="Stop working on it; what it did may have to be undone.",
    )  # fmt: skip
