"""`/nodes`: running engine processes and their leader."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import Cursor, Id, Instant, Limit, ResponseBody, format_utc, json_response
from timebell.client.validation import parse_uuid
from timebell.store.cluster import nodes as rows
from timebell.store.cluster import workers as worker_rows
from timebell.store.cluster.nodes import Lease, Node
from timebell.store.cluster.workers import RemoteWorker
from timebell.store.schedules import deployments
from timebell.tenancy.roles import Role

MAX_LEADERSHIPS = 20
routes = APIRouter(route_class=ApiRoute, tags=["nodes"])


class HandledRoutes(ResponseBody):
    """Topics and targets that a node handles."""

    exact: list[str]
    prefixes: list[str]
    all_topics: bool


class NodeOut(ResponseBody):
    """Running engine process."""

    id: str
    name: str
    version: str
    tzdata: str
    routes: Annotated[
        HandledRoutes | None, Field(description="Handled topics and targets; null unless the key is a platform key.")
    ]
    deployment: Annotated[
        str | None,
        Field(
            description="Release of the program that it runs; null if that defines nothing, or without a platform key."
        ),
    ]
    defines: Annotated[
        list[str] | None,
        Field(
            description="Names of the schedules that this release defines in code, the first 500 of all releases;"
            " null unless the key is a platform key."
        ),
    ]
    started_at: Instant
    last_heartbeat_at: Instant
    alive: Annotated[bool, Field(description="Whether its last heartbeat is within the lease time.")]
    leader: bool
    draining: bool
    slots: Annotated[int, Field(description="Maximum number of concurrent jobs.")]
    running: Annotated[int, Field(description="Running jobs at its last heartbeat.")]
    clock_ahead_ms: Annotated[
        int,
        Field(description="Milliseconds by which its clock is ahead of the database clock, which is authoritative."),
    ]


class Leadership(ResponseBody):
    """Period of leadership. If the leader did not resign, `endedAt` is the time of its last renewal."""

    fence: int
    node_id: str
    node: str
    acquired_at: Instant
    ended_at: Instant | None
    resigned: bool


class Leader(ResponseBody):
    """Current leader. `fence` increases with every change of leadership."""

    node_id: str
    since: Instant | None
    fence: int


class RemoteWorkerOut(ResponseBody):
    """Remote worker that claimed jobs within the last minute. `tenantId` is null if it claims jobs of all tenants."""

    id: str
    name: str
    tenant_id: str | None
    topics: Annotated[list[str], Field(description="Topics, prefixes such as billing.*, or *.")]
    queues: Annotated[list[str] | None, Field(description="Queues from which it claims; null for all.")]
    running: int
    started_at: Instant
    last_seen_at: Instant
    draining: bool


class NodePage(ResponseBody):
    """Page of nodes, oldest first, with the remote workers, the leader and recent leaderships."""

    items: list[NodeOut]
    workers: Annotated[list[RemoteWorkerOut], Field(description="Of the tenant; all for a platform key.")]
    next_cursor: str | None
    leader: Leader | None
    leader_changes: int
    leaderships: Annotated[list[Leadership], Field(description=f"Last {MAX_LEADERSHIPS} leaderships, newest first.")]


class NodeDraining(ResponseBody):
    """Node whose drain was requested."""

    id: str
    draining: bool


@routes.get("/nodes", response_model=NodePage, **read_route())
async def list_nodes(ctx: Context, limit: Limit = 500, cursor: Cursor = None) -> Response:
    """List running nodes, the leader and remote workers."""
    lease: Lease = await ctx.run(rows.get_lease)
    nodes: list[Node] = sorted(await ctx.run(rows.list_nodes), key=lambda node: node.id)
    rest = [node for node in nodes if cursor is None or node.id > cursor]
    own_tenant = None if ctx.caller.is_platform else ctx.tenant_id
    workers: list[RemoteWorker] = await ctx.run(worker_rows.list_workers, own_tenant)
    running: dict[str, int] = await ctx.run(worker_rows.count_running) if workers else {}
    defined = await ctx.run(deployments.list_definitions) if ctx.caller.is_platform else None
    leader = (
        {"nodeId": lease.holder, "since": format_utc(lease.acquired_at), "fence": lease.fence} if lease.holder else None
    )
    return json_response({
        "items": [_render_node(ctx, node, lease, defined) for node in rest[:limit]],
        "workers": [_render_worker(worker, running) for worker in workers],
        "nextCursor": rest[limit - 1].id if len(rest) > limit else None, "leader": leader,
        "leaderChanges": lease.fence,
        "leaderships": [
            {"fence": term.fence, "nodeId": term.node_id, "node": term.node, "acquiredAt": format_utc(term.acquired_at),
             "endedAt": format_utc(term.ended_at), "resigned": term.resigned}
            for term in await ctx.run(rows.list_leaderships, MAX_LEADERSHIPS)
        ],
    })  # fmt: skip


@routes.post("/nodes/{id}/drain", response_model=NodeDraining, **change_route("node.drain", Role.PLATFORM))
async def drain_node(id: Id, ctx: Context) -> Response:
    """Drain a node: within a heartbeat it stops claiming; it exits when its running jobs have finished.

    A remote worker is drained in the same way.
    """
    valid_id = ctx.subject = parse_uuid(id)
    if valid_id is None or not (
        await ctx.run(rows.request_drain, valid_id) or await ctx.run(worker_rows.request_drain, valid_id)
    ):
        raise not_found("node", id)
    return json_response({"id": valid_id, "draining": True})


def _render_node(ctx: Context, node: Node, lease: Lease, defined: dict[str, list[str]] | None) -> dict[str, Any]:
    own: dict[str, Any] = {"routes": None, "deployment": None, "defines": None}
    if defined is not None:
        names = defined.get(node.deployment or "", [])
        own = {"routes": node.routes.to_json(), "deployment": node.deployment, "defines": names}
    return {
        "id": node.id, "name": node.name, "version": node.version, "tzdata": node.tzdata, **own,
        "startedAt": format_utc(node.started_at), "lastHeartbeatAt": format_utc(node.seen_at),
        "alive": ctx.now - node.seen_at <= timedelta(seconds=ctx.app.settings.scheduler_lease),
        "leader": node.id == lease.holder, "draining": node.draining, "slots": node.slots, "running": node.running,
        "clockAheadMs": node.clock_ahead,
    }  # fmt: skip


def _render_worker(worker: RemoteWorker, running: dict[str, int]) -> dict[str, Any]:
    handled = worker.routes
    topics = ["*"] if handled.all_topics else sorted([*handled.exact, *(f"{prefix}*" for prefix in handled.prefixes)])
    return {
        "id": worker.id, "name": worker.name, "tenantId": worker.tenant_id, "topics": topics, "queues": worker.queues,
        "running": running.get(worker.id, 0), "startedAt": format_utc(worker.started_at),
        "lastSeenAt": format_utc(worker.seen_at), "draining": worker.draining,
    }  # fmt: skip
