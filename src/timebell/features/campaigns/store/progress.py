"""Progress of campaigns for display: aggregates whose size does not grow with the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import case, func, select

from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.model.forecast import ChunkEnds, Forecast, forecast_end
from timebell.features.campaigns.store import devices
from timebell.features.campaigns.store.tables import campaigns, chunks
from timebell.store.audit.overview import MAX_LISTED, AttentionItem
from timebell.store.cluster.gauges import schedule_label
from timebell.store.cluster.problems import FAILURE_PERIOD, ObjectProblem, page_path
from timebell.store.transaction import Transaction

MAX_CELLS = 384
"""Maximum number of cells in a chunk map; a cell represents one or more chunks."""
MAX_CAMPAIGNS = 100
RATE_WINDOW = timedelta(seconds=60)
"""The rate of a campaign is measured over this time, or over the last RATE_CHUNKS chunks."""
RATE_CHUNKS = 64
FAILED_STATES = ("failed", "partly_sent")
ACTIVE_STATES = ("running", "paused")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the map: `chunks` opened chunks from number `first` on, with `size` recipients.

    `state` is the worst of their states: waiting (for another attempt), sending, failed (recipients were not reached,
    or none was accepted), done.
    """

    first: int
    chunks: int
    size: int
    state: str


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """All chunks of a campaign, `chunks_per_cell` to a cell."""

    chunks_per_cell: int
    cells: list[Cell]


def forecast_campaign(tx: Transaction, campaign: Campaign, now: datetime) -> Forecast:
    """Return the forecast of a campaign from the chunks that ended in the last RATE_WINDOW."""
    c = chunks.c
    newest = (c.campaign_id == campaign.id) & (c.number >= campaign.next_chunk - RATE_CHUNKS)
    recent = select(c.ended_at, c.size).where(newest, c.ended_at >= now - RATE_WINDOW).order_by(c.ended_at)
    ended = tx.execute(recent).all()
    ends = ChunkEnds([row.ended_at for row in ended], sum(row.size for row in ended))
    return forecast_end(campaign, ends, now)


def build_chunk_map(tx: Transaction, campaign: Campaign, total: int) -> ChunkMap:
    """Return the map of a campaign's chunks, sized for `total` recipients."""
    c = chunks.c
    chunk_count = max(campaign.next_chunk - 1, -(-total // campaign.plan.chunk_size))
    chunks_per_cell = max(1, -(-chunk_count // MAX_CELLS))
    cell = ((c.number - 1) // chunks_per_cell).label("cell")
    query = select(
        cell, func.count().label("many"), func.sum(c.size).label("size"),
        func.sum(case((c.state == "waiting", 1), else_=0)).label("waiting"),
        func.sum(case((c.state == "sending", 1), else_=0)).label("sending"),
        func.sum(c.unknown + c.unsent).label("lost"), func.sum(c.accepted).label("accepted"),
    ).where(c.campaign_id == campaign.id)  # fmt: skip
    rows = tx.execute(query.group_by(cell).order_by(cell)).all()
    cells = [
        Cell(
            int(row.cell) * chunks_per_cell + 1, row.many, int(row.size),
            "waiting" if row.waiting else "sending" if row.sending
            else "failed" if row.lost or not row.accepted else "done",
        )
        for row in rows
    ]  # fmt: skip
    return ChunkMap(chunks_per_cell, cells)


def count_recipients(tx: Transaction, campaign: Campaign) -> int:
    """Return the number of recipients of a campaign: devices of its audience registered before it started."""
    return devices.count_devices(
        tx, campaign.tenant_id, campaign.filters, campaign.reference_time, campaign.id, campaign.cutoff
    )


def count_active_campaigns(tx: Transaction, tenant_id: str) -> int:
    """Return the number of running and paused campaigns among the MAX_CAMPAIGNS newest ones."""
    newest = select(campaigns.c.state).where(campaigns.c.tenant_id == tenant_id)
    states = tx.execute(newest.order_by(campaigns.c.id.desc()).limit(MAX_CAMPAIGNS)).scalars()
    return sum(1 for state in states if state in ACTIVE_STATES)


def list_paused_campaigns(tx: Transaction, tenant_id: str) -> list[AttentionItem]:
    """Return those of the newest campaigns that paused with a reason and need a decision."""
    c = campaigns.c
    newest = (
        select(c.id, c.name, c.state, c.reason, c.updated_at).where(c.tenant_id == tenant_id)
        .order_by(c.id.desc()).limit(MAX_CAMPAIGNS)
    )  # fmt: skip
    rows = [row for row in tx.execute(newest).all() if row.state == "paused" and row.reason]
    return [
        AttentionItem(row.id, row.name or "A campaign", at=row.updated_at, why=row.reason) for row in rows[:MAX_LISTED]
    ]


_c = campaigns.c
_NEWEST_CAMPAIGNS = (
    select(_c.id, _c.tenant_id, _c.name, _c.state, _c.reason, _c.ended_at).order_by(_c.id.desc()).limit(MAX_CAMPAIGNS)
)


def list_problems(tx: Transaction, now: datetime) -> list[ObjectProblem]:
    """Return those of the newest campaigns of all tenants that paused with a reason, or failed in the last day."""
    problems = []
    for row in tx.execute(_NEWEST_CAMPAIGNS):
        label = schedule_label(row.tenant_id, row.name or row.id)
        path = page_path(row.tenant_id, f"/ui/campaigns/{row.id}")
        if row.state == "paused" and row.reason:
            sentence = f"The campaign {label} is paused and waits for a decision: {row.reason}"
            problems.append(ObjectProblem("CAMPAIGN_PAUSED", label, sentence, path))
        elif row.state in FAILED_STATES and row.ended_at and row.ended_at >= now - FAILURE_PERIOD:
            result = "failed" if row.state == "failed" else "was sent only in part"
            sentence = f"The campaign {label} {result}{f': {row.reason}' if row.reason else '.'}"
            problems.append(ObjectProblem("CAMPAIGN_FAILED", label, sentence, path))
    return problems
