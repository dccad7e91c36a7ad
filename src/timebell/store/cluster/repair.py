"""What was lost in the rows themselves is put right: turns that nobody handed on, schedules without their next instant.

The engine leaves no such rows: an operator's SQL, a restored backup or a fault of ours may. Each look costs a few
index look-ups, and nothing is written where nothing is wrong.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, select, update

from timebell.model.decide import next_of
from timebell.model.job import Hold, Kind
from timebell.model.repair_report import Healed
from timebell.model.schedule import Schedule
from timebell.recurrence.tzdata_diff import carried
from timebell.store.jobs import groups
from timebell.store.jobs.serial import LOCK_SCHEDULES, let_go
from timebell.store.schedules.schedules import read, stamp
from timebell.store.schema import finished, jobs, revisions, schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

log = logging.getLogger("timebell.healing")

COUNTED = 10_000  # held jobs; counting stops there, as millions may wait
DAY, LONG = 86_400.0, 36_500 * 86_400.0
LATEST = 1_000  # rows of a schedule among which its latest decided occurrence is looked for

# Nothing of these schedules is live but what waits for its turn, so nothing will end and hand it on.
STUCK = Statement(
    "SELECT DISTINCT j.schedule_id FROM timebell_jobs j WHERE j.hold = 'overlap' AND j.schedule_id IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM timebell_jobs o WHERE o.schedule_id = j.schedule_id"
    " AND (o.hold IS NULL OR o.hold NOT IN ('overlap', 'recover'))) LIMIT 1000"
)
# Held for what cannot come: a turn without a schedule or in a group without a limit, a stop of what does not run, a
# word that is none of ours.
RELEASE = Statement(
    "UPDATE timebell_jobs SET hold = NULL WHERE hold IS NOT NULL AND state = 'pending'"
    " AND (hold NOT IN ('overlap', 'unheard', 'recover', 'group', 'tenant')"
    " OR (hold = 'overlap' AND schedule_id IS NULL)"
    " OR (hold = 'group' AND (group_name IS NULL OR queue NOT IN (SELECT name FROM timebell_queues"
    " WHERE concurrency_per_group IS NOT NULL)))"
    " OR (hold = 'tenant' AND (SELECT t.starts FROM timebell_tenants t WHERE t.id = tenant_id) IS NULL))"
    " RETURNING id"
)
HELD = Statement(
    "SELECT hold, count(*) AS held FROM (SELECT hold FROM timebell_jobs WHERE hold IS NOT NULL LIMIT :most) AS h"
    " GROUP BY hold"
)
WITHOUT_NEXT = Statement(
    "SELECT id FROM timebell_schedules WHERE enabled AND fault IS NULL AND next_fire_at IS NULL LIMIT :most"
)


def holds(tx: Transaction) -> Healed:
    """Let go what waits for something that cannot come, and count what rightly waits."""
    released = len(tx.fetch(RELEASE))
    stuck = sorted(str(row["schedule_id"]) for row in tx.fetch(STUCK))
    if stuck:
        tx.fetch(LOCK_SCHEDULES, [{"id": schedule} for schedule in stuck])
    handed_on = let_go(tx, stuck) + groups.hand_on(tx)
    if released:
        tx.notify()
    waiting = {row["hold"]: row["held"] for row in tx.fetch(HELD, most=COUNTED)}
    return Healed(Counter(turn=handed_on, hold=released), Counter(waiting))


def without_next(tx: Transaction, since: datetime, now: datetime, most: int) -> Healed:
    """Give schedules that lost their next instant the first that is not decided yet; of at most so many.

    `since`: rows of what was decided before may be gone, so nothing older is made up for.
    """
    ids = [str(row["id"]) for row in tx.fetch(WITHOUT_NEXT, most=most)]
    return _look(tx, ids, since, now) if ids else Healed()


def all_next(
    tx: Transaction, after: str | None, since: datetime, now: datetime, most: int
) -> tuple[Healed, str | None]:
    """As `without_next` of all schedules, also of those whose next instant leaves some out; from an id on, and where
    to go on, or None at the end."""
    query = select(schedules.c.id).order_by(schedules.c.id).limit(most)
    if after is not None:
        query = query.where(schedules.c.id > after)
    ids = list(tx.execute(query).scalars())
    return _look(tx, ids, since, now), ids[-1] if len(ids) == most else None


def _look(tx: Transaction, ids: list[str], since: datetime, now: datetime) -> Healed:
    found = select(schedules, revisions.c.effective_at).join(
        revisions, (revisions.c.schedule_id == schedules.c.id) & (revisions.c.revision == schedules.c.revision)
    )
    reasons: Counter[str] = Counter()
    healed = 0
    for row in tx.execute(found.where(schedules.c.id.in_(ids))).all():
        if (reason := _sound(tx, row, since, now)) is None:
            # Looked at without a lock, as planners pass over locked ones. Now it counts.
            mine = found.where(schedules.c.id == row.id).with_for_update(skip_locked=True, of=schedules)
            locked = tx.execute(mine).first()
            reason = "locked" if locked is None else _sound(tx, locked, since, now)
        if reason is None:
            assert locked is not None
            healed += _heal(tx, locked, since)
        else:
            reasons[reason] += 1
    if healed:
        tx.notify()
    return Healed({"schedule": healed} if healed else {}, reasons)


def _sound(tx: Transaction, row: Row[Any], since: datetime, now: datetime) -> str | None:
    """Why this schedule is left as it is; None if it lost occurrences."""
    if row.fault is not None or not row.enabled:
        return "paused" if row.fault is None else "fault"
    at = row.next_fire_at
    if at is not None and at <= now:
        return "sound"  # due: the planner decides
    try:
        schedule = read(row)
    except Exception:  # the planner sets it aside when it is due, and says why
        return "fault"
    if at is not None and row.tzdata != schedule.recurrence.release.version:
        return "sound"  # the chore of new zone data has it
    if schedule.recurrence.spec.delay is not None:
        if at is not None:
            return "sound"
        return "running" if _in_turn(tx, schedule.id) else None if _first(tx, schedule, row, since)[0] else "over"
    first, fault = next_of(schedule.recurrence, _fired(row))
    if first != at:  # not the one after the last that fired: then some were skipped in between
        first, fault = _first(tx, schedule, row, since)
    if at is None:
        return "over" if first is None and fault is None else None
    return None if first is not None and first < at else "sound"


def _heal(tx: Transaction, row: Row[Any], since: datetime) -> int:
    schedule = read(row)
    first, fault = _first(tx, schedule, row, since)
    log.warning("schedule %s had lost its next instant; it is %s", schedule.id, first)
    values = {"next_fire_at": first, "fault": fault} | stamp(schedule.recurrence, first)
    tx.execute(update(schedules).where(schedules.c.id == schedule.id).values(**values))
    return 1


def _fired(row: Row[Any]) -> datetime:
    """An edit decides all up to it, and starts anew after it."""
    fired: datetime = row.effective_at
    return fired if row.last_fired_at is None else max(fired, row.last_fired_at)


def _first(tx: Transaction, schedule: Schedule, row: Row[Any], since: datetime) -> tuple[datetime | None, str | None]:
    """The first instant of a schedule that is not decided, and the reason where a search for it is given up."""
    recurrence = schedule.recurrence
    if recurrence.spec.delay is not None:
        ends = (finished.c.schedule_id == schedule.id) & finished.c.serial & finished.c.started_at.is_not(None)
        latest = select(finished.c.started_at, finished.c.finished_at).where(ends)
        last = tx.execute(latest.order_by(finished.c.scheduled_at.desc()).limit(1)).first()
        if last is not None and last.finished_at >= row.effective_at:
            return recurrence.following(last.started_at, last.finished_at), None
        return recurrence.first(row.effective_at), None
    last = row.last_fired_at
    for table in (jobs, finished):
        until = [finished.c.skipped_to] if table is finished else []
        query = select(table.c.scheduled_at, *until)
        query = query.where(table.c.schedule_id == schedule.id, table.c.kind == Kind.PLANNED.value)
        for decided in tx.execute(query.order_by(table.c.scheduled_at.desc()).limit(LATEST)):
            last = max(at for at in (last, *decided) if at is not None)
    floor = max(row.effective_at, since)
    if last is None or last < floor:
        return next_of(recurrence, floor)
    return next_of(carried(recurrence, last, None), last)  # by other zone data it may have had another instant


def _in_turn(tx: Transaction, schedule_id: str) -> bool:
    """Whether a job of it lives whose end sets the next instant of a fixed delay."""
    apart = jobs.c.hold == Hold.RECOVER.value
    live = (jobs.c.schedule_id == schedule_id) & jobs.c.serial & (jobs.c.hold.is_(None) | ~apart)
    return tx.execute(select(jobs.c.id).where(live).limit(1)).first() is not None


def since_of(now: datetime, retention: float) -> datetime:
    """From when on the rows of decided occurrences are still there; or a day ago, as one row too many does no harm."""
    return now - timedelta(seconds=min(max(retention, DAY), LONG))
