"""Nodes, and the lease of the leader.

A lease is a counter that its holder increments. An observer considers it expired if the counter does not change for a
while by the observer's own monotonic clock, so no clock of another machine matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import orjson
from sqlalchemy import bindparam, delete, func, insert, select, update

from timebell.model.payload import decode
from timebell.model.routes import Routes
from timebell.store.schema import leaderships, leases, nodes
from timebell.store.transaction import Transaction

LEADER = "leader"
LEADERSHIP_HISTORY_SIZE = 100  # leaderships stored

# Statements of each heartbeat, or of each task of the leader, are built once: building takes as long as executing.
_UPDATE_NODE = update(nodes).where(nodes.c.id == bindparam("node_id"))
_IS_DRAINING = select(nodes.c.draining).where(nodes.c.id == bindparam("node_id"))
_ALL_NODES = select(nodes).order_by(nodes.c.id)
_LEASE = select(leases).where(leases.c.name == LEADER)
_HELD_LEASE = (
    (leases.c.name == LEADER) & (leases.c.holder == bindparam("node_id")) & (leases.c.fence == bindparam("held_fence"))
)
_RENEW_LEASE = update(leases).where(_HELD_LEASE).values(heartbeat=leases.c.heartbeat + 1)
_LOCK_HELD_LEASE = select(leases.c.fence).where(_HELD_LEASE).with_for_update()


@dataclass(frozen=True, slots=True)
class Node:
    """A running process, as announced by itself."""

    id: str
    name: str
    version: str
    tzdata: str
    routes: Routes
    heartbeat: int
    started_at: datetime
    seen_at: datetime
    draining: bool = False
    slots: int = 0
    running: int = 0
    clock_ahead: int = 0
    """Milliseconds by which its clock is ahead of the database clock."""
    deployment: str | None = None
    """The deployment whose code it runs; None if that defines nothing."""
    secret_keys: tuple[str, ...] = ()
    """The fingerprints of its secret keys, newest first."""

    def shares_secret_key(self, other: Node) -> bool:
        """Return whether API keys and secrets that one of these nodes stores are valid on the other one.

        During a rotation of the secret key, a node has several.
        """
        return self.secret_keys == other.secret_keys or not set(self.secret_keys).isdisjoint(other.secret_keys)


@dataclass(frozen=True, slots=True)
class Leadership:
    """One leadership of a node.

    `ended_at` is None while it lasts, or if its end is unknown. `resigned`: the node gave it up itself.
    """

    fence: int
    node_id: str
    node: str
    acquired_at: datetime
    ended_at: datetime | None
    resigned: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of the leader.

    `fence` increases with every change of the holder. The leader checks it before it writes, so a former leader that
    was frozen cannot write any more.
    """

    holder: str | None
    fence: int
    heartbeat: int
    acquired_at: datetime | None


def announce(tx: Transaction, node: Node) -> bool:
    """Insert or update the row of a node; return whether it was requested to drain."""
    values = {
        "name": node.name, "version": node.version, "tzdata": node.tzdata,
        "routes": orjson.dumps(node.routes.to_json()).decode(),
        "heartbeat": node.heartbeat, "started_at": node.started_at, "seen_at": node.seen_at, "slots": node.slots,
        "running": node.running, "clock_ahead": node.clock_ahead,
        "deployment": node.deployment, "secret_keys": " ".join(node.secret_keys),
    }  # fmt: skip
    if tx.execute(_UPDATE_NODE, {"node_id": node.id, **values}).rowcount == 0:
        tx.execute(insert(nodes).values(id=node.id, **values))
    return bool(tx.execute(_IS_DRAINING, {"node_id": node.id}).scalar())


def request_drain(tx: Transaction, id_: str) -> bool:
    """Request a node to finish its running jobs and stop; return False for an unknown node."""
    return tx.execute(update(nodes).where(nodes.c.id == id_).values(draining=True)).rowcount == 1


def list_nodes(tx: Transaction) -> list[Node]:
    """Return all nodes that have a row, oldest first."""
    rows = tx.execute(_ALL_NODES)
    return [
        Node(
            row.id,
            row.name,
            row.version,
            row.tzdata,
            Routes.from_json(orjson.loads(row.routes)),
            row.heartbeat,
            row.started_at,
            row.seen_at,
            bool(row.draining),
            row.slots,
            row.running,
            row.clock_ahead,
            row.deployment,
            tuple(row.secret_keys.split()),
        )
        for row in rows
    ]


def list_heartbeats(tx: Transaction) -> dict[str, int]:
    """Return the heartbeat counters of all nodes that have a row, by node id."""
    return {row.id: row.heartbeat for row in tx.execute(select(nodes.c.id, nodes.c.heartbeat))}


def remove_nodes(tx: Transaction, ids: list[str], now: datetime | None = None) -> None:
    """Remove dead nodes or, with `now`, nodes that stop; the leadership of the latter ends as resigned."""
    if now is not None:
        current = leaderships.c.node_id.in_(ids) & leaderships.c.ended_at.is_(None)
        tx.execute(update(leaderships).where(current).values(ended_at=now, resigned=True))
    tx.execute(delete(nodes).where(nodes.c.id.in_(ids)))
    tx.execute(update(leases).where(leases.c.holder.in_(ids)).values(holder=None))


def terminate_stalled_sessions(tx: Transaction) -> list[int]:
    """Terminate database sessions of frozen nodes, which hold locks; return the ids of the sessions."""
    return tx.dialect.terminate_stalled_sessions(tx)


def get_lease(tx: Transaction) -> Lease:
    """Return the current lease of the leader."""
    row = tx.execute(_LEASE).first()
    if row is None:
        return Lease(None, 0, 0, None)
    return Lease(row.holder, row.fence, row.heartbeat, row.acquired_at)


def acquire_lease(tx: Transaction, node_id: str, observed: Lease, now: datetime) -> Lease | None:
    """Become leader if the lease is unchanged since `observed`; return None if another node was faster."""
    # If the row of the lease was lost, continue after the last fence in the history: a fence must never be reused.
    last_fence = observed.fence or tx.execute(select(func.max(leaderships.c.fence))).scalar() or 0
    lease = Lease(node_id, last_fence + 1, 0, now)
    values = {"holder": node_id, "fence": lease.fence, "heartbeat": 0, "acquired_at": now}
    unchanged = (
        (leases.c.name == LEADER) & (leases.c.fence == observed.fence) & (leases.c.heartbeat == observed.heartbeat)
    )
    if tx.execute(update(leases).where(unchanged).values(**values)).rowcount != 1:
        if observed.fence or tx.execute(select(leases.c.name).where(leases.c.name == LEADER)).first() is not None:
            return None
        tx.execute(insert(leases).values(name=LEADER, **values))
    _record_leadership(tx, node_id, lease.fence, now)
    return lease


def _record_leadership(tx: Transaction, node_id: str, fence: int, now: datetime) -> None:
    """Record a new leadership, and the end of the previous one.

    A leader that did not resign is assumed to have led until its last heartbeat.
    """
    columns = leaderships.c
    known_nodes = {row.id: row for row in tx.execute(select(nodes.c.id, nodes.c.name, nodes.c.seen_at))}
    for previous in tx.execute(
        select(columns.fence, columns.node_id, columns.acquired_at).where(columns.ended_at.is_(None))
    ).all():
        last_seen = known_nodes[previous.node_id].seen_at if previous.node_id in known_nodes else previous.acquired_at
        tx.execute(
            update(leaderships)
            .where(columns.fence == previous.fence)
            .values(ended_at=max(last_seen, previous.acquired_at))
        )
    name = known_nodes[node_id].name if node_id in known_nodes else node_id
    tx.execute(insert(leaderships).values(fence=fence, node_id=node_id, node=name, acquired_at=now))
    tx.execute(delete(leaderships).where(columns.fence <= fence - LEADERSHIP_HISTORY_SIZE))


def list_leaderships(tx: Transaction, limit: int) -> list[Leadership]:
    """Return the last leaderships, newest first."""
    rows = tx.execute(select(leaderships).order_by(leaderships.c.fence.desc()).limit(limit))
    return [
        Leadership(row.fence, row.node_id, row.node, row.acquired_at, row.ended_at, bool(row.resigned)) for row in rows
    ]


def renew_lease(tx: Transaction, node_id: str, fence: int) -> bool:
    """Renew the lease; return False if another node took over."""
    return tx.execute(_RENEW_LEASE, {"node_id": node_id, "held_fence": fence}).rowcount == 1


def verify_leadership(tx: Transaction, node_id: str, fence: int) -> bool:
    """Return whether this node is still the leader with this fence, and lock the lease until the transaction ends.

    To be called in the transaction of every leader task: no other node can become leader before it commits.
    """
    return tx.execute(_LOCK_HELD_LEASE, {"node_id": node_id, "held_fence": fence}).first() is not None


def get_alerts(tx: Transaction) -> dict[str, str]:
    """Return the texts of unresolved alerts that were sent, by code."""
    alerts: dict[str, str] = decode(tx.execute(select(leases.c.alerts).where(leases.c.name == LEADER)).scalar()) or {}
    return alerts


def save_alerts(tx: Transaction, alerts: Mapping[str, str]) -> bool:
    """Store the unresolved alerts for the next leader; return True."""
    text = orjson.dumps(alerts).decode()
    tx.execute(update(leases).where(leases.c.name == LEADER).values(alerts=text if alerts else None))
    return True
