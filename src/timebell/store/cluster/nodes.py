"""Nodes and the leader's lease. A lease is a counter; its age is judged by the observer's own monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import orjson
from sqlalchemy import delete, func, insert, select, update

from timebell.model.payload import decode
from timebell.model.routes import Routes
from timebell.store.schema import leaderships, leases, nodes
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

LEADER = "leader"
REMEMBERED = 100  # leaderships


@dataclass(frozen=True, slots=True)
class Node:
    """A process that runs, as it announced itself."""

    id: str
    name: str
    version: str
    tzdata: str
    routes: Routes
    beat: int
    started_at: datetime
    seen_at: datetime
    draining: bool = False
    slots: int = 0
    running: int = 0
    clock_ahead: int = 0
    """Milliseconds, of the database's."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """Who led from when to when (None: still, or nobody knows). `resigned`: it said so."""

    fence: int
    node_id: str
    node: str
    taken_at: datetime
    ended_at: datetime | None
    resigned: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """Who leads. `fence` rises with every change of hands and guards what the leader writes."""

    holder: str | None
    fence: int
    beat: int
    acquired_at: datetime | None


def announce(tx: Transaction, node: Node) -> bool:
    """Write or renew a node's row; whether it was asked to drain."""
    values = {
        "name": node.name, "version": node.version, "tzdata": node.tzdata, "routes": _dump(node.routes),
        "beat": node.beat, "started_at": node.started_at, "seen_at": node.seen_at, "slots": node.slots,
        "running": node.running, "clock_ahead": node.clock_ahead,
    }  # fmt: skip
    if tx.execute(update(nodes).where(nodes.c.id == node.id).values(**values)).rowcount == 0:
        tx.execute(insert(nodes).values(id=node.id, **values))
    return bool(tx.execute(select(nodes.c.draining).where(nodes.c.id == node.id)).scalar())


def drain(tx: Transaction, id_: str) -> bool:
    """Ask a node to finish what runs there and leave; whether there is such a one."""
    return tx.execute(update(nodes).where(nodes.c.id == id_).values(draining=True)).rowcount == 1


def listed(tx: Transaction) -> list[Node]:
    """Every node that has a row, oldest first."""
    rows = tx.execute(select(nodes).order_by(nodes.c.id))
    return [
        Node(
            row.id,
            row.name,
            row.version,
            row.tzdata,
            _load(row.routes),
            row.beat,
            row.started_at,
            row.seen_at,
            bool(row.draining),
            row.slots,
            row.running,
            row.clock_ahead,
        )
        for row in rows
    ]


BEATS = Statement("SELECT id, beat FROM timebell_nodes")


def beats(tx: Transaction) -> dict[str, int]:
    """The beat of every node that has a row, by id."""
    return {str(row["id"]): row["beat"] for row in tx.fetch(BEATS)}


def forget(tx: Transaction, ids: list[str], now: datetime | None = None) -> None:
    """Remove nodes that are gone, and the leadership of one that leaves `now`."""
    if now is not None:
        theirs = leaderships.c.node_id.in_(ids) & leaderships.c.ended_at.is_(None)
        tx.execute(update(leaderships).where(theirs).values(ended_at=now, resigned=True))
    tx.execute(delete(nodes).where(nodes.c.id.in_(ids)))
    tx.execute(update(leases).where(leases.c.holder.in_(ids)).values(holder=None))


def lease(tx: Transaction) -> Lease:
    """The leader's lease as it stands."""
    row = tx.execute(select(leases).where(leases.c.name == LEADER)).first()
    if row is None:
        return Lease(None, 0, 0, None)
    return Lease(row.holder, row.fence, row.beat, row.acquired_at)


def take_lease(tx: Transaction, node_id: str, seen: Lease, now: datetime) -> Lease | None:
    """Become leader if the lease still is as it was seen; None if another was quicker."""
    # Where the lease itself was lost, fences go on from what is remembered of them.
    last = seen.fence or tx.execute(select(func.max(leaderships.c.fence))).scalar() or 0
    taken = Lease(node_id, last + 1, 0, now)
    values = {"holder": node_id, "fence": taken.fence, "beat": 0, "acquired_at": now}
    unchanged = (leases.c.name == LEADER) & (leases.c.fence == seen.fence) & (leases.c.beat == seen.beat)
    if tx.execute(update(leases).where(unchanged).values(**values)).rowcount != 1:
        if seen.fence or tx.execute(select(leases.c.name).where(leases.c.name == LEADER)).first() is not None:
            return None
        tx.execute(insert(leases).values(name=LEADER, **values))
    _remember(tx, node_id, taken.fence, now)
    return taken


def _remember(tx: Transaction, node_id: str, fence: int, now: datetime) -> None:
    """Who leads now, and until when the one before was heard of."""
    t = leaderships.c
    known = {row.id: row for row in tx.execute(select(nodes.c.id, nodes.c.name, nodes.c.seen_at))}
    for before in tx.execute(select(t.fence, t.node_id, t.taken_at).where(t.ended_at.is_(None))).all():
        heard = known[before.node_id].seen_at if before.node_id in known else before.taken_at
        tx.execute(update(leaderships).where(t.fence == before.fence).values(ended_at=max(heard, before.taken_at)))
    name = known[node_id].name if node_id in known else node_id
    tx.execute(insert(leaderships).values(fence=fence, node_id=node_id, node=name, taken_at=now))
    tx.execute(delete(leaderships).where(t.fence <= fence - REMEMBERED))


def led(tx: Transaction, most: int) -> list[Leadership]:
    """Who led, newest first."""
    rows = tx.execute(select(leaderships).order_by(leaderships.c.fence.desc()).limit(most))
    return [
        Leadership(row.fence, row.node_id, row.node, row.taken_at, row.ended_at, bool(row.resigned)) for row in rows
    ]


def renew_lease(tx: Transaction, node_id: str, fence: int) -> bool:
    """Keep leading; False when another took over."""
    mine = (leases.c.name == LEADER) & (leases.c.holder == node_id) & (leases.c.fence == fence)
    return tx.execute(update(leases).where(mine).values(beat=leases.c.beat + 1)).rowcount == 1


def leads(tx: Transaction, node_id: str, fence: int) -> bool:
    """Whether this fence is still the leader's, locked until the transaction ends: asked before every chore."""
    mine = (leases.c.name == LEADER) & (leases.c.holder == node_id) & (leases.c.fence == fence)
    return tx.execute(select(leases.c.fence).where(mine).with_for_update()).first() is not None


def told(tx: Transaction) -> dict[str, str]:
    """The problems that leaders told of and that are not over: what was said, by code."""
    found: dict[str, str] = decode(tx.execute(select(leases.c.told).where(leases.c.name == LEADER)).scalar()) or {}
    return found


def tell(tx: Transaction, problems: Mapping[str, str]) -> bool:
    """Remember them for whoever leads next; True."""
    text = orjson.dumps(problems).decode()
    tx.execute(update(leases).where(leases.c.name == LEADER).values(told=text if problems else None))
    return True


def _dump(routes: Routes) -> str:
    return orjson.dumps(routes.params()).decode()


def _load(text: str) -> Routes:
    read = orjson.loads(text)
    return Routes(frozenset(read["exact"]), frozenset(read["prefixes"]), read["everything"])
