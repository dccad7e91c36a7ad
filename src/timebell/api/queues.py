"""`/queues`: limits and pauses; and the switch that stops all firing.

Queues are shared by all tenants, so only keys of the platform change them; everyone sees the jobs of one's own tenant.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, reads
from timebell.api.schedules import PauseIn
from timebell.api.schemas import Body, Id, Shown, answer
from timebell.client.validation import queue_name
from timebell.model.limits import Limits
from timebell.store.jobs import queues as rows
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["queues"])


class QueueOut(Shown):
    """A queue; `pending` and `running` are the caller's jobs there."""

    name: str
    concurrency: int | None
    rate: int | None
    per_seconds: float
    concurrency_per_group: int | None
    paused: bool
    pause_reason: str | None
    pending: int
    running: int


class Queues(Shown):
    """Every queue by name. `exact` is false where there are more jobs than were counted."""

    items: list[QueueOut]
    next_cursor: None = None
    exact: bool
    everything: Everything


class Everything(Shown):
    """Whether all firing is stopped, and why."""

    paused: bool
    pause_reason: str | None


class QueueIn(Body):
    """The limits of a queue over all nodes; null or left out: no limit."""

    concurrency: Annotated[int | None, Field(ge=1, le=10**6, description="So many jobs at once.")] = None
    rate: Annotated[int | None, Field(ge=1, le=10**6, description="So many starts in any perSeconds.")] = None
    per_seconds: Annotated[float, Field(ge=0.001, le=10**6)] = 1.0
    concurrency_per_group: Annotated[int | None, Field(ge=1, le=10**6, description="At once of each group.")] = None


async def _all(let: Let) -> tuple[dict[str, dict[str, Any]], bool]:
    found, exact = await let.run(rows.listed, let.tenant_id)
    return {
        one.name: {
            "name": one.name, "concurrency": one.limits.concurrency, "rate": one.limits.rate,
            "perSeconds": one.limits.per, "concurrencyPerGroup": one.limits.concurrency_per_group,
            "paused": one.paused, "pauseReason": one.pause_reason, "pending": one.pending, "running": one.running,
        }
        for one in found
    }, exact  # fmt: skip


def _everything(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    switch = found.pop(rows.EVERYTHING, {"paused": False, "pauseReason": None})
    return {"paused": switch["paused"], "pauseReason": switch["pauseReason"]}


async def _before(let: Let, name: str) -> str:
    """The name, checked; and what it is now, for the audit record. Raises InvalidInput (INVALID_QUEUE)."""
    let.subject, let.before = queue_name(name), (await _all(let))[0].get(name)
    return name


async def _one(let: Let, name: str) -> Response:
    return answer((await _all(let))[0][name])


@routes.get("/queues", response_model=Queues, **reads())
async def list_queues(let: Let) -> Response:
    """Queues that have a limit, a pause, or live jobs of the caller."""
    found, exact = await _all(let)
    everything = _everything(found)
    return answer({"items": list(found.values()), "nextCursor": None, "exact": exact, "everything": everything})


@routes.put("/queues/{name}", response_model=QueueOut, **changes("queue.put", Role.PLATFORM))
async def put_queue(name: Id, body: QueueIn, let: Let) -> Response:
    """Set what it allows, all of it."""
    limits = Limits.read(body.concurrency, body.rate, body.per_seconds, body.concurrency_per_group)
    await let.run(rows.put, await _before(let, name), limits)
    return await _one(let, name)


@routes.post("/queues/{name}/pause", response_model=QueueOut, **changes("queue.pause", Role.PLATFORM))
async def pause_queue(name: Id, let: Let, body: PauseIn | None = None) -> Response:
    """Start no more of its jobs; those that run go on."""
    await let.run(rows.pause, await _before(let, name), body.reason if body else None)
    return await _one(let, name)


@routes.post("/queues/{name}/resume", response_model=QueueOut, **changes("queue.resume", Role.PLATFORM))
async def resume_queue(name: Id, let: Let) -> Response:
    """Start its jobs again."""
    await let.run(rows.resume, await _before(let, name))
    return await _one(let, name)


@routes.post("/pause-all", response_model=Everything, **changes("everything.pause", Role.PLATFORM))
async def pause_all(let: Let, body: PauseIn | None = None) -> Response:
    """Stop all firing on every node: nothing is planned or started; what runs goes on."""
    let.subject, let.before = rows.EVERYTHING, _everything((await _all(let))[0])
    await let.run(rows.pause, rows.EVERYTHING, body.reason if body else None)
    return answer(_everything((await _all(let))[0]))


@routes.post("/resume-all", response_model=Everything, **changes("everything.resume", Role.PLATFORM))
async def resume_all(let: Let) -> Response:
    """Fire again. What was due meanwhile is treated as after an outage."""
    let.subject, let.before = rows.EVERYTHING, _everything((await _all(let))[0])
    await let.run(rows.resume, rows.EVERYTHING)
    return answer(_everything((await _all(let))[0]))
