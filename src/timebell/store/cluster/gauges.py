"""What stands in the database now, for metrics and the watchdog: a few look-ups in indexes, whatever the history.

Each statement stands alone and writes nothing, so that they can run without a transaction and with read access only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from timebell.model.routes import ANYONE
from timebell.model.trigger import UNAUTHORISED
from timebell.store.jobs import claim, dead_letters
from timebell.store.jobs.claim import CLAIMABLE
from timebell.store.jobs.repository import COUNTED
from timebell.store.schedules import schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

LANES = 200
"""So many (queue, priority) pairs are counted; the rest have no depth."""
NAMED = 100
"""So many overdue schedules are named, the longest overdue first."""
LABELLED = 1000
"""So many schedules get a series of their own, where somebody asked for that."""


def _many(table: str, where: str) -> str:
    """Counting stops one above COUNTED, as millions may wait."""
    return f"(SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {where} LIMIT {COUNTED + 1}) AS c)"  # noqa: S608


_OFF = "(NOT enabled OR fault IS NOT NULL)"  # as the index says it
_AILING = "(orphaned_at IS NOT NULL OR fault IS NOT NULL)"  # the same
_FAILING = f"{_AILING} AND orphaned_at IS NULL"
_COUNTED = {
    "pending": ("timebell_jobs", CLAIMABLE),
    "running": ("timebell_jobs", "state = 'running'"),
    "held": ("timebell_jobs", "hold IS NOT NULL AND state = 'pending'"),
    "unheard": ("timebell_jobs", "hold = 'unheard'"),
    "dead": ("timebell_finished", dead_letters.DEAD.text),
    "active": ("timebell_schedules", "enabled AND fault IS NULL"),
    "paused": ("timebell_schedules", f"{_OFF} AND NOT enabled"),
    "fault": ("timebell_schedules", f"{_OFF} AND enabled"),
    "campaigns_pending": ("timebell_campaigns", "ended_at IS NULL AND state = 'pending'"),
    "campaigns_running": ("timebell_campaigns", "ended_at IS NULL AND state = 'running'"),
    "campaigns_paused": ("timebell_campaigns", "ended_at IS NULL AND state = 'paused'"),
    "disabled": ("timebell_targets", "disabled_at IS NOT NULL"),
    "sources_orphaned": ("timebell_sources", f"{_AILING} AND orphaned_at IS NOT NULL"),
    "sources_reauthorise": ("timebell_sources", f"{_FAILING} AND fault_code = '{UNAUTHORISED}'"),
    "sources_failing": ("timebell_sources", f"{_FAILING} AND COALESCE(fault_code, '') <> '{UNAUTHORISED}'"),
}
COUNTS = Statement("SELECT " + ", ".join(f"{_many(*what)} AS {name}" for name, what in _COUNTED.items()))
REMAINING = Statement(
    "SELECT coalesce(sum(CASE WHEN expected > opened THEN expected - opened ELSE 0 END), 0) AS count"
    " FROM timebell_campaigns WHERE ended_at IS NULL AND state = 'running'"
)
DEPTHS = Statement(
    "WITH $rows SELECT d.queue, (SELECT count(*) FROM (SELECT 1 FROM timebell_jobs"  # noqa: S608 - constants only
    f" WHERE {CLAIMABLE} AND queue = d.queue AND priority = d.priority AND run_at <= :now LIMIT {COUNTED + 1}) AS c)"
    " AS depth FROM d $by_row",
    queue="text",
    priority="int",
)
OVERDUE = Statement(
    "SELECT id, tenant_id, name, next_fire_at, recurrence FROM timebell_schedules"  # noqa: S608 - constants only
    f" WHERE enabled AND fault IS NULL AND next_fire_at < :before AND {schedules.GOING}"
    " ORDER BY next_fire_at LIMIT :most"
)
SUCCESSES = Statement(
    "SELECT s.tenant_id, s.name, ($last_success) AS at FROM timebell_schedules s ORDER BY s.id LIMIT :most"
)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A schedule whose cursor is in the past by more than a grace. `recurrence` is as stored."""

    id: str
    label: str
    since: datetime
    recurrence: str


@dataclass(frozen=True, slots=True)
class Gauges:
    """Counts (up to one above COUNTED) and ages (seconds) as they were at one instant."""

    jobs: Mapping[str, int]
    schedules: Mapping[str, int]
    unheard: int
    dead_letters: int
    depths: Mapping[str, int]
    oldest_due_age: float
    evaluation_lag: float
    overdue: list[Overdue]
    successes: Mapping[str, datetime] = field(default_factory=dict)
    disabled: int = 0
    """Targets that are sent nothing."""
    campaigns: Mapping[str, int] = field(default_factory=dict)
    remaining: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    """Those that cannot be read, by their states."""


def read(tx: Transaction, now: datetime, grace: float, *, labelled: bool = False) -> Gauges:
    """Everything. With `labelled`, also when each schedule last succeeded."""
    counted = tx.fetch(COUNTS)[0]
    oldest, depths = waiting(tx, now)
    next_fire_at = schedules.next_fire(tx)
    return Gauges(
        {name: counted[name] for name in ("pending", "running", "held")},
        {name: counted[name] for name in ("active", "paused", "fault")},
        counted["unheard"], counted["dead"], depths, oldest,
        0.0 if next_fire_at is None else max(0.0, (now - next_fire_at).total_seconds()),
        overdue(tx, now, grace), successes(tx) if labelled else {}, counted["disabled"],
        {name: counted[f"campaigns_{name}"] for name in ("pending", "running", "paused")},
        int(tx.fetch(REMAINING)[0]["count"]),
        {name.removeprefix("sources_"): count for name, count in counted.items() if name.startswith("sources_")},
    )  # fmt: skip


def waiting(tx: Transaction, now: datetime) -> tuple[float, dict[str, int]]:
    """How long the oldest due job of any lane that is not paused waits (seconds), and how many are due by queue."""
    due = [lane for lane in claim.lanes(tx, ANYONE, now) if lane.next_due is not None and lane.next_due <= now]
    oldest = max(((now - lane.next_due).total_seconds() for lane in due if lane.next_due), default=0.0)
    depths: dict[str, int] = {"default": 0}
    rows = [{"queue": lane.queue, "priority": lane.priority} for lane in due[:LANES]]
    for row in tx.fetch(DEPTHS, rows, now=tx.dialect.to_db(now)) if rows else []:
        depths[row["queue"]] = depths.get(row["queue"], 0) + row["depth"]
    return oldest, depths


def overdue(tx: Transaction, now: datetime, grace: float) -> list[Overdue]:
    """Schedules that should have fired more than `grace` seconds ago, the longest overdue first."""
    before = tx.dialect.to_db(now - timedelta(seconds=grace))
    return [
        Overdue(
            str(row["id"]), label(row["tenant_id"], row["name"]), tx.dialect.from_db(row["next_fire_at"]),
            row["recurrence"],
        )
        for row in tx.fetch(OVERDUE, before=before, most=NAMED)
    ]  # fmt: skip


def successes(tx: Transaction) -> dict[str, datetime]:
    """When schedules last succeeded, of those that did within their last 20 occurrences."""
    rows = tx.fetch(SUCCESSES, most=LABELLED)
    return {label(row["tenant_id"], row["name"]): tx.dialect.from_db(row["at"]) for row in rows if row["at"]}


def label(tenant_id: str, name: str) -> str:
    """What a schedule is called outside its tenant."""
    return name if tenant_id == "default" else f"{tenant_id}/{name}"
