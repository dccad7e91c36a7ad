"""Complete serial jobs: release the next job of the schedule or group, and advance fixed-delay schedules.

A serial job is one of a schedule whose jobs run one at a time. The others wait with hold `overlap`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import select, update

from timebell.model.decide import SUPERSEDED
from timebell.model.job import Completion, Hold, JobState
from timebell.store.jobs.complete import complete_jobs, schedule_retries
from timebell.store.schedules.recurrence_column import recurrence_from_json
from timebell.store.schema import jobs as table
from timebell.store.schema import schedules as schedule_rows
from timebell.store.transaction import JOBS, SCHEDULES, STOPS, Row, Transaction

log = logging.getLogger("timebell.completer")


def complete_serial(
    tx: Transaction, completions: Sequence[Completion], schedules: Sequence[str], *, skip_locked: bool = False
) -> set[str]:
    """Complete jobs like `complete_jobs`, release the next jobs of `schedules`, and advance fixed-delay schedules.

    Returns the ids whose fence held.

    Lock order: schedules, then queues with groups, then jobs, as the planner and the claim do. Without these locks the
    planner or a claim could hold a job behind one that has just completed. With `skip_locked`, jobs are left unchanged
    if their own row or the row of their schedule is locked by another transaction.
    """
    locked = lock_schedules(tx, schedules, skip_locked=skip_locked)
    missing = set(schedules) - {str(row["id"]) for row in locked} if skip_locked else None
    if missing:
        still_locked = set(
            map(str, tx.execute(select(schedule_rows.c.id).where(schedule_rows.c.id.in_(missing))).scalars())
        )
        completions = [
            completion for completion in completions if completion.schedule_id not in still_locked
        ]  # missing, but not locked: deleted
        if not completions:
            return set()
    return _release_and_advance(tx, locked, complete_jobs(tx, completions, skip_locked=skip_locked), completions)


def release_successors(tx: Transaction, completed: Sequence[Row], completions: Sequence[Completion]) -> set[str]:
    """Release the successors of jobs that were completed without `complete_serial`.

    A job may become serial while it runs, when another one starts to wait for it, and the node that runs it does not
    know. `completed` are rows of `complete_jobs`. Returns the ids of serial jobs among them.
    """
    serial_rows = [row for row in completed if row["serial"]]
    return _release_and_advance(
        tx, lock_schedules(tx, [str(row["schedule_id"]) for row in serial_rows]), serial_rows, completions
    )


def lock_schedules(tx: Transaction, schedules: Sequence[str], *, skip_locked: bool = False) -> Sequence[Row]:
    """Lock schedules in the order of their ids; return the rows of the locked ones."""
    return tx.dialect.lock_schedules(tx, sorted(set(schedules)), skip_locked=skip_locked) if schedules else []


def _release_and_advance(
    tx: Transaction, locked: Sequence[Row], completed: Sequence[Row], completions: Sequence[Completion]
) -> set[str]:
    ids: set[str] = set()
    to_release: set[str] = set()  # schedules with a completed job and possibly a waiting one
    fixed_delays: dict[str, str] = {}
    for row in completed:
        ids.add(str(row["id"]))
        if row["schedule_id"] is not None:
            to_release.add(str(row["schedule_id"]))
    for row in locked:
        if not row["may_have_waiting"]:
            to_release.discard(str(row["id"]))
        if row["fixed_delay"] is not None:
            fixed_delays[str(row["id"])] = row["fixed_delay"]
    release_next(tx, sorted(to_release))
    if fixed_delays:
        _advance_fixed_delays(tx, fixed_delays, completed, {completion.id: completion.at for completion in completions})
    return ids


def complete_one(tx: Transaction, completion: Completion) -> set[str]:
    """Complete one attempt, in a transaction that may contain other writes, and release its successors.

    Returns its id if its fence held.
    """
    if completion.schedule_id is None and completion.group_queue is None:
        completed = complete_jobs(tx, [completion])
        release_successors(tx, completed, [completion])
        return {str(row["id"]) for row in completed}
    return complete_serial(tx, [completion], [] if completion.schedule_id is None else [completion.schedule_id])


def schedule_group_retries(tx: Transaction, completions: Sequence[Completion]) -> set[str]:
    """Schedule retries of grouped jobs, and release the next jobs of their groups, in one transaction."""
    return schedule_retries(tx, completions)


def _advance_fixed_delays(
    tx: Transaction, recurrences: dict[str, str], completed: Sequence[Row], completed_at: dict[str, datetime]
) -> None:
    """Set the next instants of fixed-delay schedules whose job completed."""
    next_instants: dict[str, datetime] = {}
    for row in completed:
        id_, ended_at = str(row["schedule_id"]), completed_at[str(row["id"])]
        if id_ not in recurrences:
            continue
        try:
            recurrence = recurrence_from_json(recurrences[id_])
            if recurrence.spec.delay is None:
                continue
            following = recurrence.next_after_run(tx.dialect.from_db(row["started_at"]), ended_at)
        except Exception:  # fires now; the planner then marks the schedule as errored
            log.exception("could not compute the next run of schedule %s", id_)
            following = ended_at
        if following is not None:
            next_instants[id_] = max(following, next_instants.get(id_, following))
    if next_instants and tx.dialect.advance_fixed_delays(tx, next_instants):
        tx.notify(SCHEDULES)


def release_next(tx: Transaction, schedules: Sequence[str]) -> int:
    """Release the first waiting job of each schedule that has no other live job; return how many were released."""
    released = tx.dialect.release_next(tx, schedules) if schedules else 0
    if released:
        tx.notify(JOBS)
    return released


def supersede(tx: Transaction, successors: Mapping[str, str], now: datetime) -> int:
    """Cancel the earlier jobs of schedules in favor of the newest one; `successors` are its ids by schedule id.

    Pending jobs are cancelled, running ones are requested to stop. Returns the number of the latter. The newest job
    waits with hold `overlap`, and is released when the last of the others ends.
    """
    previous = select(table).where(table.c.schedule_id.in_(successors), table.c.id.not_in(successors.values()))
    completions, running = [], []
    for row in tx.execute(previous.order_by(table.c.id).with_for_update()):
        if row.state == JobState.PENDING:
            completions.append(Completion(
                row.id, row.attempt, JobState.CANCELLED, now, expected_state=JobState.PENDING, uses_attempt=False,
                reason=SUPERSEDED, errors=row.errors, replaced_by=successors[row.schedule_id],
            ))  # fmt: skip
        else:
            running.append(row.id)
    if completions:
        complete_serial(tx, completions, list(successors))
    if running:
        tx.execute(update(table).where(table.c.id.in_(running)).values(cancel_requested=True, hold=Hold.STOPPING.value))
        tx.notify(STOPS)
    return len(running)
