"""Data of a tenant's overview page: recently finished jobs, items that need attention, next firings.

Every query reads the newest rows of an index or counts up to a limit, so the cost does not grow with the history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Label, Row, case, func, select

from timebell.feature import Feature
from timebell.ids import lowest_id_at
from timebell.model.attempts import FIRST_RECORD_PREFIX_LENGTH, first_start
from timebell.model.job import Job, Reason
from timebell.model.routes import ALL_ROUTES
from timebell.model.schedule import Schedule
from timebell.store.cluster import nodes
from timebell.store.cluster.nodes import Node
from timebell.store.cluster.rewinds import Rewind, list_rewinds
from timebell.store.jobs import backlogs, next_due, queues, waiting
from timebell.store.jobs.claim import fetch_lane_rows
from timebell.store.jobs.dead_letters import IS_DEAD_LETTER
from timebell.store.jobs.indexes import COUNT_LIMIT, RUNNING_CLAUSE, UnindexedFilter, select_due, split_by_running
from timebell.store.jobs.repository import job_from_row
from timebell.store.jobs.waiting import LateQueue, UnhandledTopic
from timebell.store.schedules.rows import try_schedule_from_row
from timebell.store.schema import finished, jobs, schedules, targets, tenants
from timebell.store.tenancy import monthly_quota
from timebell.store.tenancy.tenants import limits_from_json
from timebell.store.transaction import Transaction
from timebell.store.types import EPOCH

MAX_FINISHED_ROWS = 5_000
MAX_LISTED = 5
MAX_LATE_JOBS = 50
QUOTA_WARNING_RATIO = 0.95  # share of a limit
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
MISSED_REASONS = ("missed", "expired")


def first_record(table: Any) -> Label[str]:
    """Select the beginning of the attempt records of `table`, from which `first_start` reads."""
    return func.substr(table.c.errors, 1, FIRST_RECORD_PREFIX_LENGTH).label("first_record")


FIRST_RECORD = first_record(finished)


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """An object that needs attention: its id (or name), name, number of events, time of the last one, and reason."""

    id: str
    name: str
    count: int = 1
    at: datetime | None = None
    why: str | None = None


class FeatureStatus(NamedTuple):
    """Status of a feature: at most MAX_LISTED items that need attention, and the number of its active objects."""

    attention: Sequence[AttentionItem]
    active: int = 0


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """Current status of a tenant.

    Counts stop at COUNT_LIMIT + 1. `ended`: the newest rows finished within the last hour, newest first.
    `next_due_at`: the earliest due time of the pending jobs, which may be past.
    """

    ended: list[Row[Any]]
    counts: Mapping[str, int]
    next_due_at: datetime | None
    dead: int
    dead_lately: list[AttentionItem]
    missed: list[AttentionItem]
    overdue: list[AttentionItem]
    errored: list[AttentionItem]
    disabled: list[AttentionItem]
    unhandled: list[UnhandledTopic]
    late_queues: list[LateQueue]
    never_firing: list[AttentionItem]
    nodes: Sequence[Node]
    leader_id: str | None
    backlog_jobs: int
    stopped: bool
    quota: list[AttentionItem]
    of_features: Mapping[Feature, FeatureStatus]
    rewinds: Sequence[Rewind]
    """Losses of acknowledged writes noticed within the last day."""


def get_status(
    tx: Transaction, tenant_id: str, now: datetime, grace: float, features: Sequence[Feature],
    since: datetime | None = None,
) -> TenantStatus:  # fmt: skip
    """Return the status, cheap enough to query every second.

    `grace` is in seconds: schedules due for longer are overdue. Finished rows start at `since`, by default an hour ago.
    """
    f = finished.c
    ended = select(f.state, f.reason, f.topic, f.run_at, f.started_at, f.finished_at, FIRST_RECORD).where(
        UnindexedFilter(f.tenant_id) == tenant_id, f.finished_at >= (since or now - HOUR)
    )  # fmt: skip
    return TenantStatus(
        ended=list(tx.execute(ended.order_by(f.finished_at.desc()).limit(MAX_FINISHED_ROWS)).all()),
        counts=_count_live(tx, tenant_id),
        next_due_at=next((job.run_at for job in next_due.list_next_due(tx, tenant_id, None, 1, None)), None),
        dead=_count_up_to_limit(tx, select(f.id).where(f.tenant_id == tenant_id, IS_DEAD_LETTER)),
        dead_lately=_recent_dead_letters(tx, tenant_id, now), missed=_missed_schedules(tx, tenant_id, now),
        overdue=_overdue_schedules(tx, tenant_id, now - timedelta(seconds=grace)),
        errored=_errored_schedules(tx, tenant_id), disabled=_disabled_targets(tx, tenant_id),
        unhandled=waiting.list_unhandled(tx, tenant_id),
        late_queues=waiting.list_late_queues(tx, tenant_id, now - timedelta(seconds=grace)),
        never_firing=_never_firing_schedules(tx, tenant_id),
        nodes=nodes.list_nodes(tx), leader_id=nodes.get_lease(tx).holder,
        backlog_jobs=sum(backlog.jobs for backlog in backlogs.list_backlogs(tx, tenant_id)),
        stopped=queues.is_everything_paused(tx), quota=_quota_warning(tx, tenant_id, now),
        of_features={
            each: status for each in features if (status := each.read_status(tx, tenant_id)) is not None
        },
        rewinds=list_rewinds(tx, now - DAY)[:MAX_LISTED],
    )  # fmt: skip


def _count_live(tx: Transaction, tenant_id: str) -> dict[str, int]:
    not_running, running = split_by_running(select(jobs.c.id).where(jobs.c.tenant_id == tenant_id))
    return {
        "pending": _count_up_to_limit(tx, not_running.where(jobs.c.state == "pending")),
        "running": _count_up_to_limit(tx, running),
    }


def _count_up_to_limit(tx: Transaction, query: Any) -> int:
    limited = query.limit(COUNT_LIMIT + 1).subquery()
    return int(tx.execute(select(func.count()).select_from(limited)).scalar_one())


def _recent_dead_letters(tx: Transaction, tenant_id: str, now: datetime) -> list[AttentionItem]:
    """Return the errors of dead letters within the last day, most frequent first."""
    f = finished.c
    newest = (
        select(f.error_code, f.topic, f.finished_at, f.error)
        .where(f.tenant_id == tenant_id, IS_DEAD_LETTER, f.finished_at >= now - DAY)
        .order_by(f.finished_at.desc()).limit(1000).subquery()
    )  # fmt: skip
    row_count = func.count().label("many")
    query = select(newest.c.error_code, newest.c.topic, row_count, func.max(newest.c.finished_at).label("at"),
                   func.max(newest.c.error).label("error"))  # fmt: skip
    rows = tx.execute(
        query.group_by(newest.c.error_code, newest.c.topic).order_by(row_count.desc()).limit(MAX_LISTED)
    ).all()
    return [AttentionItem(row.error_code or "", row.topic, row.many, row.at, row.error) for row in rows]


def _missed_schedules(tx: Transaction, tenant_id: str, now: datetime) -> list[AttentionItem]:
    """Return schedules with occurrences missed within the last day."""
    f, occurrence_count = finished.c, func.sum(finished.c.skipped_count).label("many")
    # UUIDv7 ids begin with the time: the lower bound limits the scan of the tenant and state index to the last day.
    query = select(f.schedule_id, occurrence_count, func.max(f.scheduled_at).label("at")).where(
        f.tenant_id == tenant_id, f.state == "skipped", f.id >= lowest_id_at(now - DAY), f.reason.in_(MISSED_REASONS)
    )  # fmt: skip
    rows = tx.execute(query.group_by(f.schedule_id).order_by(occurrence_count.desc()).limit(MAX_LISTED)).all()
    ids = [row.schedule_id for row in rows if row.schedule_id]
    name_rows = tx.execute(select(schedules.c.id, schedules.c.name).where(schedules.c.id.in_(ids))).all() if ids else []
    names = {row.id: row.name for row in name_rows}
    return [
        AttentionItem(row.schedule_id or "", names.get(row.schedule_id, "a deleted schedule"), int(row.many), row.at)
        for row in rows
    ]


def _overdue_schedules(tx: Transaction, tenant_id: str, before: datetime) -> list[AttentionItem]:
    s = schedules.c
    query = select(s.id, s.name, s.next_fire_at).where(
        s.tenant_id == tenant_id, s.enabled, s.error.is_(None), s.next_fire_at < before
    )  # fmt: skip
    return [
        AttentionItem(row.id, row.name, at=row.next_fire_at)
        for row in tx.execute(query.order_by(s.next_fire_at).limit(MAX_LISTED)).all()
    ]


def _errored_schedules(tx: Transaction, tenant_id: str) -> list[AttentionItem]:
    s = schedules.c
    not_firing = ~s.enabled | s.error.is_not(None)
    query = (
        select(s.id, s.name, s.error)
        .where(s.tenant_id == tenant_id, not_firing, s.error.is_not(None))
        .limit(MAX_LISTED)
    )
    return [AttentionItem(row.id, row.name, why=row.error) for row in tx.execute(query).all()]


def _never_firing_schedules(tx: Transaction, tenant_id: str) -> list[AttentionItem]:
    """Return enabled schedules that have never fired and have no next occurrence."""
    s = schedules.c
    query = select(s.id, s.name, s.created_at).where(
        s.tenant_id == tenant_id, s.enabled, s.error.is_(None), s.next_fire_at.is_(None), s.last_fired_at.is_(None)
    )  # fmt: skip
    return [AttentionItem(row.id, row.name, at=row.created_at) for row in tx.execute(query.limit(MAX_LISTED)).all()]


def _disabled_targets(tx: Transaction, tenant_id: str) -> list[AttentionItem]:
    t = targets.c
    query = select(t.name, t.disabled_at, t.disabled_reason).where(
        t.tenant_id == tenant_id, t.disabled_at.is_not(None)
    ).limit(MAX_LISTED)  # fmt: skip
    return [
        AttentionItem(row.name, row.name, at=row.disabled_at, why=row.disabled_reason)
        for row in tx.execute(query).all()
    ]


def _quota_warning(tx: Transaction, tenant_id: str, now: datetime) -> list[AttentionItem]:
    """Return the tenant's monthly quota if it is nearly used up: used, end of the month, and limit."""
    stored_limits = tx.execute(select(tenants.c.limits).where(tenants.c.id == tenant_id)).scalar()
    limit = None if stored_limits is None else limits_from_json(stored_limits).jobs_per_month
    if limit is None:
        return []
    month = monthly_quota.get_monthly_usage(tx, tenant_id, now)
    nearly_used_up = month.used >= QUOTA_WARNING_RATIO * limit
    return [AttentionItem(month.timezone, tenant_id, month.used, month.ends_at, f"{limit:,}")] if nearly_used_up else []


def get_schedule_names(tx: Transaction, tenant_id: str, ids: Collection[str]) -> dict[str, str]:
    """Return the names of a tenant's schedules by id."""
    s = schedules.c
    return {
        row.id: row.name
        for row in tx.execute(select(s.id, s.name).where(s.tenant_id == tenant_id, s.id.in_(sorted(ids)))).all()
    }


def list_late_starts(
    tx: Transaction, tenant_id: str, now: datetime, lag: timedelta, column_filters: Mapping[str, Any]
) -> list[Job]:
    """Return up to MAX_LATE_JOBS jobs that started more than `lag` after they were due, newest first.

    Examines the MAX_FINISHED_ROWS newest jobs finished within an hour, and as many running ones. `column_filters`
    maps columns to required values; for `state` a collection of allowed values, for `attempt` a minimum.
    """
    late_starts: list[tuple[datetime, str, Any]] = []
    tenant_column: Any
    for table, condition in ((finished, finished.c.finished_at >= now - HOUR), (jobs, RUNNING_CLAUSE)):
        t = table.c
        tenant_column = UnindexedFilter(t.tenant_id) if table is finished else t.tenant_id
        columns = [t[name] for name in ("id", "run_at", "started_at", "state", *column_filters.keys() - {"state"})]
        newest = select(*columns, first_record(table)).where(tenant_column == tenant_id, condition)
        newest = newest.order_by((t.finished_at if table is finished else UnindexedFilter(t.id)).desc()).limit(
            MAX_FINISHED_ROWS
        )
        for row in tx.execute(newest).all():
            if row.started_at is None:
                continue
            due_at, started_at = first_start(row.run_at, row.started_at, row.first_record)
            if started_at - due_at > lag and _matches(row, column_filters):
                late_starts.append((started_at, row.id, table))
    newest_ids = [
        (id_, table) for _, id_, table in sorted(late_starts, key=lambda late: late[:2], reverse=True)[:MAX_LATE_JOBS]
    ]
    rows: dict[str, Job] = {}
    for table in (jobs, finished):
        ids = [id_ for id_, source_table in newest_ids if source_table is table]
        matches = (UnindexedFilter(table.c.tenant_id) == tenant_id) & table.c.id.in_(ids)
        rows |= {row.id: job_from_row(row) for row in tx.execute(select(table).where(matches))} if ids else {}
    return [rows[id_] for id_, _ in newest_ids if id_ in rows]


def _matches(row: Row[Any], column_filters: Mapping[str, Any]) -> bool:
    for name, value in column_filters.items():
        actual = getattr(row, name)
        if not (actual in value if name == "state" else actual >= value if name == "attempt" else actual == value):
            return False
    return True


def list_next_to_fire(tx: Transaction, tenant_id: str, end: datetime, limit: int) -> list[Schedule]:
    """Return up to `limit` schedules that fire before `end`, soonest first; empty while all firing is stopped."""
    if queues.is_everything_paused(tx):
        return []
    s = schedules.c
    query = select(schedules).where(s.tenant_id == tenant_id, s.enabled, s.error.is_(None), s.next_fire_at < end)
    decoded = (try_schedule_from_row(row) for row in tx.execute(query.order_by(s.next_fire_at).limit(limit)))
    return [schedule for schedule in decoded if schedule is not None]


def count_due(tx: Transaction, tenant_id: str, end: datetime) -> int:
    """Return the number of existing jobs that may start before `end`, counted up to COUNT_LIMIT + 1.

    Counts lane by lane in an index ordered by time, so later jobs are not read.
    """
    count = 0
    for lane in fetch_lane_rows(tx, ALL_ROUTES, EPOCH):
        count += _count_up_to_limit(tx, select_due([jobs.c.id], tenant_id, lane["queue"], lane["priority"], end))
        if count > COUNT_LIMIT:
            break
    return min(count, COUNT_LIMIT + 1)


def count_outcomes(tx: Transaction, tenant_id: str, start: datetime, end: datetime) -> dict[str, int]:
    """Return the number of occurrences that ended in [start, end) by outcome: done, failed, missed, other."""
    f = finished.c
    outcome = case(
        (f.state == "completed", "done"), (f.state == "failed", "failed"),
        ((f.state == "skipped") & f.reason.in_(MISSED_REASONS), "missed"), else_="other",
    )  # fmt: skip
    where = (UnindexedFilter(f.tenant_id) == tenant_id) & (f.finished_at >= start) & (f.finished_at < end)
    query = select(outcome.label("became"), func.sum(f.skipped_count).label("many")).where(where).group_by("became")
    return {row.became: int(row.many) for row in tx.execute(query).all()}


def sample_lags(tx: Transaction, tenant_id: str, start: datetime, end: datetime, limit: int) -> list[float]:
    """Return the start lags, in seconds and ascending, of the last `limit` runs that finished in [start, end)."""
    f = finished.c
    where = (UnindexedFilter(f.tenant_id) == tenant_id) & (f.finished_at >= start) & (f.finished_at < end)
    newest = select(f.run_at, f.started_at, FIRST_RECORD).where(where, f.state.in_(("completed", "failed")))
    rows = tx.execute(newest.order_by(f.finished_at.desc()).limit(limit)).all()
    starts = [first_start(row.run_at, row.started_at, row.first_record) for row in rows if row.started_at is not None]
    return sorted(max(0.0, (started_at - due_at).total_seconds()) for due_at, started_at in starts)


def get_names_and_retry_counts(
    tx: Transaction, tenant_id: str, job_ids: Collection[str], schedule_ids: Collection[str]
) -> tuple[dict[str, str], dict[str, int]]:  # fmt: skip
    """Return the names of schedules, and the number of manual retries of those finished jobs that have any, by id."""
    f = finished.c
    matches = f.id.in_(sorted(job_ids)) & (UnindexedFilter(f.tenant_id) == tenant_id)
    retried = select(f.id, f.manual_retries).where(matches, f.manual_retries > 0)
    retry_counts = {row.id: row.manual_retries for row in tx.execute(retried).all()} if job_ids else {}
    return get_schedule_names(tx, tenant_id, schedule_ids) if schedule_ids else {}, retry_counts


def count_quota_skips(tx: Transaction, since: Mapping[str, datetime]) -> dict[str, int]:
    """Return the number of jobs by tenant skipped by the monthly quota since an instant, among its COUNT_LIMIT newest
    skips."""
    f, counts = finished.c, {}
    for tenant_id, start in since.items():
        newest = (
            select(f.reason, f.finished_at, f.skipped_count).where(f.tenant_id == tenant_id, f.state == "skipped")
            .order_by(f.id.desc()).limit(COUNT_LIMIT).subquery()
        )  # fmt: skip
        matches = (newest.c.reason == Reason.QUOTA.value) & (newest.c.finished_at >= start)
        counts[tenant_id] = int(tx.execute(select(func.sum(newest.c.skipped_count)).where(matches)).scalar() or 0)
    return counts
