"""What a person does to a schedule that is there: pause, resume, trigger, backfill, revert, delete.

Each locks the schedule's row, as the planner does, so a firing is before it or after it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import delete as delete_rows
from sqlalchemy import select, update

from timebell.errors import InvalidInput
from timebell.model import decide
from timebell.model.job import Hold, Job, JobState, Kind, Reason
from timebell.model.policy import Overlap
from timebell.model.schedule import Revision, Schedule
from timebell.recurrence import Override, Recurrence
from timebell.store.jobs import claim, repository
from timebell.store.jobs import serial as job_serial
from timebell.store.jobs.bind_targets import bound
from timebell.store.schedules.schedules import (
    Build,
    decided_until,
    live_of,
    pass_over,
    read,
    read_parts,
    revise,
    settle,
    tell,
    write_over,
)
from timebell.store.schema import finished, revisions, schedules
from timebell.store.schema import jobs as live_jobs
from timebell.store.transaction import Transaction

MOST_BACKFILLED = 10_000
DELETED = "schedule deleted"


def locked(tx: Transaction, tenant_id: str, id_: str) -> Schedule | None:
    """The schedule with this id, locked as the planner locks it."""
    mine = (schedules.c.id == id_) & (schedules.c.tenant_id == tenant_id)
    row = tx.execute(select(schedules).where(mine).with_for_update()).first()
    return None if row is None else read(row)


def _change(tx: Transaction, id_: str, now: datetime, **values: Any) -> Schedule:
    tx.execute(update(schedules).where(schedules.c.id == id_).values(updated_at=now, **values))
    return read(tx.execute(select(schedules).where(schedules.c.id == id_)).one())


def pause(
    tx: Transaction, tenant_id: str, id_: str, reason: str | None, build: Build, now: datetime
) -> Schedule | None:
    """Fire nothing more until `resume`; what was due by now is decided first. None for an unknown id."""
    found = locked(tx, tenant_id, id_)
    if found is None or not found.enabled:
        return found and _change(tx, id_, now, pause_reason=reason)
    settle(tx, found, build, now)
    return _change(tx, id_, now, enabled=False, paused_at=now, pause_reason=reason)


def resume(tx: Transaction, tenant_id: str, id_: str, catch_up: bool, build: Build, now: datetime) -> Schedule | None:
    """Fire again from now on. What fell into the pause is `skipped`, reason `paused`; with `catch_up` the
    schedule's catch-up decides on it, as after an outage. None for an unknown id."""
    found = locked(tx, tenant_id, id_)
    if found is None or found.enabled:
        return found
    if not catch_up:
        pass_over(tx, found, build, now)
    resumed = _change(tx, id_, now, enabled=True, paused_at=None, pause_reason=None)
    tell(tx, resumed, now)
    return resumed


def trigger(tx: Transaction, tenant_id: str, id_: str, build: Build, now: datetime) -> Job | None:
    """One more occurrence, now, of kind `manual`: obeys overlap, moves nothing. None for an unknown id."""
    found = locked(tx, tenant_id, id_)
    if found is None:
        return None
    planned = decide.by_hand(found, now, live_of(tx, [id_]).get(id_, (0, 0))[0])
    at = free_by_hand(tx, id_, now)
    made = build(found, at, planned.fires[0].hold if planned.fires else None, now)
    made.kind = Kind.MANUAL
    if planned.skips:
        claim.skip(tx, [(made, planned.skips[0].reason, 1, at)], now)
    else:
        claim.insert(tx, [made])
        claim.take_turns(tx, [id_])
        if planned.supersedes:
            job_serial.supersede(tx, {id_: made.id}, now)
        tx.notify()
    return repository.find(tx, tenant_id, made.id)


def free_by_hand(tx: Transaction, id_: str, at: datetime) -> datetime:
    """The first instant from then on at which no occurrence was asked for by hand."""
    while _made_by_hand(tx, id_, at):  # in the same microsecond, or before the clock was set back
        at += decide.TINY
    return at


def _made_by_hand(tx: Transaction, id_: str, at: datetime) -> bool:
    """Whether an occurrence was asked for at this instant: it, too, has a key of its own, live or finished."""
    for table in (live_jobs, finished):
        mine = (table.c.schedule_id == id_) & (table.c.scheduled_at == at) & (table.c.kind == Kind.MANUAL)
        if tx.execute(select(table.c.id).where(mine).limit(1)).first() is not None:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Backfilled:
    """What a backfill makes, or with a dry run would make: jobs for these instants; `kept` have run already."""

    instants: list[datetime]
    kept: int


def backfill(
    tx: Transaction, tenant_id: str, id_: str, start: datetime, end: datetime, overlap: Overlap | None, dry_run: bool,
    build: Build, now: datetime,
) -> Backfilled | None:  # fmt: skip
    """Jobs of kind `backfill` for the occurrences in [start, end) that were skipped or never were.

    One after another unless overlap is `allow`; what ran, runs or was cancelled is not repeated, nor is what
    another backfill made. What fell into a pause before `end` is decided by it. None for an unknown id.
    Raises InvalidInput (BACKFILL_TOO_LARGE).
    """
    found = locked(tx, tenant_id, id_)
    if found is None:
        return None
    waits = found.next_fire_at
    if found.enabled and waits is not None:
        end = min(end, waits)  # from there on the planner has yet to decide
    grid = found.recurrence.spec.delay is None  # there is nothing to make up for without one
    instants = list(islice(found.recurrence.between(start, end), MOST_BACKFILLED + 1)) if grid else []
    if len(instants) > MOST_BACKFILLED:
        raise InvalidInput(
            f"There are more than {MOST_BACKFILLED:,} occurrences in that time.", code="BACKFILL_TOO_LARGE",
            fix="Give a shorter time, and the rest later.",
        )  # fmt: skip
    done: set[datetime] = set()
    for table in (live_jobs, finished):
        of_it = (table.c.schedule_id == id_) & (table.c.kind != Kind.MANUAL)
        query = select(table.c.scheduled_at).where(of_it, table.c.scheduled_at >= start, table.c.scheduled_at < end)
        settled = table.c.state != JobState.SKIPPED
        if table is finished:
            settled |= table.c.reason == Reason.OVERRIDE.value  # left out on purpose
        done |= set(tx.execute(query.where(settled)).scalars())
    left = [at for at in instants if at not in done]
    if grid and not found.enabled and waits is not None and waits < end and not dry_run:
        pass_over(tx, found, build, end - decide.TINY)  # or to catch up on resume would fire it once more
    if left and not dry_run:
        serial = (overlap or found.policies.overlap) is not Overlap.ALLOW
        fires = (
            decide.in_turn(left, live_of(tx, [id_]).get(id_, (0, 0))[0]) if serial else [decide.Fire(at) for at in left]
        )
        made = [build(found, fire.at, fire.hold, now) for fire in fires]
        for job in made:
            job.kind, job.run_at, job.expires_at, job.serial = Kind.BACKFILL, now, None, serial
        claim.insert(tx, made)
        claim.take_turns(tx, [id_])
        tx.notify()
    return Backfilled(left, len(instants) - len(left))


def recover(tx: Transaction, tenant_id: str, id_: str | None, discard: bool, now: datetime) -> int:
    """Let the backlogs go that were not to be made up for unasked, of one schedule, or of all and jobs of none; how
    many jobs.

    Those of a schedule that takes turns take theirs. With `discard` they are cancelled instead.
    """
    mine = (live_jobs.c.tenant_id == tenant_id) & (live_jobs.c.hold == Hold.RECOVER.value)
    if id_ is not None:
        mine &= live_jobs.c.schedule_id == id_
    found = set(tx.execute(select(live_jobs.c.schedule_id).where(mine).distinct()).scalars())
    ids = sorted(found - {None})
    tx.execute(select(schedules.c.id).where(schedules.c.id.in_(ids)).order_by(schedules.c.id).with_for_update())
    if discard:
        return _discard(tx, tenant_id, [*ids, *(found & {None})], now)
    freed = tx.execute(update(live_jobs).where(mine, live_jobs.c.serial.is_(False)).values(hold=None)).rowcount
    waiting = update(live_jobs).where(mine, live_jobs.c.serial.is_(True)).values(hold=Hold.OVERLAP.value)
    freed += tx.execute(waiting).rowcount
    claim.take_turns(tx, ids)
    job_serial.let_go(tx, ids)
    if freed:
        tx.notify()
    return freed


def _discard(tx: Transaction, tenant_id: str, ids: list[str | None], now: datetime) -> int:
    count = 0
    for id_ in ids:
        after: str | None = None
        while True:
            which = {"tenant_id": tenant_id, "schedule_id": id_, "hold": Hold.RECOVER.value}
            swept, after = repository.sweep(tx, which, now, after, 1000, reason="discarded")
            count += swept.prevented
            if after is None:
                break
    return count


def history(tx: Transaction, tenant_id: str, id_: str) -> list[Revision]:
    """Every revision of a schedule, the newest first."""
    mine = (revisions.c.schedule_id == id_) & (revisions.c.tenant_id == tenant_id)
    rows = tx.execute(select(revisions).where(mine).order_by(revisions.c.revision.desc()))
    return [Revision(number=row.revision, effective_at=row.effective_at, **read_parts(row._mapping)) for row in rows]


def revert(
    tx: Transaction, tenant_id: str, id_: str, number: int, build: Build, now: datetime
) -> tuple[Schedule, bool] | None:
    """Make an earlier revision the newest, an edit like any other: the schedule, and whether there is such a one.

    None for an unknown id.
    """
    found = locked(tx, tenant_id, id_)
    wanted = next((one for one in history(tx, tenant_id, id_) if one.number == number), None)
    if found is None:
        return None
    if wanted is None:
        return found, False
    parts = {part: getattr(wanted, part) for part in ("recurrence", "action", "policies")}
    if all(getattr(found, part) == value for part, value in parts.items()):
        return found, True
    settle(tx, found, build, now)
    wanted_now = bound(tx, dataclasses.replace(found, **parts, updated_at=now))
    return write_over(tx, id_, wanted_now, found, now), True


def delete(tx: Transaction, tenant_id: str, id_: str, build: Build, now: datetime) -> repository.Swept | None:
    """Forget a schedule; its jobs that wait are cancelled, those that run are not tried again.

    Its history stays: finished jobs, and the revisions. None for an unknown id.
    """
    found = locked(tx, tenant_id, id_)
    if found is None:
        return None
    settle(tx, found, build, now)
    prevented = in_flight = 0
    after: str | None = None
    while True:
        swept, after = repository.sweep(tx, {"schedule_id": id_}, now, after, 1000, reason=DELETED)
        prevented, in_flight = prevented + swept.prevented, in_flight + swept.in_flight
        if after is None:
            break
    over = dataclasses.replace(found, revision=found.revision + 1, next_fire_at=None)
    since = decided_until(found, now)
    revise(tx, dataclasses.replace(over, recurrence=_ended(found, since)), since)
    tx.execute(delete_rows(schedules).where(schedules.c.id == id_))
    return repository.Swept(prevented, in_flight)


def _ended(schedule: Schedule, since: datetime) -> Recurrence:
    """The recurrence as it is for an audit of a schedule that is gone: it has nothing after `since`."""
    recurrence = schedule.recurrence
    start = None if recurrence.start is not None and recurrence.start >= since else recurrence.start
    passed = [
        one if one.to is None or one.to <= since else Override(one.at)
        for one in recurrence.overrides
        if one.at <= since
    ]
    return dataclasses.replace(recurrence, start=start, end=since, max_runs=None, overrides=tuple(passed))
