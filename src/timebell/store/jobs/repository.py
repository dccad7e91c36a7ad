"""What a person asks of jobs: create, find, list, cancel; and what retention forgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, Table, and_, delete, func, select, text, union_all, update

from timebell.errors import Conflict
from timebell.model.job import FINISHED, LIVE, Alike, CancelOutcome, Ending, Hold, Job, JobState, Kind, NewJob
from timebell.model.operation import Operation, Step
from timebell.model.page import Page
from timebell.model.payload import decode
from timebell.model.routes import ANYONE
from timebell.store.jobs.bind_targets import bind
from timebell.store.jobs.claim import insert as insert_jobs
from timebell.store.jobs.claim import load as load_jobs
from timebell.store.jobs.claim import look, take_turns
from timebell.store.jobs.complete import end
from timebell.store.jobs.indexes import Unsought, apart
from timebell.store.jobs.serial import LOCK_SCHEDULES, end_in_turn, let_go
from timebell.store.schema import finished, jobs, requests
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction
from timebell.store.types import EPOCH, Id, Instant


def create(
    tx: Transaction, new: Sequence[NewJob] | Alike, on_conflict: str, soon: datetime, *, bulk: bool = False
) -> dict[str, str]:
    """Write one-shots, all or none: {id of a job not written: id of the one that exists already}.

    A conflict is a request id used before or a key that a live job has: with `error` it raises Conflict, with
    `keep` the existing job stands, with `replace` the pending one is cancelled in favour of the new. Jobs due
    before `soon` make other nodes look again.
    """
    various = [new.like] if isinstance(new, Alike) else new
    shared = make_tenants(tx, {job.tenant_id for job in various}, min(job.created_at for job in various))
    bind(tx, various)
    existing: dict[str, str] = {}
    if isinstance(new, Alike) or (bulk and not any(job.key or job.request_id for job in new)):
        load_jobs(tx, new, shared=shared)
    else:
        existing = _requested(tx, [job for job in new if job.request_id], on_conflict)
        if on_conflict == "replace":
            for job in new:
                if job.key and job.id not in existing:
                    _replace(tx, job)
        fresh = [job for job in new if job.id not in existing]
        written = insert_jobs(tx, fresh) if fresh else set()
        for job in fresh:
            if job.id not in written and (holder := _holder(tx, job, on_conflict)):
                existing[job.id] = holder
    if soonest(new) <= soon:
        tx.notify()
    return existing


def soonest(new: Sequence[NewJob] | Alike) -> datetime:
    """When the first of them is due."""
    return new.soonest if isinstance(new, Alike) else min(job.run_at for job in new)


MAKE_TENANTS = Statement(
    "WITH $rows INSERT INTO timebell_tenants (id, created_at) SELECT id, created_at FROM d WHERE true"
    " ON CONFLICT DO NOTHING",
    id="text",
    created_at="instant",
)


KNOWN_TENANTS = Statement(
    "WITH $rows SELECT id FROM timebell_tenants WHERE id $pick SELECT id FROM d $picked"
    " UNION SELECT id FROM (SELECT id FROM timebell_tenants WHERE id <> 'default' LIMIT 1) AS another",
    id="text",
)


def make_tenants(tx: Transaction, ids: set[str], now: datetime) -> bool:
    """Write the tenants that are new; whether there are any beside `default`."""
    known = {row["id"] for row in tx.fetch(KNOWN_TENANTS, [{"id": tenant} for tenant in ids])}
    if unknown := sorted(ids - known):
        tx.fetch(MAKE_TENANTS, [{"id": tenant, "created_at": tx.dialect.to_db(now)} for tenant in unknown])
    return bool((known | ids) - {"default"})


TAKE_REQUESTS = Statement(
    "WITH $rows INSERT INTO timebell_requests (tenant_id, request_id, job_id) SELECT tenant_id, request_id, job_id"
    " FROM d WHERE true ON CONFLICT DO NOTHING RETURNING job_id",
    tenant_id="text",
    request_id="text",
    job_id="id",
)


USED_REQUESTS = Statement(
    "WITH $rows SELECT d.job_id AS id, r.job_id FROM d JOIN timebell_requests r"
    " ON r.tenant_id = d.tenant_id AND r.request_id = d.request_id",
    tenant_id="text",
    request_id="text",
    job_id="id",
)


def _requested(tx: Transaction, new: Sequence[NewJob], on_conflict: str) -> dict[str, str]:
    """Take the request ids of these jobs; those taken before lead to the job they made."""
    if not new:
        return {}
    rows = [{"tenant_id": job.tenant_id, "request_id": job.request_id, "job_id": job.id} for job in new]
    taken = {str(row["job_id"]) for row in tx.fetch(TAKE_REQUESTS, rows)}
    used = [row for row in rows if row["job_id"] not in taken]
    existing = {str(row["id"]): str(row["job_id"]) for row in tx.fetch(USED_REQUESTS, used)} if used else {}
    if existing and on_conflict != "keep":
        job = next(job for job in new if job.id in existing)
        raise _in_use(job.request_id, existing[job.id])
    return existing


def _in_use(request_id: str | None, job_id: str) -> Conflict:
    return Conflict(
        f"The client request id {request_id!r} was used before, for job {job_id}.",
        code="SCHEDULE_CLIENT_REQUEST_ID_IN_USE", existing=job_id,
        fix="It is the same request: use that job. For a new intent, send a new id.",
    )  # fmt: skip


def requested(tx: Transaction, tenant_id: str, request_id: str, on_conflict: str) -> str | None:
    """The job that a request id made, if it was used before; unless that is to be kept, as a Conflict."""
    same = (requests.c.tenant_id == tenant_id) & (requests.c.request_id == request_id)
    job_id = tx.execute(select(requests.c.job_id).where(same)).scalar()
    if job_id is not None and on_conflict != "keep":
        raise _in_use(request_id, str(job_id))
    return None if job_id is None else str(job_id)


def _request(job: NewJob) -> ColumnElement[bool]:
    return and_(requests.c.tenant_id == job.tenant_id, requests.c.request_id == job.request_id)


def _replace(tx: Transaction, job: NewJob) -> None:
    """Cancel the pending holder of this job's key, linked both ways."""
    same = (jobs.c.tenant_id == job.tenant_id) & (jobs.c.key == job.key)
    row = tx.execute(select(jobs.c.id, jobs.c.state, jobs.c.attempt).where(same).with_for_update()).first()
    if row is None:
        return
    ending = Ending(
        row.id, row.attempt, JobState.CANCELLED, job.created_at, was=JobState.PENDING, counts=False,
        reason="replaced", cancel=CancelOutcome.PREVENTED, replaced_by=job.id,
    )  # fmt: skip
    if row.state != JobState.PENDING or not end(tx, [ending]):
        raise Conflict(
            f"Job {row.id} with the key {job.key!r} is running; it cannot be replaced.", code="KEY_IN_USE",
            fix="Wait for it to finish, or use another key.", existing=row.id,
        )  # fmt: skip
    job.replaces = row.id


def _holder(tx: Transaction, job: NewJob, on_conflict: str) -> str | None:
    """The live job that kept this one from being written; None if it finished just now and this one is written."""
    same = (jobs.c.tenant_id == job.tenant_id) & (jobs.c.key == job.key)
    found = tx.execute(select(jobs.c.id).where(same)).scalar()
    if found is None and insert_jobs(tx, [job]):
        return None
    if found is None or on_conflict != "keep":
        raise Conflict(
            f"The key {job.key!r} belongs to job {found}, which is not finished.", code="KEY_IN_USE",
            fix='Use another key, or on_conflict="keep" or "replace".', existing=found,
        )  # fmt: skip
    if job.request_id:  # the same request again must lead to the job that was kept, not to this one
        tx.execute(update(requests).where(_request(job)).values(job_id=found))
    return str(found)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel achieved, and the job as it is after it."""

    outcome: CancelOutcome
    job: Job


def cancel(tx: Transaction, tenant_id: str | None, job_id: str, now: datetime) -> Cancelled | None:
    """Keep a job from starting if that is still possible; None for an unknown id. The first answer stands.

    The opposite of the claim: both are conditional writes to the same row, so exactly one of them wins.
    """
    mine = _mine(jobs, tenant_id, job_id)
    row = tx.execute(select(jobs).where(mine).with_for_update()).first()
    outcome = None
    if row is not None and row.state == JobState.PENDING:
        ending = Ending(
            row.id, row.attempt, JobState.CANCELLED, now, was=JobState.PENDING, counts=False,
            errors=row.errors, cancel=CancelOutcome.PREVENTED,
        )  # fmt: skip
        ended = end_in_turn(tx, [ending], [row.schedule_id]).ids if row.serial else end(tx, [ending])
        outcome = CancelOutcome.PREVENTED if ended else None
    elif row is not None:
        tx.execute(update(jobs).where(mine).values(cancel_asked=True))
        outcome = CancelOutcome.IN_FLIGHT
    job = find(tx, tenant_id, job_id)
    if job is None:
        return None
    if outcome is None:
        first = tx.execute(select(finished.c.cancel).where(_mine(finished, tenant_id, job_id))).scalar()
        outcome = CancelOutcome(first) if first else CancelOutcome.ALREADY_DONE
    return Cancelled(outcome, job)


@dataclass(frozen=True, slots=True)
class Swept:
    """What cancelling many achieved: how many will not start, and how many run already."""

    prevented: int = 0
    in_flight: int = 0


def sweep(
    tx: Transaction, equal: Mapping[str, Any], now: datetime, after: str | None, most: int, reason: str | None = None,
    before: str | None = None,
) -> tuple[Swept, str | None]:  # fmt: skip
    """Cancel up to `most` live jobs with these column values, by id from `after` on; and where to go on, if at all."""
    query = select(jobs.c.id).where(*(jobs.c[name] == value for name, value in equal.items()))
    if before is not None:
        query = query.where(jobs.c.id < before)
    if after is not None:
        query = query.where(jobs.c.id > after)
    resting, running_ones = apart(query)
    each = (resting.order_by(jobs.c.id).limit(most), running_ones)
    ids = sorted(tx.execute(union_all(*(select(one.subquery()) for one in each))).scalars())[:most]
    # Whatever has become of them since: one that ran may wait again, or the other way round.
    rows = tx.execute(select(jobs).where(jobs.c.id.in_(ids)).order_by(jobs.c.id).with_for_update()).all() if ids else []
    pending = [row for row in rows if row.state == JobState.PENDING]
    running = [row.id for row in rows if row.state != JobState.PENDING]
    endings = [
        Ending(
            row.id, row.attempt, JobState.CANCELLED, now, was=JobState.PENDING, counts=False, errors=row.errors,
            cancel=CancelOutcome.PREVENTED, reason=reason,
        )
        for row in pending
    ]  # fmt: skip
    in_turn = [row.schedule_id for row in pending if row.serial]
    if endings:
        end_in_turn(tx, endings, in_turn) if in_turn else end(tx, endings)
    if running:
        tx.execute(update(jobs).where(jobs.c.id.in_(running)).values(cancel_asked=True))
    return Swept(len(pending), len(running)), ids[-1] if len(ids) == most else None


def cancel_some(tx: Transaction, operation: Operation, most: int, now: datetime) -> Step:
    """Cancel the next jobs of an operation: done are those that will not start, skipped those that run already. Jobs
    made after it began are not its."""
    equal = {**operation.spec["equal"], "tenant_id": operation.tenant_id}
    swept, after = sweep(tx, equal, now, operation.cursor, most, before=operation.id)
    return Step(swept.prevented, 0, swept.in_flight, after)


def live(tx: Transaction, equal: Mapping[str, Any]) -> int:
    """How many live jobs have these column values."""
    query = select(func.count()).select_from(jobs).where(*(jobs.c[name] == value for name, value in equal.items()))
    return sum(int(tx.execute(each).scalar_one()) for each in apart(query))


def reschedule(
    tx: Transaction,
    tenant_id: str | None,
    job_id: str,
    new_id: str,
    read_time: Callable[[str], dict[str, Any]],
    now: datetime,
) -> NewJob | None:
    """Cancel a pending job in favour of a new one at another time, linked both ways; None for an unknown id.

    `read_time` gives what the new job says of its time, knowing the zone the old one had. An occurrence keeps its
    nominal instant. Raises Conflict (JOB_IN_FLIGHT, JOB_FINISHED).
    """
    row = tx.execute(select(jobs).where(_mine(jobs, tenant_id, job_id)).with_for_update()).first()
    if row is None:
        over = find(tx, tenant_id, job_id)
        if over is None:
            return None
        raise Conflict(
            f"Job {job_id} has {over.state} already; it cannot be moved.", code="JOB_FINISHED", existing=job_id,
            fix="Make a new job.",
        )  # fmt: skip
    ending = Ending(
        row.id, row.attempt, JobState.CANCELLED, now, was=JobState.PENDING, counts=False, reason="rescheduled",
        errors=row.errors, cancel=CancelOutcome.PREVENTED, replaced_by=new_id,
    )  # fmt: skip
    if row.state != JobState.PENDING or not end(tx, [ending]):
        raise Conflict(
            f"Job {job_id} is running; it cannot be moved.", code="JOB_IN_FLIGHT", existing=job_id,
            fix="Cancel it, or wait for it to finish and make a new one.",
        )  # fmt: skip
    when = read_time(row.timezone)
    run_at = when["run_at"]
    left = None if row.expires_at is None else row.expires_at - row.run_at
    kept = {name: getattr(row, name) for name in _KEPT}
    job = NewJob(
        **kept, **when, id=new_id, created_at=now,
        scheduled_at=run_at if row.schedule_id is None else row.scheduled_at,
        expires_at=None if left is None else run_at + left, replaces=row.id,
        kind=Kind.ONCE if row.schedule_id is None else Kind(row.kind),  # by hand, so no longer a trigger's
        hold=Hold.OVERLAP if row.serial and row.hold in (Hold.OVERLAP, Hold.RECOVER) else None, group=row.group_name,
    )  # fmt: skip
    if row.serial:
        tx.fetch(LOCK_SCHEDULES, [{"id": row.schedule_id}])
    insert_jobs(tx, [job])
    if row.hold == Hold.RECOVER and row.serial:  # it waits no more, but for its turn
        take_turns(tx, [row.schedule_id])
        let_go(tx, [row.schedule_id])
    tx.notify()
    return job


_KEPT = (
    *("tenant_id", "topic", "payload", "metadata", "owner_id", "key", "schedule_id", "revision"),
    *("target", "route", "queue", "priority", "retry", "timeout", "serial", "conditions"),
)


def find(tx: Transaction, tenant_id: str | None, job_id: str, *, over: bool = False) -> Job | None:
    """One job, live or finished; of one known to be `over` only the second is asked."""
    row = None if over else tx.execute(select(jobs).where(_mine(jobs, tenant_id, job_id))).first()
    if row is None:
        row = tx.execute(select(finished).where(_mine(finished, tenant_id, job_id))).first()
    return None if row is None else read(row)


def _mine(table: Any, tenant_id: str | None, job_id: str) -> ColumnElement[bool]:
    return table.c.id == job_id if tenant_id is None else and_(table.c.id == job_id, table.c.tenant_id == tenant_id)


def page(
    tx: Transaction,
    equal: Mapping[str, Any],
    states: Collection[JobState],
    limit: int,
    after: str | None,
    min_attempts: int = 0,
) -> Page[Job]:
    """Jobs, live and finished, newest first; `equal` names columns and the values they must have."""
    found: dict[str, Job] = {}
    for table, its in ((jobs, LIVE), (finished, FINISHED)):
        wanted = [state.value for state in its if state in states or not states]
        if not wanted:
            continue
        query = select(table).where(*(table.c[name] == value for name, value in equal.items()))
        if min_attempts:
            query = query.where(table.c.attempt >= min_attempts)
        each, by = [], [(query, wanted)]
        if table is jobs:
            resting, running = apart(query)
            by = [(resting, [state for state in wanted if state != JobState.RUNNING])]
            if JobState.RUNNING.value in wanted:
                each.append(_newest(running, Unsought(jobs.c.id), after, limit))
        if equal.keys() <= {"tenant_id", "queue"} and "tenant_id" in equal:  # each state is the end of an index
            by = [(query, [state]) for query, some in by for state in some]
        for query, some in by:
            if some:
                which = table.c.state == some[0] if len(some) == 1 else table.c.state.in_(some)
                each.append(_newest(query.where(which), table.c.id, after, limit))
        rows = tx.execute(union_all(*(select(one.subquery()) for one in each)) if len(each) > 1 else each[0])
        # One that finished between the two looks is in both: it shows as it ended.
        found |= {row.id: read(row) for row in rows}
    newest = sorted(found.values(), key=lambda job: job.id, reverse=True)
    return Page(newest[:limit], newest[limit - 1].id if len(newest) > limit else None)


def _newest(query: Select[Any], id_: Any, after: str | None, limit: int) -> Select[Any]:
    return (query if after is None else query.where(id_ < after)).order_by(id_.desc()).limit(limit + 1)


def latest(tx: Transaction, limit: int) -> list[Job]:
    """What finished last, newest first."""
    query = select(finished).order_by(finished.c.finished_at.desc()).limit(limit)
    return [read(row) for row in tx.execute(query)]


def next_pending(tx: Transaction, limit: int) -> list[Job]:
    """What runs next, soonest first, over all lanes."""
    claimable = (jobs.c.state == "pending") & jobs.c.hold.is_(None)
    found: list[Job] = []
    for at in look(tx, ANYONE, EPOCH):
        lane = select(jobs).where(claimable, jobs.c.queue == at["queue"], jobs.c.priority == at["priority"])
        found += map(read, tx.execute(lane.order_by(jobs.c.run_at).limit(limit)))
    return sorted(found, key=lambda job: job.run_at)[:limit]


COUNTED = 10_000


def counts(tx: Transaction) -> dict[str, int]:
    """How many live jobs are pending, running and held; counting stops above `COUNTED`, as millions may wait."""
    which = {
        "pending": (jobs.c.state == "pending") & jobs.c.hold.is_(None),
        "running": jobs.c.state == "running",
        "held": jobs.c.hold.is_not(None),
    }
    counted = {name: select(jobs.c.id).where(where).limit(COUNTED + 1).subquery() for name, where in which.items()}
    return {name: tx.execute(select(func.count()).select_from(rows)).scalar_one() for name, rows in counted.items()}


def prune(tx: Transaction, before: datetime, most: int) -> int:
    """Forget finished jobs that ended before an instant; how many."""
    if tx.dialect.name.startswith("mysql"):  # no LIMIT in what IN looks at; but of a DELETE itself
        some = "DELETE FROM timebell_finished WHERE finished_at < :before ORDER BY finished_at LIMIT :most"
        return tx.execute(text(some), {"before": tx.dialect.to_db(before), "most": most}).rowcount
    ids = select(finished.c.id).where(finished.c.finished_at < before).order_by(finished.c.finished_at).limit(most)
    old = (finished.c.finished_at < before) & finished.c.id.in_(ids.scalar_subquery())
    return tx.execute(delete(finished).where(old)).rowcount


def typed(tx: Transaction, table: Table, row: Mapping[str, Any]) -> Any:
    """A row that a Statement gave of one of the two tables, as `read` takes it."""
    has = dict(row)
    for name in _IDS[table.name]:
        has[name] = None if has[name] is None else str(has[name])
    for name in _INSTANTS[table.name]:
        has[name] = tx.dialect.from_db(has[name])
    return SimpleNamespace(**has, _mapping=has)


def _of_type(kind: type[Any]) -> dict[str, list[str]]:
    return {each.name: [one.name for one in each.columns if isinstance(one.type, kind)] for each in (jobs, finished)}


_IDS, _INSTANTS = _of_type(Id), _of_type(Instant)


def read(row: Row[Any]) -> Job:
    """A row of either table as a Job."""
    has = row._mapping
    metadata = decode(row.metadata) or {}
    skipped_to, asks = has.get("skipped_to"), decode(row.conditions) or {}
    return Job(
        id=row.id, tenant_id=row.tenant_id, topic=row.topic, state=JobState(row.state),
        scheduled_at=row.scheduled_at, run_at=row.run_at, timezone=row.timezone, payload=decode(row.payload),
        metadata=metadata, owner_id=row.owner_id, key=row.key, kind=Kind(row.kind), schedule_id=row.schedule_id,
        target=decode(row.target), queue=row.queue, priority=row.priority, group=row.group_name,
        condition=asks.get("condition", []), unless=asks.get("unless"),
        retry=decode(row.retry), timeout=row.timeout, expires_at=row.expires_at,
        hold=Hold(has["hold"]) if has.get("hold") else None, attempt=row.attempt, tries=row.tries,
        node_id=row.node_id, created_at=row.created_at, started_at=row.started_at,
        finished_at=has.get("finished_at"), reason=has.get("reason"), error=has.get("error"),
        error_code=has.get("error_code"), result=decode(has.get("result")), attempts=decode(row.errors) or [],
        replaces=row.replaces, replaced_by=has.get("replaced_by"), skipped_to=skipped_to,
        skipped_count=has.get("skipped_count") or 1, local_time=row.local_time,
    )  # fmt: skip
