"""Recompute stored instants after a tzdata update, one batch per transaction.

Only future instants move; due ones stay at the stored instant. A release recomputes only instants of older releases,
so that nodes with different releases do not undo each other's work.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, bindparam, select, text, update

from timebell.model.tzdata_change import ChangeTally, OffsetChange
from timebell.recurrence import Recurrence, Release
from timebell.recurrence.tzdata_diff import offset_at, re_resolve_local, relocate, relocate_overrides, with_release
from timebell.store.schedules.recurrence_column import recurrence_from_json
from timebell.store.schedules.schedules import replace_recurrence
from timebell.store.schedules.tzdata_log import record_changes, tally_schedule
from timebell.store.schema import jobs, schedules, zone_changes
from timebell.store.transaction import JOBS, SCHEDULES, Transaction

log = logging.getLogger("timebell.tzdata")

UPDATE_SCHEDULES = update(schedules).where(schedules.c.id == bindparam("schedule")).values({
    name: bindparam(f"new_{name}") for name in ("next_fire_at", "tzdata", "utc_offset")
})  # fmt: skip
UPDATE_JOBS = update(jobs).where(jobs.c.id == bindparam("job")).values({
    name: bindparam(f"new_{name}") for name in ("run_at", "scheduled_at", "expires_at", "tzdata")
})  # fmt: skip


def replan_schedules(tx: Transaction, release: Release, after: str | None, now: datetime, limit: int) -> str | None:
    """Recompute the next instants of schedules with ids above `after`; return the next `after`, or None at the end.

    Like an edit, this fires nothing by itself: the planner decides on instants that are now in the past.
    """
    query = select(schedules).where(_from_earlier_release(schedules.c.tzdata, release), schedules.c.next_fire_at > now)
    if after is not None:
        query = query.where(schedules.c.id > after)
    rows = tx.execute(query.order_by(schedules.c.id).limit(limit).with_for_update()).all()
    tally, updates = ChangeTally(), []
    for row in rows:
        try:
            stored = recurrence_under(release, row.recurrence)
            recurrence = relocate_overrides(stored, now) if stored.overrides else stored
            at = relocate(recurrence, row.next_fire_at, row.utc_offset)
        except Exception:  # one broken schedule must not stop the others; the planner marks it errored when due
            log.exception("could not recompute schedule %s with tzdata %s", row.id, release.version)
            continue
        if at is not None and row.last_fired_at is not None and at <= row.last_fired_at:
            continue  # an occurrence at or after `at` has fired; moving this one there would lose it
        if recurrence.overrides != stored.overrides:
            replace_recurrence(tx, row, recurrence, now)
        tally_schedule(tally, recurrence, row, at)
        updates.append({
            "schedule": row.id, "new_next_fire_at": at, "new_tzdata": release.version,
            "new_utc_offset": offset_at(recurrence, at),
        })  # fmt: skip
    if updates:
        tx.execute(UPDATE_SCHEDULES, updates)
        record_changes(tx, release, tally, now)
        tx.notify(SCHEDULES)
    return rows[-1].id if len(rows) == limit else None


def replan_jobs(tx: Transaction, release: Release, now: datetime, limit: int) -> int:
    """Recompute `run_at` of jobs defined by a local time that have not started; return the number examined."""
    query = _future_local_time_jobs(now).where(jobs.c.tzdata < release.version).limit(limit)
    rows = tx.execute(query.with_for_update(skip_locked=True)).all()
    tally, updates = ChangeTally(), []
    for row in rows:
        at = tally_job(tally, row.timezone, row.local_time, row.run_at, release)
        shift = at - row.run_at
        updates.append({
            "job": row.id, "new_run_at": at, "new_tzdata": release.version,
            "new_scheduled_at": at if row.schedule_id is None else row.scheduled_at,
            "new_expires_at": None if row.expires_at is None else row.expires_at + shift,
        })  # fmt: skip
    if updates:
        tx.execute(UPDATE_JOBS, updates)
        record_changes(tx, release, tally, now)
        tx.notify(JOBS)
    return len(rows)


def tally_job(tally: ChangeTally, timezone: str, local_time: str, previous: datetime, release: Release) -> datetime:
    """Count a job defined by a local time, and return its `run_at` according to this release."""
    zone = release.zone(timezone)
    at = re_resolve_local(local_time, previous, zone)
    after = zone.offset(int(at.timestamp()))
    before = after + round((at - previous).total_seconds())
    tally.add(timezone, before, after, None if at == previous else previous, jobs=1)
    return at


def recurrence_under(release: Release, stored: str) -> Recurrence:
    """Return a stored recurrence bound to this release."""
    recurrence = recurrence_from_json(stored)
    return recurrence if recurrence.release is release else with_release(recurrence, release)


def list_planned_schedules(tx: Transaction, after: str | None, limit: int) -> list[Row[Any]]:
    """Return the rows of schedules that will fire, in id order above `after`."""
    query = select(schedules).where(schedules.c.next_fire_at.is_not(None))
    query = query if after is None else query.where(schedules.c.id > after)
    return list(tx.execute(query.order_by(schedules.c.id).limit(limit)))


def list_local_time_jobs(tx: Transaction, now: datetime, after: str | None, limit: int) -> list[Row[Any]]:
    """Return the rows of future jobs defined by a local time, in id order above `after`."""
    query = _future_local_time_jobs(now)
    query = query if after is None else query.where(jobs.c.id > after)
    return list(tx.execute(query.order_by(jobs.c.id).limit(limit)))


def list_changes(tx: Transaction, version: str) -> list[OffsetChange]:
    """Return what this tzdata release moved and what it left in place when it was applied."""
    query = select(zone_changes).where(zone_changes.c.tzdata == version)
    ordered_query = query.order_by(zone_changes.c.timezone, zone_changes.c.offset_before, zone_changes.c.offset_after)
    return [
        OffsetChange(
            row.timezone, row.offset_before, row.offset_after, row.examined, row.schedules, row.jobs, 0, row.since
        )
        for row in tx.execute(ordered_query)
    ]


def _future_local_time_jobs(now: datetime) -> Select[Any]:
    """Select jobs defined by a local time that have not started: a retry's run_at is not a local time."""
    in_index = text("local_time IS NOT NULL AND state = 'pending'")  # must equal the predicate of the partial index
    return select(jobs).where(in_index, jobs.c.attempt == 0, jobs.c.run_at > now)


def _from_earlier_release(column: ColumnElement[Any], release: Release) -> ColumnElement[bool]:
    """Return the condition for rows of an earlier or unrecorded release; versions sort by age (2025b, 2026a)."""
    return column.is_(None) | (column < release.version)
