"""Schedule actions: pause, resume, trigger, backfill, revert, delete.

Each action locks the schedule's row, as the planner does, so a firing happens either before or after it.
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
from timebell.store.jobs.bind_targets import bind_definition
from timebell.store.recent_writes import PAUSES, SCHEDULES
from timebell.store.schedules.rows import schedule_from_row, spec_from_row
from timebell.store.schedules.schedules import (
    JobBuilder,
    count_live_jobs,
    decide_due_occurrences,
    decided_until,
    insert_revision,
    notify_planners,
    overwrite_schedule,
    skip_paused_occurrences,
)
from timebell.store.schema import finished, revisions, schedules
from timebell.store.schema import jobs as live_jobs
from timebell.store.transaction import JOBS, Transaction

MAX_BACKFILLED_OCCURRENCES = 10_000
SCHEDULE_DELETED_REASON = "schedule deleted"


def lock_schedule(tx: Transaction, tenant_id: str, id_: str) -> Schedule | None:
    """Return the schedule with its row locked FOR UPDATE, as the planner locks it; None for an unknown id."""
    matches = (schedules.c.id == id_) & (schedules.c.tenant_id == tenant_id)
    row = tx.execute(select(schedules).where(matches).with_for_update()).first()
    return None if row is None else schedule_from_row(row)


def _update_schedule(tx: Transaction, id_: str, now: datetime, **values: Any) -> Schedule:
    tx.execute(update(schedules).where(schedules.c.id == id_).values(updated_at=now, **values))
    tx.record(SCHEDULES, {id_: now})
    return schedule_from_row(tx.execute(select(schedules).where(schedules.c.id == id_)).one())


def pause_schedule(
    tx: Transaction, tenant_id: str, id_: str, reason: str | None, build: JobBuilder, now: datetime
) -> Schedule | None:
    """Stop firing until resumed; occurrences due by now are decided first. None for an unknown id."""
    schedule = lock_schedule(tx, tenant_id, id_)
    if schedule is None or not schedule.enabled:
        return schedule and _update_schedule(tx, id_, now, pause_reason=reason)
    decide_due_occurrences(tx, schedule, build, now)
    tx.record(PAUSES, {id_: (tenant_id, reason, now)})
    return _update_schedule(tx, id_, now, enabled=False, paused_at=now, pause_reason=reason)


def resume_schedule(
    tx: Transaction, tenant_id: str, id_: str, catch_up: bool, build: JobBuilder, now: datetime
) -> Schedule | None:
    """Fire again from now on. None for an unknown id.

    Occurrences during the pause are `skipped` with reason `paused`; with `catch_up`, the schedule's catch-up policy
    decides on them, as after an outage.
    """
    schedule = lock_schedule(tx, tenant_id, id_)
    if schedule is None or schedule.enabled:
        return schedule
    if not catch_up:
        skip_paused_occurrences(tx, schedule, build, now)
    tx.record(PAUSES, {id_: None})
    resumed = _update_schedule(tx, id_, now, enabled=True, paused_at=None, pause_reason=None)
    notify_planners(tx, resumed)
    return resumed


def trigger_schedule(tx: Transaction, tenant_id: str, id_: str, build: JobBuilder, now: datetime) -> Job | None:
    """Add an occurrence of kind `manual`, now. Obeys overlap, leaves the cursor unmoved. None for an unknown id."""
    schedule = lock_schedule(tx, tenant_id, id_)
    if schedule is None:
        return None
    planned = decide.plan_manual(schedule, now, count_live_jobs(tx, [id_]).get(id_, (0, 0))[0])
    at = next_free_manual_instant(tx, id_, now)
    job = build(schedule, at, planned.fires[0].hold if planned.fires else None, now)
    job.kind = Kind.MANUAL
    if planned.skips:
        claim.record_skipped(tx, [(job, planned.skips[0].reason, 1, at)], now)
    else:
        claim.insert_returning_ids(tx, [job])
        claim.mark_serial(tx, [id_])
        if planned.supersedes:
            job_serial.supersede(tx, {id_: job.id}, now)
    return repository.find_job(tx, tenant_id, job.id)


def next_free_manual_instant(tx: Transaction, id_: str, at: datetime) -> datetime:
    """Return the first instant from `at` on without a manual occurrence of the schedule."""
    while _has_manual_occurrence(tx, id_, at):  # two requests in one microsecond, or the clock was set back
        at += decide.MICROSECOND
    return at


def _has_manual_occurrence(tx: Transaction, id_: str, at: datetime) -> bool:
    """Return whether a manual occurrence exists at this instant, live or finished: its key would not be unique."""
    for table in (live_jobs, finished):
        matches = (table.c.schedule_id == id_) & (table.c.scheduled_at == at) & (table.c.kind == Kind.MANUAL)
        if tx.execute(select(table.c.id).where(matches).limit(1)).first() is not None:
            return True
    return False


@dataclass(frozen=True, slots=True)
class BackfillResult:
    """The `instants` a backfill creates jobs for (or would, in a dry run), and how many have `already_run`."""

    instants: list[datetime]
    already_run: int


def backfill_schedule(
    tx: Transaction, tenant_id: str, id_: str, start: datetime, end: datetime, overlap: Overlap | None, dry_run: bool,
    build: JobBuilder, now: datetime,
) -> BackfillResult | None:  # fmt: skip
    """Create jobs of kind `backfill` for the occurrences in [start, end) that were skipped or never recorded.

    The jobs run one after another unless overlap is `allow`. Occurrences that ran, are running, were cancelled, or
    belong to another backfill are not repeated. Paused occurrences before `end` are decided by the backfill.
    None for an unknown id. Raises InvalidInput (BACKFILL_TOO_LARGE).
    """
    schedule = lock_schedule(tx, tenant_id, id_)
    if schedule is None:
        return None
    cursor = schedule.next_fire_at
    if schedule.enabled and cursor is not None:
        end = min(end, cursor)  # the planner has not decided the occurrences from here on
    has_grid = schedule.recurrence.spec.delay is None  # a fixed delay has no planned occurrences to backfill
    instants = list(islice(schedule.recurrence.between(start, end), MAX_BACKFILLED_OCCURRENCES + 1)) if has_grid else []
    if len(instants) > MAX_BACKFILLED_OCCURRENCES:
        raise InvalidInput(
            f"The time range has more than {MAX_BACKFILLED_OCCURRENCES:,} occurrences.", code="BACKFILL_TOO_LARGE",
            fix="Backfill a shorter range, and the rest in further requests.",
        )  # fmt: skip
    done: set[datetime] = set()
    for table in (live_jobs, finished):
        planned = (table.c.schedule_id == id_) & (table.c.kind != Kind.MANUAL)
        query = select(table.c.scheduled_at).where(planned, table.c.scheduled_at >= start, table.c.scheduled_at < end)
        settled = table.c.state != JobState.SKIPPED
        if table is finished:
            settled |= table.c.reason == Reason.OVERRIDE.value  # skipped on purpose
        done |= set(tx.execute(query.where(settled)).scalars())
    missing = [at for at in instants if at not in done]
    if has_grid and not schedule.enabled and cursor is not None and cursor < end and not dry_run:
        # Otherwise resuming with catch-up would fire these occurrences a second time.
        skip_paused_occurrences(tx, schedule, build, end - decide.MICROSECOND)
    if missing and not dry_run:
        serial = (overlap or schedule.policies.overlap) is not Overlap.ALLOW
        fires = (
            decide.queue_in_order(missing, count_live_jobs(tx, [id_]).get(id_, (0, 0))[0])
            if serial
            else [decide.Fire(at) for at in missing]
        )
        new_jobs = [build(schedule, fire.at, fire.hold, now) for fire in fires]
        for job in new_jobs:
            job.kind, job.run_at, job.expires_at, job.serial = Kind.BACKFILL, now, None, serial
        claim.insert_returning_ids(tx, new_jobs)
        claim.mark_serial(tx, [id_])
    return BackfillResult(missing, len(instants) - len(missing))


def release_backlog(tx: Transaction, tenant_id: str, id_: str | None, discard: bool, now: datetime) -> int:
    """Release jobs held as backlog; return the number of jobs.

    With `id_` only those of this schedule, otherwise those of all schedules and of no schedule. Jobs of a serial
    schedule then run one after another. With `discard` the jobs are cancelled instead.
    """
    held = (live_jobs.c.tenant_id == tenant_id) & (live_jobs.c.hold == Hold.BACKLOG.value)
    if id_ is not None:
        held &= live_jobs.c.schedule_id == id_
    schedule_ids = set(tx.execute(select(live_jobs.c.schedule_id).where(held).distinct()).scalars())
    ids = sorted(schedule_ids - {None})
    # Locked in id order, so that concurrent releases cannot deadlock.
    tx.execute(select(schedules.c.id).where(schedules.c.id.in_(ids)).order_by(schedules.c.id).with_for_update())
    if discard:
        return _discard_backlog(tx, tenant_id, [*ids, *(schedule_ids & {None})], now)
    released = tx.execute(update(live_jobs).where(held, live_jobs.c.serial.is_(False)).values(hold=None)).rowcount
    requeue_serial = update(live_jobs).where(held, live_jobs.c.serial.is_(True)).values(hold=Hold.OVERLAP.value)
    released += tx.execute(requeue_serial).rowcount
    claim.mark_serial(tx, ids)
    job_serial.release_next(tx, ids)
    if released:
        tx.notify(JOBS)
    return released


def _discard_backlog(tx: Transaction, tenant_id: str, ids: list[str | None], now: datetime) -> int:
    count = 0
    for id_ in ids:
        after: str | None = None
        while True:
            filters = {"tenant_id": tenant_id, "schedule_id": id_, "hold": Hold.BACKLOG.value}
            batch, after = repository.cancel_matching(tx, filters, now, after, 1000, reason="discarded")
            count += batch.prevented
            if after is None:
                break
    return count


def list_revisions(tx: Transaction, tenant_id: str, id_: str) -> list[Revision]:
    """Return every revision of a schedule, newest first."""
    matches = (revisions.c.schedule_id == id_) & (revisions.c.tenant_id == tenant_id)
    rows = tx.execute(select(revisions).where(matches).order_by(revisions.c.revision.desc()))
    return [Revision(number=row.revision, effective_at=row.effective_at, **spec_from_row(row._mapping)) for row in rows]


def revert_schedule(
    tx: Transaction, tenant_id: str, id_: str, number: int, build: JobBuilder, now: datetime
) -> tuple[Schedule, bool] | None:
    """Edit the schedule to equal an earlier revision.

    Returns the schedule and whether revision `number` exists; None for an unknown id.
    """
    schedule = lock_schedule(tx, tenant_id, id_)
    revision_found = next(
        (revision for revision in list_revisions(tx, tenant_id, id_) if revision.number == number), None
    )
    if schedule is None:
        return None
    if revision_found is None:
        return schedule, False
    parts = {part: getattr(revision_found, part) for part in ("recurrence", "action", "policies")}
    if all(getattr(schedule, part) == value for part, value in parts.items()):
        return schedule, True
    decide_due_occurrences(tx, schedule, build, now)
    restored = bind_definition(tx, dataclasses.replace(schedule, **parts, updated_at=now))
    return overwrite_schedule(tx, id_, restored, schedule, now), True


def delete_schedule(
    tx: Transaction, tenant_id: str, id_: str, build: JobBuilder, now: datetime
) -> repository.BulkCancelResult | None:
    """Delete a schedule: its pending jobs are cancelled, its running jobs are not retried.

    Finished jobs and revisions are kept. None for an unknown id.
    """
    schedule = lock_schedule(tx, tenant_id, id_)
    if schedule is None:
        return None
    decide_due_occurrences(tx, schedule, build, now)
    prevented = in_flight = 0
    after: str | None = None
    while True:
        batch, after = repository.cancel_matching(
            tx, {"schedule_id": id_}, now, after, 1000, reason=SCHEDULE_DELETED_REASON
        )
        prevented, in_flight = prevented + batch.prevented, in_flight + batch.in_flight
        if after is None:
            break
    ended = dataclasses.replace(schedule, revision=schedule.revision + 1, next_fire_at=None)
    since = decided_until(schedule, now)
    insert_revision(tx, dataclasses.replace(ended, recurrence=_recurrence_ended_at(schedule, since)), since)
    tx.execute(delete_rows(schedules).where(schedules.c.id == id_))
    tx.record(SCHEDULES, {id_: None})
    return repository.BulkCancelResult(prevented, in_flight)


def _recurrence_ended_at(schedule: Schedule, since: datetime) -> Recurrence:
    """Return the recurrence with no occurrence after `since`, for audits of the deleted schedule."""
    recurrence = schedule.recurrence
    start = None if recurrence.start is not None and recurrence.start >= since else recurrence.start
    passed = [
        override if override.to is None or override.to <= since else Override(override.at)
        for override in recurrence.overrides
        if override.at <= since
    ]
    return dataclasses.replace(recurrence, start=start, end=since, max_runs=None, overrides=tuple(passed))
