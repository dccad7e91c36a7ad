"""Pending jobs: insert, scan the lanes, claim. Attempts are completed in `complete`.

A claim is a conditional update of pending jobs to `running` that increments the attempt number. That number is the
fence of the attempt: later writes for the attempt require that it is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import select

from timebell.model.job import Attempt, Hold, JobState, NewJob, UniformJobs
from timebell.model.limits import next_start
from timebell.model.payload import decode
from timebell.model.progress import decode_progress
from timebell.model.routes import Routes
from timebell.store import recent_writes
from timebell.store.dialects.batches import job_row
from timebell.store.dialects.operations import Lane
from timebell.store.jobs.target_queues import assign_queues
from timebell.store.schema import jobs
from timebell.store.transaction import JOBS, Row, Transaction, is_soon
from timebell.store.types import EPOCH, from_micros, to_micros

_NOT_BULK_LOADED = (
    "node_id",
    "started_at",
    "errors",
    "heartbeat",
    "cancel_requested",
    "progress",
    "shared",
    "manual_retries",
    "charged",
)
_BULK_CONSTANTS = {"state": "pending", "attempt": 0, "attempts_used": 0}
_BULK_COLUMNS = [column for column in jobs.columns if column.name not in (*_NOT_BULK_LOADED, *_BULK_CONSTANTS)]
_INSTANT_COLUMNS = frozenset(column.name for column in _BULK_COLUMNS if type(column.type).__name__ == "Instant")
_FIELD_BY_COLUMN = {"group_name": "group"}


@dataclass(slots=True)
class QueueLane:
    """A lane, that is one priority of one queue, with pending jobs, as seen by a scan.

    `next_due` is when its first job is due, `next_future_due` the same among the jobs that are not due yet.
    `free_capacity` is how many more jobs the concurrency limit of the queue allows (None: no limit). The rate limit of
    the queue allows no start before `rate_limited_until`. `needs_fair_sharing` if the lane is late and several tenants
    have jobs in it.
    """

    queue: str
    priority: int
    next_due: datetime | None
    free_capacity: int | None
    has_limits: bool
    rate_limited_until: datetime | None = None
    needs_fair_sharing: bool = False
    next_future_due: datetime | None = None

    @property
    def key(self) -> Lane:
        """The queue and the priority."""
        return self.queue, self.priority

    @property
    def earliest_start(self) -> datetime | None:
        """The earliest instant at which a job is due and the rate limit allows it to start."""
        return (
            self.next_due
            if self.next_due is None or self.rate_limited_until is None
            else max(self.next_due, self.rate_limited_until)
        )


def notify_of(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Notify if any of these inserted jobs may start soon."""
    if any(job.hold is None and is_soon(job.run_at, job.created_at) for job in new_jobs):
        tx.notify(JOBS)


def insert_returning_ids(tx: Transaction, new_jobs: Sequence[NewJob]) -> set[str]:
    """Insert jobs; return the ids of those inserted. A job whose key or occurrence has a live job is skipped."""
    assign_queues(tx, new_jobs)
    notify_of(tx, new_jobs)
    inserted = tx.dialect.insert_jobs_returning(tx, new_jobs)
    tx.record(recent_writes.JOBS, dict.fromkeys(inserted))
    return inserted


def insert_requested(tx: Transaction, new_jobs: Sequence[NewJob]) -> tuple[set[str], set[str]]:
    """Insert jobs like `insert_returning_ids`, except those whose request id was used before, and store request ids.

    Returns the ids of the jobs whose request id was not used, and of the jobs inserted.
    """
    assign_queues(tx, new_jobs)
    notify_of(tx, new_jobs)
    reserved, inserted = tx.dialect.insert_requested(tx, new_jobs)
    tx.record(recent_writes.JOBS, dict.fromkeys(inserted))
    return reserved, inserted


def mark_serial(tx: Transaction, schedules: Iterable[str | None]) -> None:
    """Make live jobs of schedules serial if a job of the schedule waits behind them (hold `overlap`).

    Only a serial job releases the next one when it ends. Jobs that were created to run in parallel, by another overlap
    policy or a backfill, are not serial before.
    """
    tx.dialect.mark_serial(tx, sorted(filter(None, schedules)))


def insert_jobs(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Insert jobs. Like `insert_returning_ids`, but does not report which ones were inserted."""
    assign_queues(tx, new_jobs)
    notify_of(tx, new_jobs)
    tx.dialect.insert_jobs(tx, new_jobs)
    tx.record(recent_writes.JOBS, dict.fromkeys(job.id for job in new_jobs))


def insert_running(tx: Transaction, new_jobs: Sequence[NewJob], node: str, now: datetime) -> set[str]:
    """Insert due jobs as `running`, as first attempts of this node; return the ids of those inserted."""
    inserted = tx.dialect.insert_running(tx, new_jobs, node, now)
    tx.record(recent_writes.JOBS, dict.fromkeys(inserted))
    return inserted


def bulk_load(tx: Transaction, new_jobs: Sequence[NewJob] | UniformJobs, *, shared: bool) -> None:
    """Bulk insert jobs that cannot conflict; `shared`: whether there are tenants besides `default`.

    Values are gathered by column, which needs no function call per value. Columns without any value are left out.
    """
    if not isinstance(new_jobs, UniformJobs):
        notify_of(tx, new_jobs)
    elif is_soon(new_jobs.earliest_run_at, new_jobs.template.created_at):
        tx.notify(JOBS)
    constants: dict[str, Any] = _BULK_CONSTANTS | ({"shared": True} if shared else {})
    columns: dict[str, list[Any]] = {}
    for column in _BULK_COLUMNS:
        name = column.name
        values = _field_values(new_jobs, _FIELD_BY_COLUMN.get(name, name))
        if column.nullable and values.count(None) == len(values):
            continue
        if name == "kind":
            values = list(map(str, values))
        elif name in _INSTANT_COLUMNS:
            values = list(map(tx.dialect.to_db, values))
        if len(values) < len(new_jobs):
            (constants[name],) = values
        else:
            columns[name] = values
    tx.bulk_insert("timebell_jobs", list(columns), zip(*columns.values(), strict=True), constants)
    tx.record(recent_writes.JOBS, dict.fromkeys(_field_values(new_jobs, "id")))


def bulk_load_keyed(tx: Transaction, new_jobs: Sequence[NewJob], *, shared: bool) -> set[str]:
    """Bulk insert jobs of one tenant with different keys; return the ids of those inserted.

    A job whose key has a live job is skipped. If another transaction inserts one of the keys at the same time, this one
    fails, and `Store.run` repeats it.
    """
    assign_queues(tx, new_jobs)
    query = select(jobs.c.key).where(jobs.c.tenant_id == new_jobs[0].tenant_id)
    live = set(tx.execute(tx.dialect.match_keys(query, jobs.c.key, [str(job.key) for job in new_jobs])).scalars())
    free = [job for job in new_jobs if job.key not in live]
    if free:
        bulk_load(tx, free, shared=shared)
    return {job.id for job in free}


def _field_values(new_jobs: Sequence[NewJob] | UniformJobs, field: str) -> list[Any]:
    """Return the values of a field of jobs; of UniformJobs a single value if all have the same."""
    if not isinstance(new_jobs, UniformJobs):
        return list(map(attrgetter(field), new_jobs))
    return new_jobs.varying.get(field) or [getattr(new_jobs.template, field)]


FAIR_SHARING_AFTER = timedelta(seconds=0.5)
"""The lateness of a lane from which on its tenants share it fairly."""

ScanPositions = dict[Lane, datetime]
"""By lane (queue, priority), an instant before which the lane has no due job left for the routes of the scan."""
SCAN_OVERLAP = timedelta(seconds=0.25)
"""Positions are at least this far in the past: a transaction may insert a job due now and commit a little later."""


class ScanResult(NamedTuple):
    """The lanes found by a scan, and the positions from which the next scan may start."""

    lanes: list[QueueLane]
    positions: ScanPositions


def list_lanes(tx: Transaction, routes: Routes, now: datetime) -> list[QueueLane]:
    """Return all lanes with a due job for these routes or with any future job, except those of paused queues.

    Highest priority first. `next_due` is the instant at which to scan again.
    """
    return scan_lanes(tx, routes, now).lanes


def scan_lanes(tx: Transaction, routes: Routes, now: datetime, positions: ScanPositions | None = None) -> ScanResult:
    """Scan all lanes or, given `positions`, only those lanes and only jobs due at or after their positions.

    Returns lanes as `list_lanes`, and the positions for the next scan.
    """
    from_db, result = tx.dialect.from_db, ScanResult([], {})
    for row in fetch_lane_rows(tx, routes, now, positions):
        due, later = from_db(row["due"]), from_db(row["later"])
        result.positions[row["queue"], row["priority"]] = min(due or now, now - SCAN_OVERLAP)
        next_due = later if due is None else due
        if next_due is None or row["paused"]:
            continue
        free_capacity = None if row["concurrency"] is None else max(0, row["concurrency"] - row["busy"])
        has_limits = not (row["concurrency"] is row["concurrency_per_group"] is row["rate"] is None)
        rate_limited_until = None if row["rate"] is None else _rate_limited_until(row, now)
        lane = QueueLane(
            row["queue"],
            row["priority"],
            next_due,
            free_capacity,
            has_limits,
            rate_limited_until,
            bool(row["crowded"]),
            later,
        )
        result.lanes.append(lane)
    if len(result.lanes) > 1:
        result.lanes.sort(key=lambda lane: (lane.priority, lane.next_due))
    return result


def fetch_lane_rows(
    tx: Transaction, routes: Routes, now: datetime, positions: ScanPositions | None = None
) -> list[Row]:
    """Execute the scan of `scan_lanes`; return its raw rows, also those of paused queues."""
    if positions is not None and not positions:
        return []
    return tx.dialect.scan_lanes(tx, routes, now, now - FAIR_SHARING_AFTER, positions)


def _rate_limited_until(row: Row, now: datetime) -> datetime:
    return from_micros(next_start(decode(row["starts"]) or [], row["rate"], round(row["per"] * 1e6), to_micros(now)))


def list_upcoming(
    tx: Transaction, lane: QueueLane, routes: Routes, limit: int, now: datetime, until: datetime
) -> tuple[list[datetime], datetime]:
    """Look ahead in a lane; return when its next jobs for these routes are due, and until when this is complete.

    Reads at most `limit` jobs of any route, due after `now` and until `until`.
    """
    from_db = tx.dialect.from_db
    rows = tx.dialect.list_upcoming(tx, lane.key, routes, now, until, limit)
    complete_until = from_db(rows[-1]["run_at"]) if len(rows) == limit else until
    return [from_db(row["run_at"]) for row in rows if row["is_handled"]], complete_until


def claim_batch(
    tx: Transaction,
    lane: QueueLane,
    routes: Routes,
    node: str,
    limit: int,
    now: datetime,
    *,
    recheck_queue: bool = False,
) -> list[Attempt]:
    """Claim up to `limit` due jobs of a lane, oldest first. They start with this statement.

    The search starts at the first due job seen by the scan, because the index may have many dead entries before it.
    Set `recheck_queue` for a lane without limits from an earlier scan: nothing is claimed if the queue is paused or has
    limits by now.
    """
    claimed = tx.dialect.claim(
        tx, lane.key, routes, node, now, lane.next_due or EPOCH, limit, recheck_queue=recheck_queue
    )
    return to_attempts(tx, claimed, now)


def to_attempts(tx: Transaction, started: list[Row], now: datetime) -> list[Attempt]:
    """Convert the rows of started jobs to their attempts, first due first."""
    if len(started) > 1:
        started.sort(key=itemgetter("run_at"))
    return [_attempt_from_row(tx, row, now) for row in started]


def list_running_attempts(tx: Transaction) -> dict[tuple[str, int], tuple[int, Hold | None]]:
    """Return (heartbeat, why it was requested to stop) by attempt (id, number), for watching leases.

    Includes all running attempts, and the dispatched ones that were requested to stop.
    """
    return {
        (str(row["id"]), row["attempt"]): (row["heartbeat"], Hold(row["hold"]) if row["hold"] else None)
        for row in tx.dialect.list_running(tx)
    }


def load_live_attempts(tx: Transaction, attempts: Sequence[tuple[str, int]]) -> list[tuple[Attempt, str | None]]:
    """Load those of these attempts (id, number) that are still running or dispatched, with the ids of their nodes."""
    numbers = dict(attempts)
    in_flight = jobs.c.state.in_((JobState.RUNNING.value, JobState.DISPATCHED.value))
    rows = tx.execute(select(jobs).where(jobs.c.id.in_(numbers), in_flight))
    return [(attempt_from_job(row), row.node_id) for row in rows if row.attempt == numbers[row.id]]


def attempt_from_job(row: Any) -> Attempt:
    """Convert a row of `jobs` to its attempt."""
    started_at = row.started_at or row.run_at  # a damaged row may lack it
    return Attempt(
        row.id, row.tenant_id, row.topic, row.schedule_id, row.scheduled_at, row.kind, row.timezone, row.payload,
        row.metadata, row.target, row.queue, row.retry, row.timeout, row.expires_at, row.attempt, row.attempts_used,
        bool(row.serial), row.errors, row.revision, row.run_at, started_at, JobState(row.state), row.group_name,
        priority=row.priority, manual_retries=row.manual_retries, conditions=row.conditions,
        progress=decode_progress(row.progress, row.attempt),
    )  # fmt: skip


def list_overdue_dispatched(tx: Transaction, limit: int, now: datetime) -> list[Attempt]:
    """Return attempts whose external workers missed their deadline for a report, oldest deadline first."""
    from_db = tx.dialect.from_db
    rows = tx.dialect.list_overdue_dispatched(tx, now, limit)
    return [_attempt_from_row(tx, row, from_db(row["started_at"]), JobState.DISPATCHED) for row in rows]


def _attempt_from_row(tx: Transaction, row: Row, now: datetime, state: JobState = JobState.RUNNING) -> Attempt:
    # By position, in the order of ATTEMPT_COLUMNS: access by name takes three times as long.
    (
        id_, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,
        timeout, expires_at, number, attempts_used, serial, errors, revision, run_at, group, priority,
        manual_retries, conditions, *_,
    ) = row.values()  # fmt: skip
    from_db = tx.dialect.from_db
    starts_at = from_db(run_at)
    return Attempt(
        str(id_), tenant_id, topic, None if schedule_id is None else str(schedule_id),
        starts_at if scheduled_at == run_at else from_db(scheduled_at), kind, timezone, payload, metadata, target,
        queue, retry, timeout, None if expires_at is None else from_db(expires_at), number, attempts_used, bool(serial),
        errors, revision, starts_at, now, state, group, None, priority, manual_retries, conditions,
    )  # fmt: skip


def record_skipped(
    tx: Transaction, skips: Sequence[tuple[NewJob, str, int, datetime]], at: datetime, detail: str | None = None
) -> None:
    """Record skipped occurrences, given as (job it would have been, reason, count, instant of the last one).

    `detail` explains the reason further.
    """
    to_db = tx.dialect.to_db
    tx.dialect.insert_skipped(tx, [
        job_row(job, to_db) | {
            "finished_at": to_db(at), "reason": reason, "skipped_count": count, "skipped_to": to_db(to),
            "error": detail,
        }
        for job, reason, count, to in skips
    ])  # fmt: skip
