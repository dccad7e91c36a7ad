"""Attempts: complete, schedule a retry, dispatch to external workers, renew leases.

Every write is fenced: it applies only if the attempt number and the state of the row are still those of the attempt.
Otherwise the attempt has ended, perhaps reclaimed by another node, and the row is left unchanged.

With `skip_locked`, rows that another transaction has locked are left unchanged, too, so that a stuck session cannot
delay the whole batch. Callers find these attempts with `find_unchanged`.
"""

from __future__ import annotations

from collections.abc import Sequence

from timebell.model.job import CancelOutcome, Completion, JobState
from timebell.store.jobs import groups
from timebell.store.recent_writes import CANCELS, RESULTS
from timebell.store.transaction import JOBS, Row, Transaction


def complete_jobs(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> list[Row]:
    """Move completed jobs to `finished`, and release the next jobs of their groups.

    Returns the rows of the jobs whose fence held, with the columns id, schedule_id, started_at, serial, queue,
    tenant_id and group_name.
    """
    groups.lock_queues(tx, completions)
    moved = tx.dialect.complete(tx, completions, skip_locked=skip_locked)
    cancelled = {completion.id for completion in completions if completion.cancel is CancelOutcome.PREVENTED}
    ids = [str(row["id"]) for row in moved]
    tx.record(RESULTS, dict.fromkeys(id_ for id_ in ids if id_ not in cancelled))
    tx.record(CANCELS, dict.fromkeys(id_ for id_ in ids if id_ in cancelled))
    groups.release_next(tx, moved)
    return moved


def schedule_retries(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> set[str]:
    """Return attempts to `pending`, due at their `run_at`; return the ids of those whose fence held.

    Attempts with a requested cancel are left unchanged. The next jobs of their groups are released.
    """
    groups.lock_queues(tx, completions)
    retried = tx.dialect.retry(tx, completions, skip_locked=skip_locked)
    groups.release_next(tx, retried)
    if retried:
        tx.notify(JOBS)  # no node knows when it is due
    return {str(row["id"]) for row in retried}


def dispatch(tx: Transaction, completions: Sequence[Completion], *, skip_locked: bool = False) -> set[str]:
    """Dispatch attempts to external workers, which must report until `run_at`; return the ids whose fence held.

    In state `dispatched` the column `heartbeat` holds that deadline, in microseconds since 1970.
    """
    return tx.dialect.dispatch(tx, completions, skip_locked=skip_locked)


def renew_leases(tx: Transaction, attempts: Sequence[tuple[str, int]], *, skip_locked: bool = False) -> set[str]:
    """Renew the leases of running attempts (id, number); return the ids whose fence held.

    A lease is a counter that must keep changing. Observers judge its age by their own monotonic clocks.
    """
    return tx.dialect.renew_leases(tx, attempts, skip_locked=skip_locked)


def find_unchanged(tx: Transaction, attempts: Sequence[tuple[str, int, JobState]]) -> dict[str, bool]:
    """Find those of these attempts (id, number, state) whose fence still holds; return "cancel requested" by id.

    For attempts that a `skip_locked` statement did not write: if the fence holds, their rows were only locked.
    """
    rows = tx.dialect.find_unchanged(tx, attempts)
    return {str(row["id"]): bool(row["cancel_requested"]) for row in rows}
