"""Hot statements of pending jobs: insert, scan the lanes, claim. Attempts are completed in `complete`.

Each batch is one statement. A claim is a conditional UPDATE of pending jobs to `running` that increments the attempt
number. That number is the fence of the attempt: later writes for the attempt require that it is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Column

from timebell.model.job import Attempt, JobState, NewJob, UniformJobs
from timebell.model.limits import next_start
from timebell.model.payload import decode
from timebell.model.routes import Routes
from timebell.store.schema import jobs
from timebell.store.statement import SplitStatement, Statement
from timebell.store.transaction import JOBS, Row, Transaction, is_soon
from timebell.store.types import EPOCH, from_micros, to_micros

_BATCH_TYPES = {
    "String": "text", "Text": "text", "Integer": "int", "SmallInteger": "int", "BigInteger": "int",
    "Float": "real", "Boolean": "bool", "Instant": "instant", "Id": "id",
}  # fmt: skip
# Left out of the statement if no job of the batch has a value: reading a column from JSON is expensive.
_OPTIONAL_COLUMNS = ("local_time", "tzdata", "group_name", "conditions")
_NOT_INSERTED = (
    "node_id",
    "started_at",
    "errors",
    "heartbeat",
    "cancel_requested",
    "shared",
    "manual_retries",
    "charged",
)
_ALL_INSERT_COLUMNS = [column for column in jobs.columns if column.name not in _NOT_INSERTED]
_INSERT_COLUMNS = [column for column in _ALL_INSERT_COLUMNS if column.name not in _OPTIONAL_COLUMNS]
_INSERT_NAMES = [column.name for column in _INSERT_COLUMNS]


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
    def earliest_start(self) -> datetime | None:
        """The earliest instant at which a job is due and the rate limit allows it to start."""
        return (
            self.next_due
            if self.next_due is None or self.rate_limited_until is None
            else max(self.next_due, self.rate_limited_until)
        )


# The column `shared`: jobs created while `default` is the only tenant need no fair sharing between tenants.
_HAS_OTHER_TENANTS = "(tenant_id <> 'default' OR EXISTS (SELECT 1 FROM timebell_tenants t WHERE t.id <> 'default'))"


def _insert_statement(columns: Sequence[Column[Any]], returning: str = "", where: str = "true") -> Statement:
    names = ", ".join(column.name for column in columns)
    return Statement(
        f"WITH $rows INSERT INTO timebell_jobs ({names}, shared) "  # noqa: S608 - our own column names
        f"SELECT {names}, {_HAS_OTHER_TENANTS} FROM d WHERE {where} ON CONFLICT DO NOTHING{returning}",
        **{column.name: _BATCH_TYPES[type(column.type).__name__] for column in columns},
    )


INSERT_RETURNING, INSERT_ALL_RETURNING = (
    _insert_statement(_INSERT_COLUMNS, " RETURNING id"),
    _insert_statement(_ALL_INSERT_COLUMNS, " RETURNING id"),
)
INSERT, INSERT_ALL = _insert_statement(_INSERT_COLUMNS), _insert_statement(_ALL_INSERT_COLUMNS)
# $due also checks the server's clock, as in a claim.
INSERT_RUNNING = _insert_statement([*_ALL_INSERT_COLUMNS, jobs.c.node_id, jobs.c.started_at], " RETURNING id", "$due")


def _job_row(job: NewJob, tx: Transaction) -> dict[str, Any]:
    """Return a new job as a row of the jobs table."""
    to_db = tx.dialect.to_db
    run_at = to_db(job.run_at)
    row = {
        "id": job.id, "tenant_id": job.tenant_id, "topic": job.topic, "schedule_id": job.schedule_id,
        "revision": job.revision, "kind": str(job.kind),
        "scheduled_at": run_at if job.scheduled_at is job.run_at else to_db(job.scheduled_at),
        "run_at": run_at, "timezone": job.timezone, "payload": job.payload,
        "metadata": job.metadata, "owner_id": job.owner_id, "key": job.key, "target": job.target,
        "queue": job.queue, "priority": job.priority, "retry": job.retry, "timeout": job.timeout,
        "expires_at": None if job.expires_at is None else to_db(job.expires_at), "serial": job.serial,
        "state": "pending", "attempt": 0, "attempts_used": 0,
        "created_at": run_at if job.created_at is job.run_at else to_db(job.created_at), "replaces": job.replaces,
        "route": job.route, "hold": job.hold,
    }  # fmt: skip
    if job.local_time is not None:
        row["local_time"], row["tzdata"] = job.local_time, job.tzdata
    if job.group is not None:
        row["group_name"] = job.group
    if job.conditions is not None:
        row["conditions"] = job.conditions
    return row


def _needs_optional_columns(new_jobs: Sequence[NewJob]) -> bool:
    for job in new_jobs:  # noqa: SIM110 - a generator costs more than this loop
        if job.local_time or job.group or job.conditions:
            return True
    return False


def _notify_of(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Notify if any of these inserted jobs may start soon."""
    if any(job.hold is None and is_soon(job.run_at, job.created_at) for job in new_jobs):
        tx.notify(JOBS)


def insert_returning_ids(tx: Transaction, new_jobs: Sequence[NewJob]) -> set[str]:
    """Insert jobs; return the ids of those inserted. A job whose key or occurrence has a live job is skipped."""
    _notify_of(tx, new_jobs)
    inserted = tx.fetch(
        INSERT_ALL_RETURNING if _needs_optional_columns(new_jobs) else INSERT_RETURNING,
        [_job_row(job, tx) for job in new_jobs],
    )
    return {str(row["id"]) for row in inserted}


MARK_SERIAL = Statement(
    "WITH $rows UPDATE timebell_jobs SET serial = true WHERE id $in SELECT j.id FROM timebell_jobs j"
    " JOIN d ON j.schedule_id = d.id WHERE NOT j.serial AND (j.hold IS NULL OR j.hold <> 'backlog') AND EXISTS"
    " (SELECT 1 FROM timebell_jobs w WHERE w.schedule_id = d.id AND w.hold = 'overlap') $end_in",
    id="id",
)


def mark_serial(tx: Transaction, schedules: Iterable[str | None]) -> None:
    """Make live jobs of schedules serial if a job of the schedule waits behind them (hold `overlap`).

    Only a serial job releases the next one when it ends. Jobs that were created to run in parallel, by another overlap
    policy or a backfill, are not serial before.
    """
    tx.fetch(MARK_SERIAL, [{"id": id_} for id_ in sorted(filter(None, schedules))])


def insert_jobs(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Insert jobs. Like `insert_returning_ids`, but does not report which ones were inserted."""
    _notify_of(tx, new_jobs)
    tx.fetch(INSERT_ALL if _needs_optional_columns(new_jobs) else INSERT, [_job_row(job, tx) for job in new_jobs])


def insert_running(tx: Transaction, new_jobs: Sequence[NewJob], node: str, now: datetime) -> set[str]:
    """Insert due jobs as `running`, as first attempts of this node; return the ids of those inserted."""
    started = {"state": "running", "attempt": 1, "node_id": node, "started_at": tx.dialect.to_db(now)}
    inserted = tx.fetch(INSERT_RUNNING, [_job_row(job, tx) | started for job in new_jobs], now=tx.dialect.to_db(now))
    return {str(row["id"]) for row in inserted}


_FIELD_BY_COLUMN = {"group_name": "group"}
_BULK_CONSTANTS = {"state": "pending", "attempt": 0, "attempts_used": 0}
_INSTANT_COLUMNS = frozenset(column.name for column in _INSERT_COLUMNS if type(column.type).__name__ == "Instant")
_BULK_COLUMNS = [column for column in _ALL_INSERT_COLUMNS if column.name not in _BULK_CONSTANTS]


def bulk_load(tx: Transaction, new_jobs: Sequence[NewJob] | UniformJobs, *, shared: bool) -> None:
    """Bulk insert jobs that cannot conflict; `shared`: whether there are tenants besides `default`.

    Values are gathered by column, which needs no function call per value. Columns without any value are left out.
    """
    if not isinstance(new_jobs, UniformJobs):
        _notify_of(tx, new_jobs)
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


def _field_values(new_jobs: Sequence[NewJob] | UniformJobs, field: str) -> list[Any]:
    """Return the values of a field of jobs; of UniformJobs a single value if all have the same."""
    if not isinstance(new_jobs, UniformJobs):
        return list(map(attrgetter(field), new_jobs))
    return new_jobs.varying.get(field) or [getattr(new_jobs.template, field)]


CLAIMABLE = "state = 'pending' AND hold IS NULL"
CLAIMABLE_SHARED = f"{CLAIMABLE} AND shared"
CLAIMABLE_SHARED_IN_LANE = f"{CLAIMABLE_SHARED} AND queue = l.queue AND priority = l.priority"
FAIR_SHARING_AFTER = timedelta(seconds=0.5)
"""The lateness of a lane from which on its tenants share it fairly."""
# The next lane after lane `l`: the next priority of the same queue, else the first lane of the next queue. Two look-ups
# instead of one row comparison, of which SQLite would use the index only for the first column.
_NEXT_LANE = ", ".join(
    f"COALESCE((SELECT {column} FROM timebell_jobs WHERE {CLAIMABLE} AND queue = l.queue"  # noqa: S608 - constants only
    f" AND priority > l.priority ORDER BY priority, run_at LIMIT 1), (SELECT {column} FROM timebell_jobs"
    f" WHERE {CLAIMABLE} AND queue > l.queue ORDER BY queue, priority, run_at LIMIT 1))"
    for column in ("queue", "priority", "run_at")
)
# Jobs that are running or dispatched to an external worker. Two counts, as each state has its own partial index.
COUNT_IN_FLIGHT = (
    "((SELECT count(*) FROM timebell_jobs r WHERE r.state = 'running' AND r.queue = {0})"
    " + (SELECT count(*) FROM timebell_jobs r WHERE r.state = 'dispatched' AND r.queue = {0}))"
)
# Routes are checked only for due jobs: finding a future job of one's own routes could mean walking millions of others,
# while waking up once for the job of another node costs only one scan. `since` skips the index entries of claimed jobs,
# which PostgreSQL has to pass until a vacuum removes them.
_SCAN_LANES = f"""
    SELECT l.queue, l.priority, q.concurrency, q.concurrency_per_group, q.rate, q.per, q.starts,
        q.paused OR a.paused AS paused,
        (SELECT run_at FROM timebell_jobs j WHERE {CLAIMABLE} AND j.queue = l.queue
                AND j.priority = l.priority AND run_at >= l.since AND run_at <= :now AND $handled
                ORDER BY run_at LIMIT 1) AS due,
        (SELECT run_at FROM timebell_jobs j WHERE {CLAIMABLE} AND j.queue = l.queue
                AND j.priority = l.priority AND run_at > :now ORDER BY run_at LIMIT 1) AS later,
        CASE WHEN q.concurrency IS NOT NULL THEN
            {COUNT_IN_FLIGHT.format("l.queue")} END AS busy,
        EXISTS (SELECT 1 FROM timebell_jobs j WHERE {CLAIMABLE} AND j.queue = l.queue AND j.priority = l.priority
                AND run_at >= l.since AND run_at <= :late)
            AND (SELECT tenant_id FROM timebell_jobs WHERE {CLAIMABLE_SHARED_IN_LANE} ORDER BY tenant_id LIMIT 1)
                <> (SELECT tenant_id FROM timebell_jobs WHERE {CLAIMABLE_SHARED_IN_LANE}
                    ORDER BY tenant_id DESC LIMIT 1) AS crowded
    FROM {{}} l LEFT JOIN timebell_queues q ON q.name = l.queue
    LEFT JOIN timebell_queues a ON a.name = '*' WHERE l.queue IS NOT NULL
    """  # noqa: S608 - constants only
# A loose index scan: a few index look-ups per lane, whatever the number of pending jobs. The first job of each lane is
# looked up once.
SCAN_ALL_LANES = Statement(
    f"""
    WITH RECURSIVE lane(queue, priority, since) AS (
        SELECT * FROM (SELECT queue, priority, run_at FROM timebell_jobs WHERE {CLAIMABLE}
                       ORDER BY queue, priority, run_at LIMIT 1) AS first
        UNION ALL
        SELECT {_NEXT_LANE} FROM lane l WHERE l.queue IS NOT NULL
    ) {_SCAN_LANES.format("lane")}
    """  # noqa: S608 - constants only
)
SCAN_GIVEN_LANES = Statement(f"WITH $rows {_SCAN_LANES.format('d')}", queue="text", priority="int", since="instant")

ScanPositions = dict[tuple[str, int], datetime]
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
    to_db = tx.dialect.to_db
    params = {"now": to_db(now), "late": to_db(now - FAIR_SHARING_AFTER), **routes.sql_params()}
    if positions is None:
        return tx.fetch(SCAN_ALL_LANES, **params)
    lanes = [{"queue": queue, "priority": priority, "since": to_db(at)} for (queue, priority), at in positions.items()]
    return tx.fetch(SCAN_GIVEN_LANES, lanes, **params) if lanes else []


def _rate_limited_until(row: Row, now: datetime) -> datetime:
    return from_micros(next_start(decode(row["starts"]) or [], row["rate"], round(row["per"] * 1e6), to_micros(now)))


UPCOMING_JOBS = Statement(
    f"SELECT run_at, CASE WHEN $handled THEN 1 ELSE 0 END AS is_handled FROM timebell_jobs WHERE {CLAIMABLE}"  # noqa: S608
    " AND queue = :queue AND priority = :priority AND run_at > :now AND run_at <= :until ORDER BY run_at LIMIT :limit"
)


def list_upcoming(
    tx: Transaction, lane: QueueLane, routes: Routes, limit: int, now: datetime, until: datetime
) -> tuple[list[datetime], datetime]:
    """Look ahead in a lane; return when its next jobs for these routes are due, and until when this is complete.

    Reads at most `limit` jobs of any route, due after `now` and until `until`.
    """
    to_db, from_db = tx.dialect.to_db, tx.dialect.from_db
    rows = tx.fetch(UPCOMING_JOBS, now=to_db(now), until=to_db(until), limit=limit, **lane_params(lane, routes))
    complete_until = from_db(rows[-1]["run_at"]) if len(rows) == limit else until
    return [from_db(row["run_at"]) for row in rows if row["is_handled"]], complete_until


ATTEMPT_COLUMNS = (
    "id, tenant_id, topic, schedule_id, scheduled_at, kind, timezone, payload, metadata, target, queue, retry,"
    " timeout, expires_at, attempt, attempts_used, serial, errors, revision, run_at, group_name, priority,"
    " manual_retries, conditions"
)
SET_RUNNING = "UPDATE timebell_jobs SET state = 'running', attempt = attempt + 1, node_id = :node, started_at = :now"
DUE_IN_LANE = f"{CLAIMABLE} AND queue = :queue AND priority = :priority AND $due AND $handled"
_ATTEMPT_JSON_FIELDS = ", ".join(
    f"'{name}', {'attempt + 1' if name == 'attempt' else name}" for name in ATTEMPT_COLUMNS.split(", ")
)
# For claims without a scan: the queue was not paused and got no limit since the last scan.
_QUEUE_UNRESTRICTED = (
    " AND NOT EXISTS (SELECT 1 FROM timebell_queues q WHERE q.name IN (:queue, '*') AND (q.paused"
    " OR (q.name = :queue AND COALESCE(q.concurrency, q.concurrency_per_group, q.rate) IS NOT NULL)))"
)


def _claim_statement(extra_condition: str = "") -> Statement:
    first_due = (
        f"FROM timebell_jobs WHERE {DUE_IN_LANE} AND run_at >= :since{extra_condition} ORDER BY run_at LIMIT :limit"
    )
    return Statement(
        f"{SET_RUNNING} WHERE $row_id $in SELECT $row_id {first_due} $skip_locked $end_in RETURNING {ATTEMPT_COLUMNS}",
        SplitStatement(
            f"SELECT json_group_array(json_object({_ATTEMPT_JSON_FIELDS})), json_group_array(id)"  # noqa: S608
            f" FROM (SELECT * {first_due})",
            f"{SET_RUNNING} WHERE id IN (SELECT value FROM json_each(:ids))",  # noqa: S608
        ),
    )


CLAIM, CLAIM_IF_UNRESTRICTED = _claim_statement(), _claim_statement(_QUEUE_UNRESTRICTED)


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
    since = tx.dialect.to_db(lane.next_due or EPOCH)
    statement = CLAIM_IF_UNRESTRICTED if recheck_queue else CLAIM
    return start_attempts(tx, statement, now, node=node, limit=limit, since=since, **lane_params(lane, routes))


def lane_params(lane: QueueLane, routes: Routes) -> dict[str, Any]:
    """Return the statement parameters that select jobs of a lane for these routes."""
    return {"queue": lane.queue, "priority": lane.priority, **routes.sql_params()}


def start_attempts(
    tx: Transaction, statement: Statement, now: datetime, rows: Sequence[dict[str, Any]] = (), **params: Any
) -> list[Attempt]:
    """Execute a statement that starts jobs; return their attempts, oldest first."""
    started = tx.fetch(statement, rows, now=tx.dialect.to_db(now), **params)
    if len(started) > 1:
        started.sort(key=itemgetter("run_at"))
    return [_attempt_from_row(tx, row, now) for row in started]


RUNNING_ATTEMPTS = Statement(
    "SELECT id, attempt, heartbeat, hold FROM timebell_jobs WHERE state = 'running' UNION ALL"
    " SELECT id, attempt, heartbeat, hold FROM timebell_jobs WHERE hold = 'stopping' AND state = 'dispatched'"
)


def list_running_attempts(tx: Transaction) -> dict[tuple[str, int], tuple[int, bool]]:
    """Return (heartbeat, stop requested) by attempt (id, number), for watching leases.

    Includes all running attempts, and the dispatched ones that were requested to stop.
    """
    return {
        (str(row["id"]), row["attempt"]): (row["heartbeat"], row["hold"] is not None)
        for row in tx.fetch(RUNNING_ATTEMPTS)
    }


_ATTEMPT_COLUMNS_OF_J = ", ".join(f"j.{name.strip()}" for name in ATTEMPT_COLUMNS.split(","))
LIVE_ATTEMPTS = Statement(
    f"WITH $rows SELECT {_ATTEMPT_COLUMNS_OF_J}, j.state FROM timebell_jobs j"  # noqa: S608
    " JOIN d ON j.id = d.id AND j.attempt = d.attempt WHERE j.state IN ('running', 'dispatched')",
    id="id",
    attempt="int",
)


def load_live_attempts(tx: Transaction, attempts: Sequence[tuple[str, int]], now: datetime) -> list[Attempt]:
    """Load those of these attempts (id, number) that are still running or dispatched."""
    rows = tx.fetch(LIVE_ATTEMPTS, [{"id": id_, "attempt": number} for id_, number in attempts])
    return [_attempt_from_row(tx, row, now, JobState(row["state"])) for row in rows]


OVERDUE_DISPATCHED = Statement(
    f"SELECT {_ATTEMPT_COLUMNS_OF_J} FROM timebell_jobs j WHERE j.state = 'dispatched' AND j.heartbeat <= :until"  # noqa: S608
    " ORDER BY j.heartbeat LIMIT :limit"
)


def list_overdue_dispatched(tx: Transaction, limit: int, now: datetime) -> list[Attempt]:
    """Return attempts whose external workers missed their deadline for a report, oldest deadline first."""
    rows = tx.fetch(OVERDUE_DISPATCHED, until=to_micros(now), limit=limit)
    return [_attempt_from_row(tx, row, now, JobState.DISPATCHED) for row in rows]


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


INSERT_SKIPPED = Statement(
    f"WITH $rows INSERT INTO timebell_finished ({', '.join(_INSERT_NAMES[:-2])}, finished_at, reason,"  # noqa: S608
    f" skipped_count, skipped_to, error) SELECT {', '.join(_INSERT_NAMES[:-2])}, finished_at, reason, skipped_count,"
    " skipped_to, error FROM d",
    **{column.name: _BATCH_TYPES[type(column.type).__name__] for column in _INSERT_COLUMNS[:-2]},
    finished_at="instant",
    reason="text",
    skipped_count="int",
    skipped_to="instant",
    error="text",
)


def record_skipped(
    tx: Transaction, skips: Sequence[tuple[NewJob, str, int, datetime]], at: datetime, detail: str | None = None
) -> None:
    """Record skipped occurrences, given as (job it would have been, reason, count, instant of the last one).

    `detail` explains the reason further.
    """
    rows = []
    for job, reason, count, to in skips:
        row = _job_row(job, tx) | {"state": JobState.SKIPPED.value, "finished_at": tx.dialect.to_db(at)}
        rows.append(
            row | {"reason": reason, "skipped_count": count, "skipped_to": tx.dialect.to_db(to), "error": detail}
        )
    tx.fetch(INSERT_SKIPPED, rows)
