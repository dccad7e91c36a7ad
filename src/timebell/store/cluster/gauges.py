"""Read the current state of the database for metrics and the watchdog, by a few index look-ups.

The cost does not depend on the size of the history. The statements are independent of each other and read-only, so they
need neither a transaction nor write access.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    Select,
    Table,
    TextClause,
    bindparam,
    func,
    literal,
    select,
    text,
    union_all,
)

from timebell.feature import Feature
from timebell.model.job import JobState
from timebell.model.routes import ALL_ROUTES
from timebell.store.jobs import claim, dead_letters
from timebell.store.jobs.indexes import COUNT_LIMIT, RUNNING_CLAUSE
from timebell.store.jobs.queues import ALL_QUEUES
from timebell.store.schedules.schedules import find_next_fire_at
from timebell.store.schema import CLAIMABLE, audit_exports, finished, jobs, queues, schedules, targets
from timebell.store.transaction import Transaction
from timebell.store.types import EPOCH, Instant

MAX_LANES = 200
"""The maximum number of lanes whose jobs are counted; others have no depth."""
MAX_OVERDUE = 100
"""The maximum number of overdue schedules returned, longest overdue first."""
MAX_LABELED_SCHEDULES = 1000
"""The maximum number of schedules with a time series of their own, if per-schedule metrics are enabled."""
OCCURRENCES_PER_SCHEDULE = 20
"""The number of occurrences of a schedule among which its last success is looked up."""


def bounded_count(table: Table, *where: ColumnElement[bool] | TextClause) -> ScalarSelect[int]:
    """Select the number of rows up to COUNT_LIMIT + 1, because there may be millions."""
    rows = select(literal(1)).select_from(table).where(*where).limit(COUNT_LIMIT + 1).subquery()
    return select(func.count()).select_from(rows).scalar_subquery()


# Literally as in the indexes: with bound values they would not be used.
_CLAIMABLE = text(CLAIMABLE)
IS_MISSED = text("state = 'skipped' AND reason IN ('missed', 'expired')")
_FIRES = text("enabled AND error IS NULL")
_NOT_FIRING = text("(NOT enabled OR error IS NOT NULL)")

_s = schedules.c
COUNTS = select(
    bounded_count(jobs, _CLAIMABLE).label("pending"),
    bounded_count(jobs, RUNNING_CLAUSE).label("running"),
    bounded_count(jobs, jobs.c.hold.is_not(None), jobs.c.state == "pending").label("held"),
    bounded_count(jobs, jobs.c.hold == "unhandled").label("unhandled"),
    bounded_count(finished, dead_letters.IS_DEAD_LETTER).label("dead"),
    # `enabled` once more as a comparison, for which MariaDB, without partial indexes, can use an index.
    bounded_count(schedules, _FIRES, _s.enabled).label("active"),
    bounded_count(schedules, _NOT_FIRING, ~_s.enabled).label("paused"),
    bounded_count(schedules, _NOT_FIRING, _s.enabled).label("errored"),
    bounded_count(targets, targets.c.disabled_at.is_not(None)).label("disabled"),
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
    failed_last_hour: int = 0
    """Jobs that failed permanently within an hour and were neither retried nor discarded."""
    missed_last_hour: int = 0
    """Occurrences that were missed or expired within an hour."""
    audit_export_failures: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which deliveries of the audit log have been failing, by destination."""


def read_gauges(
    tx: Transaction, now: datetime, grace: float, features: Sequence[Feature] = (), *, per_schedule: bool = False
) -> Gauges:  # fmt: skip
    """Read all gauges, also those of `features`; with `per_schedule`, also when each schedule last succeeded.

    `grace` (seconds) is how late a schedule may be before it is overdue.
    """
    counted = tx.execute(COUNTS).mappings().one()
    oldest, depths = measure_backlog(tx, now)
    next_fire_at = find_next_fire_at(tx)
    return Gauges(
        {name: counted[name] for name in ("pending", "running", "held")},
        {name: counted[name] for name in ("active", "paused", "errored")},
        counted["unhandled"], counted["dead"], depths, oldest,
        0.0 if next_fire_at is None else max(0.0, (now - next_fire_at).total_seconds()),
        list_overdue(tx, now, grace), list_last_successes(tx) if per_schedule else {}, counted["disabled"],
        {name: gauge for feature in features for name, gauge in feature.read_gauges(tx).items()},
        *_count_last_hour(tx, now), _measure_audit_export_failures(tx, now),
    )  # fmt: skip


def _count_last_hour(tx: Transaction, now: datetime) -> tuple[int, int]:
    """Return how many jobs failed permanently, up to COUNT_LIMIT + 1, and how many occurrences were missed."""
    row = tx.execute(_select_recent_counts(), {"since": now - timedelta(hours=1)}).one()
    return row.failed, int(row.missed)


@cache  # building the statement takes longer than executing it
def _select_recent_counts() -> Select[int, int]:
    is_recent = finished.c.finished_at >= bindparam("since")
    missed = select(func.coalesce(func.sum(finished.c.skipped_count), 0)).where(IS_MISSED, is_recent).scalar_subquery()
    failed = bounded_count(finished, dead_letters.IS_DEAD_LETTER, is_recent)
    return select(failed.label("failed"), missed.label("missed"))


def _measure_audit_export_failures(tx: Transaction, now: datetime) -> dict[str, float]:
    return {
        row.destination: 0.0 if row.failing_since is None else max(0.0, (now - row.failing_since).total_seconds())
        for row in tx.execute(select(audit_exports.c.destination, audit_exports.c.failing_since))
    }


def measure_backlog(tx: Transaction, now: datetime) -> tuple[float, dict[str, int]]:
    """Return the age of the oldest due job (seconds), and the number of due jobs by queue; paused queues excluded."""
    due = [lane for lane in claim.list_lanes(tx, ALL_ROUTES, now) if lane.next_due is not None and lane.next_due <= now]
    oldest = max(((now - lane.next_due).total_seconds() for lane in due if lane.next_due), default=0.0)
    depths: dict[str, int] = {"default": 0}
    if lanes := due[:MAX_LANES]:
        for row in tx.execute(union_all(*(_select_depth(lane, now) for lane in lanes))):
            depths[row.queue] = depths.get(row.queue, 0) + row.depth
    return oldest, depths


def _select_depth(lane: claim.QueueLane, now: datetime) -> Select[str, int]:
    in_lane = (jobs.c.queue == lane.queue) & (jobs.c.priority == lane.priority)
    depth = bounded_count(jobs, _CLAIMABLE, in_lane, jobs.c.run_at <= now)
    return select(literal(lane.queue).label("queue"), depth.label("depth"))


def list_overdue(tx: Transaction, now: datetime, grace: float) -> list[OverdueSchedule]:
    """Return schedules that should have fired more than `grace` seconds ago, longest overdue first."""
    return [
        OverdueSchedule(row.id, schedule_label(row.tenant_id, row.name), row.next_fire_at, row.recurrence)
        for row in tx.execute(_select_overdue(), {"due_before": now - timedelta(seconds=grace)})
    ]


@cache
def _select_overdue() -> Select[Any]:
    firing_stopped = select(queues.c.name).where(queues.c.name == ALL_QUEUES, queues.c.paused).exists()
    overdue = _s.next_fire_at < bindparam("due_before")
    query = select(_s.id, _s.tenant_id, _s.name, _s.next_fire_at, _s.recurrence).where(_FIRES, overdue, ~firing_stopped)
    return query.order_by(_s.next_fire_at).limit(MAX_OVERDUE)


def list_last_successes(tx: Transaction) -> dict[str, datetime]:
    """Return when schedules last succeeded, by label. Covers the last 20 occurrences of each schedule."""
    f = finished.c
    of_schedule = f.schedule_id == _s.id
    nth = (
        select(f.scheduled_at).where(of_schedule).order_by(f.scheduled_at.desc())
        .limit(1).offset(OCCURRENCES_PER_SCHEDULE - 1).correlate(schedules).scalar_subquery()
    )  # fmt: skip
    success = (
        select(f.finished_at)
        .where(
            of_schedule,
            f.state == JobState.COMPLETED.value,
            f.scheduled_at >= func.coalesce(nth, literal(EPOCH, Instant)),
        )
        .order_by(f.scheduled_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = tx.execute(select(_s.tenant_id, _s.name, success.label("at")).order_by(_s.id).limit(MAX_LABELED_SCHEDULES))
    return {schedule_label(row.tenant_id, row.name): row.at for row in rows if row.at is not None}


def schedule_label(tenant_id: str, name: str) -> str:
    """Return the label of a schedule in metrics and alerts; it includes the tenant unless that is `default`."""
    return name if tenant_id == "default" else f"{tenant_id}/{name}"
