"""Schedules: written by name, and fired in one transaction."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, insert, select, update

from timebell.errors import Conflict, InvalidRecurrence, NotFound, RevisionStale
from timebell.model.decide import next_of, passed_over, plan
from timebell.model.job import Attempt, Hold, NewJob
from timebell.model.payload import legible as legible_text
from timebell.model.policy import Overlap
from timebell.model.schedule import Schedule
from timebell.recurrence import Override, Recurrence
from timebell.recurrence.instants import format_instant
from timebell.recurrence.overrides import carried as carried_overrides
from timebell.store.jobs import claim, serial, start_on_insert
from timebell.store.jobs.bind_targets import bound
from timebell.store.schedules import tzdata_log
from timebell.store.schedules.queries import EVERY as EVERY
from timebell.store.schedules.queries import find as find
from timebell.store.schedules.queries import firing as firing
from timebell.store.schedules.queries import made_at as made_at
from timebell.store.schedules.queries import page as page
from timebell.store.schedules.queries import recent as recent
from timebell.store.schedules.queries import revisions_of as revisions_of
from timebell.store.schedules.queries import upcoming as upcoming
from timebell.store.schedules.rows import legible as legible
from timebell.store.schedules.rows import planned_action, row_of, schedule_of, stamped
from timebell.store.schedules.rows import read as read
from timebell.store.schedules.rows import read_parts as read_parts
from timebell.store.schedules.rows import stamp as stamp
from timebell.store.schema import jobs as job_table
from timebell.store.schema import revisions, schedules
from timebell.store.statement import Statement
from timebell.store.transaction import SCHEDULES, Transaction
from timebell.tracing import without_context

log = logging.getLogger("timebell.planner")
SOON = timedelta(seconds=10)  # what fires later is seen by the next heartbeats

# Makes the jobs of a schedule's occurrences: (schedule, [(at, hold)], now) -> rows. Given by the caller, as
# defaults of topics and targets are not the store's business.
Build = Callable[[Schedule, datetime, Any, datetime], NewJob]


def put(
    tx: Transaction, schedule: Schedule, build: Build, now: datetime, *, replace: bool, revision: int | None = None
) -> Schedule:  # fmt: skip
    """Write a schedule under its name; the same spec again is no edit.

    An edit first decides every occurrence of the old spec up to now (so it loses none), then starts the new
    one after now (so it fires nothing by itself). Raises Conflict (SCHEDULE_EXISTS) unless `replace`; with a `revision`
    RevisionStale unless it is at that one, NotFound if there is none.
    """
    schedule = bound(tx, schedule)
    named = (schedules.c.tenant_id == schedule.tenant_id) & (schedules.c.name == schedule.name)
    row = tx.execute(select(schedules).where(named).with_for_update()).first()
    if revision is not None:
        _expect(schedule.name, row, revision)
    if row is None:
        tx.execute(insert(schedules).values(**row_of(schedule)))
        revise(tx, schedule, schedule.created_at)  # as its first instant is the one after that
        tell(tx, schedule, now)
        return schedule
    if not replace:
        raise Conflict(
            f"There is a schedule {schedule.name!r} already.", code="SCHEDULE_EXISTS", existing=row.id,
            fix="Use another name, or put it by name to change it.",
        )  # fmt: skip
    old = legible(row)
    if old is None:
        return write_over(tx, row.id, schedule, None, now)
    same = row_of(schedule)
    unchanged = dataclasses.replace(old.recurrence, overrides=()) == schedule.recurrence and all(
        without_context(same[part]) == without_context(getattr(row, part)) for part in ("action", "policies")
    )
    by_code = schedule.code_hash is not None and schedule.code_hash == old.code_hash
    if old.fault is None and (unchanged or by_code):
        return old
    return edit(tx, old, schedule, build, now)


def _expect(name: str, row: Row[Any] | None, revision: int) -> None:
    if row is None:
        raise NotFound(f"There is no schedule {name}.", code="SCHEDULE_NOT_FOUND")
    if row.revision != revision:
        raise RevisionStale(
            f"{name} is at revision {row.revision}, and the change is of {revision!r:.20}. It was changed last at"
            f" {format_instant(row.updated_at)}.",
            existing=row.id, fix="Read it again, and change that.",
        )  # fmt: skip


def edit(
    tx: Transaction, old: Schedule, new: Schedule, build: Build, now: datetime,
    overrides: Sequence[Override] | None = None,
) -> Schedule:  # fmt: skip
    """Write a new spec, which has no overrides yet, over a locked one. Those that the old one has (or the given
    ones) stay where they still name an occurrence; the schedule says which were `dropped`."""
    settle(tx, old, build, now)
    since = decided_until(old, now)
    kept, dropped = carried_overrides(
        old.recurrence.overrides if overrides is None else overrides, new.recurrence, since
    )
    for one in dropped:
        log.warning("schedule %s has no occurrence at %s to override any more", old.id, one.at)
    if kept:
        new = dataclasses.replace(new, recurrence=dataclasses.replace(new.recurrence, overrides=kept))
    written = write_over(tx, old.id, dataclasses.replace(new, updated_at=now), old, now)
    return dataclasses.replace(written, dropped=dropped)


def settle(tx: Transaction, schedule: Schedule, build: Build, now: datetime) -> None:
    """Decide what is due by now under the spec that is: a pause leaves it out, otherwise it fires."""
    if schedule.enabled:
        _fire(tx, [schedule], build, now)
    else:
        pass_over(tx, schedule, build, now)


def decided_until(schedule: Schedule, now: datetime) -> datetime:
    """Up to where everything is decided, once it is settled at `now`: further where somebody else was at the locked row
    first, with a clock that was ahead, or read later."""
    last = now if schedule.last_fired_at is None else max(now, schedule.last_fired_at)
    cursor = schedule.next_fire_at
    if cursor is not None and cursor > now and schedule.recurrence.spec.delay is None:
        with suppress(InvalidRecurrence):  # a search for earlier ones that was given up
            before = schedule.recurrence.previous(cursor)
            last = last if before is None else max(last, before)
    return last


def pass_over(tx: Transaction, schedule: Schedule, build: Build, now: datetime) -> None:
    """Record what a pause left out up to now, and move the cursor behind it."""
    planned = passed_over(schedule, now)
    tzdata_log.due(tx, [schedule], now)
    if planned.skips:
        claim.skip(
            tx, [(build(schedule, one.at, None, now), one.reason, one.count, one.to) for one in planned.skips], now,
            _pause(schedule),
        )  # fmt: skip
    values = {"next_fire_at": planned.next_fire_at, "updated_at": now, "fault": planned.fault}
    values |= stamped(schedule, planned.next_fire_at)
    tx.execute(update(schedules).where(schedules.c.id == schedule.id).values(**values))


def _pause(schedule: Schedule) -> str | None:
    """The pause as its rows keep it: the schedule forgets it when it goes on."""
    if schedule.paused_at is None:
        return None
    because = f": {schedule.pause_reason}" if schedule.pause_reason else ""
    return legible_text(f"Paused since {format_instant(schedule.paused_at)}{because}", 2000)


def write_over(tx: Transaction, id_: str, schedule: Schedule, old: Schedule | None, now: datetime) -> Schedule:
    """Write a new spec over an old one. What was decided already is behind its cursor, also if `now` lags."""
    mine = schedules.c.id == id_
    row = tx.execute(select(schedules).where(mine)).one()
    written = row_of(schedule)
    for kept in ("id", "enabled", "created_at", "created_by", "last_fired_at", "paused_at", "pause_reason"):
        del written[kept]
    since = now if old is None else decided_until(old, now)
    since = since if row.last_fired_at is None else max(since, row.last_fired_at)
    following, fault = _after_edit(tx, row, schedule, old, since)
    written |= {
        "revision": row.revision + 1, "fault": fault, "code_hash": schedule.code_hash or row.code_hash,
        "next_fire_at": following,
    }  # fmt: skip
    written |= stamp(schedule.recurrence, written["next_fire_at"])
    tx.execute(update(schedules).where(mine).values(**written))
    edited = read(tx.execute(select(schedules).where(mine)).one())
    revise(tx, edited, since)
    tell(tx, edited, now)
    return edited


def tell(tx: Transaction, schedule: Schedule, now: datetime) -> None:
    """Make the planners of other nodes look again, if it fires before their next heartbeat does."""
    if schedule.enabled and schedule.next_fire_at is not None and schedule.next_fire_at <= now + SOON:
        tx.notify(SCHEDULES)


def _after_edit(
    tx: Transaction, row: Row[Any], schedule: Schedule, old: Schedule | None, since: datetime
) -> tuple[datetime | None, str | None]:
    """The first instant of a new spec, and the reason where a search for it is given up. Of a fixed delay: none while
    a run goes on, whose end decides; and the pause since the last run, if there was one, goes on with the new length.
    """
    recurrence, delay = schedule.recurrence, schedule.recurrence.spec.delay
    if delay is None:
        return next_of(recurrence, since)
    apart = job_table.c.hold == Hold.RECOVER.value
    in_turn = (job_table.c.schedule_id == row.id) & job_table.c.serial & (job_table.c.hold.is_(None) | ~apart)
    if tx.execute(select(job_table.c.id).where(in_turn).limit(1)).first() is not None:
        return None, None
    paused = None if old is None or row.last_fired_at is None else old.recurrence.spec.delay
    unnamed = row.created_at + timedelta(microseconds=delay.length)  # the anchor of a spec that names none
    if paused is not None and row.next_fire_at is not None and recurrence.next(since) in (None, unnamed):
        begun = row.next_fire_at - timedelta(microseconds=paused.length)
        following = recurrence.following(None, begun)
        if following is None or following > since:
            return following, None
    return recurrence.first(since), None


def replace_recurrence(tx: Transaction, row: Row[Any], recurrence: Recurrence, now: datetime) -> None:
    """Write another recurrence of a locked schedule as a revision that leaves its cursor where it is."""
    edited = dataclasses.replace(read(row), recurrence=recurrence, revision=row.revision + 1, updated_at=now)
    written = row_of(edited)
    values = {part: written[part] for part in ("recurrence", "revision", "updated_at")}
    tx.execute(update(schedules).where(schedules.c.id == row.id).values(**values))
    revise(tx, edited, now)


def revise(tx: Transaction, schedule: Schedule, since: datetime) -> None:
    """Keep what the schedule is for the instants after `since`."""
    row = row_of(schedule)
    kept = {part: row[part] for part in ("tenant_id", "recurrence", "action", "policies", "revision")}
    tx.execute(insert(revisions).values(schedule_id=schedule.id, effective_at=since, **kept))


@dataclass(slots=True)
class Fired:
    """What one pass of the planner did, and when the next schedule is due."""

    schedules: int = 0
    jobs: int = 0
    skips: int = 0
    stopping: int = 0
    next_fire_at: datetime | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    """How many of the skips each reason has."""
    started: list[Attempt] = field(default_factory=list)
    """The jobs that began with it, on the node that fired them."""


Skipped = tuple[NewJob, str, int, datetime]
NONE_LIVE = (0, 0)
GOING = "NOT EXISTS (SELECT 1 FROM timebell_queues WHERE name = '*' AND paused)"
DUE = Statement(
    f"SELECT * FROM timebell_schedules WHERE enabled AND fault IS NULL AND $due_schedule AND {GOING}"  # noqa: S608
    " ORDER BY next_fire_at LIMIT :most $skip_locked"
)
NEXT = Statement(
    "SELECT next_fire_at FROM timebell_schedules WHERE enabled AND fault IS NULL AND next_fire_at IS NOT NULL"  # noqa: S608
    f" AND {GOING}"
    " ORDER BY next_fire_at LIMIT 1"
)
LIVE = Statement(
    "WITH $rows SELECT j.schedule_id, count(*) AS live, sum(CASE WHEN j.serial THEN 0 ELSE 1 END) AS beside"
    " FROM timebell_jobs j JOIN d ON j.schedule_id = d.id WHERE j.hold IS NULL OR j.hold <> 'recover'"
    " GROUP BY j.schedule_id",
    id="id",
)
ADVANCE = Statement(
    "WITH $rows UPDATE timebell_schedules AS s SET next_fire_at = d.next_fire_at, last_fired_at ="
    " COALESCE(d.last_fired_at, s.last_fired_at), fault = d.fault, tzdata = d.tzdata, utc_offset = d.utc_offset"
    " FROM d WHERE s.id = d.id AND s.id $pick SELECT id FROM d $picked",
    id="id",
    next_fire_at="instant",
    last_fired_at="instant",
    fault="text",
    tzdata="text",
    utc_offset="int",
)


def fire(tx: Transaction, build: Build, now: datetime, most: int, room: start_on_insert.Room | None = None) -> Fired:
    """Fire up to `most` due schedules: decide, insert the jobs and skips, advance the cursors; all or nothing. Jobs
    that there is `room` for start with it.

    Other planners skip the rows locked here; a crash anywhere leaves the cursor where it was.
    """
    rows = tx.fetch(DUE, now=tx.dialect.to_db(now), most=most)
    fired = _fire(tx, _readable(tx, rows), build, now, room) if rows else Fired()
    fired.next_fire_at = next_fire(tx)
    return fired


def _readable(tx: Transaction, rows: Sequence[Mapping[str, Any]]) -> list[Schedule]:
    """Rows as schedules; those that cannot be read (of a newer release, a zone that is gone) are set aside."""
    found: list[Schedule] = []
    for row in rows:
        try:
            found.append(schedule_of(row, tx.dialect.from_db, planned_action(row["action"])))
        except Exception as broken:  # one broken schedule must not stop the others
            id_ = str(row["id"])
            tx.execute(update(schedules).where(schedules.c.id == id_).values(fault=_fault(id_, broken)))
    return found


def _fault(schedule_id: str, broken: Exception) -> str:
    log.error("schedule %s cannot be fired and is set aside", schedule_id, exc_info=broken)
    return f"{type(broken).__name__}: {broken}"[:500].replace("\x00", "")


def _fire(
    tx: Transaction, due: Sequence[Schedule], build: Build, now: datetime, room: start_on_insert.Room | None = None
) -> Fired:
    """The part of `fire` after the locks."""
    tzdata_log.due(tx, due, now)
    live = live_of(tx, [one.id for one in due if one.policies.overlap is not Overlap.ALLOW])
    new: list[NewJob] = []
    skips: list[Skipped] = []
    advances = []
    successors: dict[str, str] = {}
    for schedule in due:
        advance: dict[str, Any] = {"id": schedule.id, "fault": None, "last_fired_at": None}
        try:
            planned = plan(schedule, now, *(live.get(schedule.id, NONE_LIVE) if live else NONE_LIVE))
            made: list[NewJob] = []
            for one in planned.fires:
                job = build(schedule, one.at, one.hold, now)
                job.run_at = one.run_at or job.run_at
                made.append(job)
            left: list[Skipped] = [
                (build(schedule, skip.at, None, now), skip.reason.value, skip.count, skip.to) for skip in planned.skips
            ]
        except Exception as broken:  # one broken schedule must not stop the others
            advance["fault"] = _fault(schedule.id, broken)
            advance["next_fire_at"] = tx.dialect.to_db(schedule.next_fire_at)
            advance |= stamped(schedule, schedule.next_fire_at)
        else:
            new += made
            skips += left
            advance["next_fire_at"] = tx.dialect.to_db(planned.next_fire_at)
            advance |= stamped(schedule, planned.next_fire_at)
            if planned.fault is not None:
                log.error("schedule %s is set aside: %s", schedule.id, planned.fault)
                advance["fault"] = planned.fault[:500]
            if planned.supersedes:
                successors[schedule.id] = made[-1].id
            if planned.fires:
                advance["last_fired_at"] = tx.dialect.to_db(planned.fires[-1].at)
        advances.append(advance)
    started: list[Attempt] = []
    if new:
        started = start_on_insert.add(tx, new, room, now)
        if live and (beside := [id_ for id_, (_, others) in live.items() if others]):
            claim.take_turns(tx, beside)
    if skips:
        claim.skip(tx, skips, now)
    stopping = serial.supersede(tx, successors, now) if successors else 0
    tx.fetch(ADVANCE, advances)
    reasons: dict[str, int] = {}
    for _, reason, count, _ in skips:
        reasons[reason] = reasons.get(reason, 0) + count
    return Fired(len(due), len(new), sum(reasons.values()), stopping, reasons=reasons, started=started)


def live_of(tx: Transaction, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """How many live jobs these schedules have, and how many of them take no turns; those without any are left out."""
    rows = tx.fetch(LIVE, [{"id": id_} for id_ in ids]) if ids else []
    return {str(row["schedule_id"]): (row["live"], row["beside"]) for row in rows} if rows else {}


def next_fire(tx: Transaction) -> datetime | None:
    """The next instant at which any schedule is due; one index look-up."""
    found = tx.fetch(NEXT)
    at: datetime | None = tx.dialect.from_db(found[0]["next_fire_at"]) if found else None
    return at
