"""Jobs that run one at a time within their schedule, or so many within their group: whose turn is next, and when a
fixed delay fires again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select, update

from timebell.model.decide import SUPERSEDED
from timebell.model.job import Ending, Hold, JobState
from timebell.store.jobs.complete import end, retry
from timebell.store.schedules.recurrence_column import recurrence_of
from timebell.store.schema import jobs as table
from timebell.store.schema import schedules as schedule_rows
from timebell.store.statement import Statement
from timebell.store.transaction import Row, Transaction

log = logging.getLogger("timebell.completer")

# Without a next instant are only schedules that are over, and those of a fixed delay while a job of theirs lives.
# `in_turn`: whether any job waits for its turn, where that is known (else true: one may come before the lock is got).
LOCK_SCHEDULES = Statement(
    "WITH $rows SELECT id, CASE WHEN next_fire_at IS NULL THEN recurrence END AS waiting,"
    " $in_turn AS in_turn FROM timebell_schedules"
    " WHERE id $pick SELECT id FROM d $picked ORDER BY id $for_update",
    id="id",
)
LOCK_UNLOCKED = Statement(LOCK_SCHEDULES.template.template.replace("$for_update", "$skip_locked"), id="id")
NEXT_IN_TURN = Statement(
    """
    WITH $rows UPDATE timebell_jobs SET hold = NULL WHERE id $pick
        SELECT (SELECT j.id FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.hold = 'overlap'
                ORDER BY j.scheduled_at, j.id LIMIT 1)
        FROM d WHERE NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.serial
                                 AND (j.hold IS NULL OR j.hold NOT IN ('overlap', 'recover')))
    $picked RETURNING id
    """,
    id="id",
)
# Not while another job of it lives, whose end comes here too; what waits for `recover` is in nobody's way.
PUT_OFF = Statement(
    "WITH $rows UPDATE timebell_schedules AS s SET next_fire_at = d.next_fire_at FROM d WHERE s.id = d.id"
    " AND s.id $pick SELECT id FROM d $picked"
    " AND NOT EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = d.id AND j.serial"
    " AND (j.hold IS NULL OR j.hold <> 'recover')) RETURNING name",
    id="id",
    next_fire_at="instant",
)


class Ended(NamedTuple):
    """The ids whose fence still held, how many jobs that may let go, and whether a schedule got its next instant."""

    ids: set[str]
    let_go: int
    put_off: bool


def end_in_turn(tx: Transaction, endings: Sequence[Ending], schedules: Sequence[str], *, skip: bool = False) -> Ended:
    """As `end`, for jobs that take turns: the next of the schedule or group is let go, and a schedule of a fixed
    delay gets its next instant.

    The rows of schedules (and of queues with groups) are locked first, as the planner (and the claim) does, so that
    none is held behind a job just gone. With `skip` those whose own row, or schedule, somebody else has locked are left
    as they are.
    """
    locked = _lock(tx, schedules, LOCK_UNLOCKED if skip else LOCK_SCHEDULES)
    missing = set(schedules) - {str(row["id"]) for row in locked} if skip else None
    if missing:
        theirs = set(map(str, tx.execute(select(schedule_rows.c.id).where(schedule_rows.c.id.in_(missing))).scalars()))
        endings = [ending for ending in endings if ending.schedule_id not in theirs]  # else it is there no more
        if not endings:
            return Ended(set(), 0, put_off=False)
    return _hand_on(tx, locked, end(tx, endings, skip=skip), endings)


def hand_on(tx: Transaction, ended: Sequence[Row], endings: Sequence[Ending]) -> Ended:
    """What `end_in_turn` does, for jobs that have ended already, where something has come to wait for them since they
    began: whoever ran them did not know."""
    late = [row for row in ended if row["serial"]]
    return _hand_on(tx, _lock(tx, [str(row["schedule_id"]) for row in late]), late, endings)


def _lock(tx: Transaction, schedules: Sequence[str], lock: Statement = LOCK_SCHEDULES) -> Sequence[Row]:
    wanted = [{"id": schedule} for schedule in sorted(set(schedules))]
    return tx.fetch(lock, wanted) if wanted else []


def _hand_on(tx: Transaction, locked: Sequence[Row], ended: Sequence[Row], endings: Sequence[Ending]) -> Ended:
    ids: set[str] = set()
    left: set[str] = set()  # schedules of which a job ended, and another may wait
    waiting: dict[str, str] = {}
    of_groups = 0
    for row in ended:
        ids.add(str(row["id"]))
        if row["schedule_id"] is not None:
            left.add(str(row["schedule_id"]))
        of_groups += row["group_name"] is not None
    for row in locked:
        if not row["in_turn"]:
            left.discard(str(row["id"]))
        if row["waiting"] is not None:
            waiting[str(row["id"])] = row["waiting"]
    freed = of_groups + (let_go(tx, sorted(left)) if left else 0)
    put_off = _put_off(tx, waiting, ended, {ending.id: ending.at for ending in endings}) if waiting else False
    return Ended(ids, freed, put_off)


def complete(tx: Transaction, ending: Ending) -> Ended:
    """End one attempt, in a transaction that others write in too; in turn, if it has a schedule or group."""
    if ending.schedule_id is None and ending.grouped is None:
        ended = end(tx, [ending])
        return hand_on(tx, ended, [ending])._replace(ids={str(row["id"]) for row in ended})
    return end_in_turn(tx, [ending], [] if ending.schedule_id is None else [ending.schedule_id])


def retry_in_group(tx: Transaction, endings: Sequence[Ending]) -> set[str]:
    """As `retry`, for jobs of groups: in one transaction with letting the next one go."""
    return retry(tx, endings)


def _put_off(tx: Transaction, waiting: dict[str, str], ended: Sequence[Row], ends: dict[str, datetime]) -> bool:
    """Give the schedules of a fixed delay whose run ended their next instant; whether there was one."""
    found: dict[str, datetime] = {}
    for row in ended:
        id_, end = str(row["schedule_id"]), ends[str(row["id"])]
        if id_ not in waiting:
            continue
        try:
            recurrence = recurrence_of(waiting[id_])
            if recurrence.spec.delay is None:
                continue
            following = recurrence.following(tx.dialect.from_db(row["started_at"]), end)
        except Exception:  # the planner looks at it at once, and sets it aside with the reason
            log.exception("schedule %s cannot be read", id_)
            following = end
        if following is not None:
            found[id_] = max(following, found.get(id_, following))
    rows = [{"id": id_, "next_fire_at": tx.dialect.to_db(at)} for id_, at in found.items()]
    return bool(rows) and bool(tx.fetch(PUT_OFF, rows))


def let_go(tx: Transaction, schedules: Sequence[str]) -> int:
    """Where nothing of a schedule is live but what waits for its turn, the first in turn may start; how many do."""
    freed = len(tx.fetch(NEXT_IN_TURN, [{"id": schedule} for schedule in schedules])) if schedules else 0
    if freed:
        tx.notify()
    return freed


def supersede(tx: Transaction, successors: Mapping[str, str], now: datetime) -> int:
    """Make way for the newest job of each schedule: end what is pending before it, ask what runs to stop.

    Returns how many were asked. The successor waits for its turn, and so is let go when the last one ends.
    """
    previous = select(table).where(table.c.schedule_id.in_(successors), table.c.id.not_in(successors.values()))
    endings, running = [], []
    for row in tx.execute(previous.order_by(table.c.id).with_for_update()):
        if row.state == JobState.PENDING:
            endings.append(Ending(
                row.id, row.attempt, JobState.CANCELLED, now, was=JobState.PENDING, counts=False,
                reason=SUPERSEDED, errors=row.errors, replaced_by=successors[row.schedule_id],
            ))  # fmt: skip
        else:
            running.append(row.id)
    if endings:
        end_in_turn(tx, endings, list(successors))
    if running:
        tx.execute(update(table).where(table.c.id.in_(running)).values(cancel_asked=True, hold=Hold.STOPPING.value))
    return len(running)
