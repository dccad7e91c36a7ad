"""The hot operations, which every dialect implements with SQL of its own.

A dialect has one module for each subject: `insert`, `claim`, `complete`, `release`, `fire` and `forecast`. Everything
else is written once, in SQLAlchemy Core. "Add a hot store operation" in CONTRIBUTING.md describes how to add one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Executable, Insert, Select, Table
from sqlalchemy.engine import CursorResult

from timebell.model.job import Completion, JobState, NewJob
from timebell.model.routes import Routes
from timebell.store.sql import SQL, Row

Lane = tuple[str, int]
"""A queue and a priority."""
ATTEMPT_COLUMNS = (
    "id", "tenant_id", "topic", "schedule_id", "scheduled_at", "kind", "timezone", "payload", "metadata", "target",
    "queue", "retry", "timeout", "expires_at", "attempt", "attempts_used", "serial", "errors", "revision", "run_at",
    "group_name", "priority", "manual_retries", "conditions",
)  # fmt: skip
"""The columns that operations which start attempts return, in this order."""


class Executor(Protocol):
    """The part of a transaction that operations use."""

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        """Execute a literal statement; return its rows."""

    def atomic(self) -> AbstractContextManager[object]:
        """Return a context whose statements are one transaction, also on a connection in autocommit mode."""

    def execute(self, statement: Executable, rows: Any = None) -> CursorResult[Any]:
        """Execute a SQLAlchemy statement."""


class InsertOperations(Protocol):
    """Insert jobs and skipped occurrences."""

    def find_tenants(self, tx: Executor, ids: Collection[str]) -> set[str]:
        """Return those of these tenants that exist and, if there is any, one that is not `default`."""

    def reserve_request_ids(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        """Store the request ids of jobs; return the ids of the jobs whose request id was not used before."""

    def insert_jobs(self, tx: Executor, new_jobs: Sequence[NewJob]) -> None:
        """Insert pending jobs. A job whose key or occurrence has a live job is skipped."""

    def insert_jobs_returning(self, tx: Executor, new_jobs: Sequence[NewJob]) -> set[str]:
        """Insert jobs like `insert_jobs`; return the ids of those inserted."""

    def insert_requested(self, tx: Executor, new_jobs: Sequence[NewJob]) -> tuple[set[str], set[str]]:
        """Store the request ids of those jobs that have one, and insert the jobs whose request id was not used before.

        Returns the ids of the jobs whose request id was not used, and of the jobs inserted. It does the same as
        `reserve_request_ids` and then `insert_jobs_returning`, in one statement where the database can do that.
        """

    def insert_change(self, tx: Executor, usage: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Insert a row of `timebell_audit_log`, and add to a counter of its tenant in `timebell_usage`.

        `usage` has `day`, `slot` and `payload_bytes`. Changes with the same slot wait for each other's commit.
        """

    def insert_recorded(
        self, tx: Executor, job: NewJob, usage: Mapping[str, Any], record: Mapping[str, Any]
    ) -> bool:  # fmt: skip
        """Insert a pending job without a key, its request id, and the rows of `insert_change`.

        Returns False, and inserts nothing, if the request id was used before or the tenant does not exist. It is a
        single statement where the database can do that.
        """

    def insert_running(self, tx: Executor, new_jobs: Sequence[NewJob], node: str, now: datetime) -> set[str]:
        """Insert due jobs as `running`, as first attempts of a node; return the ids of those inserted.

        On servers a job must also be due by the server's clock.
        """

    def insert_skipped(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert skipped occurrences into `finished`: rows of `batches.job_row` with the details of the skip."""

    def mark_serial(self, tx: Executor, schedules: Sequence[str]) -> None:
        """Make the live jobs of schedules serial if a job of the schedule waits behind them (hold `overlap`)."""

    def find_open_lanes(self, tx: Executor, lanes: Collection[Lane], now: datetime) -> set[Lane]:
        """Return those of these lanes whose queue has no limits and is not paused, and that have no due job."""


class ClaimOperations(Protocol):
    """Scan lanes and claim jobs."""

    def scan_lanes(
        self, tx: Executor, routes: Routes, now: datetime, late: datetime, positions: Mapping[Lane, datetime] | None
    ) -> list[Row]:
        """Return one row per lane with pending jobs, or per given lane.

        `due` is the instant of its first due job for these routes, from its position on; `later` that of its first
        job of any route after `now`. `crowded`: it has a job due before `late`, and several tenants share it. `busy`
        is the number of jobs of the queue in flight, if its concurrency is limited. The other columns are those of
        the queue.
        """

    def list_upcoming(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, until: datetime, limit: int
    ) -> list[Row]:
        """Return `run_at` and `is_handled` of the next jobs of a lane, due after `now` and until `until`."""

    def claim(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, since: datetime, limit: int, *,
        recheck_queue: bool,
    ) -> list[Row]:  # fmt: skip
        """Start up to `limit` due jobs of a lane, first due first, from `since` on; return ATTEMPT_COLUMNS.

        Skips rows locked by other transactions. On servers a job must also be due by the server's clock. With
        `recheck_queue` nothing is claimed if the queue is paused or has limits.
        """

    def claim_fair_shares(
        self, tx: Executor, lane: Lane, routes: Routes, node: str, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        """Start up to `share` due jobs of each tenant in a lane, like `claim`."""

    def rotate_tenants(self, tx: Executor, lane: Lane, after: str, now: datetime, limit: int) -> list[Row]:
        """Return up to `limit` tenants with claimable jobs in a lane: `id`, and `due` if one of the jobs is due.

        They are in a circle by id that starts after `after`.
        """

    def lock_due(self, tx: Executor, lane: Lane, routes: Routes, now: datetime, limit: int) -> list[Row]:
        """Lock the jobs that `claim` would start; return `id`, `tenant_id` and `group_name`."""

    def lock_due_shares(
        self, tx: Executor, lane: Lane, routes: Routes, now: datetime, tenants: Sequence[str], share: int
    ) -> list[Row]:
        """Lock the jobs that `claim_fair_shares` would start; return the columns of `lock_due`."""

    def start_locked(self, tx: Executor, ids: Sequence[str], node: str, now: datetime) -> list[Row]:
        """Start jobs that this transaction has locked; return ATTEMPT_COLUMNS."""

    def hold_for_group(self, tx: Executor, ids: Sequence[str]) -> None:
        """Hold jobs that this transaction has locked, until a job of their group ends."""


class CompleteOperations(Protocol):
    """Write to attempts.

    Every write is fenced: the attempt number and the state of the row must be those of the attempt. With
    `skip_locked`, rows that another transaction has locked are left unchanged.
    """

    def complete(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        """Move jobs to `finished`.

        Returns id, schedule_id, started_at, serial, queue, tenant_id and group_name of the moved jobs.
        """

    def retry(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> list[Row]:
        """Return attempts to `pending`, due at their `run_at`, unless a cancel was requested.

        Returns id, queue, tenant_id and group_name of the changed jobs.
        """

    def dispatch(self, tx: Executor, completions: Sequence[Completion], *, skip_locked: bool) -> set[str]:
        """Make attempts `dispatched`, with their `run_at` as deadline; return the ids of the changed jobs."""

    def renew_leases(self, tx: Executor, attempts: Sequence[tuple[str, int]], *, skip_locked: bool) -> set[str]:
        """Increment the lease counters of running attempts (id, number); return the ids of the changed jobs."""

    def prune_finished(self, tx: Executor, before: datetime, limit: int) -> int:
        """Delete up to `limit` jobs that finished before an instant, oldest first; return how many."""

    def find_unchanged(self, tx: Executor, attempts: Sequence[tuple[str, int, JobState]]) -> list[Row]:
        """Return id and cancel_requested of the attempts (id, number, state) whose fence still holds."""

    def list_running(self, tx: Executor) -> list[Row]:
        """Return id, attempt, heartbeat and hold of running attempts, and of dispatched ones requested to stop."""

    def list_overdue_dispatched(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        """Return ATTEMPT_COLUMNS and `started_at` of dispatched attempts past their deadline, earliest first."""


class ReleaseOperations(Protocol):
    """Release the jobs that waited for a completed one."""

    def lock_schedules(self, tx: Executor, ids: Collection[str], *, skip_locked: bool) -> list[Row]:
        """Lock schedules in the order of their ids.

        Returns their `id`; `fixed_delay`, the recurrence, if it has no next instant; and `may_have_waiting`, whether
        one of its jobs may wait for another (hold `overlap`).
        """

    def release_next(self, tx: Executor, schedules: Sequence[str]) -> int:
        """Release the first waiting job of each schedule without another live job; return how many."""

    def release_next_of_groups(self, tx: Executor, groups: Collection[tuple[str, str, str]]) -> int:
        """Release the next held job of each group (queue, tenant, name); return how many."""

    def advance_fixed_delays(self, tx: Executor, next_instants: Mapping[str, datetime]) -> bool:
        """Set the next instants of schedules (by id) that have no live job; return whether any was set."""


class FireOperations(Protocol):
    """Fire schedules."""

    def lock_due_schedules(self, tx: Executor, now: datetime, limit: int) -> list[Row]:
        """Lock and return due schedules, first due first; none while all firing is stopped (queue `*` paused).

        Skips rows locked by other transactions. On servers a schedule must also be due by the server's clock.
        """

    def find_next_fire_at(self, tx: Executor) -> datetime | None:
        """Return the next instant at which any schedule is due; None while all firing is stopped."""

    def count_live_jobs(self, tx: Executor, schedules: Sequence[str]) -> list[Row]:
        """Return schedule_id, live and non_serial: the numbers of live jobs, and of those that are not serial.

        Jobs of the backlog do not count. Schedules without live jobs are omitted.
        """

    def advance_cursors(self, tx: Executor, rows: Sequence[Mapping[str, Any]]) -> None:
        """Set next_fire_at, error, tzdata and utc_offset of locked schedules, and last_fired_at if it is not None.

        The instants of `rows` are in database form.
        """


class ForecastOperations(Protocol):
    """Count what is due later."""

    def count_lane_by_minute(
        self, tx: Executor, lane: Lane, tenant: str | None, start: datetime, end: datetime, limit: int
    ) -> list[Row]:
        """Return minute, jobs and scanned for each minute of [start, end) in which jobs of a lane are due.

        Counts the jobs of a tenant; None means all, which is faster where there is no tenant but `default`. `scanned`
        is the number of index entries that were read: a minute is left after `limit` of them, except on MariaDB.
        """


class Operations(
    InsertOperations, ClaimOperations, CompleteOperations, ReleaseOperations, FireOperations, ForecastOperations,
    Protocol,
):  # fmt: skip
    """All hot operations."""

    name: str
    """The name of the dialect in SQLAlchemy."""
    product: str
    """The name of the database, as people write it."""
    version_query: str
    """SQL for the version of the database."""
    durability_queries: Mapping[str, str]
    """SQL for each setting on which the durability of commits depends, by its name."""
    notifies: bool
    """True if the database delivers notifications to other processes."""
    complete_in_one_statement: bool
    """True if `complete` needs no transaction."""
    partitioned: bool
    """True if `timebell_finished` has partitions."""

    def to_db(self, instant: datetime | None) -> Any:
        """Convert an instant to a parameter or JSON value."""

    def from_db(self, value: Any) -> Any:
        """Convert a value from the database to an instant, or None."""

    def insert_ignoring_duplicates(self, table: Table) -> Insert:
        """Return an INSERT that ignores rows whose key exists already; cached, as `upsert`."""

    def upsert(
        self, table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> Insert:  # fmt: skip
        """Return an INSERT that updates the rows whose key exists already.

        It replaces the columns `replace` by the new values, and adds the new values to the columns `add`. `key` are the
        columns of a unique index; by default those of the primary key.

        The statement is cached, because building it takes longer than executing it: pass the rows to `execute`.
        """

    def on_conflict(
        self, table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> str:  # fmt: skip
        """Return the clause of an INSERT that does the same as `upsert`, as SQL; cached."""

    def match_keys(self, query: Select[Any], column: ColumnElement[str], keys: Collection[str]) -> Select[Any]:
        """Restrict a query to rows whose text column has one of many values, found by an index of the column.

        The query is complete, with its locks and their order. The rows are in no order.
        """

    def json_text(self, column: ColumnElement[str], names: Sequence[str]) -> ColumnElement[str]:
        """Return an expression for the text at a path of names in a JSON text."""

    def terminate_stalled_sessions(self, tx: Executor) -> list[int]:
        """Terminate sessions of frozen clients that hold locks, if the server does not do so; return their ids."""
