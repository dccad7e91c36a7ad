"""`/dead-letters`: jobs that failed for good: shown, grouped, replayed, discarded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.job_fields import JobOut, shown_job
from timebell.api.operations import Counted, OperationOut, Rate, begin, counted
from timebell.api.route import Guarded, Let, changes, reads
from timebell.api.schemas import Body, Instant, Limit, Name, Shown, answer, aware, paged, utc
from timebell.client.validation import uuid_of
from timebell.errors import InvalidInput
from timebell.model.job import Job
from timebell.model.operation import OperationKind
from timebell.store.jobs import dead_letters
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["dead letters"])
Text = Annotated[str | None, Query(max_length=200)]
COLUMNS = {"topic": "topic", "error": "error_code"}


class DeadLetter(JobOut):
    """A job that failed for good."""

    failed_at: Instant


class DeadLetterPage(Shown):
    """Dead letters, those that failed last first."""

    items: list[DeadLetter]
    next_cursor: str | None


class Group(Shown):
    """How many share a topic or an error code, and the one that failed last."""

    topic: str | None = None
    error: str | None = None
    count: int
    last_failed_at: Instant
    error_message: str | None
    latest: DeadLetter


class Groups(Shown):
    """The largest group first; at most `limit` are shown. `total` counts all dead letters that fit."""

    items: list[Group]
    total: int
    next_cursor: None = None


class Filter(Body):
    """Which dead letters: all that is given must fit; `{}` is all of them."""

    topic: Name | None = None
    schedule_id: Name | None = None
    error_code: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    from_: Annotated[Instant | None, Field(alias="from")] = None
    to: Instant | None = None


class ReplayIn(Body):
    filter: Filter
    rate: Rate = None
    dry_run: bool = False


class DiscardIn(Body):
    filter: Filter
    dry_run: bool = False


def which(
    topic: str | None, schedule_id: str | None, error_code: str | None, start: str | None, end: str | None
) -> dead_letters.Which:
    """Which dead letters are meant. Raises InvalidInput."""
    if schedule_id is not None and (schedule_id := uuid_of(schedule_id)) is None:
        raise InvalidInput("scheduleId is no id.", code="INVALID_FILTER", fix="Give the id of a schedule.")
    return dead_letters.Which(
        topic=topic, schedule_id=schedule_id, error_code=error_code,
        start=None if start is None else aware(start, "from"), end=None if end is None else aware(end, "to"),
    )  # fmt: skip


def shown(job: Job) -> dict[str, Any]:
    """A dead letter as it is answered."""
    return {**shown_job(job), "failedAt": utc(job.finished_at)}


@routes.get("/dead-letters", response_model=DeadLetterPage | Groups, **reads())
async def list_dead_letters(
    let: Let, limit: Limit = 50, cursor: Text = None, topic: Text = None,
    schedule_id: Annotated[Text, Query(alias="scheduleId")] = None,
    error_code: Annotated[Text, Query(alias="errorCode")] = None,
    from_: Annotated[Text, Query(alias="from", description="Failed then or later.")] = None,
    to: Annotated[Text, Query(description="Failed before.")] = None,
    group_by: Annotated[Literal["topic", "error"] | None, Query(alias="groupBy")] = None,
) -> Response:  # fmt: skip
    """A page of dead letters, those that failed last first; or how many there are by topic or by error code."""
    chosen = which(topic, schedule_id, error_code, from_, to)
    if group_by is None:
        page = await let.run(dead_letters.page, let.tenant_id, chosen, limit, cursor)
        return paged(page, [shown(job) for job in page])
    found = await let.run(dead_letters.groups, let.tenant_id, chosen, COLUMNS[group_by], limit)
    groups = [
        {group_by: one.value, "count": one.count, "lastFailedAt": utc(one.latest.finished_at),
         "errorMessage": one.latest.error, "latest": shown(one.latest)}
        for one in found
    ]  # fmt: skip
    total = await let.run(dead_letters.count, let.tenant_id, chosen)
    return answer({"items": groups, "total": total, "nextCursor": None})


@routes.post(
    "/dead-letters/replay", status_code=202, response_model=OperationOut, responses={200: {"model": Counted}},
    **changes("dead_letters.replay", Role.OPERATOR),
)  # fmt: skip
async def replay_dead_letters(body: ReplayIn, let: Let) -> Response:
    """Try them again, at most `rate` a second; with dryRun, say how many those are."""
    return await _operate(let, OperationKind.REPLAY, body.filter, body.dry_run, body.rate)


@routes.post(
    "/dead-letters/discard", status_code=202, response_model=OperationOut, responses={200: {"model": Counted}},
    **changes("dead_letters.discard", Role.OPERATOR),
)  # fmt: skip
async def discard_dead_letters(body: DiscardIn, let: Let) -> Response:
    """They are dead letters no longer; in the history they stay `failed`, with the reason `discarded`."""
    return await _operate(let, OperationKind.DISCARD, body.filter, body.dry_run, None)


async def _operate(let: Let, kind: OperationKind, given: Filter, dry_run: bool, rate: float | None) -> Response:
    chosen = which(given.topic, given.schedule_id, given.error_code, given.from_, given.to)
    count = await let.run(dead_letters.count, let.tenant_id, chosen)
    if dry_run:
        return counted(let, count)
    return await begin(let, kind, {"which": chosen.to_json(), "rate": rate}, count)
