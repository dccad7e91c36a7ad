"""Hold or complete due jobs that no live node handles.

They are held (hold `unhandled`) until a node handles them, or completed if they were created with
`on_unhandled="complete"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, func, not_, or_, select, text, update

from timebell.model.job import Completion, Hold, JobState
from timebell.model.routes import ALL_ROUTES, COMPLETE_UNHANDLED_JSON, Routes
from timebell.store.cluster.workers import RemoteWorker
from timebell.store.dialects.operations import Lane
from timebell.store.jobs import groups
from timebell.store.jobs.claim import fetch_lane_rows
from timebell.store.jobs.serial import complete_serial
from timebell.store.schema import CLAIMABLE, jobs
from timebell.store.transaction import JOBS, Row, Transaction

NO_HANDLERS_RESULT = '{"listeners":0}'

LANE_HEAD_SIZE = 1_000
"""Due jobs of a lane that are examined: an unhandled job is a problem only if other jobs wait behind it."""
RELEASE_BATCH_SIZE = 10_000


class UnhandledReport(NamedTuple):
    """The numbers of jobs held, released because a node handles them again, and completed without a handler."""

    held: int = 0
    released: int = 0
    completed: int = 0
    routes: frozenset[str] = frozenset()
    """The routes of the held jobs: topics, or `@http` and similar."""


def process_unhandled(
    tx: Transaction, handled: Routes, now: datetime, workers: Sequence[RemoteWorker] = ()
) -> UnhandledReport:
    """Hold or complete due jobs that no live node handles, and release held jobs that a node handles again.

    `handled` are the routes of all live nodes; `workers` are the live remote workers.
    """
    released = release_handled(tx, handled, workers)
    held = completed = 0
    routes: set[str] = set()
    for row in fetch_lane_rows(tx, ALL_ROUTES, now):
        unhandled = _list_unhandled(tx, (row["queue"], row["priority"]), handled, workers, now)
        completable = [job for job in unhandled if _completes_unhandled(job)]
        if to_hold := [job.id for job in unhandled if not _completes_unhandled(job)]:
            held_jobs = _hold_claimable(tx, to_hold)
            held, routes = held + len(held_jobs), routes | {job["route"] for job in held_jobs}
        completions = [
            Completion(
                job.id, 0, JobState.COMPLETED, now, expected_state=JobState.PENDING, uses_attempt=False,
                result=NO_HANDLERS_RESULT,
            )
            for job in completable
        ]  # fmt: skip
        if completions:
            schedules = [job.schedule_id for job in completable if job.serial]
            completed += len(complete_serial(tx, completions, schedules))
    return UnhandledReport(held, released, completed, frozenset(routes))


def _list_unhandled(
    tx: Transaction, lane: Lane, handled: Routes, workers: Sequence[RemoteWorker], now: datetime
) -> Sequence[Any]:
    """Return the jobs at the head of a lane that no node handles."""
    query = _select_unhandled(handled, _claims_of(workers))
    return tx.execute(query, {"lane_queue": lane[0], "lane_priority": lane[1], "due_until": now}).all()


Claims = tuple[tuple[Routes, tuple[str, ...] | None], ...]
"""The routes and queues of each remote worker; all queues if None."""


def _claims_of(workers: Sequence[RemoteWorker]) -> Claims:
    return tuple((worker.routes, worker.queues) for worker in workers)


@lru_cache(maxsize=16)  # building the statement takes longer than executing it, and routes rarely change
def _select_unhandled(handled: Routes, claims: Claims) -> Select[Any]:
    j = jobs.c
    lane = (j.queue == bindparam("lane_queue")) & (j.priority == bindparam("lane_priority"))
    due = select(j.id, j.route, j.target, j.attempt, j.schedule_id, j.serial, j.tenant_id, j.queue).where(
        text(CLAIMABLE), lane & (j.run_at <= bindparam("due_until"))
    )
    head = due.order_by(j.run_at).limit(LANE_HEAD_SIZE).subquery()
    return select(head).where(not_(_is_handled(head.c, handled, claims)))


def _completes_unhandled(job: Any) -> bool:
    """Return whether a job completes instead of being held: a job that was attempted was handled by some node."""
    return bool(job.target == COMPLETE_UNHANDLED_JSON and job.attempt == 0)


def _hold_claimable(tx: Transaction, ids: Sequence[str]) -> list[Row]:
    """Hold those of these jobs that are still claimable, and release the next jobs of their groups; return them."""
    columns = (jobs.c.id, jobs.c.route, jobs.c.queue, jobs.c.tenant_id, jobs.c.group_name)
    claimable = select(*columns).where(jobs.c.id.in_(ids), text(CLAIMABLE)).order_by(jobs.c.id).with_for_update()
    locked: list[Row] = [dict(row._mapping) for row in tx.execute(claimable)]
    if locked:
        same = jobs.c.id.in_([job["id"] for job in locked])
        tx.execute(update(jobs).where(same).values(hold=Hold.UNHANDLED.value))
        groups.release_next(tx, locked)
    return locked


def _is_handled(job: Any, handled: Routes, claims: Claims) -> ColumnElement[bool]:
    """Return the condition that a node or a remote worker handles a job, given its columns."""
    return or_(_has_route(job.route, handled), *(_is_claimed_by(job, *claim) for claim in claims))


def _is_claimed_by(job: Any, routes: Routes, queues: tuple[str, ...] | None) -> ColumnElement[bool]:
    is_handled = _has_route(job.route, routes)
    if routes.tenant_id is not None:
        is_handled &= job.tenant_id == routes.tenant_id
    return is_handled if queues is None else is_handled & job.queue.in_(queues)


def _has_route(route: ColumnElement[str], routes: Routes) -> ColumnElement[bool]:
    prefixes = [func.substr(route, 1, len(prefix)) == prefix for prefix in sorted(routes.prefixes)]
    topics = [route.not_like("@%")] if routes.all_topics else []
    return or_(route.in_(sorted(routes.exact)), *topics, *prefixes)


_IS_UNHANDLED = (jobs.c.hold == Hold.UNHANDLED.value) & (jobs.c.state == JobState.PENDING.value)


@lru_cache(maxsize=16)
def _select_releasable(handled: Routes, claims: Claims) -> Select[str]:
    return select(jobs.c.id).where(_IS_UNHANDLED, _is_handled(jobs.c, handled, claims)).limit(RELEASE_BATCH_SIZE)


def release_handled(tx: Transaction, handled: Routes, workers: Sequence[RemoteWorker] = ()) -> int:
    """Release unhandled jobs that these routes or remote workers handle; return how many."""
    ids = tx.execute(_select_releasable(handled, _claims_of(workers))).scalars().all()
    if not ids:
        return 0
    released: int = tx.execute(update(jobs).where(jobs.c.id.in_(ids), _IS_UNHANDLED).values(hold=None)).rowcount
    if released:
        tx.notify(JOBS)
    return released
