"""New zone data: instants that an earlier release of it gave are computed again, a batch a transaction.

Only what is still to come moves: what was due stays due at the instant that was stored. Only a newer release
computes again what an older one gave, so that nodes with different ones do not undo each other's work.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, select, text

from timebell.model.tzdata_change import Change, Tally
from timebell.recurrence import Recurrence, Release
from timebell.recurrence.tzdata_diff import moved_to, offset_at, overrides_again, resolve_again, under
from timebell.store.schedules.recurrence_column import recurrence_of
from timebell.store.schedules.schedules import replace_recurrence
from timebell.store.schedules.tzdata_log import count_schedule, record
from timebell.store.schema import jobs, schedules, zone_changes
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

log = logging.getLogger("timebell.zones")

PLACE = Statement(
    "WITH $rows UPDATE timebell_schedules AS s SET next_fire_at = d.next_fire_at, tzdata = d.tzdata,"
    " utc_offset = d.utc_offset FROM d WHERE s.id = d.id",
    id="id",
    next_fire_at="instant",
    tzdata="text",
    utc_offset="int",
)
PLACE_JOBS = Statement(
    "WITH $rows UPDATE timebell_jobs AS j SET run_at = d.run_at, scheduled_at = d.scheduled_at,"
    " expires_at = d.expires_at, tzdata = d.tzdata FROM d WHERE j.id = d.id",
    id="id",
    run_at="instant",
    scheduled_at="instant",
    expires_at="instant",
    tzdata="text",
)


def place_schedules(tx: Transaction, release: Release, after: str | None, now: datetime, most: int) -> str | None:
    """Compute the next instants of schedules again that an earlier release gave, from the id `after` on; where to
    go on, or None at the end.

    As an edit, it fires nothing by itself: an instant that has passed by now is for the planner to decide on.
    """
    query = select(schedules).where(_earlier(schedules.c.tzdata, release), schedules.c.next_fire_at > now)
    if after is not None:
        query = query.where(schedules.c.id > after)
    rows = tx.execute(query.order_by(schedules.c.id).limit(most).with_for_update()).all()
    tally, placed = Tally(), []
    for row in rows:
        try:
            stored = recurrence_by(release, row.recurrence)
            recurrence = overrides_again(stored, now) if stored.overrides else stored
            at = moved_to(recurrence, row.next_fire_at, row.utc_offset)
        except Exception:  # one broken schedule must not stop the others; the planner sets it aside when it is due
            log.exception("schedule %s cannot be computed by the zone data %s", row.id, release.version)
            continue
        if at is not None and row.last_fired_at is not None and at <= row.last_fired_at:
            continue  # an occurrence of that name has fired: this one stays where it is, and is not lost
        if recurrence.overrides != stored.overrides:
            replace_recurrence(tx, row, recurrence, now)
        count_schedule(tally, recurrence, row, at)
        placed.append({
            "id": row.id, "next_fire_at": tx.dialect.to_db(at), "tzdata": release.version,
            "utc_offset": offset_at(recurrence, at),
        })  # fmt: skip
    if placed:
        tx.fetch(PLACE, placed)
        record(tx, release, tally, now)
    return rows[-1].id if len(rows) == most else None


def place_jobs(tx: Transaction, release: Release, now: datetime, most: int) -> int:
    """Compute again when jobs run that were made at a local time and have not begun; how many were looked at."""
    query = _jobs_to_come(now).where(jobs.c.tzdata < release.version).limit(most)
    rows = tx.execute(query.with_for_update(skip_locked=True)).all()
    tally, placed = Tally(), []
    for row in rows:
        at = count_job(tally, row.timezone, row.local_time, row.run_at, release)
        by = at - row.run_at
        placed.append({
            "id": row.id, "run_at": tx.dialect.to_db(at), "tzdata": release.version,
            "scheduled_at": tx.dialect.to_db(at if row.schedule_id is None else row.scheduled_at),
            "expires_at": None if row.expires_at is None else tx.dialect.to_db(row.expires_at + by),
        })  # fmt: skip
    if placed:
        tx.fetch(PLACE_JOBS, placed)
        record(tx, release, tally, now)
        tx.notify()
    return len(rows)


def count_job(tally: Tally, timezone: str, local_time: str, was: datetime, release: Release) -> datetime:
    """Count a job that was made at a local time; when it runs by this release."""
    zone = release.zone(timezone)
    at = resolve_again(local_time, was, zone)
    after = zone.offset(int(at.timestamp()))
    before = after + round((at - was).total_seconds())
    tally.add(timezone, before, after, None if at == was else was, jobs=1)
    return at


def recurrence_by(release: Release, stored: str) -> Recurrence:
    """A stored recurrence, by this release."""
    recurrence = recurrence_of(stored)
    return recurrence if recurrence.release is release else under(recurrence, release)


def page_of_schedules(tx: Transaction, after: str | None, most: int) -> list[Row[Any]]:
    """Schedules that will fire, by id from `after` on, as they are stored."""
    query = select(schedules).where(schedules.c.next_fire_at.is_not(None))
    query = query if after is None else query.where(schedules.c.id > after)
    return list(tx.execute(query.order_by(schedules.c.id).limit(most)))


def page_of_jobs(tx: Transaction, now: datetime, after: str | None, most: int) -> list[Row[Any]]:
    """Jobs to come that were made at a local time, by id from `after` on."""
    query = _jobs_to_come(now)
    query = query if after is None else query.where(jobs.c.id > after)
    return list(tx.execute(query.order_by(jobs.c.id).limit(most)))


def recorded(tx: Transaction, version: str) -> list[Change]:
    """What this release of the zone data moved when it came, and what it left in place."""
    which = select(zone_changes).where(zone_changes.c.tzdata == version)
    ordered = which.order_by(zone_changes.c.timezone, zone_changes.c.offset_before, zone_changes.c.offset_after)
    return [
        Change(row.timezone, row.offset_before, row.offset_after, row.looked_at, row.schedules, row.jobs, 0, row.since)
        for row in tx.execute(ordered)
    ]


def _jobs_to_come(now: datetime) -> Select[Any]:
    """Jobs at a local time that have not begun: after a try, run_at is no local time any more."""
    in_index = text("local_time IS NOT NULL AND state = 'pending'")  # to the letter, or it is not used
    return select(jobs).where(in_index, jobs.c.attempt == 0, jobs.c.run_at > now)


def _earlier(column: ColumnElement[Any], release: Release) -> ColumnElement[bool]:
    """Given by an earlier release, or before releases were kept: their names sort by age (2025b, 2026a)."""
    return column.is_(None) | (column < release.version)
