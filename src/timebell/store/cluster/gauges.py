"""Read the current state of the database for metrics and the watchdog, by a few index look-ups.

The cost does not depend on the size of the history. The statements are independent of each other and read-only, so they
need neither a transaction nor write access.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from timebell.feature import Feature
from timebell.model.routes import ALL_ROUTES
from timebell.store.jobs import claim, dead_letters
from timebell.store.jobs.claim import CLAIMABLE
from timebell.store.jobs.repository import COUNT_LIMIT
from timebell.store.schedules import schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

MAX_LANES = 200
"""The maximum number of lanes whose jobs are counted; others have no depth."""
MAX_OVERDUE = 100
"""The maximum number of overdue schedules returned, longest overdue first."""
MAX_LABELED_SCHEDULES = 1000
"""The maximum number of schedules with a time series of their own, if per-schedule metrics are enabled."""


def bounded_count(table: str, where: str) -> str:
    """Return SQL that counts rows up to COUNT_LIMIT + 1, because there may be millions."""
    return f"(SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {where} LIMIT {COUNT_LIMIT + 1}) AS c)"  # noqa: S608


_NOT_FIRING = "(NOT enabled OR error IS NOT NULL)"  # literally as in the index
_COUNTED_ROWS = {
    "pending": ("timebell_jobs", CLAIMABLE),
    "running": ("timebell_jobs", "state = 'running'"),
    "held": ("timebell_jobs", "hold IS NOT NULL AND state = 'pending'"),
    "unhandled": ("timebell_jobs", "hold = 'unhandled'"),
    "dead": ("timebell_finished", dead_letters.IS_DEAD_LETTER.text),
    "active": ("timebell_schedules", "enabled AND error IS NULL"),
    "paused": ("timebell_schedules", f"{_NOT_FIRING} AND NOT enabled"),
    "errored": ("timebell_schedules", f"{_NOT_FIRING} AND enabled"),
    "disabled": ("timebell_targets", "disabled_at IS NOT NULL"),
}
COUNTS = Statement(
    "SELECT " + ", ".join(f"{bounded_count(*source)} AS {name}" for name, source in _COUNTED_ROWS.items())
)
DEPTHS = Statement(
    "WITH $rows SELECT d.queue, (SELECT count(*) FROM (SELECT 1 FROM timebell_jobs"  # noqa: S608 - constants only
    f" WHERE {CLAIMABLE} AND queue = d.queue AND priority = d.priority AND run_at <= :now LIMIT {COUNT_LIMIT + 1})"
    " AS c) AS depth FROM d $per_row",
    queue="text",
    priority="int",
)
OVERDUE = Statement(
    "SELECT id, tenant_id, name, next_fire_at, recurrence FROM timebell_schedules"  # noqa: S608 - constants only
    f" WHERE enabled AND error IS NULL AND next_fire_at < :before AND {schedules.FIRING_NOT_STOPPED}"
    " ORDER BY next_fire_at LIMIT :limit"
)
LAST_SUCCESSES = Statement(
    "SELECT s.tenant_id, s.name, ($last_success) AS at FROM timebell_schedules s ORDER BY s.id LIMIT :limit"
)


FeatureGauge = Mapping[tuple[str, ...], float]
"""A gauge of a feature, by its label values."""


@dataclass(frozen=True, slots=True)
class OverdueSchedule:
    """A schedule whose next instant is in the past by more than a grace period. `recurrence` is JSON as stored."""

    id: str
    label: str
    since: datetime
    recurrence: str


@dataclass(frozen=True, slots=True)
class Gauges:
    """Counts (up to COUNT_LIMIT + 1) and ages (seconds) at one instant."""

    jobs: Mapping[str, int]
    schedules: Mapping[str, int]
    unhandled: int
    dead_letters: int
    depths: Mapping[str, int]
    oldest_due_age: float
    evaluation_lag: float
    overdue: list[OverdueSchedule]
    successes: Mapping[str, datetime] = field(default_factory=dict)
    disabled_targets: int = 0
    """The number of disabled targets."""
    of_features: Mapping[str, FeatureGauge] = field(default_factory=dict)
    """The gauges of features, by the name of their metric."""


def read_gauges(
    tx: Transaction, now: datetime, grace: float, features: Sequence[Feature] = (), *, per_schedule: bool = False
) -> Gauges:  # fmt: skip
    """Read all gauges, also those of `features`; with `per_schedule`, also when each schedule last succeeded.

    `grace` (seconds) is how late a schedule may be before it is overdue.
    """
    counted = tx.fetch(COUNTS)[0]
    oldest, depths = measure_backlog(tx, now)
    next_fire_at = schedules.find_next_fire_at(tx)
    return Gauges(
        {name: counted[name] for name in ("pending", "running", "held")},
        {name: counted[name] for name in ("active", "paused", "errored")},
        counted["unhandled"], counted["dead"], depths, oldest,
        0.0 if next_fire_at is None else max(0.0, (now - next_fire_at).total_seconds()),
        list_overdue(tx, now, grace), list_last_successes(tx) if per_schedule else {}, counted["disabled"],
        {name: gauge for feature in features for name, gauge in feature.read_gauges(tx).items()},
    )  # fmt: skip


def measure_backlog(tx: Transaction, now: datetime) -> tuple[float, dict[str, int]]:
    """Return the age of the oldest due job (seconds), and the number of due jobs by queue; paused queues excluded."""
    due = [lane for lane in claim.list_lanes(tx, ALL_ROUTES, now) if lane.next_due is not None and lane.next_due <= now]
    oldest = max(((now - lane.next_due).total_seconds() for lane in due if lane.next_due), default=0.0)
    depths: dict[str, int] = {"default": 0}
    rows = [{"queue": lane.queue, "priority": lane.priority} for lane in due[:MAX_LANES]]
    for row in tx.fetch(DEPTHS, rows, now=tx.dialect.to_db(now)) if rows else []:
        depths[row["queue"]] = depths.get(row["queue"], 0) + row["depth"]
    return oldest, depths


def list_overdue(tx: Transaction, now: datetime, grace: float) -> list[OverdueSchedule]:
    """Return schedules that should have fired more than `grace` seconds ago, longest overdue first."""
    before = tx.dialect.to_db(now - timedelta(seconds=grace))
    return [
        OverdueSchedule(
            str(row["id"]), schedule_label(row["tenant_id"], row["name"]), tx.dialect.from_db(row["next_fire_at"]),
            row["recurrence"],
        )
        for row in tx.fetch(OVERDUE, before=before, limit=MAX_OVERDUE)
    ]  # fmt: skip


def list_last_successes(tx: Transaction) -> dict[str, datetime]:
    """Return when schedules last succeeded, by label. Covers the last 20 occurrences of each schedule."""
    rows = tx.fetch(LAST_SUCCESSES, limit=MAX_LABELED_SCHEDULES)
    return {schedule_label(row["tenant_id"], row["name"]): tx.dialect.from_db(row["at"]) for row in rows if row["at"]}


def schedule_label(tenant_id: str, name: str) -> str:
    """Return the label of a schedule in metrics and alerts; it includes the tenant unless that is `default`."""
    return name if tenant_id == "default" else f"{tenant_id}/{name}"
