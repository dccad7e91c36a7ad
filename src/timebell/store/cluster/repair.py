"""Repair inconsistent rows: jobs held without reason, and schedules that lost their next instant.

The engine does not create such rows, but manual SQL, a restored backup or a bug may. A check costs a few index look-ups
and writes nothing if everything is consistent.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, Update, func, or_, select, text, update

from timebell.model.decide import next_cursor
from timebell.model.job import Hold, JobState, Kind
from timebell.model.repair_report import RepairReport
from timebell.model.schedule import Schedule
from timebell.recurrence.tzdata_diff import resume_from
from timebell.store.jobs import groups
from timebell.store.jobs.serial import lock_schedules, release_next
from timebell.store.schedules.rows import schedule_from_row, tzdata_columns
from timebell.store.schema import finished, jobs, queues, revisions, schedules, tenants
from timebell.store.transaction import JOBS, SCHEDULES, Transaction

log = logging.getLogger("timebell.repair")

COUNT_LIMIT = 10_000  # held jobs counted at most; there may be millions
MIN_LOOKBACK_SECONDS, MAX_LOOKBACK_SECONDS = 86_400.0, 36_500 * 86_400.0
STUCK_SCHEDULES_LIMIT = 1_000  # schedules released by one scan
RELEASED_HOLDS = [hold.value for hold in (Hold.OVERLAP, Hold.UNHANDLED, Hold.BACKLOG, Hold.GROUP, Hold.TENANT)]
"""Holds that something releases."""
FIRES = text("enabled AND enabled = true AND error IS NULL")
"""Literally as in the partial index. MariaDB, which has none, uses its index only for the comparison."""
LATEST_ROWS_SCANNED = 1_000  # rows per schedule and table, searched for its latest decided occurrence


def repair_holds(tx: Transaction) -> RepairReport:
    """Release jobs whose hold nothing else will release, and count the jobs that are held rightly."""
    released = _release_invalid_holds(tx)
    stuck = _find_stuck_schedules(tx)
    lock_schedules(tx, stuck)
    advanced = release_next(tx, stuck) + groups.release_stuck(tx)
    if released:
        tx.notify(JOBS)
    held = {row.hold: row.held for row in tx.execute(_count_by_hold())}
    return RepairReport(Counter(turn=advanced, hold=released), Counter(held))


@cache  # building the statement takes longer than executing it
def _count_by_hold() -> Select[Any]:
    sample = select(jobs.c.hold).where(jobs.c.hold.is_not(None)).limit(COUNT_LIMIT).subquery()
    return select(sample.c.hold, func.count().label("held")).group_by(sample.c.hold)


def _release_invalid_holds(tx: Transaction) -> int:
    """Release jobs whose hold nothing else will release; return how many."""
    return tx.execute(_update_invalid_holds()).rowcount


@cache
def _update_invalid_holds() -> Update:
    """Release the holds that nothing else will release.

    These are `overlap` without a schedule, `group` without a group limit, `tenant` without a tenant limit, `stopping`
    of a job that is not running, and unknown values.
    """
    hold = jobs.c.hold
    group_queues = select(queues.c.name).where(queues.c.concurrency_per_group.is_not(None))
    starts = select(tenants.c.starts).where(tenants.c.id == jobs.c.tenant_id).scalar_subquery()
    is_invalid = or_(
        hold.not_in(RELEASED_HOLDS),
        (hold == Hold.OVERLAP.value) & jobs.c.schedule_id.is_(None),
        (hold == Hold.GROUP.value) & or_(jobs.c.group_name.is_(None), jobs.c.queue.not_in(group_queues)),
        (hold == Hold.TENANT.value) & starts.is_(None),
    )
    is_pending = jobs.c.state == JobState.PENDING.value
    return update(jobs).where(hold.is_not(None), is_pending, is_invalid).values(hold=None)


def _find_stuck_schedules(tx: Transaction) -> list[str]:
    """Return schedules whose live jobs all wait (hold `overlap`): no job will end and release the next one."""
    return sorted(tx.execute(_select_stuck_schedules()).scalars())


@cache
def _select_stuck_schedules() -> Select[Any]:
    other = jobs.alias()
    is_released = other.c.hold.is_(None) | other.c.hold.not_in((Hold.OVERLAP.value, Hold.BACKLOG.value))
    has_released = select(other.c.id).where(other.c.schedule_id == jobs.c.schedule_id, is_released).exists()
    waits = (jobs.c.hold == Hold.OVERLAP.value) & jobs.c.schedule_id.is_not(None)
    return select(jobs.c.schedule_id).where(waits, ~has_released).distinct().limit(STUCK_SCHEDULES_LIMIT)


def repair_missing_next(tx: Transaction, since: datetime, now: datetime, limit: int) -> RepairReport:
    """Restore the next instant of up to `limit` schedules that lost it: the first undecided occurrence.

    `since` is the start of the stored history. Occurrences before it are not made up for, because their rows may have
    been pruned.
    """
    query = select(schedules.c.id).where(FIRES, schedules.c.next_fire_at.is_(None)).limit(limit)
    ids = list(tx.execute(query).scalars())
    return _repair_schedules(tx, ids, since, now) if ids else RepairReport()


def repair_every_next(
    tx: Transaction, after: str | None, since: datetime, now: datetime, limit: int
) -> tuple[RepairReport, str | None]:
    """Check the next instants of all schedules in pages, and correct missing ones and ones that omit occurrences.

    `after` is the last id of the previous page. Returns the report, and the `after` of the next page or None at the
    end.
    """
    query = select(schedules.c.id).order_by(schedules.c.id).limit(limit)
    if after is not None:
        query = query.where(schedules.c.id > after)
    ids = list(tx.execute(query).scalars())
    return _repair_schedules(tx, ids, since, now), ids[-1] if len(ids) == limit else None


def _repair_schedules(tx: Transaction, ids: list[str], since: datetime, now: datetime) -> RepairReport:
    query = select(schedules, revisions.c.effective_at).join(
        revisions, (revisions.c.schedule_id == schedules.c.id) & (revisions.c.revision == schedules.c.revision)
    )
    reasons: Counter[str] = Counter()
    repaired = 0
    for row in tx.execute(query.where(schedules.c.id.in_(ids))).all():
        if (reason := _reason_to_skip(tx, row, since, now)) is None:
            # The check above takes no lock, because planners skip locked schedules. Repeat it with the lock.
            lock_query = query.where(schedules.c.id == row.id).with_for_update(skip_locked=True, of=schedules)
            locked = tx.execute(lock_query).first()
            reason = "locked" if locked is None else _reason_to_skip(tx, locked, since, now)
        if reason is None:
            assert locked is not None
            repaired += _set_next(tx, locked, since)
        else:
            reasons[reason] += 1
    if repaired:
        tx.notify(SCHEDULES)
    return RepairReport({"schedule": repaired} if repaired else {}, reasons)


def _reason_to_skip(tx: Transaction, row: Row[Any], since: datetime, now: datetime) -> str | None:
    """Return why a schedule needs no repair, or None if it needs one."""
    if row.error is not None or not row.enabled:
        return "paused" if row.error is None else "errored"
    next_fire_at = row.next_fire_at
    if next_fire_at is not None and next_fire_at <= now:
        return "sound"  # due: the planner handles it
    try:
        schedule = schedule_from_row(row)
    except Exception:  # the planner marks it as errored when it is due
        return "errored"
    if next_fire_at is not None and row.tzdata != schedule.recurrence.release.version:
        return "sound"  # the tzdata replan handles it
    if schedule.recurrence.spec.delay is not None:
        if next_fire_at is not None:
            return "sound"
        return (
            "running"
            if _has_live_serial_job(tx, schedule.id)
            else None
            if _first_undecided(tx, schedule, row, since)[0]
            else "over"
        )
    first, error = next_cursor(schedule.recurrence, _decided_until(row))
    if first != next_fire_at:  # some occurrences may have been skipped since the last one that fired
        first, error = _first_undecided(tx, schedule, row, since)
    if next_fire_at is None:
        return "over" if first is None and error is None else None
    return None if first is not None and first < next_fire_at else "sound"


def _set_next(tx: Transaction, row: Row[Any], since: datetime) -> int:
    schedule = schedule_from_row(row)
    next_fire_at, error = _first_undecided(tx, schedule, row, since)
    log.warning("restored the next run of schedule %s: %s", schedule.id, next_fire_at)
    values = {"next_fire_at": next_fire_at, "error": error} | tzdata_columns(schedule.recurrence, next_fire_at)
    tx.execute(update(schedules).where(schedules.c.id == schedule.id).values(**values))
    return 1


def _decided_until(row: Row[Any]) -> datetime:
    """Return until when occurrences are decided: the last one that fired, or the last edit if it is later."""
    edited_at: datetime = row.effective_at
    return edited_at if row.last_fired_at is None else max(edited_at, row.last_fired_at)


def _first_undecided(
    tx: Transaction, schedule: Schedule, row: Row[Any], since: datetime
) -> tuple[datetime | None, str | None]:
    """Return the first undecided instant of a schedule, and the error if the search for it was given up."""
    recurrence = schedule.recurrence
    if recurrence.spec.delay is not None:
        completed_runs = (
            (finished.c.schedule_id == schedule.id) & finished.c.serial & finished.c.started_at.is_not(None)
        )
        latest = select(finished.c.started_at, finished.c.finished_at).where(completed_runs)
        last = tx.execute(latest.order_by(finished.c.scheduled_at.desc()).limit(1)).first()
        if last is not None and last.finished_at >= row.effective_at:
            return recurrence.next_after_run(last.started_at, last.finished_at), None
        return recurrence.first_fire(row.effective_at), None
    last = row.last_fired_at
    for table in (jobs, finished):
        until = [finished.c.skipped_to] if table is finished else []
        query = select(table.c.scheduled_at, *until)
        query = query.where(table.c.schedule_id == schedule.id, table.c.kind == Kind.PLANNED.value)
        for decided in tx.execute(query.order_by(table.c.scheduled_at.desc()).limit(LATEST_ROWS_SCANNED)):
            last = max(at for at in (last, *decided) if at is not None)
    earliest = max(row.effective_at, since)
    if last is None or last < earliest:
        return next_cursor(recurrence, earliest)
    return next_cursor(
        resume_from(recurrence, last, None), last
    )  # it may have been computed with another tzdata release


def _has_live_serial_job(tx: Transaction, schedule_id: str) -> bool:
    """Return whether a fixed-delay schedule has a live job whose completion will set its next instant."""
    in_backlog = jobs.c.hold == Hold.BACKLOG.value
    live = (jobs.c.schedule_id == schedule_id) & jobs.c.serial & (jobs.c.hold.is_(None) | ~in_backlog)
    return tx.execute(select(jobs.c.id).where(live).limit(1)).first() is not None


def history_start(now: datetime, retention: float) -> datetime:
    """Return from when on the rows of decided occurrences are stored, but at least one day ago.

    `retention` is in seconds.
    """
    return now - timedelta(seconds=min(max(retention, MIN_LOOKBACK_SECONDS), MAX_LOOKBACK_SECONDS))
