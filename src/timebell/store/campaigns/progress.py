"""How far campaigns and triggers are, for those who look at them: counts that stay small however many there are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select

from timebell.model.campaign_plan import Campaign
from timebell.store.campaigns import devices
from timebell.store.campaigns.tables import campaigns, chunks
from timebell.store.jobs.repository import COUNTED
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import firings

CELLS = 384
"""Squares of a map of chunks: each stands for one, or for several."""
NEWEST = 100
UNDER_WAY = ("running", "paused")


@dataclass(frozen=True, slots=True)
class Cell:
    """A square of the map: the chunks from `first` on, how many of them there are, and the worst of their states:
    waiting (for another try), sending, failed (some were not reached), done."""

    first: int
    chunks: int
    size: int
    state: str


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """All chunks there are, `per` to a square; `lately` messages ended since an instant."""

    per: int
    cells: list[Cell]
    lately: int


def chunk_map(tx: Transaction, of: Campaign, total: int, since: datetime) -> ChunkMap:
    """The map of a campaign's chunks, with room for those of `total` recipients."""
    c = chunks.c
    most = max(of.next_chunk - 1, -(-total // of.sending.size))
    per = max(1, -(-most // CELLS))
    cell = ((c.number - 1) // per).label("cell")
    query = select(
        cell, func.count().label("many"), func.sum(c.size).label("size"),
        func.sum(case((c.state == "waiting", 1), else_=0)).label("waiting"),
        func.sum(case((c.state == "sending", 1), else_=0)).label("sending"),
        func.sum(c.unknown + c.unsent).label("lost"),
        func.sum(case((c.ended_at >= since, c.size), else_=0)).label("lately"),
    ).where(c.campaign_id == of.id)  # fmt: skip
    rows = tx.execute(query.group_by(cell).order_by(cell)).all()
    cells = [
        Cell(
            int(row.cell) * per + 1, row.many, int(row.size),
            "waiting" if row.waiting else "sending" if row.sending else "failed" if row.lost else "done",
        )
        for row in rows
    ]  # fmt: skip
    return ChunkMap(per, cells, sum(int(row.lately) for row in rows))


def meant(tx: Transaction, of: Campaign) -> int:
    """How many a campaign is for: those of its audience that were registered when it began."""
    return devices.count(tx, of.tenant_id, of.filters, of.cutoff)


def under_way(tx: Transaction, tenant_id: str) -> int:
    """How many of the newest campaigns are under way."""
    newest = select(campaigns.c.state).where(campaigns.c.tenant_id == tenant_id)
    states = tx.execute(newest.order_by(campaigns.c.id.desc()).limit(NEWEST)).scalars()
    return sum(1 for state in states if state in UNDER_WAY)


def planned(tx: Transaction, trigger_ids: Collection[str]) -> dict[str, int]:
    """How many jobs of each trigger wait; counting stops one above COUNTED."""
    found = {}
    for id_ in trigger_ids:
        some = select(firings.c.item).where(firings.c.trigger_id == id_, firings.c.job_id.is_not(None))
        found[id_] = int(tx.execute(select(func.count()).select_from(some.limit(COUNTED + 1).subquery())).scalar_one())
    return found
