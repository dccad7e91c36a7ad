"""Hold or complete due jobs that no live node handles.

They are held (hold `unhandled`) until a node handles them, or completed if they were created with
`on_unhandled="complete"`.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from timebell.model.job import Completion, JobState
from timebell.model.routes import ALL_ROUTES, COMPLETE_UNHANDLED_JSON, Routes
from timebell.store.jobs import groups
from timebell.store.jobs.claim import CLAIMABLE, fetch_lane_rows
from timebell.store.jobs.serial import complete_serial
from timebell.store.statement import Statement
from timebell.store.transaction import JOBS, Transaction

NO_HANDLERS_RESULT = '{"listeners":0}'

# Only the head of each lane: an unhandled job is a problem only if other jobs wait behind it.
_LANE_HEAD = (
    f"SELECT id, route FROM timebell_jobs j WHERE {CLAIMABLE} AND queue = :queue"  # noqa: S608 - constants only
    " AND priority = :priority AND run_at <= :now ORDER BY run_at LIMIT 1000"
)
# Only before the first attempt: a job that was attempted before was handled by some node.
_COMPLETES_UNHANDLED = "target = :completes AND attempt = 0"
HOLD_UNHANDLED = Statement(
    f"UPDATE timebell_jobs SET hold = 'unhandled' WHERE id $in SELECT id FROM ({_LANE_HEAD}) AS head"  # noqa: S608
    f" WHERE NOT $handled $end_in AND {CLAIMABLE} AND (target IS NULL OR NOT ({_COMPLETES_UNHANDLED}))"
    " RETURNING id, route, queue, tenant_id, group_name"
)
COMPLETABLE_UNHANDLED = Statement(
    f"SELECT id, schedule_id, serial FROM timebell_jobs WHERE id $in SELECT id FROM ({_LANE_HEAD}) AS head"  # noqa: S608
    f" WHERE NOT $handled $end_in AND {CLAIMABLE} AND {_COMPLETES_UNHANDLED}"
)
RELEASE_HANDLED = Statement(
    "UPDATE timebell_jobs SET hold = NULL WHERE id $in SELECT id FROM timebell_jobs j"
    " WHERE hold = 'unhandled' AND state = 'pending' AND $handled LIMIT 10000 $end_in RETURNING id"
)


class UnhandledReport(NamedTuple):
    """The numbers of jobs held, released because a node handles them again, and completed without a handler."""

    held: int = 0
    released: int = 0
    completed: int = 0
    routes: frozenset[str] = frozenset()
    """The routes of the held jobs: topics, or `@http` and similar."""


def process_unhandled(tx: Transaction, handled: Routes, now: datetime) -> UnhandledReport:
    """Hold or complete due jobs that no live node handles, and release held jobs that a node handles again.

    `handled` are the routes of all live nodes.
    """
    released = release_handled(tx, handled)
    held = completed = 0
    routes: set[str] = set()
    for row in fetch_lane_rows(tx, ALL_ROUTES, now):
        lane = {"queue": row["queue"], "priority": row["priority"], "now": tx.dialect.to_db(now)}
        params = {**lane, **handled.sql_params(), "completes": COMPLETE_UNHANDLED_JSON}
        held_jobs = tx.fetch(HOLD_UNHANDLED, **params)
        groups.release_next(tx, held_jobs)
        held, routes = held + len(held_jobs), routes | {job["route"] for job in held_jobs}
        completable = tx.fetch(COMPLETABLE_UNHANDLED, **params)
        completions = [
            Completion(
                str(job["id"]),
                0,
                JobState.COMPLETED,
                now,
                expected_state=JobState.PENDING,
                uses_attempt=False,
                result=NO_HANDLERS_RESULT,
            )
            for job in completable
        ]
        if completions:
            completed += len(
                complete_serial(tx, completions, [str(job["schedule_id"]) for job in completable if job["serial"]])
            )
    return UnhandledReport(held, released, completed, frozenset(routes))


def release_handled(tx: Transaction, handled: Routes) -> int:
    """Release unhandled jobs that these routes handle; return how many."""
    released = len(tx.fetch(RELEASE_HANDLED, **handled.sql_params()))
    if released:
        tx.notify(JOBS)
    return released
