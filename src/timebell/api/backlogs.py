"""`/backlogs`: what an outage left behind above `catchUp.holdAbove`, or a restore; it waits until somebody decides."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, reads
from timebell.api.schemas import Body, Instant, Shown, answer, utc
from timebell.client.validation import uuid_of
from timebell.errors import NotFound
from timebell.store.jobs import backlogs as rows
from timebell.store.schedules import actions
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["backlogs"])


class BacklogOut(Shown):
    """So many occurrences of a schedule wait, from the first to the last; jobs of no schedule have a row together."""

    schedule_id: str | None
    schedule: str | None
    topic: str
    jobs: int
    first_at: Instant
    last_at: Instant


class Backlogs(Shown):
    """The largest first; up to 1,000 schedules."""

    items: list[BacklogOut]
    next_cursor: None = None


class RecoverIn(Body):
    """Of which schedule; null or left out: of all of them."""

    schedule_id: Annotated[str | None, Field(max_length=64)] = None


class Recovered(Shown):
    """How many jobs that were."""

    jobs: int


@routes.get("/backlogs", response_model=Backlogs, **reads())
async def list_backlogs(let: Let) -> Response:
    """What waits until it is released or discarded, by schedule."""
    found: list[rows.Backlog] = await let.run(rows.waiting, let.tenant_id)
    return answer({"items": [_shown(one) for one in found], "nextCursor": None})


@routes.post("/backlogs/release", response_model=Recovered, **changes("backlogs.release", Role.OPERATOR))
async def release_backlogs(let: Let, body: RecoverIn | None = None) -> Response:
    """Let it run: one after another, unless the overlap of the schedule is `allow`."""
    return await _recover(let, body, discard=False)


@routes.post("/backlogs/discard", response_model=Recovered, **changes("backlogs.discard", Role.OPERATOR))
async def discard_backlogs(let: Let, body: RecoverIn | None = None) -> Response:
    """Let it rest: each job ends as `cancelled`, with the reason `discarded`."""
    return await _recover(let, body, discard=True)


async def _recover(let: Let, body: RecoverIn | None, *, discard: bool) -> Response:
    given = None if body is None else body.schedule_id
    id_ = None if given is None else uuid_of(given)
    waiting: list[rows.Backlog] = await let.run(rows.waiting, let.tenant_id)
    if given is not None and (id_ is None or not await let.run(actions.history, let.tenant_id, id_)):
        raise NotFound(f"There is no schedule {given!s:.60}.", code="SCHEDULE_NOT_FOUND")
    let.subject = id_ or "*"
    let.before = [_shown(one) for one in waiting if id_ in (None, one.schedule_id)]
    return answer({"jobs": await let.run(actions.recover, let.tenant_id, id_, discard, let.now)})


def _shown(one: rows.Backlog) -> dict[str, Any]:
    return {
        "scheduleId": one.schedule_id, "schedule": one.schedule, "topic": one.topic, "jobs": one.jobs,
        "firstAt": utc(one.first), "lastAt": utc(one.last),
    }  # fmt: skip
