"""`/nodes`: the processes that run, and which one leads."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Cursor, Id, Instant, Limit, Shown, answer, utc
from timebell.client.validation import uuid_of
from timebell.store.cluster import nodes as rows
from timebell.store.cluster.nodes import Lease, Node
from timebell.tenancy.roles import Role

LED = 20
routes = APIRouter(route_class=Guarded, tags=["nodes"])


class Heard(Shown):
    """What a node takes jobs of."""

    exact: list[str]
    prefixes: list[str]
    everything: bool


class NodeOut(Shown):
    """A process that runs."""

    id: str
    name: str
    version: str
    tzdata: str
    routes: Annotated[Heard | None, Field(description="Topics and targets; shown to keys of the platform.")]
    started_at: Instant
    seen_at: Instant
    alive: Annotated[bool, Field(description="Whether it was seen within a lease.")]
    leader: bool
    draining: bool
    slots: Annotated[int, Field(description="So many jobs may run there at once.")]
    running: Annotated[int, Field(description="So many did at its last heartbeat.")]
    clock_ahead_ms: Annotated[int, Field(description="How far its clock is ahead of the database's, which counts.")]


class Leadership(Shown):
    """Who led, from when to when. Of one that did not say that it leaves, the end is when it was last heard of."""

    fence: int
    node_id: str
    node: str
    taken_at: Instant
    ended_at: Instant | None
    resigned: bool


class Leader(Shown):
    """Who leads, since when. `fence` rises with every change of hands, so it counts them."""

    node_id: str
    since: Instant | None
    fence: int


class NodePage(Shown):
    """Every node, oldest first; there is one page."""

    items: list[NodeOut]
    next_cursor: str | None
    leader: Leader | None
    leader_changes: int
    leaderships: Annotated[list[Leadership], Field(description=f"The last {LED}, newest first.")]


class Draining(Shown):
    """The node that was asked."""

    id: str
    draining: bool


@routes.get("/nodes", response_model=NodePage, **reads())
async def list_nodes(let: Let, limit: Limit = 500, cursor: Cursor = None) -> Response:
    """The processes that run, and which one leads."""
    lease: Lease = await let.run(rows.lease)
    found: list[Node] = sorted(await let.run(rows.listed), key=lambda node: node.id)
    rest = [node for node in found if cursor is None or node.id > cursor]
    leader = {"nodeId": lease.holder, "since": utc(lease.acquired_at), "fence": lease.fence} if lease.holder else None
    return answer({
        "items": [_shown(let, node, lease) for node in rest[:limit]],
        "nextCursor": rest[limit - 1].id if len(rest) > limit else None, "leader": leader,
        "leaderChanges": lease.fence,
        "leaderships": [
            {"fence": one.fence, "nodeId": one.node_id, "node": one.node, "takenAt": utc(one.taken_at),
             "endedAt": utc(one.ended_at), "resigned": one.resigned}
            for one in await let.run(rows.led, LED)
        ],
    })  # fmt: skip


@routes.post("/nodes/{id}/drain", response_model=Draining, **changes("node.drain", Role.PLATFORM))
async def drain_node(id: Id, let: Let) -> Response:
    """Ask a node to finish what runs there and leave; it claims nothing more within a heartbeat."""
    known = let.subject = uuid_of(id)
    if known is None or not await let.run(rows.drain, known):
        raise missing("node", id)
    return answer({"id": known, "draining": True})


def _shown(let: Let, node: Node, lease: Lease) -> dict[str, Any]:
    heard = node.routes.params() if let.caller.everywhere else None
    if heard is not None:
        heard = {**heard, "exact": sorted(heard["exact"]), "prefixes": sorted(heard["prefixes"])}
    return {
        "id": node.id, "name": node.name, "version": node.version, "tzdata": node.tzdata, "routes": heard,
        "startedAt": utc(node.started_at), "seenAt": utc(node.seen_at),
        "alive": let.now - node.seen_at <= timedelta(seconds=let.app.settings.scheduler_lease),
        "leader": node.id == lease.holder, "draining": node.draining, "slots": node.slots, "running": node.running,
        "clockAheadMs": node.clock_ahead,
    }  # fmt: skip
