"""`/queues`: limits and pauses of queues, and the global pause.

All tenants share the queues, so only platform keys may change them. The job counts include only the caller's tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schedules import PauseIn
from timebell.api.schemas import Id, RequestBody, ResponseBody, json_response
from timebell.client.validation import check_queue_name
from timebell.model.limits import Limits
from timebell.store.jobs import queues as rows
from timebell.store.jobs.target_queues import is_visible
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["queues"])


QueueName = Annotated[str, Path(max_length=200, json_schema_extra={"maxLength": 100, "not": {"const": "*"}})]


class QueueOut(ResponseBody):
    """Queue with its limits. `pending` and `running` count jobs of the caller's tenant."""

    name: str
    concurrency: int | None
    rate: int | None
    per_seconds: float
    concurrency_per_group: int | None
    paused: bool
    pause_reason: str | None
    pending: int
    running: int


class QueuePage(ResponseBody):
    """All queues, sorted by name. `exact` is false if the job counts reached their maximum."""

    items: list[QueueOut]
    next_cursor: None = None
    exact: bool
    global_pause: GlobalPause


class GlobalPause(ResponseBody):
    """State of the global pause, which stops all firing."""

    paused: bool
    pause_reason: str | None


class QueueIn(RequestBody):
    """Limits of a queue across all nodes. null or omitted means unlimited."""

    concurrency: Annotated[int | None, Field(ge=1, le=10**6, description="Maximum number of concurrent jobs.")] = None
    rate: Annotated[int | None, Field(ge=1, le=10**6, description="Maximum number of starts in any perSeconds.")] = None
    per_seconds: Annotated[float, Field(ge=0.001, le=10**6, description="Window of rate in seconds.")] = 1.0
    concurrency_per_group: Annotated[
        int | None, Field(ge=1, le=10**6, description="Maximum number of concurrent jobs of one group.")
    ] = None


async def _load_queues(ctx: Context) -> tuple[dict[str, dict[str, Any]], bool]:
    queues, exact = await ctx.run(rows.list_queues, ctx.tenant_id)
    return {
        queue.name: {
            "name": queue.name, "concurrency": queue.limits.concurrency, "rate": queue.limits.rate,
            "perSeconds": queue.limits.per, "concurrencyPerGroup": queue.limits.concurrency_per_group,
            "paused": queue.paused, "pauseReason": queue.pause_reason, "pending": queue.pending,
            "running": queue.running,
        }
        for queue in queues
        if is_visible(queue.name, ctx.tenant_id)
    }, exact  # fmt: skip


def _render_global_pause(queues: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pause = queues.pop(rows.ALL_QUEUES, {"paused": False, "pauseReason": None})
    return {"paused": pause["paused"], "pauseReason": pause["pauseReason"]}


async def _prepare_change(ctx: Context, name: str, if_match: str | None) -> str:
    """Validate the name, lock the queue, check If-Match if it was sent, and record the queue as the audit subject.

    Raises InvalidInput (INVALID_QUEUE), RevisionStale.
    """
    ctx.subject = check_queue_name(name)
    await ctx.run(rows.lock, name)
    ctx.before = (await _load_queues(ctx))[0].get(name)
    if ctx.before is not None:
        check_match(if_match, etag(ctx.before), f"The queue {name}", name)
    return name


async def _queue_response(ctx: Context, name: str) -> Response:
    queue = (await _load_queues(ctx))[0][name]
    return json_response(queue, headers={"ETag": etag(queue)})


def etag(queue: Mapping[str, Any]) -> str:
    """Return the strong ETag of a rendered queue: its limits and its pause, not the numbers of its jobs."""
    return entity_tag(0, *(value for field, value in queue.items() if field not in ("pending", "running")))


@routes.get("/queues/{name}", response_model=QueueOut, **read_route())
async def get_queue(name: Id, ctx: Context) -> Response:
    """Get a queue."""
    if name not in (await _load_queues(ctx))[0]:
        raise not_found("queue", name)
    return await _queue_response(ctx, name)


@routes.get("/queues", response_model=QueuePage, **read_route())
async def list_queues(ctx: Context) -> Response:
    """List queues that have a limit, a pause, or live jobs of the caller's tenant."""
    queues, exact = await _load_queues(ctx)
    global_pause = _render_global_pause(queues)
    page = {"items": list(queues.values()), "nextCursor": None, "exact": exact, "globalPause": global_pause}
    return json_response(page)


@routes.put("/queues/{name}", response_model=QueueOut, **change_route("queue.put", Role.PLATFORM))
async def put_queue(name: QueueName, body: QueueIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Replace all limits of a queue."""
    limits = Limits.parse(body.concurrency, body.rate, body.per_seconds, body.concurrency_per_group)
    await ctx.run(rows.set_limits, await _prepare_change(ctx, name, if_match), limits)
    return await _queue_response(ctx, name)


@routes.post("/queues/{name}/pause", response_model=QueueOut, **change_route("queue.pause", Role.PLATFORM))
async def pause_queue(name: QueueName, ctx: Context, body: PauseIn | None = None, if_match: IfMatch = None) -> Response:
    """Pause a queue: no more of its jobs start. Running jobs continue."""
    await ctx.run(rows.pause, await _prepare_change(ctx, name, if_match), body.reason if body else None)
    return await _queue_response(ctx, name)


@routes.post("/queues/{name}/resume", response_model=QueueOut, **change_route("queue.resume", Role.PLATFORM))
async def resume_queue(name: QueueName, ctx: Context, if_match: IfMatch = None) -> Response:
    """Resume a paused queue."""
    await ctx.run(rows.resume, await _prepare_change(ctx, name, if_match))
    return await _queue_response(ctx, name)


@routes.post("/pause-all", response_model=GlobalPause, **change_route("global_pause.pause", Role.PLATFORM))
async def pause_all(ctx: Context, body: PauseIn | None = None) -> Response:
    """Stop all firing on every node: nothing is planned or started. Running jobs continue."""
    ctx.subject, ctx.before = rows.ALL_QUEUES, _render_global_pause((await _load_queues(ctx))[0])
    await ctx.run(rows.pause, rows.ALL_QUEUES, body.reason if body else None)
    return json_response(_render_global_pause((await _load_queues(ctx))[0]))


@routes.post("/resume-all", response_model=GlobalPause, **change_route("global_pause.resume", Role.PLATFORM))
async def resume_all(ctx: Context) -> Response:
    """Resume firing. Occurrences that became due in the meantime are handled as after an outage."""
    ctx.subject, ctx.before = rows.ALL_QUEUES, _render_global_pause((await _load_queues(ctx))[0])
    await ctx.run(rows.resume, rows.ALL_QUEUES)
    return json_response(_render_global_pause((await _load_queues(ctx))[0]))
