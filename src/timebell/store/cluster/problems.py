"""Objects of all tenants that failed, were missed or do not work, for alerts.

A failed job is a problem until it is retried or discarded, its schedule succeeds, or a day has passed; a missed
occurrence is one for an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

from sqlalchemy import Select, bindparam, func, or_, select, text

from timebell.feature import Feature
from timebell.model.job import JobState
from timebell.store.cluster.gauges import IS_MISSED, schedule_label
from timebell.store.jobs.dead_letters import IS_DEAD_LETTER
from timebell.store.schema import audit_exports, finished, schedules, targets
from timebell.store.transaction import Transaction

FAILURE_PERIOD = timedelta(days=1)
MISSED_PERIOD = timedelta(hours=1)
AUDIT_EXPORT_GRACE = timedelta(minutes=1)
"""A shorter failure of a receiver is not a problem: records wait in the database."""
MAX_ROWS = 10_000
"""The newest failed jobs that are grouped."""
MAX_PROBLEMS = 100
"""The maximum number of problems of each kind."""


class ObjectProblem(NamedTuple):
    """A problem of one object: a code, the label of the object, a sentence, the number of events, and a page."""

    code: str
    label: str
    text: str
    path: str
    events: int = 1


def page_path(tenant_id: str, path: str) -> str:
    """Return the path of a page, which selects the tenant of its object."""
    separator = "&" if "?" in path else "?"
    return path if tenant_id == "default" else f"{path}{separator}tenant={quote(tenant_id, safe='')}"


def list_problems(tx: Transaction, now: datetime, features: Sequence[Feature]) -> list[ObjectProblem]:
    """Return the problems of all objects, also of those of `features`."""
    return [
        *_list_failures(tx, now), *_list_missed(tx, now), *_list_errored(tx), *_list_disabled_targets(tx),
        *_list_failing_audit_exports(tx, now),
        *(problem for feature in features for problem in feature.list_problems(tx, now)),
    ]  # fmt: skip


def _list_failures(tx: Transaction, now: datetime) -> list[ObjectProblem]:
    """Return failed jobs, grouped by schedule, or else by topic, most jobs first."""
    return [_failure(row) for row in tx.execute(_select_failures(), {"since": now - FAILURE_PERIOD})]


@cache  # building the statement takes longer than executing it
def _select_failures() -> Select[Any]:
    f = finished.c
    newest = (
        select(f.tenant_id, f.schedule_id, f.topic, f.scheduled_at, f.finished_at, f.id)
        .where(IS_DEAD_LETTER, f.finished_at >= bindparam("since"))
        .order_by(f.finished_at.desc()).limit(MAX_ROWS).subquery()
    )  # fmt: skip
    n, group = newest.c, (newest.c.tenant_id, newest.c.schedule_id, newest.c.topic)
    ranked = select(
        *group, n.id.label("last_id"),
        func.count().over(partition_by=group).label("failed_count"),
        func.max(n.scheduled_at).over(partition_by=group).label("last_due"),
        func.row_number().over(partition_by=group, order_by=(n.finished_at.desc(), n.id.desc())).label("place"),
    ).subquery()  # fmt: skip
    groups = (
        select(ranked).where(ranked.c.place == 1).order_by(ranked.c.failed_count.desc()).limit(MAX_PROBLEMS).subquery()
    )
    later = finished.alias().c
    has_recovered = (
        select(later.id)
        .where(
            later.schedule_id == groups.c.schedule_id, later.scheduled_at > groups.c.last_due,
            later.state == JobState.COMPLETED.value,
        )
        .exists()
    )  # fmt: skip
    last = finished.alias().c
    return (
        select(groups, schedules.c.name, last.error)
        .join(last.id.table, last.id == groups.c.last_id)
        .outerjoin(schedules, schedules.c.id == groups.c.schedule_id)
        .where(or_(groups.c.schedule_id.is_(None), ~has_recovered))
    )


def _failure(row: Any) -> ObjectProblem:
    label = schedule_label(row.tenant_id, row.name or row.topic)
    jobs = "A job" if row.failed_count == 1 else f"{row.failed_count:,} jobs"
    sentence = f"{jobs} of {label} failed permanently within a day. Last error: {(row.error or '')[:500]}"
    path = f"/ui/jobs/{row.last_id}" if row.failed_count == 1 else f"/ui/dead-letters?topic={quote(row.topic, safe='')}"
    return ObjectProblem("JOB_FAILED", label, sentence, page_path(row.tenant_id, path), row.failed_count)


@cache
def _select_missed() -> Select[Any]:
    f, count = finished.c, func.sum(finished.c.skipped_count).label("missed_count")
    groups = (
        select(f.tenant_id, f.schedule_id, f.topic, count, func.max(f.scheduled_at).label("last_due"))
        .where(IS_MISSED, f.finished_at >= bindparam("since"))
        .group_by(f.tenant_id, f.schedule_id, f.topic).order_by(count.desc()).limit(MAX_PROBLEMS).subquery()
    )  # fmt: skip
    return select(groups, schedules.c.name).outerjoin(schedules, schedules.c.id == groups.c.schedule_id)


def _list_missed(tx: Transaction, now: datetime) -> list[ObjectProblem]:
    problems = []
    for row in tx.execute(_select_missed(), {"since": now - MISSED_PERIOD}):
        label = schedule_label(row.tenant_id, row.name or row.topic)
        runs = "1 run" if row.missed_count == 1 else f"{row.missed_count:,} runs"
        sentence = f"{label} missed {runs} within an hour, the last one due {row.last_due:%Y-%m-%d %H:%M:%S} UTC."
        path = f"/ui/schedules/{row.schedule_id}" if row.schedule_id else "/ui/jobs?q=status:skipped"
        path = page_path(row.tenant_id, path)
        problems.append(ObjectProblem("RUN_MISSED", label, sentence, path, int(row.missed_count)))
    return problems


_s, _t, _e = schedules.c, targets.c, audit_exports.c
_ERRORED_SCHEDULES = (
    select(_s.id, _s.tenant_id, _s.name, _s.error)
    .where(text("(NOT enabled OR error IS NOT NULL)"), _s.enabled, _s.error.is_not(None))
    .limit(MAX_PROBLEMS)
)
_DISABLED_TARGETS = (
    select(_t.tenant_id, _t.name, _t.disabled_reason).where(_t.disabled_at.is_not(None)).limit(MAX_PROBLEMS)
)
_FAILING_EXPORTS = select(_e.destination, _e.failing_since, _e.error).where(_e.failing_since <= bindparam("since"))


def _list_errored(tx: Transaction) -> list[ObjectProblem]:
    return [
        ObjectProblem(
            "SCHEDULE_ERRORED", label := schedule_label(row.tenant_id, row.name),
            f"{label} cannot fire: {row.error[:500]}", page_path(row.tenant_id, f"/ui/schedules/{row.id}"),
        )
        for row in tx.execute(_ERRORED_SCHEDULES)
    ]  # fmt: skip


def _list_disabled_targets(tx: Transaction) -> list[ObjectProblem]:
    return [
        ObjectProblem(
            "TARGET_DISABLED", label := schedule_label(row.tenant_id, row.name),
            f"The target {label} is disabled, and its jobs fail: {row.disabled_reason or 'its receiver is gone.'}",
            page_path(row.tenant_id, "/ui/targets"),
        )
        for row in tx.execute(_DISABLED_TARGETS)
    ]  # fmt: skip


def _list_failing_audit_exports(tx: Transaction, now: datetime) -> list[ObjectProblem]:
    return [
        ObjectProblem(
            "AUDIT_EXPORT_FAILED", row.destination,
            f"The audit log has not been delivered to {row.destination} since"
            f" {row.failing_since:%Y-%m-%d %H:%M:%S} UTC: {(row.error or '')[:500]}. The records wait in the database.",
            "/ui/audit-log",
        )
        for row in tx.execute(_FAILING_EXPORTS, {"since": now - AUDIT_EXPORT_GRACE})
    ]  # fmt: skip
