"""What the first page shows of a tenant: what just ended, what needs somebody, what comes next.

Everything is bounded: the newest rows of an index, or a count that stops. Whatever the history, it costs the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, case, func, select, text

from timebell.ids import first_id
from timebell.model.job import Job, Reason
from timebell.model.routes import ANYONE
from timebell.model.schedule import Schedule
from timebell.store.campaigns import progress
from timebell.store.campaigns.tables import campaigns
from timebell.store.jobs import backlogs, queues
from timebell.store.jobs.claim import CLAIMABLE, look
from timebell.store.jobs.dead_letters import DEAD
from timebell.store.jobs.indexes import RUNNING, Unsought, apart
from timebell.store.jobs.repository import COUNTED
from timebell.store.jobs.repository import read as as_job
from timebell.store.schedules.schedules import legible
from timebell.store.schema import finished, jobs, schedules, targets, tenants
from timebell.store.tenancy import monthly_quota
from timebell.store.tenancy.tenants import read_limits
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import sources
from timebell.store.types import EPOCH

NEWEST = 5_000
NAMED = 5
LATE = 50
NEARLY = 0.95  # of a limit
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
MISSED = ("missed", "expired")


@dataclass(frozen=True, slots=True)
class Named:
    """A schedule or target that needs somebody: its id (or name), its name, how often, when last, and why."""

    id: str
    name: str
    count: int = 1
    at: datetime | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """What stands now. Counts stop one above COUNTED; `ended` are the newest of the last hour, newest first."""

    ended: list[Row[Any]]
    counts: Mapping[str, int]
    dead: int
    dead_lately: list[Named]
    missed: list[Named]
    overdue: list[Named]
    faults: list[Named]
    disabled: list[Named]
    waiting: int
    stopped: bool
    sending: int
    gated: list[Named]
    sources: list[Named]
    quota: list[Named]


def signals(
    tx: Transaction, tenant_id: str, now: datetime, grace: float, since: datetime | None = None
) -> Signals:  # fmt: skip
    """Everything that is cheap enough to look at every second; what ended, from `since` on."""
    f = finished.c
    ended = select(f.state, f.reason, f.topic, f.run_at, f.started_at, f.finished_at).where(
        Unsought(f.tenant_id) == tenant_id, f.finished_at >= (since or now - HOUR)
    )  # fmt: skip
    return Signals(
        ended=list(tx.execute(ended.order_by(f.finished_at.desc()).limit(NEWEST)).all()),
        counts=_counts(tx, tenant_id), dead=_count(tx, select(f.id).where(f.tenant_id == tenant_id, DEAD)),
        dead_lately=_dead(tx, tenant_id, now), missed=_missed(tx, tenant_id, now),
        overdue=_overdue(tx, tenant_id, now - timedelta(seconds=grace)), faults=_faults(tx, tenant_id),
        disabled=_disabled(tx, tenant_id), waiting=sum(one.jobs for one in backlogs.waiting(tx, tenant_id)),
        stopped=queues.stopped(tx), sending=progress.under_way(tx, tenant_id), gated=_gated(tx, tenant_id),
        sources=_sources(tx, tenant_id), quota=_quota(tx, tenant_id, now),
    )  # fmt: skip


def _counts(tx: Transaction, tenant_id: str) -> dict[str, int]:
    resting, running = apart(select(jobs.c.id).where(jobs.c.tenant_id == tenant_id))
    return {"pending": _count(tx, resting.where(jobs.c.state == "pending")), "running": _count(tx, running)}


def _count(tx: Transaction, query: Any) -> int:
    counted = query.limit(COUNTED + 1).subquery()
    return int(tx.execute(select(func.count()).select_from(counted)).scalar_one())


def _dead(tx: Transaction, tenant_id: str, now: datetime) -> list[Named]:
    """The errors of what failed for good within a day, the most frequent first."""
    f = finished.c
    newest = (
        select(f.error_code, f.topic, f.finished_at, f.error)
        .where(f.tenant_id == tenant_id, DEAD, f.finished_at >= now - DAY)
        .order_by(f.finished_at.desc()).limit(1000).subquery()
    )  # fmt: skip
    many = func.count().label("many")
    query = select(newest.c.error_code, newest.c.topic, many, func.max(newest.c.finished_at).label("at"),
                   func.max(newest.c.error).label("error"))  # fmt: skip
    rows = tx.execute(query.group_by(newest.c.error_code, newest.c.topic).order_by(many.desc()).limit(NAMED)).all()
    return [Named(row.error_code or "", row.topic, row.many, row.at, row.error) for row in rows]


def _missed(tx: Transaction, tenant_id: str, now: datetime) -> list[Named]:
    """Schedules with occurrences that were missed within a day."""
    f, many = finished.c, func.sum(finished.c.skipped_count).label("many")
    # Ids begin with their time: the index of a tenant's states gives the last day without reading more.
    query = select(f.schedule_id, many, func.max(f.scheduled_at).label("at")).where(
        f.tenant_id == tenant_id, f.state == "skipped", f.id >= first_id(now - DAY), f.reason.in_(MISSED)
    )  # fmt: skip
    rows = tx.execute(query.group_by(f.schedule_id).order_by(many.desc()).limit(NAMED)).all()
    ids = [row.schedule_id for row in rows if row.schedule_id]
    found = tx.execute(select(schedules.c.id, schedules.c.name).where(schedules.c.id.in_(ids))).all() if ids else []
    names = {row.id: row.name for row in found}
    return [
        Named(row.schedule_id or "", names.get(row.schedule_id, "a deleted schedule"), int(row.many), row.at)
        for row in rows
    ]


def _overdue(tx: Transaction, tenant_id: str, before: datetime) -> list[Named]:
    s = schedules.c
    query = select(s.id, s.name, s.next_fire_at).where(
        s.tenant_id == tenant_id, s.enabled, s.fault.is_(None), s.next_fire_at < before
    )  # fmt: skip
    return [
        Named(row.id, row.name, at=row.next_fire_at)
        for row in tx.execute(query.order_by(s.next_fire_at).limit(NAMED)).all()
    ]


def _faults(tx: Transaction, tenant_id: str) -> list[Named]:
    s = schedules.c
    off = ~s.enabled | s.fault.is_not(None)
    query = select(s.id, s.name, s.fault).where(s.tenant_id == tenant_id, off, s.fault.is_not(None)).limit(NAMED)
    return [Named(row.id, row.name, why=row.fault) for row in tx.execute(query).all()]


def _disabled(tx: Transaction, tenant_id: str) -> list[Named]:
    t = targets.c
    query = select(t.name, t.disabled_at, t.disabled_reason).where(
        t.tenant_id == tenant_id, t.disabled_at.is_not(None)
    ).limit(NAMED)  # fmt: skip
    return [Named(row.name, row.name, at=row.disabled_at, why=row.disabled_reason) for row in tx.execute(query).all()]


def _gated(tx: Transaction, tenant_id: str) -> list[Named]:
    """Of the newest campaigns those that paused with a reason, and wait for somebody."""
    c = campaigns.c
    newest = (
        select(c.id, c.name, c.state, c.reason, c.updated_at).where(c.tenant_id == tenant_id)
        .order_by(c.id.desc()).limit(progress.NEWEST)
    )  # fmt: skip
    rows = [row for row in tx.execute(newest).all() if row.state == "paused" and row.reason]
    return [Named(row.id, row.name or "A campaign", at=row.updated_at, why=row.reason) for row in rows[:NAMED]]


def _quota(tx: Transaction, tenant_id: str, now: datetime) -> list[Named]:
    """The month of the tenant, once it is nearly used up: how much of it, until when, and of how much."""
    found = tx.execute(select(tenants.c.limits).where(tenants.c.id == tenant_id)).scalar()
    limit = None if found is None else read_limits(found).jobs_per_month
    if limit is None:
        return []
    month = monthly_quota.of(tx, tenant_id, now)
    nearly = month.used >= NEARLY * limit
    return [Named(month.timezone, tenant_id, month.used, month.ends_at, f"{limit:,}")] if nearly else []


def _sources(tx: Transaction, tenant_id: str) -> list[Named]:
    """Sources of triggers that cannot be read, or to which access was lost."""
    s = sources.c
    lost = s.fault.is_not(None) | s.orphaned_at.is_not(None)
    query = select(s.id, s.name, s.fault, s.orphaned_at, s.orphaned_reason).where(s.tenant_id == tenant_id, lost)
    return [
        Named(row.id, row.name, at=row.orphaned_at, why=row.orphaned_reason or row.fault)
        for row in tx.execute(query.order_by(s.name).limit(NAMED)).all()
    ]


def names(tx: Transaction, tenant_id: str, ids: Collection[str]) -> dict[str, str]:
    """The names of a tenant's schedules."""
    s = schedules.c
    return {
        row.id: row.name
        for row in tx.execute(select(s.id, s.name).where(s.tenant_id == tenant_id, s.id.in_(sorted(ids)))).all()
    }


def late(tx: Transaction, tenant_id: str, now: datetime, lag: timedelta, wanted: Mapping[str, Any]) -> list[Job]:
    """Jobs that started later than they were due by more than `lag`, newest first: of the NEWEST that ended within an
    hour, and of as many that run. `wanted`: columns and the values they must have, of `state` any of
    several, of `attempt` at least that."""
    found: list[tuple[datetime, str, Any]] = []
    mine: Any
    for table, which in ((finished, finished.c.finished_at >= now - HOUR), (jobs, RUNNING)):
        t = table.c
        mine = Unsought(t.tenant_id) if table is finished else t.tenant_id
        read = [t[name] for name in ("id", "run_at", "started_at", "state", *wanted.keys() - {"state"})]
        newest = select(*read).where(mine == tenant_id, which)
        newest = newest.order_by((t.finished_at if table is finished else Unsought(t.id)).desc()).limit(NEWEST)
        for row in tx.execute(newest).all():
            if row.started_at is not None and row.started_at - row.run_at > lag and _fits(row, wanted):
                found.append((row.started_at, row.id, table))
    newest_ids = [(id_, table) for _, id_, table in sorted(found, key=lambda one: one[:2], reverse=True)[:LATE]]
    rows: dict[str, Job] = {}
    for table in (jobs, finished):
        ids = [id_ for id_, of in newest_ids if of is table]
        mine = (table.c.tenant_id == tenant_id) & table.c.id.in_(ids)
        rows |= {row.id: as_job(row) for row in tx.execute(select(table).where(mine))} if ids else {}
    return [rows[id_] for id_, _ in newest_ids if id_ in rows]


def _fits(row: Row[Any], wanted: Mapping[str, Any]) -> bool:
    for name, value in wanted.items():
        has = getattr(row, name)
        if not (has in value if name == "state" else has >= value if name == "attempt" else has == value):
            return False
    return True


def soonest(tx: Transaction, tenant_id: str, end: datetime, most: int) -> list[Schedule]:
    """The schedules that fire first before an instant."""
    if queues.stopped(tx):
        return []
    s = schedules.c
    query = select(schedules).where(s.tenant_id == tenant_id, s.enabled, s.fault.is_(None), s.next_fire_at < end)
    read = (legible(row) for row in tx.execute(query.order_by(s.next_fire_at).limit(most)))
    return [schedule for schedule in read if schedule is not None]


def due(tx: Transaction, tenant_id: str, end: datetime) -> int:
    """How many jobs that are there already may start before an instant; counting stops above COUNTED. Each lane is
    read by its time: what waits for later is not looked at."""
    j, many = jobs.c, 0
    for lane in look(tx, ANYONE, EPOCH):
        query = select(j.id).where(
            text(CLAIMABLE), j.queue == lane["queue"], j.priority == lane["priority"], j.run_at < end,
            Unsought(j.tenant_id) == tenant_id,
        )  # fmt: skip
        many += _count(tx, query)
        if many > COUNTED:
            break
    return min(many, COUNTED + 1)


def ended_within(tx: Transaction, tenant_id: str, start: datetime, end: datetime) -> dict[str, int]:
    """What ended in [start, end): done, failed, missed, other."""
    f = finished.c
    became = case(
        (f.state == "completed", "done"), (f.state == "failed", "failed"),
        ((f.state == "skipped") & f.reason.in_(MISSED), "missed"), else_="other",
    )  # fmt: skip
    where = (Unsought(f.tenant_id) == tenant_id) & (f.finished_at >= start) & (f.finished_at < end)
    query = select(became.label("became"), func.sum(f.skipped_count).label("many")).where(where).group_by("became")
    return {row.became: int(row.many) for row in tx.execute(query).all()}


def about(
    tx: Transaction, tenant_id: str, job_ids: Collection[str], schedule_ids: Collection[str]
) -> tuple[dict[str, str], dict[str, int]]:  # fmt: skip
    """The names of schedules, and how often those of these finished jobs were replayed that were."""
    f = finished.c
    replayed = select(f.id, f.replays).where(f.id.in_(sorted(job_ids)), f.tenant_id == tenant_id, f.replays > 0)
    again = {row.id: row.replays for row in tx.execute(replayed).all()} if job_ids else {}
    return names(tx, tenant_id, schedule_ids) if schedule_ids else {}, again


def skipped_by_quota(tx: Transaction, since: Mapping[str, datetime]) -> dict[str, int]:
    """How many jobs of each tenant its month had no room for since an instant, among its COUNTED newest skips."""
    f, found = finished.c, {}
    for tenant_id, start in since.items():
        newest = (
            select(f.reason, f.finished_at, f.skipped_count).where(f.tenant_id == tenant_id, f.state == "skipped")
            .order_by(f.id.desc()).limit(COUNTED).subquery()
        )  # fmt: skip
        mine = (newest.c.reason == Reason.QUOTA.value) & (newest.c.finished_at >= start)
        found[tenant_id] = int(tx.execute(select(func.sum(newest.c.skipped_count)).where(mine)).scalar() or 0)
    return found
