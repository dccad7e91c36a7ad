"""Job repository: create, find, list, cancel, reschedule and prune jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, bindparam, delete, func, select, tuple_, union_all, update

from timebell.errors import Conflict
from timebell.model.attempts import last_progress
from timebell.model.job import FINISHED, LIVE, CancelOutcome, Completion, Hold, Job, JobState, Kind, NewJob, UniformJobs
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.store.jobs.bind_targets import bind_jobs
from timebell.store.jobs.claim import bulk_load as load_jobs
from timebell.store.jobs.claim import insert_requested, mark_serial
from timebell.store.jobs.claim import insert_returning_ids as insert_jobs
from timebell.store.jobs.complete import complete_jobs
from timebell.store.jobs.indexes import SingleValue, UnindexedFilter, split_by_running
from timebell.store.jobs.serial import complete_serial, lock_schedules, release_next
from timebell.store.jobs.target_queues import assign_queues
from timebell.store.recent_writes import CREATIONS
from timebell.store.schema import finished, jobs, requests, tenants
from timebell.store.transaction import STOPS, Transaction, read_only


def create(
    tx: Transaction,
    new_jobs: Sequence[NewJob] | UniformJobs,
    on_conflict: str,
    *,
    bulk: bool = False,
) -> dict[str, str]:
    """Create one-time jobs, all or none; return the ids of existing jobs by the ids of jobs not created.

    A conflict is a request id that was used before, or a key that a live job has. `on_conflict` is `error` (raise
    Conflict), `keep` (the existing job) or `replace` (cancel the existing job if it is pending, and create the new
    one). A reused request id with `replace` raises Conflict, too. With `bulk` jobs without key and request id are
    loaded by the bulk path of the database. Raises Conflict, and the errors of `bind_jobs`. A caller may commit its own
    transaction after a Conflict: it then contains none of the jobs, and none of their request ids. With `replace` it
    may contain cancels, if another transaction created a job with one of the keys at the same time.
    """
    distinct_jobs = [new_jobs.template] if isinstance(new_jobs, UniformJobs) else new_jobs
    is_loaded = isinstance(new_jobs, UniformJobs) or (bulk and not any(job.key or job.request_id for job in new_jobs))
    tenant_ids, shared = {job.tenant_id for job in distinct_jobs}, False
    if is_loaded or tenant_ids != {"default"}:  # `default` always exists
        shared = ensure_tenants(tx, tenant_ids, min(job.created_at for job in distinct_jobs))
    bind_jobs(tx, distinct_jobs)
    if is_loaded:
        assign_queues(tx, distinct_jobs)
        load_jobs(tx, new_jobs, shared=shared)
    try:
        existing = {} if is_loaded else _insert_or_find(tx, distinct_jobs, on_conflict)
    except Conflict:
        _remove(tx, distinct_jobs)
        raise
    if not isinstance(new_jobs, UniformJobs):
        tx.record(CREATIONS, {job.id: job for job in new_jobs if job.id not in existing})
    return existing


def _insert_or_find(tx: Transaction, new_jobs: Sequence[NewJob], on_conflict: str) -> dict[str, str]:
    """Insert jobs that may conflict with existing ones; return the latter by the ids of jobs not inserted."""
    requested = [job for job in new_jobs if job.request_id]
    inserted: set[str] | None = None
    reserved: set[str] = set()
    if len(new_jobs) == len(requested) == 1 and on_conflict != "replace":
        reserved, inserted = insert_requested(tx, requested)
    elif requested:
        reserved = tx.dialect.reserve_request_ids(tx, requested)
    existing = _existing_by_request(tx, [job for job in requested if job.id not in reserved], on_conflict)
    fresh = [job for job in new_jobs if job.id not in existing]
    if on_conflict == "replace":
        _cancel_key_holders(tx, [job for job in fresh if job.key])
    if inserted is None:
        inserted = insert_jobs(tx, fresh) if fresh else set()
    for job in fresh:
        if job.id not in inserted and (holder := _resolve_conflict(tx, job, on_conflict)):
            existing[job.id] = holder
    return existing


def _remove(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Remove the jobs and request ids that have been inserted in this transaction."""
    tx.execute(delete(jobs).where(jobs.c.id == bindparam("job")), [{"job": job.id} for job in new_jobs])
    if reserved := [
        {"tenant": job.tenant_id, "request": job.request_id, "job": job.id} for job in new_jobs if job.request_id
    ]:
        own = (requests.c.tenant_id == bindparam("tenant")) & (requests.c.request_id == bindparam("request"))
        tx.execute(delete(requests).where(own, requests.c.job_id == bindparam("job")), reserved)


def ensure_tenants(tx: Transaction, ids: set[str], now: datetime) -> bool:
    """Insert missing tenants; return whether there are any besides `default`."""
    known = tx.dialect.find_tenants(tx, ids)
    if unknown := sorted(ids - known):
        tx.execute(
            tx.dialect.insert_ignoring_duplicates(tenants), [{"id": tenant, "created_at": now} for tenant in unknown]
        )
    return bool((known | ids) - {"default"})


def _existing_by_request(tx: Transaction, repeated: Sequence[NewJob], on_conflict: str) -> dict[str, str]:
    """Return the existing jobs by the ids of these jobs, whose request ids were used before.

    Raises Conflict unless `on_conflict` is `keep`.
    """
    if not repeated:
        return {}
    is_used = tuple_(requests.c.tenant_id, requests.c.request_id).in_(
        {(job.tenant_id, job.request_id) for job in repeated}  # several may have the same request id
    )
    holders = {(row.tenant_id, row.request_id): row.job_id for row in tx.execute(select(requests).where(is_used))}
    existing = {job.id: holders[job.tenant_id, str(job.request_id)] for job in repeated}
    if on_conflict != "keep":
        raise _request_id_in_use(repeated[0].request_id, existing[repeated[0].id])
    return existing


def _request_id_in_use(request_id: str | None, job_id: str) -> Conflict:
    return Conflict(
        f"The client request id {request_id!r} was already used for job {job_id}.",
        code="SCHEDULE_CLIENT_REQUEST_ID_IN_USE", existing=job_id,
        fix="If it is the same request, use that job. For a new request, send a new id.",
    )  # fmt: skip


def find_by_request_id(tx: Transaction, tenant_id: str, request_id: str, on_conflict: str) -> str | None:
    """Return the job created with a request id, or None if it was not used before.

    Raises Conflict for a used request id unless `on_conflict` is `keep`.
    """
    same = (requests.c.tenant_id == tenant_id) & (requests.c.request_id == request_id)
    job_id = tx.execute(select(requests.c.job_id).where(same)).scalar()
    if job_id is not None and on_conflict != "keep":
        raise _request_id_in_use(request_id, str(job_id))
    return None if job_id is None else str(job_id)


def _request_of(job: NewJob) -> ColumnElement[bool]:
    return and_(requests.c.tenant_id == job.tenant_id, requests.c.request_id == job.request_id)


def _cancel_key_holders(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Cancel the pending jobs that have the keys of these ones, linked both ways. Raises Conflict (KEY_IN_USE).

    None is cancelled before a Conflict: the caller may commit the transaction after it.
    """
    holders = []
    keys: set[tuple[str, str | None]] = set()
    for job in new_jobs:
        if (job.tenant_id, job.key) in keys:
            raise Conflict(
                f"Two of the new jobs have the key {job.key!r}.", code="KEY_IN_USE", fix="Give each job its own key."
            )
        keys.add((job.tenant_id, job.key))
        same_key = (jobs.c.tenant_id == job.tenant_id) & (jobs.c.key == job.key)
        row = tx.execute(select(jobs.c.id, jobs.c.state, jobs.c.attempt).where(same_key).with_for_update()).first()
        if row is not None and row.state != JobState.PENDING:
            raise Conflict(
                f"Job {row.id} with the key {job.key!r} is running; it cannot be replaced.", code="KEY_IN_USE",
                fix="Wait for it to finish, or use another key.", existing=row.id,
            )  # fmt: skip
        if row is not None:
            holders.append((job, row))
    for job, row in holders:
        completion = Completion(
            row.id, row.attempt, JobState.CANCELLED, job.created_at, expected_state=JobState.PENDING,
            uses_attempt=False, reason="replaced", cancel=CancelOutcome.PREVENTED, replaced_by=job.id,
        )  # fmt: skip
        complete_jobs(tx, [completion])  # the row is locked
        job.replaces = row.id


def _resolve_conflict(tx: Transaction, job: NewJob, on_conflict: str) -> str | None:
    """Return the live job whose key conflicts with this one.

    Returns None if that job has finished meanwhile and this one was inserted now. Raises Conflict (KEY_IN_USE) unless
    `on_conflict` is `keep`.
    """
    same_key = (jobs.c.tenant_id == job.tenant_id) & (jobs.c.key == job.key)
    holder = tx.execute(select(jobs.c.id).where(same_key)).scalar()
    if holder is None and insert_jobs(tx, [job]):
        return None
    if holder is None or on_conflict != "keep":
        raise Conflict(
            f"The key {job.key!r} belongs to job {holder}, which is not finished.", code="KEY_IN_USE",
            fix='Use another key, or on_conflict="keep" or "replace".', existing=holder,
        )  # fmt: skip
    if job.request_id:  # repeating the request must return the existing job, not this one
        tx.execute(update(requests).where(_request_of(job)).values(job_id=holder))
    return str(holder)


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The outcome of a cancel, and the job after it."""

    outcome: CancelOutcome
    job: Job


def cancel(
    tx: Transaction, tenant_id: str | None, job_id: str, now: datetime, *, stop: bool = False
) -> CancelResult | None:
    """Cancel a job: prevent its start if it is pending, else request its cancellation; None for an unknown id.

    With `stop`, a running attempt is requested to stop, unless a later occurrence has requested that already.
    Repeating a cancel returns the first outcome. Claim and cancel are conditional writes to the same row, so exactly
    one of them wins.
    """
    same = _by_id(jobs, tenant_id, job_id)
    row = tx.execute(select(jobs).where(same).with_for_update()).first()
    outcome = None
    if row is not None and row.state == JobState.PENDING:
        completion = Completion(
            row.id, row.attempt, JobState.CANCELLED, now, expected_state=JobState.PENDING, uses_attempt=False,
            errors=row.errors, cancel=CancelOutcome.PREVENTED,
        )  # fmt: skip
        moved = complete_serial(tx, [completion], [row.schedule_id]) if row.serial else complete_jobs(tx, [completion])
        outcome = CancelOutcome.PREVENTED if moved else None
    elif row is not None:
        tx.execute(update(jobs).where(same).values(cancel_requested=True))
        if stop and row.state == JobState.RUNNING:
            tx.execute(update(jobs).where(same, jobs.c.hold.is_(None)).values(hold=Hold.CANCELLING.value))
            tx.notify(STOPS)
        outcome = CancelOutcome.IN_FLIGHT
    job = find_job(tx, tenant_id, job_id)
    if job is None:
        return None
    if outcome is None:
        first_outcome = tx.execute(select(finished.c.cancel).where(_by_id(finished, tenant_id, job_id))).scalar()
        outcome = CancelOutcome(first_outcome) if first_outcome else CancelOutcome.ALREADY_DONE
    return CancelResult(outcome, job)


@dataclass(frozen=True, slots=True)
class BulkCancelResult:
    """The result of a bulk cancel: the numbers of jobs prevented from starting, and of jobs already in flight."""

    prevented: int = 0
    in_flight: int = 0


def cancel_matching(
    tx: Transaction, filters: Mapping[str, Any], now: datetime, after: str | None, limit: int,
    reason: str | None = None, before: str | None = None,
) -> tuple[BulkCancelResult, str | None]:  # fmt: skip
    """Cancel up to `limit` live jobs with these column values, by id after `after`.

    With `before`, only jobs with smaller ids. Returns the result and the `after` of the next call, None at the end.
    """
    query = select(jobs.c.id).where(*(jobs.c[name] == value for name, value in filters.items()))
    if before is not None:
        query = query.where(jobs.c.id < before)
    if after is not None:
        query = query.where(jobs.c.id > after)
    not_running, running_query = split_by_running(query)
    queries = (not_running.order_by(jobs.c.id).limit(limit), running_query)
    ids = sorted(tx.execute(union_all(*(select(query_part.subquery()) for query_part in queries))).scalars())[:limit]
    # Read again with locks: meanwhile a running job may have become pending, or the other way round.
    rows = tx.execute(select(jobs).where(jobs.c.id.in_(ids)).order_by(jobs.c.id).with_for_update()).all() if ids else []
    pending = [row for row in rows if row.state == JobState.PENDING]
    running = [row.id for row in rows if row.state != JobState.PENDING]
    completions = [
        Completion(
            row.id, row.attempt, JobState.CANCELLED, now, expected_state=JobState.PENDING, uses_attempt=False,
            errors=row.errors, cancel=CancelOutcome.PREVENTED, reason=reason,
        )
        for row in pending
    ]  # fmt: skip
    serial_schedules = [row.schedule_id for row in pending if row.serial]
    if completions:
        complete_serial(tx, completions, serial_schedules) if serial_schedules else complete_jobs(tx, completions)
    if running:
        tx.execute(update(jobs).where(jobs.c.id.in_(running)).values(cancel_requested=True))
    return BulkCancelResult(len(pending), len(running)), ids[-1] if len(ids) == limit else None


def count_live(tx: Transaction, filters: Mapping[str, Any]) -> int:
    """Return the number of live jobs with these column values."""
    query = select(func.count()).select_from(jobs).where(*(jobs.c[name] == value for name, value in filters.items()))
    return sum(int(tx.execute(part).scalar_one()) for part in split_by_running(query))


def reschedule(
    tx: Transaction,
    tenant_id: str | None,
    job_id: str,
    new_id: str,
    change_fields: Callable[[Job], dict[str, Any]],
    now: datetime,
) -> NewJob | None:
    """Replace a pending job by a new one, linked both ways; return None for an unknown id.

    `change_fields` receives the old job and returns the fields of the new one that differ, with at least `run_at`. An
    occurrence of a schedule keeps its nominal instant. Raises Conflict (JOB_IN_FLIGHT, JOB_FINISHED).
    """
    row = tx.execute(select(jobs).where(_by_id(jobs, tenant_id, job_id)).with_for_update()).first()
    if row is None:
        finished_job = find_job(tx, tenant_id, job_id)
        if finished_job is None:
            return None
        raise Conflict(
            f"Job {job_id} is {finished_job.state}; it cannot be rescheduled.", code="JOB_FINISHED", existing=job_id,
            fix="Create a new job.",
        )  # fmt: skip
    completion = Completion(
        row.id, row.attempt, JobState.CANCELLED, now, expected_state=JobState.PENDING, uses_attempt=False,
        reason="rescheduled", errors=row.errors, cancel=CancelOutcome.PREVENTED, replaced_by=new_id,
    )  # fmt: skip
    if row.state != JobState.PENDING or not complete_jobs(tx, [completion]):
        raise Conflict(
            f"Job {job_id} is running; it cannot be rescheduled.", code="JOB_IN_FLIGHT", existing=job_id,
            fix="Cancel it, or wait for it to finish and create a new one.",
        )  # fmt: skip
    changed = change_fields(job_from_row(row))
    run_at = changed["run_at"]
    copied = {name: getattr(row, name) for name in _RESCHEDULED_FIELDS}
    copied |= {"group": row.group_name, "expires_at": None}
    if row.expires_at is not None:
        due_at = row.scheduled_at if row.schedule_id is None else row.run_at  # a retry changes only run_at
        copied["expires_at"] = run_at + (row.expires_at - due_at)
    job = NewJob(
        **(copied | changed), id=new_id, created_at=now, replaces=row.id,
        scheduled_at=run_at if row.schedule_id is None else row.scheduled_at,
        kind=Kind.ONCE if row.schedule_id is None else Kind(row.kind),  # a trigger's job becomes a one-time job
        hold=Hold.OVERLAP if row.serial and row.hold in (Hold.OVERLAP, Hold.BACKLOG) else None,
    )  # fmt: skip
    if row.serial:
        lock_schedules(tx, [row.schedule_id])
    insert_jobs(tx, [job])
    if row.hold == Hold.BACKLOG and row.serial:  # released from the backlog, but still one at a time
        mark_serial(tx, [row.schedule_id])
        release_next(tx, [row.schedule_id])
    return job


_RESCHEDULED_FIELDS = (
    *("tenant_id", "topic", "payload", "metadata", "owner_id", "key", "schedule_id", "revision"),
    *("target", "route", "queue", "priority", "retry", "timeout", "serial", "conditions", "tzdata"),
)


@read_only
def find_job(tx: Transaction, tenant_id: str | None, job_id: str, *, finished_only: bool = False) -> Job | None:
    """Find a live or finished job. Set `finished_only` if it is known to be finished, to save a look-up."""
    row = None if finished_only else tx.execute(select(jobs).where(_by_id(jobs, tenant_id, job_id))).first()
    if row is None:
        row = tx.execute(select(finished).where(_by_id(finished, tenant_id, job_id))).first()
    return None if row is None else job_from_row(row)


def _by_id(table: Any, tenant_id: str | None, job_id: str) -> ColumnElement[bool]:
    return table.c.id == job_id if tenant_id is None else and_(table.c.id == job_id, table.c.tenant_id == tenant_id)


@read_only
def list_jobs(
    tx: Transaction,
    filters: Mapping[str, Any],
    states: Collection[JobState],
    limit: int,
    after: str | None,
    min_attempts: int = 0,
) -> Page[Job]:
    """Return a page of live and finished jobs with these column values, newest first.

    `states` empty: all states. `after` is the id of the last job of the previous page. The queue of finished jobs has
    no index, so with this filter a page may be short, or empty, and have a next page: see MAX_EXAMINED.
    """
    jobs_by_id: dict[str, Job] = {}
    examined_until = ""  # older jobs were not examined
    for table, table_states in ((jobs, LIVE), (finished, FINISHED)):
        wanted = [state.value for state in table_states if state in states or not states]
        if not wanted:
            continue
        query = select(table).where(
            *(
                table.c[name] == (SingleValue(value) if name == "tenant_id" else value)
                for name, value in filters.items()
            )
        )
        order = [table.c[name] for name in ("tenant_id", "id") if name == "id" or name in filters]
        if min_attempts:
            query = query.where(table.c.attempt >= min_attempts)
        queries, filtered_queries = [], [(query, wanted)]
        if table is jobs:
            not_running, running = split_by_running(query)
            filtered_queries = [(not_running, [state for state in wanted if state != JobState.RUNNING])]
            if JobState.RUNNING.value in wanted:
                queries.append(_newest_first(running, [UnindexedFilter(jobs.c.id)], after, limit))
        if (
            filters.keys() <= {"tenant_id", "queue"} and "tenant_id" in filters
        ):  # one query per state: each reads the end of one index range
            filtered_queries = [(query, [state]) for query, subset in filtered_queries for state in subset]
        if table is finished and "queue" in filters:
            of_all_queues = [table.c[name] == value for name, value in filters.items() if name != "queue"]
            examined_until = find_last_examined(tx, table, of_all_queues, wanted, after)
            if examined_until:
                is_examined = table.c.id >= examined_until
                filtered_queries = [(query.where(is_examined), subset) for query, subset in filtered_queries]
        for query, subset in filtered_queries:
            if subset:
                matches = table.c.state == subset[0] if len(subset) == 1 else table.c.state.in_(subset)
                queries.append(_newest_first(query.where(matches), order, after, limit))
        rows = tx.execute(union_all(*(select(part.subquery()) for part in queries)) if len(queries) > 1 else queries[0])
        # A job that finishes between the two queries is in both results: the finished one wins.
        jobs_by_id |= {row.id: job_from_row(row) for row in rows}
    newest = sorted(
        (job for job in jobs_by_id.values() if job.id >= examined_until), key=lambda job: job.id, reverse=True
    )
    return Page(newest[:limit], newest[limit - 1].id if len(newest) > limit else examined_until or None)


MAX_EXAMINED = 20_000
"""The number of jobs per state that a page examines at most for a filter without an index.

The cursor of the page continues there.
"""


def find_last_examined(
    tx: Transaction, table: Any, conditions: Sequence[Any], states: Sequence[str], after: str | None
) -> str:
    """Return the id of the oldest job that a page with a filter without an index examines; empty: all.

    `conditions` are the filters with an index.
    """
    ids = [""]
    for state in states:
        newest = select(table.c.id).where(*conditions, table.c.state == state).order_by(table.c.id.desc())
        newest = newest if after is None else newest.where(table.c.id < after)
        ids.append(tx.execute(newest.limit(1).offset(MAX_EXAMINED - 1)).scalar() or "")
    return max(ids)


def select_newest_of_states(table: Any, conditions: Sequence[Any], states: Sequence[str], limit: int) -> Any:
    """Select the `limit` newest jobs of each state; each query reads the end of an index range."""
    return union_all(
        *(
            select(
                select(table).where(*conditions, table.c.state == state).order_by(table.c.id.desc()).limit(limit)
                .subquery()
            )
            for state in states
        )
    )  # fmt: skip


def _newest_first(query: Select[Any], order: Sequence[Any], after: str | None, limit: int) -> Select[Any]:
    """Select the `limit` + 1 newest rows; the last column of `order` is the id."""
    older = query if after is None else query.where(order[-1] < after)
    return older.order_by(*(column.desc() for column in order)).limit(limit + 1)


def list_recently_finished(tx: Transaction, limit: int) -> list[Job]:
    """Return the jobs that finished last, latest first."""
    query = select(finished).order_by(finished.c.finished_at.desc()).limit(limit)
    return [job_from_row(row) for row in tx.execute(query)]


def job_from_row(row: Row[Any]) -> Job:
    """Convert a row of `jobs` or `finished` to a Job."""
    mapping = row._asdict()
    metadata = decode(row.metadata) or {}
    attempts = decode(row.errors) or []
    skipped_to, conditions = mapping.get("skipped_to"), decode(row.conditions) or {}
    return Job(
        id=row.id, tenant_id=row.tenant_id, topic=row.topic, state=JobState(row.state),
        scheduled_at=row.scheduled_at, run_at=row.run_at, timezone=row.timezone, payload=decode(row.payload),
        metadata=metadata, owner_id=row.owner_id, key=row.key, kind=Kind(row.kind), schedule_id=row.schedule_id,
        target=decode(row.target), queue=row.queue, priority=row.priority, group=row.group_name,
        condition=conditions.get("condition", []), unless=conditions.get("unless"),
        retry=decode(row.retry), timeout=row.timeout, expires_at=row.expires_at,
        hold=Hold(mapping["hold"]) if mapping.get("hold") else None, attempt=row.attempt,
        attempts_used=row.attempts_used, node_id=row.node_id, created_at=row.created_at, started_at=row.started_at,
        finished_at=mapping.get("finished_at"), reason=mapping.get("reason"), error=mapping.get("error"),
        error_code=mapping.get("error_code"), result=decode(mapping.get("result")), attempts=attempts,
        replaces=row.replaces, replaced_by=mapping.get("replaced_by"), skipped_to=skipped_to,
        skipped_count=mapping.get("skipped_count") or 1, local_time=row.local_time,
        progress=last_progress(row.attempt, attempts, mapping.get("progress")),
    )  # fmt: skip
