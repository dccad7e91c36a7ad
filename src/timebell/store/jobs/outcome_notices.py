"""Endings that somebody is told of, by jobs written in the same transaction: each one is told of exactly once.

A dead letter is told to whoever listens to `timebell.job.dead`. The owner of a schedule (`notify`) is told of the
first failure in a row, and when it works again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, select

from timebell.ids import new_id
from timebell.model.job import Ending, JobState, NewJob
from timebell.model.payload import encode
from timebell.store.cluster import nodes
from timebell.store.jobs import claim as job_rows
from timebell.store.jobs.serial import Ended, end_in_turn
from timebell.store.schema import finished, jobs, schedules
from timebell.store.transaction import Transaction

DEAD = "timebell.job.dead"
ALERT = "timebell.alert"
OWN = "timebell."
"""Of jobs of Timebell's own topics nobody is told, so that telling cannot go in circles."""
TARGET = {"kind": "alert", "options": {}}


def end_told(tx: Transaction, endings: Sequence[Ending], *, skip: bool = False) -> Ended:
    """As `end_in_turn`, for any jobs; then tell of those whose fence held."""
    ids = [ending.id for ending in endings]
    of_schedules = select(jobs.c.id, jobs.c.schedule_id).where(jobs.c.id.in_(ids), jobs.c.schedule_id.is_not(None))
    schedule_of = {str(row.id): str(row.schedule_id) for row in tx.execute(of_schedules)}
    for ending in endings:
        ending.schedule_id = schedule_of.get(ending.id)
    ended = end_in_turn(tx, endings, list(schedule_of.values()), skip=skip)  # locks the schedules first
    written = select(finished).where(
        finished.c.id.in_(ended.ids), ~finished.c.topic.startswith(OWN),
        finished.c.finished_at >= min(ending.at for ending in endings),
    )  # fmt: skip
    rows = tx.execute(written.order_by(finished.c.scheduled_at)).all()
    dead = [row for row in rows if row.state == JobState.FAILED]
    told = [_dead(row) for row in dead] if dead and _heard(tx) else []
    told += _to_owners(tx, [row for row in rows if row.schedule_id is not None])
    if told:
        job_rows.insert(tx, told)
        tx.notify()
    return ended


def _heard(tx: Transaction) -> bool:
    return any(node.routes.hears(DEAD) for node in nodes.listed(tx))


def _dead(row: Row[Any]) -> NewJob:
    payload = {
        "jobId": row.id, "topic": row.topic, "error": row.error, "code": row.error_code, "attempt": row.attempt,
        "scheduleId": row.schedule_id, "scheduledAt": _instant(row.scheduled_at), "ownerId": row.owner_id,
    }  # fmt: skip
    return _job(row, DEAD, DEAD, payload, None)


def _to_owners(tx: Transaction, rows: Sequence[Row[Any]]) -> Iterable[NewJob]:
    """A notice for each schedule whose newest job here failed or succeeded, where the one before did otherwise."""
    newest = {row.schedule_id: row for row in rows if row.state in (JobState.FAILED, JobState.COMPLETED)}
    if not newest:
        return
    of = select(schedules.c.id, schedules.c.name, schedules.c.policies).where(schedules.c.id.in_(newest))
    for schedule in tx.execute(of.order_by(schedules.c.id)):
        names = orjson.loads(schedule.policies).get("notify")
        row = newest[schedule.id]
        failed = row.state == JobState.FAILED
        if not names or _failed_before(tx, schedule.id, [one.id for one in rows]) is failed:
            continue
        what = f"failed: {row.error}" if failed else "works again."
        payload = {
            "code": "SCHEDULE_FAILED", "resolved": not failed, "to": names,
            "text": f"{schedule.name} ({row.topic}) {what} Job {row.id}, due {_instant(row.scheduled_at)}.",
        }  # fmt: skip
        yield _job(row, ALERT, f"@{TARGET['kind']}", payload, encode(TARGET))


def _failed_before(tx: Transaction, schedule_id: str, these: Sequence[str]) -> bool:
    """Whether the last job of a schedule before these failed."""
    query = select(finished.c.state).where(
        finished.c.schedule_id == schedule_id, finished.c.id.not_in(these),
        finished.c.state.in_([JobState.FAILED.value, JobState.COMPLETED.value]),
    )  # fmt: skip
    return tx.execute(query.order_by(finished.c.scheduled_at.desc()).limit(1)).scalar() == JobState.FAILED


def _job(row: Row[Any], topic: str, route: str, payload: dict[str, Any], target: str | None) -> NewJob:
    at = row.finished_at
    return NewJob(
        id=new_id(at), tenant_id=row.tenant_id, topic=topic, scheduled_at=at, run_at=at, timezone=row.timezone,
        created_at=at, payload=encode(payload), owner_id=row.owner_id, route=route, target=target,
    )  # fmt: skip


def _instant(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
