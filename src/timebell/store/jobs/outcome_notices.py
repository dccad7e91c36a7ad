"""Enqueue notification jobs for outcomes, in the transaction of the completion (outbox): exactly one per outcome.

Handlers of the topic `timebell.job.dead` are notified of each dead letter. The alert channels of a schedule (`notify`)
are notified of the first of several consecutive failures, and of the next success.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, select, update

from timebell.ids import new_id
from timebell.model.error_groups import error_group
from timebell.model.job import Completion, JobState, NewJob
from timebell.model.payload import encode
from timebell.store.cluster import nodes
from timebell.store.jobs import claim as job_rows
from timebell.store.jobs.serial import complete_serial
from timebell.store.schema import finished, jobs, schedules
from timebell.store.transaction import Transaction

DEAD_JOB_TOPIC = "timebell.job.dead"
ALERT_TOPIC = "timebell.alert"
OWN_TOPIC_PREFIX = "timebell."
"""Outcomes of jobs with Timebell's own topics cause no notifications, which prevents loops."""
ALERT_TARGET = {"kind": "alert", "options": {}}


def complete_with_notices(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> set[str]:
    """Complete jobs as `complete_serial`, and enqueue the notification jobs for those whose fence held.

    The jobs may be of any kind; their schedules are looked up here. Returns the ids of those whose fence held.
    """
    ids = [completion.id for completion in completions]
    of_schedules = select(jobs.c.id, jobs.c.schedule_id).where(jobs.c.id.in_(ids), jobs.c.schedule_id.is_not(None))
    schedule_of = {str(row.id): str(row.schedule_id) for row in tx.execute(of_schedules)}
    for completion in completions:
        completion.schedule_id = schedule_of.get(completion.id)
    written = complete_serial(
        tx, completions, list(schedule_of.values()), skip_locked=skip_locked
    )  # locks the schedules before the jobs
    query = select(finished).where(
        finished.c.id.in_(written), ~finished.c.topic.startswith(OWN_TOPIC_PREFIX),
        finished.c.finished_at >= min(completion.at for completion in completions),
    )  # fmt: skip
    rows = tx.execute(query.order_by(finished.c.scheduled_at)).all()
    dead = [row for row in rows if row.state == JobState.FAILED]
    _set_error_groups(tx, dead)
    notices = [_dead_job_notice(row) for row in dead] if dead and _has_dead_job_handler(tx) else []
    notices += _owner_notices(tx, [row for row in rows if row.schedule_id is not None])
    if notices:
        job_rows.insert_returning_ids(tx, notices)
    return written


def _set_error_groups(tx: Transaction, dead: Sequence[Row[Any]]) -> None:
    """Store the error group of failed jobs, by which dead letters are grouped and filtered."""
    ids_by_group: dict[str, list[str]] = {}
    for row in dead:
        ids_by_group.setdefault(error_group(row.error), []).append(row.id)
    for group, ids in ids_by_group.items():
        tx.execute(update(finished).where(finished.c.id.in_(ids)).values(error_group=group))


def _has_dead_job_handler(tx: Transaction) -> bool:
    return any(node.routes.handles(DEAD_JOB_TOPIC) for node in nodes.list_nodes(tx))


def _dead_job_notice(row: Row[Any]) -> NewJob:
    payload = {
        "jobId": row.id, "topic": row.topic, "error": row.error, "code": row.error_code, "attempt": row.attempt,
        "scheduleId": row.schedule_id, "scheduledAt": _format_instant(row.scheduled_at), "ownerId": row.owner_id,
    }  # fmt: skip
    return _notice_job(row, DEAD_JOB_TOPIC, DEAD_JOB_TOPIC, payload, None)


def _owner_notices(tx: Transaction, rows: Sequence[Row[Any]]) -> Iterable[NewJob]:
    """Yield a notice for each schedule with a changed outcome: failure after success, or success after failure.

    Compares the newest of these jobs with the last job of the schedule before them.
    """
    newest = {row.schedule_id: row for row in rows if row.state in (JobState.FAILED, JobState.COMPLETED)}
    if not newest:
        return
    query = select(schedules.c.id, schedules.c.name, schedules.c.policies).where(schedules.c.id.in_(newest))
    for schedule in tx.execute(query.order_by(schedules.c.id)):
        names = orjson.loads(schedule.policies).get("notify")
        row = newest[schedule.id]
        failed = row.state == JobState.FAILED
        if not names or _failed_before(tx, schedule.id, [other.id for other in rows]) is failed:
            continue
        outcome = f"failed: {row.error}" if failed else "works again."
        payload = {
            "code": "SCHEDULE_FAILED", "resolved": not failed, "to": names,
            "text": f"{schedule.name} ({row.topic}) {outcome} Job {row.id}, due {_format_instant(row.scheduled_at)}.",
        }  # fmt: skip
        yield _notice_job(row, ALERT_TOPIC, f"@{ALERT_TARGET['kind']}", payload, encode(ALERT_TARGET))


def _failed_before(tx: Transaction, schedule_id: str, job_ids: Sequence[str]) -> bool:
    """Return whether the last job of a schedule before these failed."""
    query = select(finished.c.state).where(
        finished.c.schedule_id == schedule_id, finished.c.id.not_in(job_ids),
        finished.c.state.in_([JobState.FAILED.value, JobState.COMPLETED.value]),
    )  # fmt: skip
    return tx.execute(query.order_by(finished.c.scheduled_at.desc()).limit(1)).scalar() == JobState.FAILED


def _notice_job(row: Row[Any], topic: str, route: str, payload: dict[str, Any], target: str | None) -> NewJob:
    at = row.finished_at
    return NewJob(
        id=new_id(at), tenant_id=row.tenant_id, topic=topic, scheduled_at=at, run_at=at, timezone=row.timezone,
        created_at=at, payload=encode(payload), owner_id=row.owner_id, route=route, target=target,
    )  # fmt: skip


def _format_instant(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
